"""--kt-method and --kt-weight-path, in `proa serve` and in SGLang's command line."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest

from proa.cli import serve
from proa.cli.sglang_flags import parse
from proa.core.errors import ConfigError
from proa.engine.config import ExpertMethod
from proa.models.expert_method import METHODS


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "experts.gguf").touch()
    (tmp_path / "converted").mkdir()
    names = {"FILE": "gguf/experts.gguf", "DIR": "gguf", "AMX": "converted", "NONE": "missing"}
    return {name: str(tmp_path / path) for name, path in names.items()}


@pytest.mark.parametrize(
    ("method", "path", "honoured"),
    [
        ("LLAMAFILE", "FILE", True),
        ("llamafile", "DIR", True),
        ("LLAMAFILE", "NONE", True),  # the engine says what is wrong with it
        (None, "FILE", True),
        (None, "DIR", True),
        (None, "AMX", False),
        (None, "NONE", False),
        ("AMXINT4", "AMX", False),
        ("RAWINT4", "DIR", False),  # a model directory that holds GGUF beside what the method asks for
    ],
)
def test_launch_lines_read_gguf_experts_only_when_they_ask_for_them(paths, method, path, honoured):
    words = ["--model", "m", "--kt-weight-path", paths[path], *(["--kt-method", method] if method else [])]
    launch = parse(words)
    values = {name: value for name, value in launch.values.items() if name.startswith("--kt")}
    assert values.get("--kt-weight-path") == (paths[path] if honoured else None)
    assert values.get("--kt-method") == (method.upper() if method else None)
    assert ("--kt-weight-path" in launch.notes) is not honoured


def test_serve_hands_them_to_the_engine(tmp_path):
    (tmp_path / "config.json").touch()
    values = {"--kt-weight-path": "/models/q4.gguf", "--kt-method": "LLAMAFILE"}
    engine = serve.compose(str(tmp_path), values)[1]
    assert (engine.expert_path, engine.expert_method) == ("/models/q4.gguf", "LLAMAFILE")
    assert serve.compose(str(tmp_path), {})[1].expert_path is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"--kt-method": "LLAMAFILE"}, "--kt-weight-path with LLAMAFILE"),
        ({"--kt-method": "INT3"}, "--kt-method"),
    ],
)
def test_serve_refuses_a_method_it_cannot_follow(tmp_path, values, message):
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError, match=message):
        serve.compose(str(tmp_path), values)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "auto"])
def test_every_name_reaches_the_engine(tmp_path, method):
    (tmp_path / "config.json").touch()
    words = ["--model", str(tmp_path), "--kt-method", method.lower(), "--kt-weight-path", str(tmp_path / "x.gguf")]
    assert serve.compose(str(tmp_path), parse(words).values)[1].expert_method == method


def test_the_engine_knows_the_names_that_have_a_meaning():
    assert set(typing.get_args(ExpertMethod)) == set(METHODS)
