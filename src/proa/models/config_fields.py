"""Reading typed, bounded values out of an untrusted config.json."""

from __future__ import annotations

import math
from typing import Any

from proa.core.errors import CheckpointError

__all__ = ["ConfigFields"]


class ConfigFields:
    """A view of one JSON object. Every getter raises CheckpointError naming the key for a wrong or missing value.

    JSON null counts as missing. A getter without `default` requires the key.
    """

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in `[low, high]`."""
        value = self._value(key, default)
        # An integral float (1.0) is what some exporters write.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, f"an integer in {low}..{high}", value)
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in `[low, high]`."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not low <= value <= high or not math.isfinite(value):
            raise self.error(key, f"a number in {low:g}..{high:g}", value)
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.error(key, "true or false", value)
        return value

    def string(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string", value)
        return value

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """One integer or a list of them, each in `[low, high]`; empty when missing."""
        value = self._values.get(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        for item in items:
            if type(item) is not int or not low <= item <= high:
                raise self.error(key, f"integers in {low}..{high}", item)
        return tuple(items)

    def object(self, key: str) -> ConfigFields | None:
        """A nested object, None when missing."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object", value)
        return ConfigFields(value, f"{self.where}: {key}")

    def first_of(self, *keys: str) -> str:
        """The first of several spellings of a key that is present."""
        for key in keys:
            if key in self:
                return key
        raise self.error(" or ".join(keys), "a value", None)

    def error(self, key: str, expected: str, got: Any) -> CheckpointError:
        shown = "nothing" if got is None else repr(got)
        return CheckpointError(f"{self.where}: {key}", expected, shown if len(shown) <= 200 else f"{shown[:200]}...")

    def _value(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.error(key, "a value", None)
        return default
