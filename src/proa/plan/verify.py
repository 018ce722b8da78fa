"""A plan beside a run: what was predicted of memory and speed, and what was found."""

from __future__ import annotations

from dataclasses import dataclass, replace

from proa.plan.estimate import Estimate, estimate_decode, estimate_prefill
from proa.plan.hardware import Machine
from proa.plan.memory_plan import MemoryPlan
from proa.plan.model_sizes import ModelSizes
from proa.plan.trial import Trial

__all__ = ["Comparison", "Pace", "compare_memory", "compare_speed"]


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
class Pace:
    """`name`: "decode" or "prefill", of what the run had: tokens per second, estimated and found."""

    name: str
    tokens: int
    context: int
    estimate: Estimate
    actual: float

    @property
    def is_expected(self) -> bool:
        return self.estimate.range.low <= self.actual <= self.estimate.range.high


def compare_speed(sizes: ModelSizes, plan: MemoryPlan, machine: Machine, trial: Trial) -> list[Pace]:
    """The estimates for what `trial` computed, which is shorter than what `plan` allows, beside its times."""
    decode, prefill = trial.decode, trial.prefill
    decoded = estimate_decode(sizes, replace(plan, context=decode.context, concurrency=decode.tokens), machine)
    prompt = estimate_prefill(sizes, replace(plan, context=prefill.tokens), machine)
    return [
        Pace("decode", decode.tokens, decode.context, decoded, decode.rate),
        Pace("prefill", prefill.tokens, prefill.context, prompt, prefill.rate),
    ]


def compare_memory(sizes: ModelSizes, plan: MemoryPlan, trial: Trial) -> list[Comparison]:
    """Of GPU memory from the CUDA context on, by stages, and of the resident set."""
    found, marks = [], trial.marks
    if plan.uses_gpu:
        rows, gpu = plan.vram, {name: mark.gpu for name, mark in marks.items()}
        loaded, built = (
            ("trunk", "routed experts", "streaming buffers", "workspace", "kernels"),
            ("CUDA graphs", "running steps"),
        )
        found += [
            Comparison("GPU", " + ".join(loaded), sum(rows[name] for name in loaded), gpu["loaded"] - gpu["start"]),
            Comparison("GPU", "KV cache", rows["KV cache"], gpu["cache"] - gpu["loaded"]),
            Comparison("GPU", " + ".join(built), sum(rows[name] for name in built), gpu["built"] - gpu["cache"]),
            Comparison("GPU", "taken while running", 0, gpu["end"] - gpu["built"]),
            Comparison("GPU", "total", sum(rows.values()) - rows["reserve"], gpu["end"] - gpu["start"]),
        ]
    rows, ram = plan.ram, {name: mark.ram for name, mark in marks.items()}
    # Of an embedding on the CPU, which stays in its file, only rows of tokens become resident.
    weights = rows.get("trunk", sizes.embedding_bytes) - sizes.embedding_bytes + rows["routed experts"]
    buffers = rows.get("pinned buffers", 0)
    cache = ("KV cache" in rows) * trial.used_tokens * plan.kv_token_bytes
    total = rows["process"] + weights + buffers + rows.get("workspace", 0) + cache
    # What of the workspace, and of the process, becomes resident while loading and what later is not to be told apart.
    found += [
        Comparison(
            "RAM", "weights + buffers + workspace + used cache", total - rows["process"], ram["end"] - ram["start"]
        ),
        Comparison("RAM", "total", total, ram["end"]),
    ]
    return found
