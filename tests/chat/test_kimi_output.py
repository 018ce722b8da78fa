"""What Kimi writes -> reasoning, content, calls: case by case, for every way to cut it, and for any token sequence."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.chat.chunkings import chunkings, pieces_of
from proa.chat.output.events import Answer, ArgumentsDelta, CallStart
from proa.chat.output.kimi_k2 import (
    ARGUMENT_BEGIN,
    CALL_BEGIN,
    CALL_END,
    MARKERS,
    SECTION_BEGIN,
    SECTION_END,
    THINK,
    THINK_END,
    KimiK2Parser,
)
from proa.chat.output.tools import DeclaredTools

SB, SE, CB, AB, CE, TH, TE = SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENT_BEGIN, CALL_END, THINK, THINK_END
SB1, SE1 = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"


def function(name, required=(), optional=(), **schema):
    properties = {key: {"type": "string"} for key in (*required, *optional)}
    parameters = {"type": "object", "properties": properties, "required": list(required), **schema}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = function("weather", ["place"], ["unit"])
READ = function("read-file", ["path"])
BOOK = function("book", ["place"])
DOTTED = function("mcp.files.read", ["path"])
OPEN = function("log", additionalProperties=True)
ALL = [WEATHER, READ]


def call(header, arguments="{}", end=CE):
    return f"{CB}{header}{AB}{arguments}{end}"


def section(*calls):
    return SB + "".join(calls) + SE


def expected(content=None, reasoning=None, *calls):
    return content, reasoning, [(f"functions.{name}:{k}", name, text) for k, (name, text) in enumerate(calls)]


OSLO = '{"place":"Oslo"}'
W0 = call("functions.weather:0", OSLO)
W = ("weather", OSLO)
X = '{"path":"x"}'
UNENDED = call("weather:0", OSLO, "")


def weather(arguments, seen=None):
    """A section with one call and what is expected of it; `seen`: the arguments as they come out."""
    return section(call("weather:0", arguments)), expected(None, None, ("weather", arguments if seen is None else seen))


# (what it is, text, expected content, reasoning and calls); tools are ALL and the answer begins as content.
CASES = [
    ("plain", "Hello.", expected("Hello.")),
    ("empty", "", expected()),
    ("blank answer", " \n", expected()),
    ("a no-break space is text", "\u00a0", expected("\u00a0")),
    ("call", section(W0), expected(None, None, W)),
    ("text, call, text", f"A {section(W0)} B", expected("A  B", None, W)),
    ("blanks around a section", f"A\n{section(W0)}\n", expected("A\n", None, W)),
    ("two calls", section(W0, call("functions.read-file:1", X)), expected(None, None, W, ("read-file", X))),
    ("two sections", f"{section(W0)}{section(W0)}", expected(None, None, W, W)),
    ("think", f"{TH}r{TE}c", expected("c", "r")),
    ("empty think", f"{TH}{TE}c", expected("c", "")),
    ("think after blanks", f" \n{TH}r{TE}c", expected("c", "r")),
    ("think after content is dropped", f"a{TH}b{TE}c", expected("abc")),
    ("think after a section is dropped", f"{section(W0)}{TH}b", expected("b", None, W)),
    ("call inside think", f"{TH}r{section(W0)}", expected(None, "r", W)),
    ("no section markers", f"A{call('weather:0', OSLO)}", expected("A", None, W)),
    ("no end of call", f"{SB}{UNENDED}{UNENDED}{SE}", expected(None, None, W, W)),
    ("end at a section begin", f"{SB}{UNENDED}{SB}{W0}", expected(None, None, W, W)),
    ("cut in arguments", f'{SB}{CB}weather:0{AB}{{"pla', expected(None, None, ("weather", '{"pla'))),
    ("cut in the header", f"A{SB}{CB}functions.wea", expected("A")),
    ("cut in a marker", f"A{section(W0)}B<|tool", expected("AB<|tool", None, W)),
    ("header begun anew", f"{SB}{CB}junk{CB}weather:0{AB}{OSLO}{CE}{SE}", expected(None, None, W)),
    ("header ended by a call end", f"{SB}{CB}junk{CE}{W0}{SE}", expected(None, None, W)),
    ("header ended by a section end", f"{SB}{CB}junk{SE}after", expected("after")),
    ("text inside a section", f"{SB} noise {W0} more {SE}", expected(None, None, W)),
    ("stray markers", f"a{SE}b{CE}c{AB}d{TE}e", expected("abcde")),
    ("think tags in arguments are text", *weather(f'{{"place":"{TH}{TE}"}}')),
    ("argument marker in arguments", *weather(f'{{"place":{AB}"x"}}', '{"place":"x"}')),
    ("plain section markers", f"A{SB1} \n{W0}{SE1}B", expected("AB", None, W)),
    ("plain begin without a call is text", f"A{SB1} B", expected(f"A{SB1} B")),
    ("plain begin at the end", f"A{SB1} ", expected(f"A{SB1} ")),
    ("plain end outside is text", f"A{SE1}", expected(f"A{SE1}")),
    ("plain begin inside think", f"{TH}r{SB1}{W0}", expected(None, "r", W)),
    ("two plain begins", f"{SB1}{SB1}{W0}", expected(SB1, None, W)),
    ("header with blanks", section(call(" functions.weather:3 \n", OSLO)), expected(None, None, W)),
    ("hyphen", section(call("functions.read-file:0")), expected(None, None, ("read-file", "{}"))),
    ("undeclared name passes", section(call("functions.other:0")), expected(None, None, ("other", "{}"))),
    ("undeclared without prefix", section(call("other:0")), expected(None, None, ("other", "{}"))),
    ("colons in the name", section(call("functions.a:b:0")), expected(None, None, ("a:b", "{}"))),
    ("broken header next to a call", section(call("functions.bad.0", '{"a":1}'), W0), expected(None, None, W)),
    ("only a broken header", f"A{section(call('functions.bad.0', '{} '))}", expected("Afunctions.bad.0{} ")),
    ("bare number, by keys", section(call("7", OSLO)), expected(None, None, W)),
    ("opaque id, by keys", section(call("call_ab12", X)), expected(None, None, ("read-file", X))),
    ("opaque id, no keys", section(call("call_ab12", "{}")), expected("call_ab12{}")),
    ("opaque id, malformed", section(call("0", '{"path"')), expected('0{"path"')),
    ("unknown keys lose", section(call("0", '{"x":1,"y":2}')), expected('0{"x":1,"y":2}')),
    ("best score", section(call("0", '{"path":"x","y":2}')), expected(None, None, ("read-file", '{"path":"x","y":2}'))),
    ("arguments trimmed", section(call("weather:0", f" \n{OSLO}\t ")), expected(None, None, W)),
    ("blanks inside arguments stay", *weather('{ "place" : "a  b" }')),
    ("no arguments", section(call("weather:0", " ")), expected(None, None, ("weather", "{}"))),
    ("arguments in a string", section(call("weather:0", json.dumps(f" {OSLO}\n"))), expected(None, None, W)),
    ("a string that holds no object", section(call("weather:0", '"[1]"')), expected(None, None, ("weather", '"[1]"'))),
    ("an unfinished string", section(call("weather:0", '"{\\"pl')), expected(None, None, ("weather", '"{\\"pl'))),
    ("string arguments of an opaque id", section(call("0", json.dumps(OSLO))), expected(None, None, W)),
    ("malformed arguments pass", *weather('{"place": fasle}')),
    ("emoji and escapes", *weather('{"place":"\\u00e9 😀 \\\\ \\" } {"}')),
    ("think tags of a broken call vanish", section(call("functions.bad.0", f"a{TH}b")), expected("functions.bad.0ab")),
    ("half markers are text", "a < b <| c <|tool_call d", expected("a < b <| c <|tool_call d")),
]  # fmt: skip


def parse(pieces_or_text, chunks=None, tools=ALL, **options):
    parser = KimiK2Parser(DeclaredTools(tools), **{"in_reasoning": False, **options})
    events = []
    for chunk in chunks if chunks is not None else [pieces_or_text]:
        events += parser.push_text(chunk) if isinstance(chunk, str) else parser.push(chunk)
    return events + parser.finish()


def summary(events):
    answer = Answer.of(events)
    return answer.content, answer.reasoning, [(c.id, c.name, c.arguments) for c in answer.calls]


@pytest.mark.parametrize(("text", "expect"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_every_chunking_of_a_case_gives_the_same(text, expect):
    for name, chunks in chunkings(pieces_of(text, MARKERS), every=True):
        assert summary(parse(None, chunks)) == expect, f"tokens, {name}"
    for name, chunks in chunkings([(text, False)], every=True):
        assert summary(parse(None, ["".join(t for t, _ in chunk) for chunk in chunks])) == expect, f"text, {name}"


def test_begins_in_reasoning():
    def run(text):
        return summary(parse(text, in_reasoning=True))

    assert run("abc") == expected(None, "abc")
    assert run(f"abc{TE}d") == expected("d", "abc")
    assert run(TE + "d") == expected("d", "")
    assert run(f"{TH}abc{TE}d") == expected("d", "abc")
    assert run("") == expected()
    assert run(f" a {section(W0)}") == expected(None, " a ", W)


def test_ids_go_on_from_the_history():
    (name, start) = ("weather", CallStart(0, "functions.weather:4", "weather"))
    events = parse(section(call(f"functions.{name}:9", OSLO)), history_calls=4)
    assert events[0] == start


def test_tool_choice_none_swallows_calls_and_their_text():
    text = f"A{section(W0, call('functions.bad.0', 'x'))}B"
    assert summary(parse(text, no_calls=True)) == expected("AB")


def test_inference_of_a_single_tool_needs_no_arguments():
    assert summary(parse(section(call("0", '{"x"')), tools=[READ])) == expected(None, None, ("read-file", '{"x"'))
    assert summary(parse(section(call("0")), tools=[])) == expected("0{}")


def test_two_tools_that_fit_are_not_guessed():
    assert summary(parse(section(call("0", OSLO)), tools=[WEATHER, BOOK]))[2] == []


def test_an_open_tool_takes_any_key():
    events = parse(section(call("0", '{"anything":1}')), tools=[READ, OPEN])
    assert summary(events)[2] == [("functions.log:0", "log", '{"anything":1}')]


def test_declared_dotted_names_stay_whole():
    assert summary(parse(section(call("functions.mcp.files.read:0")), tools=[DOTTED]))[2][0][1] == "mcp.files.read"
    prefixed = function("functions.x")
    assert summary(parse(section(call("functions.functions.x:0")), tools=[prefixed]))[2][0][1] == "functions.x"
    assert summary(parse(section(call("functions.x:0")), tools=[prefixed]))[2][0][1] == "functions.x"


def test_ordinary_spellings_are_text_on_the_token_path():
    pieces = [(SB, True), (CB, True), ("weather:0", False), (AB, True), (f'{{"place":"{CE}"}}', False), (CE, True)]
    assert summary(parse(pieces)) == expected(None, None, ("weather", f'{{"place":"{CE}"}}'))


def test_text_is_told_at_once():
    """What is not needed to decide anything is not held back."""
    parser = KimiK2Parser(DeclaredTools(ALL), in_reasoning=False)
    assert summary(parser.push_text("Hello "))[0] == "Hello "
    assert summary(parser.push_text("a < b"))[0] == "a < b"
    assert parser.push_text(SB + CB + "functions.weather:0") == []
    (start, *rest) = parser.push_text(AB + '{"place"')
    assert start == CallStart(0, "functions.weather:0", "weather")
    assert rest == [ArgumentsDelta(0, '{"place"')]
    assert parser.push_text(":1} ") == [ArgumentsDelta(0, ":1}")]
    assert parser.push_text(CE) == []


TEXTS = st.text(st.sampled_from('ab:0 \n"{}<|>🙂é'), max_size=8)
PIECES = st.lists(
    st.one_of(
        st.sampled_from(MARKERS).map(lambda marker: (marker, True)),
        st.sampled_from(["functions.weather:0", "7", OSLO, SB1, SE1, SB1[:-4], " ", ""]).map(
            lambda text: (text, False)
        ),
        TEXTS.map(lambda text: (text, False)),
    ),
    max_size=20,
)


@settings(max_examples=500, deadline=None)
@given(
    PIECES,
    st.data(),
    st.booleans(),
    st.sampled_from([[], [WEATHER], ALL]),
    st.booleans(),
)
def test_any_token_sequence(pieces, data, in_reasoning, tools, no_calls):
    options = {"in_reasoning": in_reasoning, "tools": tools, "no_calls": no_calls}
    events = parse(pieces, **options)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(pieces)), max_size=6)))
    chunks = [pieces[a:b] for a, b in itertools.pairwise([0, *cuts, len(pieces)])]
    characters = [[(c, False) for c in text] if not is_marker else [(text, True)] for text, is_marker in pieces]
    for other in (parse(None, chunks, **options), parse(None, characters, **options)):
        assert summary(other) == summary(events)
    check_stream(events)
    if no_calls:
        assert not any(isinstance(event, CallStart | ArgumentsDelta) for event in events)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from([*MARKERS, SB1, SE1, "functions.weather:0", OSLO]), TEXTS), max_size=15),
    st.data(),
)
def test_any_text(texts, data):
    text = "".join(texts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    chunks = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    events = parse(None, chunks)
    assert summary(events) == summary(parse(text)) == summary(parse(pieces_of(text, MARKERS)))
    check_stream(events)
    content, reasoning, _ = summary(events)
    for field in (content, reasoning):
        assert field is None or not any(marker in field for marker in MARKERS)


def check_stream(events):
    """Calls come one after another with dense indices, each opened before its arguments, each with some."""
    current, has_arguments = -1, True
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == current + 1 and has_arguments
            current, has_arguments = event.index, False
        elif isinstance(event, ArgumentsDelta):
            assert event.index == current and event.text
            has_arguments = True
    assert has_arguments


@pytest.mark.parametrize(
    "text",
    ["<|tool_call" * 100_000, SB1 * 40_000, SB1 + " " * 1_000_000, SB + CB * 50_000, "<" * 1_000_000, W0 * 10_000],
    ids=["half markers", "plain begins", "blanks held", "headers", "angles", "calls"],
)
def test_hostile_output_takes_linear_time(text):
    """A quadratic path would take minutes here."""
    parse(None, [text[i : i + 7] for i in range(0, len(text), 7)])
    parse(text)


@pytest.mark.parametrize("name", ["kimi_stream.jsonl"])
def test_handed_cases(shared, name):
    from proa.chat.replay import main

    assert main(["--family", "kimi_k2", str(shared / "cases" / name)]) == 0
