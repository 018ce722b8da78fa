from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from proa.cli.sglang_flags import DEFAULT_PORT, FOREIGN, parse
from proa.core.errors import ConfigError, UnsupportedError

SEEDS = Path(__file__).parents[2].parent / "shared" / "seeds"

# The launch lines as published, one string each; the seeds hold the same when they lie beside the repository.
KIMI_K27_LINE = """--model-path /models/Kimi-K2.7-Code --kt-weight-path /models/Kimi-K2.7-Code
--served-model-name kimi-k2.7-code --host 0.0.0.0 --port 8000 --mem-fraction-static 0.94 --trust-remote-code
--sleep-on-idle --enable-metrics --kt-cpuinfer 24 --kt-threadpool-count 1 --context-length 163840
--max-running-requests 2 --prefill-max-requests 2 --max-total-tokens 327680 --kt-num-gpu-experts 8
--kt-method RAWINT4 --kt-gpu-prefill-token-threshold 400 --kt-max-deferred-experts-per-token 1
--kt-enable-dynamic-expert-update --enable-mixed-chunk --tensor-parallel-size 1 --disable-shared-experts-fusion
--chunked-prefill-size 16384 --attention-backend flashinfer --fp8-gemm-backend triton --reasoning-parser kimi_k2
--tool-call-parser kimi_k2 --chat-template /opt/templates/Kimi-K2.7-Default.jinja --sampling-defaults model"""
KIMI_THINKING_LINE = """--host 0.0.0.0 --port 60000 --model path/to/Kimi-K2-Thinking/
--kt-weight-path path/to/Kimi-K2-Instruct-CPU-weight/ --kt-cpuinfer 56 --kt-threadpool-count 2
--kt-num-gpu-experts 200 --kt-method AMXINT4 --attention-backend flashinfer --trust-remote-code
--mem-fraction-static 0.98 --chunked-prefill-size 4096 --max-running-requests 37 --max-total-tokens 37000
--enable-mixed-chunk --tensor-parallel-size 8 --enable-p2p-check --disable-shared-experts-fusion"""
OTHER_FLAGS_NAMED = """--disable-radix-cache --disable-chunked-prefix-cache --kt-gpu-experts-ratio 0.5
--kt-expert-placement-strategy frequency --init-expert-location counts.pt --tp-size 1"""
CODERAI_LINE = """--host h --port 1 --model m --kt-weight-path w --served-model-name id --context-length 4096"""


def seed_lines():
    """The launch lines as they stand in the seeds, where these lie beside the repository; placeholders become 1."""
    lines = []
    for path in sorted(SEEDS.glob("*.txt")):
        text = path.read_text().replace("\\\n", " ").replace(" \\ ", " ").replace("[extra_args]", "")
        lines += re.findall(r"sglang\.launch_server\s+(--.*?)(?=3\.1 KT-Kernel|\n\n|\n[A-Z]|$)", text, re.DOTALL)
    assert len(lines) == (3 if SEEDS.is_dir() else 0)
    assert all(len(re.findall(r"(?<!\S)--[\w-]+", line)) >= 6 for line in lines)
    # Chinese prose follows one line without a space; flags and values are ASCII.
    words = [[re.match(r"[\x20-\x7e]*", w)[0] for w in shlex.split(re.sub(r"<\w+>", "1", line))] for line in lines]
    return [" ".join(line) for line in words]


@pytest.mark.parametrize(
    "line", [*seed_lines(), KIMI_K27_LINE, KIMI_THINKING_LINE, CODERAI_LINE, f"--model m {OTHER_FLAGS_NAMED}"]
)
@pytest.mark.parametrize("underscores", [False, True])
def test_published_launch_lines_parse(line, underscores):
    words = [re.sub("(?<=[a-z0-9])-(?=[a-z0-9])", "_", w) if underscores and w[:2] == "--" else w for w in line.split()]
    launch = parse(words)
    flags = {word for word in line.split() if word.startswith("--")}
    assert launch.model in line
    for flag in FOREIGN:
        if flags & set(flag.names):
            assert launch.notes[flag.names[0]] == flag.meaning


def test_honoured_flags_reach_their_fields():
    values = parse(KIMI_K27_LINE.split()).values
    assert {name: value for name, value in values.items() if name != "--threads"} == {
        "--kt-method": "RAWINT4",
        "--served-model-name": "kimi-k2.7-code",
        "--host": "0.0.0.0",
        "--port": 8000,
        "--context-length": 163840,
        "--max-running-requests": 2,
        "--max-total-tokens": 327680,
        "--gpu-experts": 8,
        "--expert-updates": True,
        "--max-deferred-experts": 1,
        "--gpu-prefill-threshold": 400,
        "--chunked-prefill-size": 16384,
        "--prefill-max-requests": 2,
        "--chat-template": Path("/opt/templates/Kimi-K2.7-Default.jinja"),
        "--tool-call-parser": "kimi_k2",
        "--reasoning-parser": "kimi_k2",
        "--sampling-defaults": "model",
        "--attention-backend": "flashinfer",
        "--mem-fraction-static": 0.94,
    }
    assert values["--threads"] == min(24, len(os.sched_getaffinity(0)))
    assert parse(["--model", "m", "--disable-radix-cache"]).values["--disable-radix-cache"] is True


def test_other_attention_backends_of_sglang_are_taken_for_auto():
    launch = parse(["--model", "m", "--attention-backend", "trtllm_mla"])
    assert "--attention-backend" not in launch.values
    assert launch.notes["--attention-backend"] == "trtllm_mla is taken for auto"


def test_the_default_of_sglangs_expert_location_is_no_file():
    launch = parse(["--model", "m", "--init-expert-location", "trivial"])
    assert "--expert-location" not in launch.values
    assert launch.notes["--init-expert-location"].startswith("trivial")
    assert parse(["--model", "m", "--init-expert-location", "c.pt"]).values["--expert-location"] == "c.pt"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("--kt-num-gpu-expert", "--kt-num-gpu-experts"),
        ("--max_runing_requests=4", "--max-running-requests"),
        ("--chunk-prefill-size", "--chunked-prefill-size"),
        ("--model-paht", "--model-path"),
    ],
)
def test_an_unknown_flag_names_the_nearest(wrong, meant):
    with pytest.raises(ConfigError, match=f"did you mean {meant}"):
        parse(["--model-path", "m", wrong, "8"])


def test_a_stray_word_is_not_taken_for_a_flag():
    with pytest.raises(ConfigError, match="expected flags and their values, got 'stray'"):
        parse(["--model-path", "m", "stray"])


def test_abbreviations_are_unknown_flags():
    with pytest.raises(ConfigError, match="did you mean --max-running-requests"):
        parse(["--model-path", "m", "--max-running", "8"])


@pytest.mark.parametrize(
    "words", [["--port", "1"], ["--model", "m", "--port", "x"], ["--model", "m", "--port"], ["--model", "m", "stray"]]
)
def test_wrong_command_lines_are_config_errors(words):
    with pytest.raises(ConfigError):
        parse(words)


@pytest.mark.parametrize("words", [["--enable-lora"], ["--lora-paths", "a", "b"], ["--kt-lora-path", "a"]])
def test_flags_that_change_the_answers_are_refused(words):
    with pytest.raises(UnsupportedError, match="LoRA"):
        parse(["--model", "m", *words])


def test_default_port_is_sglangs():
    assert parse(["--model", "m"]).values == {"--port": DEFAULT_PORT}


def test_the_module_exits_2_with_one_line_for_an_unknown_flag():
    done = subprocess.run(
        [sys.executable, "-m", "proa.launch_server", "--model", "m", "--kt-metod", "x"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "did you mean --kt-method" in done.stderr
