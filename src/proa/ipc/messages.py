"""Every message between the API process and the engine process (msgpack; no torch, no pickle).

API -> engine: Generate, Abort, FlushCache, RecordExperts, Shutdown.
engine -> API: Loading, Ready, StepOutput, Flushed, ExpertsRecorded, Fatal.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from proa.core.constraint import Constraint
from proa.core.sampling_params import SamplingParams

__all__ = [
    "Abort",
    "EngineStats",
    "ExpertsRecorded",
    "Fatal",
    "FlushCache",
    "Flushed",
    "FromEngine",
    "Generate",
    "Loading",
    "PrefillProgress",
    "Ready",
    "RecordExperts",
    "Shutdown",
    "StepOutput",
    "ToEngine",
    "TokenLogprob",
    "TokenOutput",
]


class Generate(msgspec.Struct, tag="generate", frozen=True, kw_only=True):
    """One sequence to generate. `rid` is unique. The prefix cache lets the n choices of a request share one prefill."""

    rid: str
    token_ids: list[int]
    sampling: SamplingParams
    constraint: Constraint | None = None


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Stop `rid` (or everything when empty) before the next layer; the engine answers with finish_reason "abort"."""

    rid: str = ""


class FlushCache(msgspec.Struct, tag="flush", frozen=True):
    """Empty the prefix cache; answered by Flushed."""

    id: str


class RecordExperts(msgspec.Struct, tag="record_experts", frozen=True):
    """Begin or end to record which experts tokens go to, or tell what was recorded; answered by ExpertsRecorded."""

    id: str
    action: Literal["start", "stop", "dump"]


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """End the engine process before the next layer."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of the chosen token and of the `top` alternatives, natural log."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one sequence.

    finish_reason: None while running, else "stop" | "length" | "abort" | "error". `matched_stop` is the token id that
    ended it (part of token_ids). `cached_tokens` is how many prompt tokens came from the prefix cache.
    """

    rid: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    matched_stop: int | None = None
    cached_tokens: int = 0
    error: str = ""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the engine. Byte and token counters and expert_ms are totals since start, other times of a step.

    out_of_memory: forwards that found no memory, since start. prefill_tokens: of the pass that is on its way, and the
    share of the layers it has been through. expert_slots: of each MoE layer, slots of tokens and those whose expert was
    on the GPU, empty where nothing is new. streamed_bytes, streamed_ms: of experts that crossed the bus for prompts.
    """

    num_running: int = 0
    num_queued: int = 0
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    aborted: int = 0
    out_of_memory: int = 0
    prefill_tokens: int = 0
    prefill_share: float = 0.0
    step_ms: float = 0.0
    schedule_ms: float = 0.0
    sample_ms: float = 0.0
    expert_bytes_read: int = 0
    expert_ms: float = 0.0
    expert_slots: tuple[tuple[int, int], ...] = ()
    streamed_bytes: int = 0
    streamed_ms: float = 0.0
    moved_experts: int = 0
    deferred_experts: int = 0


class Loading(msgspec.Struct, tag="loading", frozen=True):
    """Weight loading progress in bytes."""

    bytes_done: int
    bytes_total: int


class Ready(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """The engine takes requests. read_gb_s: measured read bandwidth of the RAM, 0 where it was not measured."""

    max_model_len: int
    kv_tokens_total: int
    max_running_requests: int
    vocab_size: int
    load_seconds: float
    weight_bytes: int
    read_gb_s: float = 0.0
    info: dict[str, str] = {}


class PrefillProgress(msgspec.Struct, frozen=True, array_like=True):
    """A prompt on its way: how many of its tokens are done, those of a pass in proportion to the layers done."""

    rid: str
    tokens_done: int


class StepOutput(msgspec.Struct, tag="step", frozen=True, omit_defaults=True):
    """All outputs of one engine step; one without any every second while idle or between layers (heartbeat).

    `progress` has the prompts of which a chunk that is not the last has ended, or that are in a pass, twice a second.
    """

    outputs: list[TokenOutput]
    stats: EngineStats
    progress: list[PrefillProgress] = []


class Flushed(msgspec.Struct, tag="flushed", frozen=True):
    """Answer to FlushCache. `ok` is False while requests run."""

    id: str
    ok: bool


class ExpertsRecorded(msgspec.Struct, tag="experts_recorded", frozen=True):
    """Answer to RecordExperts. `counts`: of a dump, tokens by MoE layer and expert; None: there is no recording."""

    id: str
    counts: list[list[int]] | None = None


class Fatal(msgspec.Struct, tag="fatal", frozen=True):
    """The engine cannot start or go on; `user` when the configuration or checkpoint is to blame (no restart).

    is_shortage: what is to be served does not fit this machine's memory.
    """

    message: str
    user: bool = False
    is_shortage: bool = False


ToEngine = Generate | Abort | FlushCache | RecordExperts | Shutdown
FromEngine = Loading | Ready | StepOutput | Flushed | ExpertsRecorded | Fatal
