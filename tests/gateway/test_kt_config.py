"""An application's config.json and models.json, as the document of its `kt` backend describes them."""

from __future__ import annotations

import json

import pytest

from proa.gateway.config import ModelConfig
from proa.gateway.config_file import read_config
from proa.gateway.errors import UnknownModelError
from proa.gateway.kt_config import parse_kt
from proa.gateway.problems import InvalidConfigError
from proa.gateway.routing import names, resolve

# Every field of the document's table.
CONFIG = """{
  "some_other_setting": {"of": "the application"},
  "ktransformers": {
    "enabled": true,
    "model_path": "/models/Kimi-K2",
    "kt_weight_path": "/models/Kimi-K2-KT",
    "model_id": "kimi-k2",
    "host": "127.0.0.1",
    "port": 0,
    "ctx": 65536,
    "extra_args": "--tp-size 1",
    "extra_env": "OMP_NUM_THREADS=8 KT_DEBUG='a b'",
    "auto_build": false
  }
}"""
# The document's example, verbatim.
ENTRY = '{ "path": "…", "backend": "kt", "alias": "deepseek-v4-kt" }'
KIMI = ModelConfig(
    name="kimi-k2",
    backend="kt",
    path="/models/Kimi-K2",
    kt_weight_path="/models/Kimi-K2-KT",
    context_length=65536,
    args=("--tp-size", "1"),
    env={"OMP_NUM_THREADS": "8", "KT_DEBUG": "a b"},
)


def parse(block, models=None):
    text = block if isinstance(block, str) else json.dumps({"ktransformers": block})
    return parse_kt(text, models, "config.json")


def test_the_documented_snippets_work_as_they_are():
    config = parse(CONFIG, f"[{ENTRY}]")
    assert config.models["kimi-k2"] == KIMI
    added = config.models["deepseek-v4-kt"]
    assert (added.path, added.backend, added.args, added.env) == ("…", "kt", KIMI.args, KIMI.env)
    assert added.kt_weight_path == "", "the weights of another model are not its weights"
    assert list(config.models) == ["kimi-k2", "deepseek-v4-kt"]


@pytest.mark.parametrize("models", [ENTRY, f"[{ENTRY}]", f'{{"models": [{ENTRY}]}}'])
def test_models_json_may_be_a_list_or_hold_one(models):
    assert "deepseek-v4-kt" in parse(CONFIG, models).models


def test_defaults_of_the_table():
    assert parse({"enabled": True, "model_path": "/m"}).models == {
        "ktransformers": ModelConfig(name="ktransformers", backend="kt", path="/m")
    }


def test_only_an_explicit_backend_or_the_id_leads_to_kt():
    others = [
        {"path": "/a", "alias": "kimi-k2-kt"},
        {"path": "/b", "backend": "ds4", "alias": "kt"},
        {"path": "/c", "backend": "ktransformers", "alias": "c"},
        "kt",
    ]
    config = parse(CONFIG, json.dumps(others))
    assert names(config) == ("kimi-k2",)
    assert resolve(config, "kimi-k2").model.backend == "kt"
    for name in ("kimi-k2-kt", "Kimi-K2", "kimi-k2 ", "kimi", "kt", "ktransformers", "/models/Kimi-K2"):
        with pytest.raises(UnknownModelError, match="expected kimi-k2,"):
            resolve(config, name)


def test_an_entry_may_say_what_is_different():
    entry = {"path": "/m", "backend": "kt", "alias": "m", "kt_weight_path": "/w", "ctx": 1024, "extra_args": ["-a", 1]}
    model = parse(CONFIG, json.dumps([entry])).models["m"]
    assert (model.kt_weight_path, model.context_length, model.args) == ("/w", 1024, ("-a", "1"))
    same = {"path": "/models/Kimi-K2", "backend": "kt", "alias": "again"}
    assert parse(CONFIG, json.dumps([same])).models["again"].kt_weight_path == "/models/Kimi-K2-KT"


def test_an_engine_that_is_not_enabled_serves_nothing():
    assert not parse({"enabled": False, "model_path": "/m"}, f"[{ENTRY}]").models
    assert not parse({"model_path": "/m"}).models


def test_entries_alone_are_enough():
    assert list(parse({"enabled": True}, f"[{ENTRY}]").models) == ["deepseek-v4-kt"]
    assert parse({"enabled": True, "extra_env": {"A": 1}, "extra_args": ["x"]}, ENTRY).models["deepseek-v4-kt"].env == {
        "A": "1"
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "line 1: file: expected JSON"),
        ("[]", "ktransformers: expected an object with the settings of the engine, got null"),
        (
            '{\n"ktransformers": {\n"enabled": true,\n"modelpath": 1}}',
            "line 4: ktransformers.modelpath: expected one of",
        ),
        ('{"ktransformers": {"enabled": "yes"}}', 'ktransformers.enabled: expected true or false, got "yes"'),
        ('{"ktransformers": {"port": 65536}}', "expected an integer from 0 to 65535, got 65536"),
        ('{"ktransformers": {"ctx": true}}', "ktransformers.ctx: expected an integer"),
        ('{"ktransformers": {"model_path": 3}}', "ktransformers.model_path: expected a text, got 3"),
        ('{"ktransformers": {"extra_args": "\'"}}', "ktransformers.extra_args: expected a command line"),
        ('{"ktransformers": {"extra_args": 5}}', "ktransformers.extra_args: expected a command line"),
        ('{"ktransformers": {"extra_env": "NAME"}}', "ktransformers.extra_env: expected KEY=VALUE"),
    ],
)
def test_mistakes_are_named(text, problem):
    with pytest.raises(InvalidConfigError) as failure:
        parse(text)
    assert problem in str(failure.value)


@pytest.mark.parametrize(
    ("models", "problem"),
    [
        ("3", "expected a list of models, got 3"),
        ('[\n{"backend": "kt", "path": "/m"}]', "line 2: 0: expected a path and an alias"),
        ('[{"backend": "kt", "path": "/m", "alias": "a",\n"ctx": -1}]', "line 2: a.ctx: expected an integer"),
        ('[{"backend": "kt", "path": "/m", "alias": "kimi-k2"}]', "expected a name that is not taken"),
    ],
)
def test_mistakes_of_entries_are_named(models, problem):
    with pytest.raises(InvalidConfigError) as failure:
        parse(CONFIG, models)
    assert problem in str(failure.value)


def test_models_json_is_read_beside_config_json(tmp_path):
    (tmp_path / "config.json").write_text(CONFIG)
    assert list(read_config(tmp_path / "config.json").models) == ["kimi-k2"]
    (tmp_path / "models.json").write_text(f"[{ENTRY}]")
    assert "deepseek-v4-kt" in read_config(tmp_path / "config.json").models


@pytest.mark.parametrize("text", ["[" * 100_000, '{"port": ' + "9" * 5000 + "}"], ids=["nesting", "digits"])
def test_what_the_parser_chokes_on_is_a_mistake_of_the_file(text):
    with pytest.raises(InvalidConfigError, match=r"config\.json"):
        parse_kt(text, None, "config.json")
