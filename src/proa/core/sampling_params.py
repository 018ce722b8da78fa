"""How one request is sampled. Validated at the API; the engine trusts it."""

from __future__ import annotations

import msgspec

__all__ = ["SamplingParams"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling of one sequence. Ranges are checked by `proa.server.protocol` before this is built.

    `stop` strings are matched by the API process on decoded text; everything else by the engine.
    `logprobs` is the number of alternatives per token (0: only the chosen one, None: none).
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
