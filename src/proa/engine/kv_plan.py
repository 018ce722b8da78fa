"""How large the KV cache is and how long a sequence may be: a pure function of model, flags and memory."""

from __future__ import annotations

from dataclasses import dataclass

from proa.core.errors import ConfigError, MemoryShortageError
from proa.engine.config import EngineConfig
from proa.kvcache.layout import KVLayout
from proa.kvcache.pool import KVDtype, kv_bytes_per_token

__all__ = ["MIN_AUTO_TOKENS", "RESERVE_BYTES", "KVPlan", "cache_dtype", "plan_kv"]

_GIB = 2**30
# Activations, logits, the interpreter, and room for the rest of the machine.
RESERVE_BYTES = 1 * _GIB
# An engine that cannot take this many tokens is not worth starting unless asked for.
MIN_AUTO_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class KVPlan:
    """`notes` says in words what was chosen for the user, by name."""

    num_blocks: int
    block_size: int
    dtype: KVDtype
    max_model_len: int
    notes: dict[str, str]

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


def cache_dtype(config: EngineConfig, auto: KVDtype = "float32") -> KVDtype:
    """Of the cache; `auto`: where the config leaves it open."""
    return auto if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def plan_kv(
    config: EngineConfig,
    layout: KVLayout,
    *,
    model_context: int,
    weight_bytes: int,
    available_bytes: int,
    auto_dtype: KVDtype = "float32",
    auto_block: int = 16,
    fraction: float | None = None,
    memory: str = "memory",
    bound: str = "",
) -> KVPlan:
    """Size the cache from the memory left beside `weight_bytes`, at most what the running requests can fill.

    `weight_bytes` includes scratch memory as far as it is known. A context the user asked for must fit; the model's own
    is lowered to what the cache holds. `auto_dtype`, `auto_block`: number format and tokens of a block where the
    config leaves them open. `fraction`: share of what is left for an automatic size, None for the config's.
    `memory`: its name in messages; `bound`: the flag that lets no more of it be available.

    Raises:
        ConfigError: the context is over the model's, or weights and cache do not fit the memory.
    """
    dtype = cache_dtype(config, auto_dtype)
    block = config.block_size or auto_block
    fraction = config.memory_fraction if fraction is None else fraction
    context = config.context_length or model_context
    if context > model_context:
        raise ConfigError("context_length", f"at most {model_context}, the model's limit", context)
    token_bytes = kv_bytes_per_token(layout, dtype)
    room = available_bytes - weight_bytes - RESERVE_BYTES
    numbers = (
        f"{available_bytes / _GIB:.2f} GiB available{bound}, {weight_bytes / _GIB:.2f} GiB weights and scratch, "
        f"{RESERVE_BYTES / _GIB:.2f} GiB reserve, {token_bytes / 1024:.1f} KiB of KV cache per token"
    )
    if config.max_total_tokens is not None:
        num_blocks = config.max_total_tokens // block
        if num_blocks < 1 or num_blocks * block * token_bytes > room:
            limit, tokens = max(0, room) // token_bytes, config.max_total_tokens
            if limit < block <= tokens:
                raise MemoryShortageError(
                    memory, f"room for the weights and {tokens} tokens of KV cache", numbers, "free memory"
                )
            expected = f"{block} to {limit} tokens ({numbers})"
            raise MemoryShortageError("max_total_tokens", expected, tokens, "lower it or free memory")
    else:
        useful = config.requests * -(-context // block)
        num_blocks = min(useful, int(room * fraction) // (token_bytes * block))
        least = min(context, MIN_AUTO_TOKENS)
        if num_blocks * block < least:
            raise MemoryShortageError(
                memory,
                f"room for the weights and {least} tokens of KV cache",
                numbers,
                "free memory" + (" or use bfloat16 KV" if dtype == "float32" else ""),
            )
    return _with_context(config, context, num_blocks, block, dtype)


def _with_context(config: EngineConfig, context: int, num_blocks: int, block: int, dtype: KVDtype) -> KVPlan:
    tokens = num_blocks * block
    notes = {"kv_cache": f"{tokens} tokens in {dtype}", "context_length": str(context)}
    if tokens < context:
        if config.context_length is not None:
            raise MemoryShortageError(
                "context_length", f"at most {tokens}, what the KV cache holds", context, "lower it or enlarge the cache"
            )
        notes["context_length"] = f"lowered from the model's {context} to {tokens}, what the KV cache holds"
        context = tokens
    return KVPlan(num_blocks, block, dtype, context, notes)
