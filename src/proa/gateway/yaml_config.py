"""gateway.yaml: its schema, and what the schema cannot say."""

from __future__ import annotations

import difflib
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from proa.gateway.backends import BACKENDS
from proa.gateway.config import GatewayConfig, Group, ModelConfig
from proa.gateway.invocation import PLACEHOLDERS, placeholders
from proa.gateway.problems import ConfigProblem, InvalidConfigError
from proa.gateway.units import parse_duration, parse_size
from proa.gateway.yaml_source import KeyPath, YamlSource, read_yaml

__all__ = ["parse_yaml", "schema"]

_DURATIONS = ("stall_timeout", "stop_timeout", "drain_timeout", "ttl", "cancel_load_after")
_PATHS = ("path", "kt_weight_path", "venv")
_INTEGERS = ("context_length", "port", "max_running", "max_waiting")
_TYPE_NAMES = {
    "object": "keys with values", "array": "a list", "string": "a text", "integer": "an integer", "number": "a number",
    "boolean": "true or false", "null": "nothing",
}  # fmt: skip


def schema() -> dict[str, Any]:
    """The JSON schema of gateway.yaml."""
    text = resources.files("proa.gateway").joinpath("gateway.schema.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def parse_yaml(text: str, name: str) -> GatewayConfig:
    """The configuration in `text`, which came from the file `name`.

    Raises:
        InvalidConfigError: everything that is wrong with it.
    """
    source = read_yaml(text, name)
    errors = Draft202012Validator(schema()).iter_errors(source.value or {})
    # A set: what two parts of the schema ask for is missed twice.
    if breaches := {problem for error in errors for problem in _described(error, source)}:
        raise InvalidConfigError(name, list(breaches))
    if problems := [_problem(source, *mistake) for mistake in _unreadable_words(source.value)]:
        raise InvalidConfigError(name, problems)
    config = _built(source.value, name)
    if problems := [_problem(source, *mistake) for mistake in _mistakes(config)]:
        raise InvalidConfigError(name, problems)
    return config


def _built(raw: Mapping[str, Any], name: str) -> GatewayConfig:
    defaults = raw.get("defaults", {})
    fields: dict[str, Any] = {key: int(raw[key]) for key in ("port", "log_lines") if key in raw}
    if "host" in raw:
        fields["host"] = raw["host"]
    if "patience" in raw:
        fields["patience"] = parse_duration(raw["patience"])
    return GatewayConfig(
        models={name: _model(name, {**defaults, **own}) for name, own in raw["models"].items()},
        groups={name: _group(group) for name, group in raw.get("groups", {}).items()},
        memory_budget=_memory(raw.get("memory_budget", {})),
        source=name,
        **fields,
    )


def _group(raw: Mapping[str, Any]) -> Group:
    return Group(members=tuple(raw["members"]), max_loaded=int(raw.get("max_loaded", 1)))


def _model(name: str, raw: Mapping[str, Any]) -> ModelConfig:
    fields = dict(raw)
    for key in ("command", "args"):
        if key in fields:
            fields[key] = _words(fields[key])
    for key in _PATHS:
        if key in fields:
            # A home that nobody has stays as it is: then the path is missed, by name.
            fields[key] = os.path.expanduser(fields[key])  # noqa: PTH111 - pathlib raises instead
    for key in _DURATIONS:
        if key in fields:
            fields[key] = None if fields[key] in {"never", None} else parse_duration(fields[key])
    for key in _INTEGERS:
        if fields.get(key) is not None:
            fields[key] = int(fields[key])  # to JSON schema 1.0 is an integer
    if "memory" in fields:
        fields["memory"] = _memory(fields["memory"])
    if "env" in fields:
        fields["env"] = {key: str(value) for key, value in fields["env"].items()}
    if "params" in fields:
        fields["params"] = fields["params"] or {}
    if "aliases" in fields:
        aliases = fields["aliases"]
        fields["aliases"] = {a: (aliases[a] or {}) if isinstance(aliases, dict) else {} for a in aliases}
    return ModelConfig(name=name, **fields)


def _words(value: str | list[Any]) -> tuple[str, ...]:
    return tuple(shlex.split(value)) if isinstance(value, str) else tuple(str(word) for word in value)


def _memory(value: Mapping[str, Any]) -> dict[str, int]:
    return {resource: parse_size(size) for resource, size in value.items()}


# A path, what is expected, what is there, what to do.
_Mistake = tuple[KeyPath, str, str, str]


def _unreadable_words(raw: Mapping[str, Any]) -> Iterator[_Mistake]:
    for name, model in raw["models"].items():
        for key in ("command", "args"):
            try:
                _words(model.get(key, ""))
            except ValueError as error:
                yield ("models", name, key), "a command line", str(error), "close the quotes"


def _mistakes(config: GatewayConfig) -> Iterator[_Mistake]:
    """What is wrong with a configuration that the schema accepts."""
    names = dict.fromkeys(config.models, "a model")
    ports: dict[int, str] = {}
    for name, model in config.models.items():
        yield from _model_mistakes(model)
        for alias in model.aliases:
            if alias in names:
                where = ("models", name, "aliases", alias)
                yield where, "a name that is not taken", f"{alias}, {names[alias]}", "choose another one"
            names.setdefault(alias, f"an alias of {name}")
        if model.port and ports.setdefault(model.port, name) != name:
            yield ("models", name, "port"), "a port of its own", f"{model.port}, as {ports[model.port]}", "use 0"
        for resource, size in (model.memory or {}).items():
            if size > (budget := config.memory_budget.get(resource, size)):
                yield ("models", name, "memory", resource), f"at most the budget, {budget} bytes", f"{size} bytes", ""
    for name, group in config.groups.items():
        for index, member in enumerate(group.members):
            if member not in config.models:
                yield ("groups", name, "members", index), "a model", member, _nearest(member, list(config.models))


def _model_mistakes(model: ModelConfig) -> Iterator[_Mistake]:
    where: KeyPath = ("models", model.name)
    for field in BACKENDS[model.backend].needs:
        if not getattr(model, field):
            yield (*where, field), f"a {field} for backend {model.backend}", "none", f"set {field}"
    texts = {"command": model.command, "args": model.args, "env": tuple(model.env.values())}
    used = {key: {name for word in words for name in placeholders(word)} for key, words in texts.items()}
    for key, found in used.items():
        for name in sorted(found - set(PLACEHOLDERS)):
            known = " | ".join(f"${{{name}}}" for name in PLACEHOLDERS)
            yield (*where, key), known, f"${{{name}}}", "put it in env"
    if model.backend == "command" and not model.port and "PORT" not in set().union(*used.values()):
        yield (*where, "command"), "${PORT} in it, or a port", "neither", "say where to listen"


def _problem(source: YamlSource, path: KeyPath, expected: str, got: str, fix: str) -> ConfigProblem:
    return ConfigProblem(source.line(path), ".".join(map(str, path)), expected, got, fix)


def _described(error: ValidationError, source: YamlSource) -> Iterator[ConfigProblem]:
    """What a schema error means for the person who wrote the file."""
    path: KeyPath = tuple(error.absolute_path)
    if error.validator in {"additionalProperties", "unevaluatedProperties"} and isinstance(error.instance, dict):
        known = _known_keys(error.schema)
        for key in (key for key in error.instance if key not in known):
            yield _problem(source, (*path, key), "a key there is", repr(key), _nearest(key, known))
        return
    if error.validator == "required":
        missing = [key for key in error.validator_value if key not in error.instance]
        yield _problem(source, path, f"a key {' and '.join(missing)}", "none", "")
        return
    yield _problem(source, path, _expected(error), _shown(error.instance), "")


def _known_keys(part: Mapping[str, Any]) -> list[str]:
    """Keys of an object's schema, those it takes from another one included."""
    referred = schema()["$defs"][part["$ref"].rsplit("/", 1)[1]] if "$ref" in part else {}
    return [*part.get("properties", {}), *referred.get("properties", {})]


def _expected(error: ValidationError) -> str:
    part = error.schema
    if "title" in part:
        return str(part["title"])
    if error.validator == "enum":
        return " | ".join(map(str, error.validator_value))
    if error.validator == "type":
        kinds = error.validator_value
        return " or ".join(_TYPE_NAMES[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds))
    return str(error.message)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _nearest(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"
