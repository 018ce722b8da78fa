"""A run of a model as it was planned: what it takes by stages, and how fast it computes a long prompt and answers.

GPU memory is what the driver says is used (as nvidia-smi does); RAM is the resident set of this process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

import msgspec
import torch

from proa.core.errors import ConfigError, ProaError
from proa.core.sampling_params import SamplingParams
from proa.device.select import Gpu, choose_gpu
from proa.engine.build import LoadedModel, build_engine
from proa.engine.engine import Engine
from proa.engine.load import load_on
from proa.ipc.messages import Generate
from proa.kvcache.pool import KVPool
from proa.plan.memory_plan import MemoryPlan

__all__ = ["Mark", "Timed", "Trial", "resident_bytes", "run_trial"]

_PROMPT, _ANSWER = 64, 48  # of every request that runs beside others
_FIRST_STEPS = 8  # of an answer, which are not timed: kernels of their shape are compiled


@dataclass(frozen=True, slots=True)
class Mark:
    """Bytes in use: on the GPU by whomever, in RAM by this process, `peak_ram` until here."""

    gpu: int
    ram: int
    peak_ram: int = 0


@dataclass(frozen=True, slots=True)
class Timed:
    """`tokens` in `seconds`: of a prompt, or of a decode step of so many sequences with `context` behind each."""

    tokens: int
    context: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Trial:
    """`marks`: at "start", when "loaded", with the "cache", "built" and at the "end". `used_tokens`: of the cache."""

    marks: dict[str, Mark]
    used_tokens: int
    prefill: Timed
    decode: Timed


def run_trial(
    path: Path,
    plan: MemoryPlan,
    *,
    vram_bytes: int | None = None,
    report: Callable[[int, int], None] = lambda *_: None,
    marked: Callable[[str, Mark], None] = lambda *_: None,
) -> Trial:
    """Loads the model at `path` as `plan` says, computes long prompts and then `plan.concurrency` requests together.

    `vram_bytes`: of the GPU's memory that is to be used, None for all that is free. `report`: bytes loaded, bytes in
    all; `marked`: hears of each stage. Call it early in a process: what that holds already is counted as its own.

    Raises:
        ConfigError: this machine has less than what was planned for. ProaError: a request failed.
    """
    gpu = _share_of(choose_gpu("cuda"), vram_bytes) if plan.uses_gpu else None
    device = None if gpu is None else gpu.torch_device
    marks: dict[str, Mark] = {}

    def mark(stage: str) -> None:
        marks[stage] = _mark(device)
        marked(stage, marks[stage])

    mark("start")
    torch.set_num_threads(1)
    config = msgspec.structs.replace(plan.config, model_path=str(path))
    loaded = load_on(config, gpu, report)
    mark("loaded")
    engine = build_engine(config, _marking_capture(loaded, mark))
    if "cache" not in marks:
        mark("cache")
    mark("built")
    requests = _Requests(engine, plan, loaded.model.vocab_size)
    prefill, decode = requests.prefill(), requests.decode()
    mark("end")
    return Trial(marks, min(requests.used_tokens, plan.context * plan.concurrency), prefill, decode)


def resident_bytes(root: Path = Path("/proc/self"), field: str = "VmRSS") -> int:
    """Of this process, in RAM; with `VmHWM` the most it has been."""
    for line in (root / "status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{root}/status has no {field}")


def _share_of(gpu: Gpu | None, vram_bytes: int | None) -> Gpu:
    assert gpu is not None, "cuda was asked for"
    if vram_bytes is None:
        return gpu
    if vram_bytes > gpu.free_bytes:
        got = f"{vram_bytes / 2**30:.2f}"
        raise ConfigError("--vram", f"at most the {gpu.free_bytes / 2**30:.2f} GiB that are free here", got)
    return replace(gpu, free_bytes=vram_bytes)


def _mark(device: torch.device | None) -> Mark:
    used = 0
    if device is not None:
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        used = total - free
    return Mark(used, resident_bytes(), resident_bytes(field="VmHWM"))


def _marking_capture(loaded: LoadedModel, mark: Callable[[str], None]) -> LoadedModel:
    """The model with a mark between KV cache and graphs."""
    capture = loaded.capture
    if capture is None:
        return loaded

    def marking(pool: KVPool, max_blocks: int):  # type: ignore[no-untyped-def]  # noqa: ANN202  # as Capture
        mark("cache")
        return capture(pool, max_blocks)

    return replace(loaded, capture=marking)


@dataclass(frozen=True, slots=True)
class _Step:
    seconds: float
    answers: int


class _Requests:
    """What is asked of the engine: prompts of random tokens, none of which begins as another does."""

    def __init__(self, engine: Engine, plan: MemoryPlan, vocab_size: int) -> None:
        self._engine, self._plan, self._vocab_size = engine, plan, vocab_size
        self._rng = random.Random(0)
        self._submitted = 0
        self.used_tokens = 0

    def prefill(self) -> Timed:
        """A prompt of one and a half passes, as far as the context has so many; the second one is timed."""
        prompt, seconds = 0, 0.0
        for _ in range(2):
            prompt = self._submit(self._plan.chunk + self._plan.chunk // 2, 1, temperature=0.0)
            seconds = sum(step.seconds for step in self._steps())
        return Timed(prompt, prompt, seconds)

    def decode(self) -> Timed:
        """As many answers as the plan has requests; the steps with most of them are timed."""
        for _ in range(self._plan.concurrency):
            prompt = self._submit(_PROMPT, _ANSWER, temperature=1.0, top_p=0.9)
        steps = list(self._steps())
        most = max(step.answers for step in steps)
        full = [step.seconds for step in steps if step.answers == most]
        return Timed(most, prompt + _ANSWER // 2, median(full[_FIRST_STEPS:] or full))

    def _submit(self, prompt: int, answer: int, **sampling: float) -> int:
        """Returns how many tokens the prompt has."""
        answer = min(answer, max(1, self._plan.context // 2))
        prompt = max(1, min(prompt, self._plan.context - answer - 1))
        self.used_tokens += -(-(prompt + answer) // 16) * 16
        ids = [self._rng.randrange(self._vocab_size) for _ in range(prompt)]
        params = SamplingParams(max_tokens=answer, ignore_eos=True, **sampling)  # type: ignore[arg-type]
        self._submitted += 1
        self._engine.submit(Generate(rid=str(self._submitted), token_ids=ids, sampling=params))
        return prompt

    def _steps(self) -> Iterator[_Step]:
        """Until all requests have their answers."""
        while self._engine.has_work:
            started = perf_counter()
            outputs = self._engine.step().outputs
            yield _Step(perf_counter() - started, len(outputs))
            for output in outputs:
                if output.error:
                    raise ProaError("trial", "answers to all requests", output.error)
