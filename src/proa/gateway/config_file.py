"""The gateway's configuration file: read, and read again when it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from proa.core.errors import ConfigError
from proa.gateway.config import GatewayConfig
from proa.gateway.kt_config import parse_kt
from proa.gateway.yaml_config import parse_yaml

__all__ = ["follow_config", "read_config"]

logger = logging.getLogger("proa.gateway")

_POLL_S = 1.0


def read_config(path: Path) -> GatewayConfig:
    """Read gateway.yaml, or a config.json with "ktransformers" and the models.json beside it.

    Raises:
        ConfigError: there is no such file, or what is wrong with it.
    """
    if path.suffix == ".json":
        models = path.with_name("models.json")
        return parse_kt(_text(path), _text(models) if models.exists() else None, str(path), str(models))
    return parse_yaml(_text(path), str(path))


async def follow_config(
    path: Path,
    apply: Callable[[GatewayConfig], Awaitable[None]],
    refuse: Callable[[ConfigError], None],
    *,
    poll: float = _POLL_S,
) -> None:
    """Call `apply` with each new version of the file, or `refuse` with what is wrong with it. Ends when cancelled.

    Files are polled: editors replace them, and mounts of containers send no notice.
    """
    seen = await asyncio.to_thread(_version, path)
    while True:
        await asyncio.sleep(poll)
        if (version := await asyncio.to_thread(_version, path)) == seen:
            continue
        seen = version
        try:
            config = await asyncio.to_thread(read_config, path)
        except ConfigError as error:
            logger.error("the configuration in use stays: %s", error)
            refuse(error)
        except Exception as error:
            # The next version has to be looked at all the same.
            logger.exception("the configuration in use stays")
            refuse(ConfigError(str(path), "a configuration file", f"one that cannot be read: {error!r}"[:300]))
        else:
            logger.info("%s has changed and is used", path)
            await apply(config)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), "a configuration file", str(error), "proa gateway init makes one") from error


def _version(path: Path) -> list[tuple[int, int, int] | None]:
    """What changes with the content: of the file, and of models.json beside it."""
    return [_stamp(file) for file in (path, path.with_name("models.json"))]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
