"""What comes before the start of an engine: files and program are there, it has the flags, or it is installed."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from proa.core.errors import ProaError
from proa.gateway.backends import Backend, Installation
from proa.gateway.config import ModelConfig
from proa.gateway.invocation import invoke, used_flags

__all__ = ["PreparationError", "RunTool", "prepare"]

_HELP_SECONDS = 180.0
_INSTALL_SECONDS = 3600.0
_ANY_PORT = 1
_FLAG = re.compile(r"(?<![\w-])--[A-Za-z0-9][\w-]*")

# Runs a command to its end: (command, environment, seconds) -> (exit status, output). It is killed after `seconds`.
RunTool = Callable[[Sequence[str], Mapping[str, str], float], Awaitable[tuple[int, list[str]]]]


class PreparationError(ProaError):
    """An engine that cannot be started as it is configured."""


async def prepare(backend: Backend, model: ModelConfig, run_tool: RunTool, on_install: Callable[[], None]) -> None:
    """See to it that a start makes sense.

    Args:
        on_install: told before the engine is installed, which takes long.

    Raises:
        PreparationError: it makes none; says why.
    """
    for field in ("path", "kt_weight_path"):
        path = getattr(model, field)
        # Anything else may be a name that the engine knows: demo, or a repository of a model hub.
        if path.startswith(("/", "./", "../")) and not await asyncio.to_thread(Path(path).exists):
            raise PreparationError(f"{model.name}.{field}", "a file or directory that exists", path)
    planned = invoke(backend, model, _ANY_PORT)
    problem = await _problem(backend, model, run_tool, planned.command, planned.env)
    if problem is None:
        return
    installation = backend.installation(model) if model.auto_build else None
    if installation is None:
        raise problem
    on_install()
    await _install(installation, model, run_tool, planned.env)
    if (problem := await _problem(backend, model, run_tool, planned.command, planned.env)) is not None:
        raise problem


async def _problem(
    backend: Backend, model: ModelConfig, run_tool: RunTool, command: tuple[str, ...], environment: Mapping[str, str]
) -> PreparationError | None:
    """Why the engine could not run the command, None when nothing speaks against it."""
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        return PreparationError(f"{model.name}.command", "a program that exists", repr(command[0]), _how_to(backend))
    if (asking := backend.help_command(model)) is None:
        return None
    code, output = await run_tool(asking, environment, _HELP_SECONDS)
    if code != 0:
        got = f"exit status {code} of `{' '.join(asking)}`: {' | '.join(output[-3:])}"
        return PreparationError(f"{model.name}.backend", f"an engine {backend.name} that runs", got, _how_to(backend))
    known = set(_FLAG.findall("\n".join(output)))
    # The program's own flags (python -P -m ...) are no flags of the engine.
    missing = [flag for flag in used_flags(command[len(asking) - 1 :]) if flag not in known]
    if not missing:
        return None
    got = f"one without {', '.join(missing)}"
    return PreparationError(f"{model.name}.backend", "an engine with all flags it is given", got, _how_to(backend))


def _how_to(backend: Backend) -> str:
    if backend.name == "kt":
        return "install sglang-kt (sglang has no --kt-* flags) and name its `venv`, or set `auto_build`"
    return "install it, or name it in `command`"


async def _install(installation: Installation, model: ModelConfig, run_tool: RunTool, env: Mapping[str, str]) -> None:
    pip = (installation.python, "-m", "pip", "install", "--disable-pip-version-check", *installation.packages)
    for step in ((sys.executable, "-m", "venv", str(installation.venv)), pip):
        code, output = await run_tool(step, env, _INSTALL_SECONDS)
        if code != 0:
            got = f"exit status {code} of `{' '.join(step)}`: {' | '.join(output[-3:])}"
            raise PreparationError(f"{model.name}.auto_build", "an installation that succeeds", got)
