"""The table of what became of each flag."""

from __future__ import annotations

from proa.cli import console
from proa.cli.flag_report import FlagReport
from proa.cli.flags import FLAGS
from proa.cli.sglang_flags import parse
from proa.ipc.messages import Ready


def ready(**info):
    return Ready(max_model_len=1, kv_tokens_total=1, max_running_requests=1, vocab_size=1, load_seconds=0.0,
                 weight_bytes=0, info=info)  # fmt: skip


def test_the_engine_says_what_came_of_it_else_the_description_does():
    report = FlagReport({"--gpu-experts": 8, "--expert-placement": "random", "--port": 80, "--host": None})
    info = {"gpu_experts": "6 of 8, random", "device": "GPU"}
    assert report.rows(info) == [
        ("--port", "80", "Port to listen on."),
        ("--gpu-experts", "8", "6 of 8, random"),
        ("--expert-placement", "random", "6 of 8, random"),
    ]
    unused = {"expert_placement": "not used: the trunk runs on the CPU"}
    assert report.rows(unused)[2] == ("--expert-placement", "random", unused["expert_placement"])


def test_a_line_of_sglang_has_a_row_for_each_of_its_flags():
    words = "--model m --port 1 --kt-num-gpu-experts 3 --tp-size 8 --attention-backend fa3 --kt-cpuinfer 9999"
    launch = parse(words.split())
    rows = {name: (value, effect) for name, value, effect in FlagReport(launch.values, launch.notes).rows({})}
    assert rows.keys() == {
        "--port", "--kt-num-gpu-experts", "--tensor-parallel-size", "--attention-backend", "--kt-cpuinfer",
    }  # fmt: skip
    assert rows["--attention-backend"] == ("", "fa3 is taken for auto")
    assert "9999 threads asked for" in rows["--kt-cpuinfer"][1]


def test_it_is_shown_once_and_no_key_with_it():
    report = FlagReport({"--api-key": "sesame", "--log-level": "[b]info"})
    with console.err.capture() as captured:
        report.show(ready(log_level="[/] stays as it is"))
        report.show(ready())
    lines = captured.get().splitlines()
    assert lines == [
        "  --api-key    ***      Key every request has to carry; better in PROA_API_KEY.",
        "  --log-level  [b]info  [/] stays as it is",
    ]


def test_rows_of_the_engine_that_flags_name_are_in_its_table():
    """Each is a key that the engine writes."""
    from pathlib import Path

    import proa.engine

    source = "".join(path.read_text() for path in Path(proa.engine.__file__).parent.glob("*.py"))
    for flag in FLAGS:
        assert not flag.row or f'"{flag.row}"' in source, flag.name
