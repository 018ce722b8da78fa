"""gateway.yaml: what it may say, and that mistakes are named with line and key."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import textwrap

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.gateway.backends import BACKENDS
from proa.gateway.config import GatewayConfig, Group, ModelConfig
from proa.gateway.problems import InvalidConfigError
from proa.gateway.routing import names, resolve
from proa.gateway.units import parse_duration, parse_size
from proa.gateway.yaml_config import parse_yaml, schema

FULL = """
host: 0.0.0.0
port: 9000
memory_budget: {ram: 700GiB, gpu: 45GB}
patience: 20s
log_lines: 50
defaults:
  stall_timeout: 10m
  env: {OMP_NUM_THREADS: 4}
models:
  kimi-k2: &kimi
    path: /models/Kimi-K2
    kt_weight_path: /models/Kimi-K2-int4
    args: --gpu-experts 40 --log-level "warning"
    context_length: 131072
    memory: {ram: 640GiB, gpu: 20.5GiB}
    ttl: 2h
    cancel_load_after: never
    pin: true
    params: {top_k: 20}
    aliases:
      kimi-cold: {temperature: 0.1}
      kimi:
  other:
    <<: *kimi
    ttl: never
    pin: false
    backend: sglang-kt
    venv: /opt/kt
    stall_timeout: 1.5
    env: {}
    aliases: [second]
  any:
    backend: command
    command: [server, --port, "${PORT}", 7]
    port: 8123
groups:
  pair: {members: [kimi-k2, other], max_loaded: 1}
"""


def test_everything_there_is():
    config = parse_yaml(FULL, "gateway.yaml")
    kimi = ModelConfig(
        name="kimi-k2",
        path="/models/Kimi-K2",
        kt_weight_path="/models/Kimi-K2-int4",
        args=("--gpu-experts", "40", "--log-level", "warning"),
        context_length=131072,
        memory={"ram": 640 << 30, "gpu": int(20.5 * (1 << 30))},
        ttl=7200.0,
        cancel_load_after=None,
        pin=True,
        params={"top_k": 20},
        aliases={"kimi-cold": {"temperature": 0.1}, "kimi": {}},
        stall_timeout=600.0,
        env={"OMP_NUM_THREADS": "4"},
    )
    other = dataclasses.replace(
        kimi,
        name="other",
        ttl=None,
        pin=False,
        backend="sglang-kt",
        venv="/opt/kt",
        stall_timeout=1.5,
        env={},
        aliases={"second": {}},
    )
    command = ModelConfig(
        name="any", backend="command", command=("server", "--port", "${PORT}", "7"), port=8123,
        stall_timeout=600.0, env={"OMP_NUM_THREADS": "4"},
    )  # fmt: skip
    assert config == GatewayConfig(
        models={"kimi-k2": kimi, "other": other, "any": command},
        groups={"pair": Group(members=("kimi-k2", "other"))},
        host="0.0.0.0",
        port=9000,
        memory_budget={"ram": 700 << 30, "gpu": 45 * 10**9},
        patience=20.0,
        log_lines=50,
        source="gateway.yaml",
    )
    assert names(config) == ("kimi-k2", "kimi-cold", "kimi", "other", "second", "any")
    assert resolve(config, "kimi-cold").params == {"top_k": 20, "temperature": 0.1}
    assert resolve(config, "kimi").params == {"top_k": 20}


def test_a_short_one_has_the_defaults():
    assert parse_yaml("models: {m: {path: /m}}", "g") == GatewayConfig(
        models={"m": ModelConfig(name="m", path="/m")}, source="g"
    )


def test_the_schema_knows_every_field_and_its_default():
    parts = schema()
    model = {**parts["$defs"]["settings"]["properties"], **parts["$defs"]["model"]["properties"]}
    for properties, config in (
        (model, ModelConfig),
        (parts["properties"], GatewayConfig),
        (parts["$defs"]["group"]["properties"], Group),
    ):
        fields = {f.name: f for f in dataclasses.fields(config)}
        assert set(properties) - {"defaults"} == set(fields) - {"name", "source"}
        for name, entry in properties.items():
            if "default" in entry:
                assert entry["default"] == fields[name].default, name
            assert "description" in entry or config is not ModelConfig, name
    assert set(parts["$defs"]["settings"]["properties"]["backend"]["enum"]) == set(BACKENDS)


def mistakes(text: str) -> list[str]:
    with pytest.raises(InvalidConfigError) as failure:
        parse_yaml(textwrap.dedent(text).lstrip("\n"), "g.yaml")
    assert str(failure.value).splitlines() == [f"[g.yaml] {problem}" for problem in failure.value.problems]
    return [str(problem) for problem in failure.value.problems]


def test_every_mistake_is_named_with_line_and_key():
    found = mistakes("""
        port: 70000
        modls: {}
        patience: soon
        models:
          a:
            path: /a
            tll: 5m
            ttl: 5 minutes
            memory: {ram: lots}
            max_running: 0
            while_starting: wait
            aliases: 3
          b: 7
        groups:
          g: {members: [], max_load: 1}
    """)
    assert found == [
        "line 1: port: expected a port from 0 to 65535, 0 for a free one, got 70000.",
        "line 2: modls: expected a key there is, got 'modls'. Fix: did you mean models?",
        "line 3: patience: expected seconds, or a text such as 90s, 5m, 2h, got 'soon'.",
        "line 7: models.a.tll: expected a key there is, got 'tll'. Fix: did you mean ttl?",
        "line 8: models.a.ttl: expected seconds, a text such as 90s, 5m, 2h, or never, got '5 minutes'.",
        "line 9: models.a.memory.ram: expected bytes, or a text such as 640GiB, 20GB, got 'lots'.",
        "line 10: models.a.max_running: expected an integer from 1 to 1000000, got 0.",
        "line 11: models.a.while_starting: expected hold | refuse, got 'wait'.",
        "line 12: models.a.aliases: expected a list of names, or names with fields of their own, got 3.",
        "line 13: models.b: expected keys with values, got 7.",
        "line 15: groups.g.max_load: expected a key there is, got 'max_load'. Fix: did you mean max_loaded?",
        "line 15: groups.g.members: expected a list of models, got [].",
    ]


def test_what_the_schema_cannot_say():
    found = mistakes("""
        memory_budget: {ram: 10GB}
        models:
          a:
            backend: llama-server
            aliases: [b, x]
            port: 9001
          b:
            backend: command
            command: run --port 1
            args: "${HOME} ${NAME}"
            memory: {ram: 11GB, gpu: 1}
          c: {path: /c, port: 9001, aliases: [x]}
        groups: {g: {members: [a, bb]}}
    """)
    assert found == [
        "line 3: models.a.path: expected a path for backend llama-server, got none. Fix: set path",
        "line 5: models.a.aliases.b: expected a name that is not taken, got b, a model. Fix: choose another one",
        "line 9: models.b.command: expected ${PORT} in it, or a port, got neither. Fix: say where to listen",
        "line 10: models.b.args: expected ${HOST} | ${PORT} | ${MODEL} | ${NAME} | ${API_KEY}, got ${HOME}. Fix: put it in env",  # noqa: E501
        "line 11: models.b.memory.ram: expected at most the budget, 10000000000 bytes, got 11000000000 bytes.",
        "line 12: models.c.aliases.x: expected a name that is not taken, got x, an alias of a. Fix: choose another one",
        "line 12: models.c.port: expected a port of its own, got 9001, as a. Fix: use 0",
        "line 13: groups.g.members.1: expected a model, got bb. Fix: did you mean b?",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "line 1: file: expected a key models, got none."),
        ("[1]", "line 1: file: expected keys with values, got [1]."),
        (
            "models:\n  a: {path: /a}\n  a: {path: /b}",
            "line 3: models.a: expected a key once, got again, after line 2.",
        ),
        ("models:\n  1: {path: /a}", "line 2: models.1: expected a text as key, got 1. Fix: put it in quotes"),
        ("models:\n  a: {path: [}", "line 2: file: expected YAML"),
        ("a: !!python/object:os.system {}", "line 1: file: expected YAML"),
        ("a: !!python/name:os.system", "line 1: a: expected a JSON value"),
        ("models:\n  a: {ttl: .nan}", "line 2: models.a.ttl: expected a JSON value, got .nan. Fix: put it in quotes"),
        ("models:\n  a: {params: {x: 2020-01-01}}", "line 2: models.a.params.x: expected a JSON value"),
        ("models: {}\n---\nmodels: {}", "line 2: file: expected YAML"),
        ("a: &x [*x]", "levels, got more"),
        ('models:\n  a:\n    path: /a\n    args: "it\'s"', "line 4: models.a.args: expected a command line"),
        ("models: {'': {path: /a}}", "line 1: models: expected a name of 1 to 200 characters in one line, got ''."),
        ('models: {"a\\nb": {path: /a}}', "line 1: models: expected a name of 1 to 200 characters in one line"),
        ('models: {a: {path: /a, aliases: {"a\\u2028b": {}}}}', "line 1: models.a.aliases: expected"),
    ],
)
def test_what_is_no_configuration(text, problem):
    assert problem in mistakes(text)[0]


def test_units():
    durations = {0: 0, 1.5: 1.5, "90s": 90, "5m": 300, "1.5h": 5400, "250ms": 0.25, "1 d": 86400}
    assert {value: parse_duration(value) for value in durations} == durations
    sizes = {7: 7, "7B": 7, "1KiB": 1024, "1kB": None, "20 GB": 20 * 10**9, "1.5TiB": 3 << 39}
    for text, size in sizes.items():
        if size is None:
            with pytest.raises(ValueError, match=text):
                parse_size(text)
        else:
            assert parse_size(text) == size
    with pytest.raises(ValueError, match="soon"):
        parse_duration("soon")


def test_a_home_directory_is_written_out(monkeypatch):
    monkeypatch.setenv("HOME", "/home")
    model = parse_yaml("models: {m: {path: ~/m, venv: /v, kt_weight_path: a/~b}}", "g").models["m"]
    assert (model.path, model.venv, model.kt_weight_path) == ("/home/m", "/v", "a/~b")


def test_integers_are_integers():
    config = parse_yaml("port: 8081.0\nmodels: {m: {path: /m, context_length: 4096.0}}", "g")
    assert (repr(config.port), repr(config.models["m"].context_length)) == ("8081", "4096")


KEYS = st.sampled_from(sorted({**schema()["properties"], **schema()["$defs"]["settings"]["properties"], "x": 0}))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 70000) | st.floats() | st.text(max_size=5)
    | st.sampled_from(["5m", "1GiB", "/p", "${PORT}", "kt", "command", "never", "a 'b"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS | st.sampled_from("mn"), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
MODELS = st.dictionaries(st.sampled_from("mn"), st.dictionaries(KEYS, VALUES, max_size=2), min_size=1)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=1), MODELS)
def test_whatever_stands_there_is_a_configuration_or_a_problem(top, models):
    """What is a configuration can be run: its values have the types of the fields."""
    models = {name: {"path": "/p", **model} for name, model in models.items()}
    with contextlib.suppress(InvalidConfigError):
        for model in parse_yaml(yaml.safe_dump({**top, "models": models}), "g").models.values():
            assert all(isinstance(word, str) for word in (*model.command, *model.args, *model.env.values()))
            assert (model.ttl is None or model.ttl >= 0) and model.stall_timeout >= 0
            json.dumps([dict(model.params), *map(dict, model.aliases.values())], allow_nan=False)


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 3000 + "]" * 3000,
        "port: " + "9" * 5000,
        "port: 0x_",
        "port: !!int abc",
        "port: !!float abc",
        "host: \x01",
    ],
    ids=["nesting", "digits", "hexadecimal", "integer", "number", "control character"],
)
def test_what_the_parser_chokes_on_is_a_mistake_of_the_file(text):
    with pytest.raises(InvalidConfigError, match=r"gateway\.yaml"):
        parse_yaml(text, "gateway.yaml")


def test_a_home_that_nobody_has_is_a_path_that_is_missed_later():
    config = parse_yaml("models: {m: {path: ~no-such-user/m}}", "gateway.yaml")
    assert config.models["m"].path == "~no-such-user/m"
