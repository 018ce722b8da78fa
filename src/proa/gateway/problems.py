"""Everything that is wrong with a configuration, each with its line and key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proa.core.errors import ConfigError

__all__ = ["ConfigProblem", "InvalidConfigError"]


@dataclass(frozen=True, slots=True, order=True)
class ConfigProblem:
    """One mistake. `line` counts from 1; `key` is a path such as models.kimi-k2.ttl."""

    line: int
    key: str
    expected: str
    got: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"line {self.line}: {self.key or 'file'}: expected {self.expected}, got {self.got}."
        return f"{text} Fix: {self.fix}" if self.fix else text


class InvalidConfigError(ConfigError):
    """A configuration that cannot be used. `problems` are in the order of their lines, at least one."""

    def __init__(self, source: str, problems: Sequence[ConfigProblem]) -> None:
        self.problems = sorted(problems)
        first = self.problems[0]
        super().__init__(f"{source}:{first.line}", first.expected, first.got, first.fix)
        self.args = ("\n".join(f"[{source}] {problem}" for problem in self.problems),)
