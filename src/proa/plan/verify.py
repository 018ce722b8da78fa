"""A plan beside a run: the model is loaded and computes, and what it takes is compared with what was predicted.

GPU memory is what the driver says is used (as nvidia-smi does), from the CUDA context on; RAM is the resident set of
this process.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from proa.core.errors import ProaError
from proa.core.sampling_params import SamplingParams
from proa.device.select import choose_gpu
from proa.engine.build import LoadedModel, build_engine
from proa.engine.engine import Engine
from proa.engine.load import load_checkpoint
from proa.ipc.messages import Generate
from proa.kvcache.pool import KVPool
from proa.plan.memory_plan import MemoryPlan
from proa.plan.model_sizes import ModelSizes

__all__ = ["Comparison", "compare", "resident_bytes", "verify"]

_PROMPT, _ANSWER = 64, 16  # of every request that runs beside others


@dataclass(frozen=True, slots=True)
class Comparison:
    """`name`: what takes the memory, "total" for all of it. Bytes."""

    device: str
    name: str
    predicted: int
    actual: int

    @property
    def deviation(self) -> float:
        """Of the prediction, in terms of what was found; 0 for nothing of either."""
        return (self.predicted - self.actual) / self.actual if self.actual else float(self.predicted > 0)


@dataclass(frozen=True, slots=True)
class _Mark:
    gpu: int
    ram: int


def verify(
    path: Path, sizes: ModelSizes, plan: MemoryPlan, report: Callable[[int, int], None] = lambda *_: None
) -> list[Comparison]:
    """Loads the model at `path` as `plan` says, computes a long prompt and `plan.concurrency` requests together.

    `report`: bytes loaded, bytes in all. Call it early in a process: what that holds already is counted as its own.

    Raises:
        ConfigError: this machine has less than what was planned for. ProaError: a request failed.
    """
    device = choose_gpu("cuda" if plan.uses_gpu else "cpu")
    torch_device = None if device is None else device.torch_device
    marks = {"start": _mark(torch_device)}

    def marked(name: str) -> None:
        marks[name] = _mark(torch_device)

    torch.set_num_threads(1)
    loaded = load_checkpoint(plan.engine_config(str(path)), report)
    marked("loaded")
    engine = build_engine(plan.engine_config(str(path)), _marking_capture(loaded, marked))
    marks.setdefault("cache", _mark(torch_device))
    marked("built")
    tokens = _run(engine, plan, loaded.model.vocab_size)
    marked("end")
    return compare(sizes, plan, marks, tokens)


def compare(sizes: ModelSizes, plan: MemoryPlan, marks: dict[str, _Mark], tokens: int) -> list[Comparison]:
    """`marks`: at "start", when "loaded", with the "cache", "built" and at the "end". `tokens`: of the cache, used."""
    found = []
    if plan.uses_gpu:
        rows, gpu = plan.vram, {name: mark.gpu for name, mark in marks.items()}
        loaded = ("trunk", "routed experts", "streaming buffers", "workspace")
        found += [
            Comparison("GPU", " + ".join(loaded), sum(rows[name] for name in loaded), gpu["loaded"] - gpu["start"]),
            Comparison("GPU", "KV cache", rows["KV cache"], gpu["cache"] - gpu["loaded"]),
            Comparison("GPU", "CUDA graphs", rows["CUDA graphs"], gpu["built"] - gpu["cache"]),
            Comparison("GPU", "running steps", rows["running steps"], gpu["end"] - gpu["built"]),
            Comparison("GPU", "total", sum(rows.values()) - rows["reserve"], gpu["end"] - gpu["start"]),
        ]
    rows, ram = plan.ram, {name: mark.ram for name, mark in marks.items()}
    # Of an embedding on the CPU, which stays in its file, only rows of tokens become resident.
    weights = rows.get("trunk", sizes.embedding_bytes) - sizes.embedding_bytes + rows["routed experts"]
    buffers = rows.get("pinned buffers", 0)
    cache = ("KV cache" in rows) * tokens * plan.kv_token_bytes
    total = rows["process"] + weights + buffers + rows["workspace"] + cache
    # What of the workspace, and of the process, becomes resident while loading and what later is not to be told apart.
    found += [
        Comparison(
            "RAM", "weights + buffers + workspace + used cache", total - rows["process"], ram["end"] - ram["start"]
        ),
        Comparison("RAM", "total", total, ram["end"]),
    ]
    return found


def resident_bytes(root: Path = Path("/proc/self")) -> int:
    """Of this process, in RAM."""
    for line in (root / "status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{root}/status has no VmRSS")


def _mark(device: torch.device | None) -> _Mark:
    used = 0
    if device is not None:
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        used = total - free
    return _Mark(used, resident_bytes())


def _marking_capture(loaded: LoadedModel, marked: Callable[[str], None]) -> LoadedModel:
    """The model with a mark between KV cache and graphs."""
    capture = loaded.capture
    if capture is None:
        return loaded

    def marking(pool: KVPool, max_blocks: int):  # type: ignore[no-untyped-def]  # noqa: ANN202  # as Capture
        marked("cache")
        return capture(pool, max_blocks)

    return replace(loaded, capture=marking)


def _run(engine: Engine, plan: MemoryPlan, vocab_size: int) -> int:
    """Returns how many slots of the KV cache were used."""
    rng = random.Random(0)
    block, used = 16, 0

    def submit(rid: str, prompt: int, answer: int, **sampling: float) -> None:
        nonlocal used
        prompt = max(1, min(prompt, plan.context - answer - 1))
        used += -(-(prompt + answer) // block) * block
        ids = [rng.randrange(vocab_size) for _ in range(prompt)]
        params = SamplingParams(max_tokens=answer, ignore_eos=True, **sampling)  # type: ignore[arg-type]
        engine.submit(Generate(rid=rid, token_ids=ids, sampling=params))

    def finish() -> None:
        while engine.has_work:
            for output in engine.step().outputs:
                if output.error:
                    raise ProaError("verify", "answers to all requests", output.error)

    submit("long", plan.chunk + plan.chunk // 2, 2, temperature=0.0)
    finish()
    for number in range(plan.concurrency):
        submit(f"beside {number}", _PROMPT, _ANSWER, temperature=1.0, top_p=0.9)
    finish()
    return min(used, plan.context * plan.concurrency)
