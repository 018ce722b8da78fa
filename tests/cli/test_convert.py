"""`proa convert` on the command line, and KTransformers' options in front of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.convert_cases import NUM_LAYERS, contents, write_model
from typer.testing import CliRunner

from proa.cli.main import app
from proa.cli.sglang_flags import parse
from proa.convert import cpu_weights
from proa.core.errors import ConfigError


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("convert-cli") / "model")


def test_convert_prints_the_error_of_every_layer(model, tmp_path):
    output = tmp_path / "out"
    arguments = ["convert", str(model), "--method", "amxint4", "-o", str(output), "--threads", "2", "--verify"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[0] for row in rows[1 : 1 + NUM_LAYERS]] == ["0", "1", "2", "3"]
    assert all(0 < float(row[1]) < 0.2 for row in rows[1 : 1 + NUM_LAYERS])
    assert "AMXINT4 (int4_g32) of model: 4 layers" in result.stdout
    assert "verified: all checksums" in result.stdout
    again = CliRunner().invoke(app, arguments)
    assert "4 of them kept" in again.stdout


def test_convert_raises_what_main_prints(model, tmp_path):
    (tmp_path / "mine").touch()
    result = CliRunner().invoke(app, ["convert", str(model), "--method", "FP8", "-o", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert CliRunner().invoke(app, ["convert", str(model), "--method", "INT3", "-o", str(tmp_path)]).exit_code == 2


@pytest.mark.parametrize(
    ("quant_method", "method"),
    [("int4", "AMXINT4"), ("moe_int4", "AMXINT4"), ("int8", "AMXINT8"), ("moe_int8", "AMXINT8")],
)
def test_the_old_converter_line_gives_the_same_bytes(model, tmp_path, capsys, quant_method, method):
    old = ["--input-path", str(model), "--input-type", "bf16", "--output", str(tmp_path / "old")]
    old += ["--quant-method", quant_method, "--cpuinfer-threads", "2", "--threadpool-count", "2"]
    assert cpu_weights.main([*old, "--no-merge-safetensor", "--resume-layer", "3", "--gpu", "--profile"]) == 0
    captured = capsys.readouterr()
    for option in (
        "--input-type",
        "--threadpool-count",
        "--no-merge-safetensor",
        "--resume-layer",
        "--gpu",
        "--profile",
    ):
        assert captured.err.count(f"{option} is ignored: ") == 1
    assert f"--kt-method {method}" in captured.out
    CliRunner().invoke(app, ["convert", str(model), "--method", method, "-o", str(tmp_path / "new")])
    assert contents(tmp_path / "old") == contents(tmp_path / "new")


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--quant-method", "awq"], 1, "expected one of int4"),
        (["--save-backward-weights"], 1, "no option for training"),
        (["--cpuinfer-threads", "0"], 1, "at least 1"),
    ],
)
def test_old_options_without_a_meaning_are_refused(model, tmp_path, capsys, options, status, message):
    line = ["-i", str(model), "-o", str(tmp_path / "out"), *options]
    assert cpu_weights.main(line) == status
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        cpu_weights.main(["-i", str(model), "-o", str(tmp_path / "out"), "--quant-method", "int3"])
    assert caught.value.code == 2


@pytest.mark.parametrize("method", [None, "AMXINT8", "amxint4"])
def test_launch_lines_hand_on_converted_directories(tmp_path, method):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "proa_experts.json").touch()
    (tmp_path / "kt" / "_layer_0").mkdir(parents=True)
    for directory in ("ours", "kt"):  # kt-kernel's have the experts of the model directory
        words = ["--model", "m", "--kt-weight-path", str(tmp_path / directory)]
        launch = parse([*words, *(["--kt-method", method] if method else [])])
        assert launch.values.get("--kt-weight-path") == (str(tmp_path / "ours") if directory == "ours" else None)
        assert launch.values.get("--kt-method") == (method and method.upper())
        assert len(launch.notes) == (directory == "kt")
        assert all("kt-kernel's packed bytes are not read" in note for note in launch.notes.values())
