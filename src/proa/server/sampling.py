"""From a request's fields and the model's defaults to the SamplingParams of one sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from proa.core.errors import CheckpointError, ContextLengthError, UserError
from proa.core.sampling_params import SamplingParams
from proa.server.generation_request import GenerationRequest

__all__ = ["SamplingDefaults", "SequenceLimits", "build_sampling"]

# top_p = 0 means: only the likeliest token. The engine wants it above 0.
_SMALLEST_TOP_P = 1e-9


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that names no value gets."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @staticmethod
    def choose(source: Literal["model", "openai"], generation_config: Mapping[str, Any]) -> SamplingDefaults:
        """From generation_config.json, or OpenAI's.

        Raises:
            CheckpointError: a value in generation_config.json that no request could carry either.
        """
        if source == "openai":
            return SamplingDefaults()
        base = SamplingDefaults()
        top_k = _number(generation_config, "top_k", -1, 2**31 - 1, base.top_k)
        return SamplingDefaults(
            temperature=_number(generation_config, "temperature", 0, 100, base.temperature),
            top_p=_number(generation_config, "top_p", 0, 1, base.top_p),
            top_k=int(top_k) or -1,
            min_p=_number(generation_config, "min_p", 0, 1, base.min_p),
            repetition_penalty=_number(generation_config, "repetition_penalty", 1e-6, 100, base.repetition_penalty),
        )


def _number(config: Mapping[str, Any], key: str, low: float, high: float, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise CheckpointError(f"generation_config.json {key}", f"a number from {low} to {high}", value)
    return float(value)


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """What the engine and the tokenizer allow. `eos_token_ids` end an answer unless ignore_eos."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]


def build_sampling(
    request: GenerationRequest,
    defaults: SamplingDefaults,
    limits: SequenceLimits,
    *,
    prompt_tokens: int,
    max_new_tokens: int | None,
    num_logprobs: int | None,
) -> SamplingParams:
    """The parameters of a sequence with `prompt_tokens`; without `max_new_tokens` the rest of the context.

    Raises:
        ContextLengthError: prompt and answer do not fit.      UserError: a token id outside the vocabulary.
    """
    room = limits.max_model_len - prompt_tokens
    max_tokens = max_new_tokens if max_new_tokens is not None else max(room, 1)
    if max_tokens > room:
        raise ContextLengthError(request.PROMPT_FIELD, prompt_tokens, max_tokens, limits.max_model_len)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise UserError("min_tokens", f"at most {max_tokens}", min_tokens)
    bias = {int(key): value for key, value in (request.logit_bias or {}).items()}
    stop_ids = set(request.stop_token_ids or ())
    for field, ids in (("logit_bias", bias), ("stop_token_ids", stop_ids)):
        if outside := [token_id for token_id in ids if token_id >= limits.vocab_size]:
            raise UserError(field, f"token ids below {limits.vocab_size}", outside[0])
    ignore_eos = bool(request.ignore_eos)
    if not ignore_eos:
        stop_ids |= {token_id for token_id in limits.eos_token_ids if token_id < limits.vocab_size}
    top_k = _given(request.top_k, defaults.top_k)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_given(request.temperature, defaults.temperature),
        top_p=max(_given(request.top_p, defaults.top_p), _SMALLEST_TOP_P),
        top_k=top_k if top_k > 0 else -1,
        min_p=_given(request.min_p, defaults.min_p),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty),
        seed=request.seed,
        stop=request.stops,
        stop_token_ids=tuple(sorted(stop_ids)),
        ignore_eos=ignore_eos,
        logit_bias=bias,
        logprobs=num_logprobs,
    )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value
