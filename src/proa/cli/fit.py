"""What to change when `proa serve` was refused for memory: flags that were planned again and fit this machine."""

from __future__ import annotations

from proa.core.errors import ProaError
from proa.engine.config import EngineConfig

__all__ = ["ways_to_fit"]

# `proa plan` says in other words what `proa serve` is told.
_SERVE_FLAGS = {"--concurrency": "--max-running-requests", "--context": "--context-length"}
# An engine that was told no context starts with as many tokens.
_LEAST_CONTEXT = 1024


def ways_to_fit(config: EngineConfig) -> list[str]:
    """Up to three ways for an engine that was refused with `config`, the cheapest first; none where none is known."""
    # Here: they need torch and the extension, which serving itself does without.
    from proa.plan.advice import cheapest_ways
    from proa.plan.hardware import Overrides, probe
    from proa.plan.memory_plan import Wanted, plan_memory
    from proa.plan.model_sizes import read_sizes

    try:
        sizes = read_sizes(config.model_path)
        # Rates make no difference to what fits.
        machine = probe(Overrides(bandwidth=1.0, vram=0.0 if config.device == "cpu" else None))
        context = config.context_length or min(_LEAST_CONTEXT, sizes.info.max_position_embeddings)
        wanted = Wanted(context, kv_dtype=config.kv_cache_dtype, use_gpu=config.device != "cpu")
        plan = plan_memory(sizes, machine, wanted)
        if plan.fits:
            return [" ".join(plan.flags)]
        texts = [way.text for way in cheapest_ways(sizes, machine, wanted)]
    except ProaError:
        return []
    return [_as_serve(text) for text in texts]


def _as_serve(text: str) -> str:
    flag, space, rest = text.partition(" ")
    return f"{_SERVE_FLAGS.get(flag, flag)}{space}{rest}"
