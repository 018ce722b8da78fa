"""What the gateway has to know of a kind of engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from proa.gateway.config import ModelConfig

__all__ = ["Address", "Backend", "Installation", "Invocation"]


@dataclass(frozen=True, slots=True)
class Address:
    """Where one run listens, and the secret that only the gateway and this run know."""

    host: str
    port: int
    secret: str


@dataclass(frozen=True, slots=True)
class Invocation:
    """How one run is started. `headers` go with every request to it."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Installation:
    """How an engine that is missing is installed: a virtual environment and what goes into it."""

    venv: Path
    packages: tuple[str, ...]

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.venv / "bin" / "python")


class Backend(ABC):
    """One kind of engine. Subclasses have no state.

    Attributes:
        name: what `backend:` says in the configuration.
        needs: fields of ModelConfig that must be set.
        ready_path: GET of it answers 200 once requests are taken.
        listens_itself: whoever listens on the port must be one of its own processes.
    """

    name: str
    needs: tuple[str, ...] = ("path",)
    ready_path: str = "/health"
    listens_itself: bool = True

    @abstractmethod
    def invocation(self, model: ModelConfig, address: Address) -> Invocation:
        """The command of one run."""

    def help_command(self, model: ModelConfig) -> tuple[str, ...] | None:
        """A command whose output names all its flags, to miss one before a long load. None: not checked."""
        del model
        return None

    def reported_bytes(self, ready_answer: bytes) -> tuple[int, int] | None:
        """Bytes loaded and bytes in all, from the answer to an unfinished ready check. None: it does not say."""
        del ready_answer
        return None

    def installation(self, model: ModelConfig) -> Installation | None:
        """How `auto_build` installs it. None: it cannot."""
        del model
        return None


def bearer(secret: str) -> dict[str, str]:
    """The header that OpenAI-compatible servers expect their key in."""
    return {"authorization": f"Bearer {secret}"}


def option(flag: str, value: object) -> tuple[str, ...]:
    """A flag with its value, nothing when there is no value."""
    return () if value is None or value == "" else (flag, str(value))
