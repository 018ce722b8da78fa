"""The flags of `proa serve`: one table, from which its options, `proa.launch_server` and docs/flags.md are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from proa.chat.answer_style import check_parsers
from proa.cli.engine_flags import ENGINE_FLAGS
from proa.cli.flag import Flag, Owner
from proa.cli.server_flags import SERVER_FLAGS
from proa.core.errors import ConfigError

__all__ = ["DEMO", "FLAGS", "by_owner", "check_values"]

DEMO = "demo"  # the MODEL that is built when it is not there
FLAGS: tuple[Flag, ...] = (*SERVER_FLAGS, *ENGINE_FLAGS)


def by_owner(values: Mapping[str, Any], owner: Owner) -> dict[str, Any]:
    """Config fields of one package from flag values by flag name; flags that were not given (None) are left out."""
    given = {flag.name: flag for flag in FLAGS if flag.owner == owner}
    return {given[name].field: value for name, value in values.items() if name in given and value is not None}


def check_values(values: Mapping[str, Any]) -> None:
    """Check what the configs themselves do not, before a model is looked at.

    Raises:
        ConfigError: a number that is none, or outside its flag's `between`.
        UnsupportedError: a parser there is not.
    """
    for flag in FLAGS:
        value = values.get(flag.name)
        if isinstance(value, float) and not math.isfinite(value):
            # JSON, in which the engine gets it, has no such number: it would arrive as null, as if it were not given.
            raise ConfigError(flag.name, "a finite number", value)
        if flag.between and value is not None and not flag.between[0] <= value <= flag.between[1]:
            raise ConfigError(flag.name, f"a number from {flag.between[0]:g} to {flag.between[1]:g}", value)
    check_parsers(values.get("--tool-call-parser"), values.get("--reasoning-parser"))
