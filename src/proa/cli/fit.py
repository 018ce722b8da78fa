"""What to change when `proa serve` was refused for memory: flags that were planned again and fit this machine."""

from __future__ import annotations

from proa.cli.flags import FLAGS
from proa.core.errors import ProaError
from proa.engine.config import EngineConfig

__all__ = ["ways_to_fit"]

_SERVE_FLAGS = {flag.field: flag.name for flag in FLAGS if flag.owner == "engine"}


def ways_to_fit(config: EngineConfig) -> list[str]:
    """Up to three ways for an engine that was refused with `config`, the cheapest first; none where none is known."""
    # Here: they need torch and the extension, which serving itself does without.
    from proa.plan.advice import cheapest_ways
    from proa.plan.hardware import Overrides, probe
    from proa.plan.model_sizes import read_sizes

    try:
        sizes = read_sizes(config.model_path, config.expert_path)
        # Rates make no difference to what fits.
        machine = probe(Overrides(vram=0.0 if config.device == "cpu" else None), rates=False)
        return [way.text(config, _SERVE_FLAGS) for way in cheapest_ways(sizes, machine, config, _SERVE_FLAGS)]
    except ProaError:
        return []
