"""The configuration of an application with a `kt` backend: config.json with "ktransformers", and models.json.

"ktransformers" describes the engine and one model, named by its `model_id`. Each entry of models.json with
`"backend": "kt"` is one more, named by its `alias`, which is run with the settings of "ktransformers"; those it states
itself go before them. Nothing else is routed here: neither entries of other backends nor names that look alike.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from proa.gateway.config import GatewayConfig, ModelConfig
from proa.gateway.problems import ConfigProblem, InvalidConfigError

__all__ = ["parse_kt"]

logger = logging.getLogger("proa.gateway")

_BLOCK = "ktransformers"
_DEFAULT_ID = "ktransformers"
_TEXTS = ("model_path", "kt_weight_path", "model_id", "host", "venv")
_FIELDS = (*_TEXTS, "enabled", "port", "ctx", "extra_args", "extra_env", "auto_build")


def parse_kt(config: str, models: str | None, name: str, models_name: str = "models.json") -> GatewayConfig:
    """The models that "ktransformers" and models.json describe; none when it is not enabled.

    Args:
        config: text of config.json; models: text of models.json, None when there is none.
        name, models_name: of the files, for messages.

    Raises:
        InvalidConfigError: what is wrong with the block, or else with the entries.
    """
    source = _Json(config, name)
    block = source.value.get(_BLOCK) if isinstance(source.value, dict) else None
    if not isinstance(block, dict):
        problem = ConfigProblem(1, _BLOCK, "an object with the settings of the engine", _shown(block))
        raise InvalidConfigError(name, [problem])
    _check(block, source, (_BLOCK,))
    if not block.get("enabled", False):
        logger.info("%s: %s is not enabled", name, _BLOCK)
        return GatewayConfig(source=name)
    found = [] if not block.get("model_path") else [_model(block.get("model_id") or _DEFAULT_ID, block)]
    if models is not None:
        found += _entries(_Json(models, models_name), block)
    return GatewayConfig(models=_by_name(found, name), source=name)


class _Json:
    """A JSON text and where its keys stand."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        try:
            self.value: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidConfigError(name, [ConfigProblem(error.lineno, "", "JSON", error.msg)]) from error
        except (ValueError, RecursionError) as error:
            # Numbers and nesting that no parser takes.
            raise InvalidConfigError(name, [ConfigProblem(1, "", "JSON", str(error))]) from error

    def line(self, keys: tuple[str, ...]) -> int:
        """Line of the last of `keys`, each looked for after the one before."""
        position = 0
        for key in keys:
            found = self.text.find(json.dumps(key, ensure_ascii=False), position)
            position = found if found >= 0 else position
        return self.text.count("\n", 0, position) + 1


def _entries(source: _Json, block: Mapping[str, Any]) -> Iterator[ModelConfig]:
    entries = source.value.get("models") if isinstance(source.value, dict) else source.value
    if isinstance(source.value, dict) and "path" in source.value:
        entries = [source.value]
    if not isinstance(entries, list):
        raise InvalidConfigError(source.name, [ConfigProblem(1, "", "a list of models", _shown(source.value))])
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.get("backend") != "kt":
            continue
        alias, path = entry.get("alias"), entry.get("path")
        if not (isinstance(alias, str) and alias and isinstance(path, str) and path):
            line = source.line((str(path or alias),))
            problem = ConfigProblem(line, f"{index}", "a path and an alias", _shown(entry))
            raise InvalidConfigError(source.name, [problem])
        own = {key: entry[key] for key in _FIELDS if key in entry}
        _check(own, source, (alias,))
        shared = dict(block)
        if path != block.get("model_path") and block.get("model_path"):
            # Weights of another model.
            shared.pop("kt_weight_path", None)
            if "kt_weight_path" not in own:
                logger.warning("%s: %s has no kt_weight_path of its own, so it is started without", source.name, alias)
        yield _model(alias, {**shared, **own, "model_path": path})


def _model(name: str, settings: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(
        name=name,
        backend="kt",
        path=settings["model_path"],
        kt_weight_path=settings.get("kt_weight_path") or "",
        host=settings.get("host") or "127.0.0.1",
        port=settings.get("port") or 0,
        context_length=settings.get("ctx") or None,
        args=_words(settings.get("extra_args")),
        env=_variables(settings.get("extra_env")),
        auto_build=settings.get("auto_build", False),
        venv=settings.get("venv") or "",
    )


def _check(settings: Mapping[str, Any], source: _Json, where: tuple[str, ...]) -> None:
    problems = []
    for key, value in settings.items():
        if (expected := _expectation(key, value)) is not None:
            line = source.line((*where, key))
            problems.append(ConfigProblem(line, ".".join((*where, key)), expected, _shown(value)))
    if problems:
        raise InvalidConfigError(source.name, problems)


def _expectation(key: str, value: Any) -> str | None:
    """What should stand there in place of `value`, None when it is right."""
    if key not in _FIELDS:
        return f"one of {', '.join(_FIELDS)}"
    if key in _TEXTS:
        return None if value is None or isinstance(value, str) else "a text"
    if key in {"enabled", "auto_build"}:
        return None if isinstance(value, bool) else "true or false"
    if key in {"port", "ctx"}:
        highest = 65535 if key == "port" else 1 << 31
        is_number = value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= highest)
        return None if is_number else f"an integer from 0 to {highest}"
    try:
        _ = _words(value) if key == "extra_args" else _variables(value)
    except (ValueError, TypeError, AttributeError):
        return "a command line or a list of words" if key == "extra_args" else "KEY=VALUE pairs or an object"
    return None


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, list):
        return tuple(str(word) for word in value)
    return tuple(shlex.split(value or ""))


def _variables(value: Any) -> dict[str, str]:
    if isinstance(value, dict):
        return {str(key): str(entry) for key, entry in value.items()}
    pairs = [word.split("=", 1) for word in _words(value)]
    return {key: entry for key, entry in pairs}  # noqa: C416 - a pair without = must raise


def _by_name(models: list[ModelConfig], source: str) -> dict[str, ModelConfig]:
    found: dict[str, ModelConfig] = {}
    for model in models:
        if model.name in found:
            problem = ConfigProblem(1, model.name, "a name that is not taken", "one that two models have")
            raise InvalidConfigError(source, [problem])
        found[model.name] = model
    return found


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
