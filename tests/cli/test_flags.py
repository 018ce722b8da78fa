from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proa.cli import serve
from proa.cli.flag import default_of, default_text
from proa.cli.flags import FLAGS, by_owner
from proa.cli.main import app
from proa.cli.sglang_flags import parse
from proa.convert.demo_path import demo_model_path
from proa.core.errors import CheckpointError, ConfigError, ProaError

ROOT = Path(__file__).parents[2]
runner = CliRunner()


def test_every_flag_sets_a_field_of_its_owner_with_a_default_of_its_kind():
    for flag in FLAGS:
        default = default_of(flag)  # raises when the field does not exist
        assert default is not None or flag.unset, f"{flag.name}: say what happens when it is not given"
        assert default is None or isinstance(default, flag.kind), flag.name
        if flag.choices and default is not None:
            assert default in flag.choices
        assert flag.doc.endswith("."), flag.name


def test_names_are_unique_and_within_budget():
    names = [flag.name for flag in FLAGS]
    assert len(set(names)) == len(names) <= 60
    fields = [(flag.owner, flag.field) for flag in FLAGS]
    assert len(set(fields)) == len(fields)


def test_flags_document_is_current():
    spec = importlib.util.spec_from_file_location("gen_flags", ROOT / "scripts" / "gen_flags.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.DOCUMENT.read_text() == module.render(), "run `make flags`"


def test_help_of_serve_shows_every_flag_and_default(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = runner.invoke(app, ["serve", "--help"])
    assert result.exit_code == 0
    for flag in FLAGS:
        assert flag.name in result.stdout
        assert f"[default: {default_text(flag)}]" in result.stdout
    assert "proa serve demo" in result.stdout


@pytest.mark.parametrize("command", [[], ["serve"], ["chat"], ["bench"], ["bench", "serve"], ["doctor"]])
def test_every_command_has_help(command):
    result = runner.invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    if command not in ([], ["bench"]):
        assert "Examples" in result.stdout


def test_values_reach_run_by_flag_name(monkeypatch):
    seen = {}
    monkeypatch.setattr(serve, "run", lambda model, values: seen.update(values, model=model))
    result = runner.invoke(
        app, ["serve", "dir", "--port", "9", "--kv-cache-dtype", "bfloat16", "--disable-radix-cache"]
    )
    assert result.exit_code == 0, result.output
    given = {name: value for name, value in seen.items() if value is not None}
    assert given == {"model": "dir", "--port": 9, "--kv-cache-dtype": "bfloat16", "--disable-radix-cache": True}


@pytest.mark.parametrize("arguments", [["--port", "x"], ["--kv-cache-dtype", "int3"], ["--nonsense"]])
def test_wrong_options_exit_2(arguments):
    assert runner.invoke(app, ["serve", "dir", *arguments]).exit_code == 2


def test_by_owner_splits_and_drops_what_was_not_given():
    values = {"--port": 9, "--threads": 2, "--block-size": None}
    assert by_owner(values, "server") == {"port": 9}
    assert by_owner(values, "engine") == {"num_threads": 2}


def test_compose_gives_both_configurations(tmp_path):
    (tmp_path / "config.json").touch()
    server, engine = serve.compose(str(tmp_path), {"--port": 9, "--threads": 2, "--log-level": "error"})
    assert (server.port, engine.num_threads, engine.log_level) == (9, 2, "error")
    assert engine.model_path == str(server.model_path) == str(tmp_path)
    assert server.api_key is None


def test_compose_refuses_what_is_out_of_range(tmp_path):
    for name, value in (("--port", 70000), ("--threads", 0), ("--memory-fraction", 1.5)):
        with pytest.raises(ConfigError):
            serve.compose(str(tmp_path), {name: value})


def test_compose_refuses_a_missing_directory(tmp_path):
    with pytest.raises(ProaError, match=r"config\.json at .*no-such-model, got nothing there"):
        serve.compose(str(tmp_path / "no-such-model"), {})
    with pytest.raises(ProaError, match="a directory without one"):
        serve.compose(str(tmp_path), {})


@pytest.mark.parametrize(
    ("flag", "value", "text"),
    [
        ("--threads", 0, "[--threads] expected `int` >= 1, got 0"),
        ("--memory-fraction", float("nan"), "[--memory-fraction] expected a finite number, got nan"),
        ("--memory-fraction", 2.0, "[--memory-fraction] expected `float` <= 1.0, got 2.0"),
        ("--block-size", 0, "[--block-size] expected `int` >= 1, got 0"),
    ],
)
def test_a_wrong_engine_value_is_an_error_that_names_the_flag(flag, value, text):
    with pytest.raises(ConfigError) as caught:
        serve.compose("demo", {flag: value})
    assert text in str(caught.value)


def test_the_key_comes_from_the_environment_unless_the_flag_names_one(tmp_path, monkeypatch):
    (tmp_path / "config.json").touch()
    monkeypatch.setenv("PROA_API_KEY", "from-environment")
    assert serve.compose(str(tmp_path), {})[0].api_key == "from-environment"
    assert serve.compose(str(tmp_path), {"--api-key": "flag"})[0].api_key == "flag"


def test_a_model_answers_to_its_path_too_unless_it_was_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert serve.compose(str(tmp_path), {})[0].model_names == (tmp_path.name, str(tmp_path))
    assert serve.compose(str(tmp_path), {"--served-model-name": "kimi"})[0].model_names == ("kimi",)
    config = serve.compose(str(tmp_path), {"--served-model-name": "kimi, claude-x"})[0]
    assert (config.model_name, config.model_names) == ("kimi", ("kimi", "claude-x"))
    assert config.serves("claude-x") and not config.serves("gpt") and not config.serves("*")
    config = serve.compose(str(tmp_path), {"--served-model-name": "kimi, *"})[0]
    assert config.model_names == ("kimi",) and config.serves("gpt")


def test_the_commands_import_neither_torch_nor_native_code():
    code = (
        "import sys, proa.cli.main, proa.launch_server, proa.server.launch; "
        "sys.exit(', '.join(m for m in ('torch', 'transformers', 'numpy', 'proa.native') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_serving_a_demo_model_that_is_there_imports_nothing_slow(tmp_path, monkeypatch):
    monkeypatch.setenv("PROA_CACHE_DIR", str(tmp_path))
    demo_model_path().mkdir(parents=True)
    code = (
        "import sys, proa.server.launch; from proa.cli import main, serve; serve.compose('demo', {}); "
        "sys.exit(', '.join(m for m in ('httpx', 'numpy', 'proa.convert.demo_model') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_unknown_parsers_are_refused_before_a_model_is_looked_at(flag):
    result = runner.invoke(app, ["serve", "no-such-directory", flag, "nonsense"])
    assert result.exit_code != 0
    assert isinstance(result.exception, ProaError) and flag in str(result.exception)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.kind is float], ids=lambda flag: flag.name)
def test_numbers_that_are_none_are_refused(flag, value):
    """The engine would not see them: they are null in JSON."""
    with pytest.raises(ConfigError, match=flag.name):
        serve.compose("nowhere", {flag.name: float(value)})


def test_numbers_that_proa_chooses_may_be_auto(tmp_path):
    """As when they are left out, in both command lines; others have a default and no auto."""
    numbers = [flag for flag in FLAGS if flag.may_be_auto]
    assert {"--max-running-requests", "--max-total-tokens", "--context-length", "--chunked-prefill-size"} <= {
        flag.name for flag in numbers
    }
    words = [word for flag in numbers if flag.sglang for word in (flag.sglang[0], "auto")]
    assert parse(["--model", "m", *words]).values == parse(["--model", "m"]).values
    words = [word for flag in numbers for word in (flag.name, "auto")]
    result = runner.invoke(app, ["serve", str(tmp_path), *words])
    assert isinstance(result.exception, CheckpointError), result.output
    result = runner.invoke(app, ["serve", str(tmp_path), "--context-length", "much"])
    assert result.exit_code == 2 and "expected a number (int) or auto" in " ".join(result.output.split())
