"""What a flag of `proa serve` is: a name for one field of one package's configuration."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from proa.engine.config import EngineConfig
from proa.server.config import ServerConfig

__all__ = ["Flag", "Owner", "default_of", "default_text"]

Owner = Literal["server", "engine"]
AUTO = "auto"
CONFIGS: dict[Owner, type] = {"server": ServerConfig, "engine": EngineConfig}


@dataclass(frozen=True, slots=True)
class Flag:
    """One option. Its default is that of the configuration's field.

    unset: what happens when the default is None.
    between: smallest and largest number, where the config itself does not check.
    sglang: SGLang's spellings of the same thing.
    row: of `Ready.info`, that says what became of it; without one it is the field's.
    """

    name: str
    owner: Owner
    field: str
    kind: type[int] | type[float] | type[str] | type[bool] | type[Path]
    doc: str
    choices: tuple[str, ...] = ()
    unset: str = ""
    between: tuple[float, float] | None = None
    sglang: tuple[str, ...] = ()
    row: str = ""

    @property
    def may_be_auto(self) -> bool:
        """Whether it is a number that may be left to proa in words too."""
        return bool(self.unset) and self.kind in (int, float)

    def number(self, text: str) -> float | None:
        """The value of one that `may_be_auto`; None for "auto", as when it is not given. ValueError for no number."""
        assert self.may_be_auto
        return None if text == AUTO else self.kind(text)  # type: ignore[return-value]


def default_of(flag: Flag) -> Any:
    """The default in the owner's config; None when the owner decides."""
    config = CONFIGS[flag.owner]
    if is_dataclass(config):
        for field in fields(config):
            if field.name == flag.field:
                return None if field.default is MISSING else field.default
    else:
        for entry in msgspec.structs.fields(config):
            if entry.name == flag.field:
                return None if entry.default is msgspec.NODEFAULT else entry.default
    raise AssertionError(f"{config.__name__} has no field {flag.field}")


def default_text(flag: Flag) -> str:
    """The default as a person reads it."""
    default = default_of(flag)
    if flag.unset and default in {None, ""}:
        return flag.unset
    if flag.kind is bool:
        return "on" if default else "off"
    return str(default)
