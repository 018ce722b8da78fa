"""Every family but Kimi: its cases for every way to cut them, and any token sequence."""

import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.chat.chunkings import pieces_of
from proa.chat.output.events import Answer, ArgumentsDelta, CallStart
from proa.chat.output.output_format import THINK, THINK_END
from proa.chat.output.parser import FAMILIES
from proa.chat.output.tools import DeclaredTools
from proa.chat.replay import main

CASES = sorted((Path(__file__).parent / "cases").glob("*.jsonl"))
OTHERS = sorted(set(FAMILIES) - {"kimi_k2", "none"})
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string"},
                "days": {"type": "integer"},
                "raw": {"type": ["string", "null"]},
                "parts": {"type": "array"},
            },
            "required": ["place"],
        },
    },
}
READ = {"type": "function", "function": {"name": "read-file"}}

# What a family's output is made of beside its markers: plain spellings of tags and what stands between them.
FRAGMENTS = {
    "deepseek_v3": ["function", "weather\n", "```json\n", "\n```", '{"place": "Oslo"}', "{"],
    "deepseek_v31": ["weather", '{"place": "Oslo"}', '"{}"'],
    "deepseek_v32": [
        "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", '<｜DSML｜invoke name="weather">',
        "</｜DSML｜invoke>", '<｜DSML｜parameter name="place" string="true">', "</｜DSML｜parameter>",
        '<parameter name="days" string="false">', "</invoke>", "<｜DSML｜parameter", ">", "{", "7",
    ],
    "glm45": ["weather", "place", "days", "7", "nu", "raw", "\n"],
    "minimax_m2": [
        '<invoke name="weather">', "</invoke>", '<parameter name="place">', '<parameter name="raw">', "</parameter>",
        "<invoke", ">", "{", "null",
    ],
    "mistral": ["weather", '[{"name": "weather", "arguments": {"place": "Oslo"}}]', '{"place": 1}', '", "', "[", "]"],
    "qwen3": [
        '{"name": "weather", "arguments": {"place": "Oslo"}}', '{"name": "', "weather", '", "arguments": ', "{}}", "\\",
    ],
    "qwen3_coder": [
        "<function=weather>", "</function>", "<parameter=place>", "<parameter=parts>", "</parameter>", "\n",
        "<function=", "<function=x>", "[1]",
    ],
}  # fmt: skip
# Into the states that hold text back.
OPENINGS = {
    "deepseek_v3": ["<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"],
    "deepseek_v32": ['<｜DSML｜function_calls><｜DSML｜invoke name="weather"><parameter name="x">'],
    "glm45": ["<tool_call>weather<arg_key>days</arg_key><arg_value>"],
    "mistral": ['[TOOL_CALLS] [{"arguments": '],
    "qwen3": ["<tool_call>", '<tool_call>{"arguments": '],
    "qwen3_coder": ["<tool_call><function=weather><parameter=raw>"],
}
FRAGMENTS["glm47"] = FRAGMENTS["glm45"]


def parse(family, chunks, **options):
    parser = FAMILIES[family].parser(DeclaredTools([WEATHER, READ]), **{"in_reasoning": False, **options})
    events = []
    for chunk in chunks:
        events += parser.push_text(chunk) if isinstance(chunk, str) else parser.push(chunk)
    return events + parser.finish()


def summary(events):
    answer = Answer.of(events)
    return answer.content, answer.reasoning, [(call.name, call.arguments) for call in answer.calls]


def cut(sequence, cuts):
    return [sequence[a:b] for a, b in itertools.pairwise([0, *sorted(cuts), len(sequence)])]


def check_stream(family, events, *, spelled):
    """Calls come one after another with dense indices, each opened before its arguments, each with some."""
    current, has_arguments, ids = -1, True, set()
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == current + 1 and has_arguments and event.name
            assert event.id not in ids
            ids.add(event.id)
            current, has_arguments = event.index, False
        elif isinstance(event, ArgumentsDelta):
            assert event.index == current and event.text
            has_arguments = True
    assert has_arguments
    if spelled:
        content, reasoning, calls = summary(events)
        markers = [marker for marker in FAMILIES[family].markers if marker[0] in "<["]
        for field in (content, reasoning, *[name for name, _ in calls]):
            assert field is None or not any(marker in field for marker in markers)
        for _, arguments in calls:
            assert not any(marker in arguments for marker in markers if marker not in (THINK, THINK_END))


def sequences(family):
    """Lists of pieces: markers, fragments, any text."""
    texts = st.text(st.sampled_from('0 \n"{}<>/=🙂é'), max_size=6)
    fragments = st.one_of(st.sampled_from(FRAGMENTS[family]), texts).map(lambda text: (text, False))
    markers = st.sampled_from(FAMILIES[family].markers).map(lambda marker: (marker, True))
    return st.lists(st.one_of(markers, fragments), max_size=24)


def test_every_family_has_its_cases():
    assert {path.stem for path in CASES} == set(OTHERS)
    assert all(len(path.read_text().splitlines()) >= 40 for path in CASES)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_cases(path, tmp_path):
    """By token and by text: all of them whole and piece by piece, the short ones cut everywhere."""
    assert main(["--family", path.stem, str(path)]) == 0
    short = [line for line in path.read_text().splitlines() if len(json.loads(line)["text"]) < 150]
    (tmp_path / "short.jsonl").write_text("\n".join(short))
    assert main(["--family", path.stem, "--splits", "all", str(tmp_path / "short.jsonl")]) == 0


@pytest.mark.parametrize("family", OTHERS)
@settings(deadline=None)
@given(st.data())
def test_any_token_sequence(family, data):
    pieces = data.draw(sequences(family))
    options = {"in_reasoning": data.draw(st.booleans()), "no_calls": data.draw(st.sampled_from([False, False, True]))}
    events = parse(family, [pieces], **options)
    cuts = data.draw(st.sets(st.integers(0, len(pieces)), max_size=6))
    characters = [[(c, False) for c in text] if not is_marker else [(text, True)] for text, is_marker in pieces]
    for chunks in (cut(pieces, cuts), characters):
        assert summary(parse(family, chunks, **options)) == summary(events)
    check_stream(family, events, spelled=False)
    if options["no_calls"]:
        assert not any(isinstance(event, CallStart | ArgumentsDelta) for event in events)


@pytest.mark.parametrize("family", OTHERS)
@settings(deadline=None)
@given(st.data())
def test_any_text(family, data):
    text = "".join(text for text, _ in data.draw(sequences(family)))
    events = parse(family, [text])
    cuts = data.draw(st.sets(st.integers(0, len(text)), max_size=6))
    pieces = pieces_of(text, FAMILIES[family].markers)
    for chunks in (cut(text, cuts), list(text), [pieces]):
        assert summary(parse(family, chunks)) == summary(events)
    check_stream(family, events, spelled=True)


@pytest.mark.parametrize("family", OTHERS)
@settings(deadline=None)
@given(st.integers(0, 2**64 - 1))
def test_the_output_of_a_seed(family, seed):
    """The two tests above over cheaper examples, for long runs: see `conftest.py`."""
    rng = random.Random(seed)
    parts = [*FAMILIES[family].markers, *FRAGMENTS[family], *'0 \n"{}<>/=🙂é', "", "<", " weather"]
    drawn = rng.choices(parts, k=rng.randrange(24))
    markers = FAMILIES[family].markers
    pieces = [(part, part in markers and rng.random() < 0.9) for part in drawn]
    options = {"in_reasoning": rng.random() < 0.3}
    events = parse(family, [pieces], **options)
    single = [[(c, False) for c in text] if not is_marker else [(text, True)] for text, is_marker in pieces]
    assert summary(parse(family, single, **options)) == summary(events)
    check_stream(family, events, spelled=False)
    text = "".join(drawn)
    events = parse(family, [text], **options)
    cuts = rng.sample(range(len(text) + 1), k=rng.randrange(min(len(text), 5) + 1))
    for chunks in (cut(text, cuts), list(text), [pieces_of(text, markers)]):
        assert summary(parse(family, chunks, **options)) == summary(events)
    check_stream(family, events, spelled=True)


@pytest.mark.parametrize("family", OTHERS)
def test_hostile_output_takes_linear_time(family):
    """A quadratic path would take minutes here."""
    markers = [*FAMILIES[family].markers, *FRAGMENTS[family]]
    parts = [*markers, *[marker[:-1] for marker in markers], "<", " ", "0"]
    for text in [part * (50_000 // max(1, len(part))) for part in parts]:
        for opening in ("", *OPENINGS.get(family, ())):
            parse(family, [opening, *[text[i : i + 7] for i in range(0, len(text), 7)]])
