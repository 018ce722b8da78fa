"""Writes tests/chat/cases/: `python tests/chat/write_cases.py`. What is expected is stated, never what a parser gave.

Every family gets the same conversations in its own writing, and cases of its own (`own_cases.py`). Literal markers
between ⟦ and ⟧ are ordinary text: the model wrote them out in other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from case_writers import WRITERS, Writer, dumps
from own_cases import OWN

DIRECTORY = Path(__file__).parent / "cases"
TH, TE = "<think>", "</think>"


def tool(name: str, required: Sequence[str] = (), **properties: Any) -> dict[str, Any]:
    schemas = {key: value if isinstance(value, dict) else {"type": value} for key, value in properties.items()}
    parameters = {"type": "object", "properties": schemas, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("weather", ["place"], place="string", days="integer", celsius="boolean"),
    tool(
        "search",
        ["query"],
        query="string",
        limit={"anyOf": [{"type": "number"}, {"type": "null"}]},
        filters={"$ref": "#/$defs/filters"},
        tags={"type": "array", "items": {"type": "string"}},
        note=["string", "null"],
    ),
    tool("ping"),
    tool("mcp__fs__read-file", ["path"], path="string"),
]
TOOLS[1]["function"]["parameters"]["$defs"] = {"filters": {"type": "object"}}

OSLO = {"place": "Oslo"}
ROME = {"place": "Roma", "days": 3, "celsius": True}
Case = dict[str, Any]


def case(
    about: str, text: str, content: str | None, reasoning: str | None, *calls: tuple[str, Any], **more: Any
) -> Case:
    """`calls`: (name, arguments), arguments as text or as a value that comes out as `json.dumps` writes it."""
    seen = [{"name": name, "arguments": a if isinstance(a, str) else dumps(a)} for name, a in calls]
    plain_text, ordinary = unquote(text)
    finish = more.pop("finish", "stop")
    expect = {
        "content": content,
        "reasoning": reasoning,
        "calls": seen,
        "finish_reason": "length" if finish == "length" else "tool_calls" if seen else "stop",
    }
    # Few tools, unless one has to be found among them.
    names = (
        {tool["function"]["name"] for tool in TOOLS} if "by the" in about else {"ping", *(name for name, _ in calls)}
    )
    tools = [tool for tool in TOOLS if tool["function"]["name"] in names]
    fields = {"state": "content", "tools": tools, "tool_choice": "auto", "history_calls": 0, **more}
    return {"about": about, **fields, "text": plain_text, "ordinary": ordinary, "finish": finish, "expect": expect}


def unquote(text: str) -> tuple[str, list[list[int]]]:
    """The text without ⟦ and ⟧, and the UTF-8 byte ranges that stood between them."""
    plain, ordinary = "", []
    for position, part in enumerate(text.replace("⟧", "⟦").split("⟦")):
        begin = len(plain.encode())
        plain += part
        if position % 2:
            ordinary.append([begin, len(plain.encode())])
    return plain, ordinary


def shared_cases(w: Writer) -> Iterator[Case]:
    one = w.section(("weather", OSLO))
    yield case("plain content", "Hello there.", "Hello there.", None)
    yield case("nothing", "", None, None)
    yield case("blanks only", " \n\t\r\n", None, None)
    yield case("line ends, no-break space, emoji", "a\r\n\u00a0b \U0001f642\n", "a\r\n\u00a0b \U0001f642\n", None)
    yield case("one call", one, None, None, ("weather", OSLO))
    yield case("all types of the schema", w.section(("weather", ROME)), None, None, ("weather", ROME))
    yield case("text before", f"Let me look.{one}", "Let me look.", None, ("weather", OSLO))
    yield case("line breaks around a section", f"A\n\n{one}\n", "A\n\n", None, ("weather", OSLO))
    if w.has_end:
        yield case("text behind", f"{one}\nDone.", "\nDone.", None, ("weather", OSLO))
        yield case(
            "text between sections",
            f"A{one}B{w.section(('weather', ROME))}C",
            "ABC",
            None,
            ("weather", OSLO),
            ("weather", ROME),
        )
    two = w.section(("weather", OSLO), ("search", {"query": "x"}))
    yield case("two calls", two, None, None, ("weather", OSLO), ("search", {"query": "x"}))
    same = [("weather", OSLO)] * 3
    yield case("the same call three times", w.section(*same), None, None, *same)
    yield from shared_reasoning(w, one)
    yield from shared_arguments(w)
    yield from shared_names(w, one)
    yield from shared_truncation(w, one)
    yield from shared_markers(w, one)


def shared_reasoning(w: Writer, one: str) -> Iterator[Case]:
    yield case("think", f"{TH}Hm.{TE}Yes.", "Yes.", "Hm.")
    yield case("think with line breaks", f"{TH}\nHm.\n{TE}\n\nYes.", "\n\nYes.", "\nHm.\n")
    yield case("prefilled think", f"Hm.{TE}Yes.", "Yes.", "Hm.", state="reasoning")
    yield case("prefilled think, opened again", f"{TH}Hm.{TE}Yes.", "Yes.", "Hm.", state="reasoning")
    yield case("empty think", f"{TH}{TE}Yes.", "Yes.", "")
    yield case("cut in think", "Hm, so", None, "Hm, so", state="reasoning", finish="length")
    yield case("thoughts and no answer", "Hm.", None, "Hm.", state="reasoning")
    yield case("think, then a call", f"{TH}Hm.{TE}{one}", None, "Hm.", ("weather", OSLO))
    yield case("think, text, call", f"Hm.{TE}On it.{one}", "On it.", "Hm.", ("weather", OSLO), state="reasoning")
    yield case("call inside an unfinished think", f"Hm. {one}", None, "Hm. ", ("weather", OSLO), state="reasoning")
    yield case("call inside a think of its own", f"{TH}Hm.{one}", None, "Hm.", ("weather", OSLO))
    yield case("tags behind content are dropped", f"a{TH}b{TE}c", "abc", None)
    yield case("the end of no think is dropped", f"{TE}Yes.", "Yes.", None)
    if w.has_end:
        yield case("think behind a call is dropped", f"{one}{TH}Done.{TE}", "Done.", None, ("weather", OSLO))


def shared_arguments(w: Writer) -> Iterator[Case]:
    def one(about: str, name: str, arguments: dict[str, Any], **more: Any) -> Case:
        return case(about, w.section((name, arguments)), None, None, (name, arguments), **more)

    yield one("no arguments", "ping", {})
    yield one("unicode", "weather", {"place": "北京 \U0001f642 e\u0301 Łódź"})
    yield one("quotes and backslashes", "search", {"query": "say \"hi\" \\n C:\\dir \\\\ 'x'"})
    yield one("line breaks and tabs in a string", "search", {"query": "a\nb\tc\r\nd\n\n  e"})
    yield one("blanks at the edges of a string", "search", {"query": "  a b "})
    yield one("an empty string", "search", {"query": ""})
    yield one("a string that looks like a number", "search", {"query": "12.50"})
    yield one("a string that looks like JSON", "search", {"query": '{"a": [1, 2]}'})
    yield one("nested JSON", "search", {"query": "x", "filters": {"a": {"b": [1, {"c": None}], "d": "}{]["}}})
    yield one("empty object and array", "search", {"query": "x", "filters": {}, "tags": []})
    yield one("an array of strings", "search", {"query": "x", "tags": ["a, b", 'c"d', ""]})
    yield one("numbers", "search", {"query": "x", "limit": -1.5e-07})
    yield one("null", "search", {"query": "x", "limit": None, "note": None})
    yield one("a string that may be null", "search", {"query": "x", "note": "nothing"})
    yield one("brackets and code", "search", {"query": "<b>if (a < b && c > d) { return x[0]; }</b>"})
    yield one("half markers", "search", {"query": "<tool </ <｜ </arg <param </think <|"})
    yield one("two kilobytes", "search", {"query": "0123456789 abcdef\n" * 120})


def shared_names(w: Writer, one: str) -> Iterator[Case]:
    path = {"path": "/tmp/a b.txt"}
    yield case(
        "dashes and underscores", w.section(("mcp__fs__read-file", path)), None, None, ("mcp__fs__read-file", path)
    )
    other = {"x": 1, "y": "two"}
    yield case("an undeclared tool passes", w.section(("other", other)), None, None, ("other", other))
    yield case("no tools declared", one, None, None, ("weather", OSLO), tools=[])
    behind = "B" if w.has_end else ""
    yield case("tool_choice none hides calls", f"A{one}{behind}", f"A{behind}", None, tool_choice="none")
    yield case("tool_choice none, nothing else", one, None, None, tool_choice="none")


def shared_truncation(w: Writer, one: str) -> Iterator[Case]:
    begin = one[: one.index("weather")]
    yield case("cut in the first marker", f"A{begin[:5]}", f"A{begin[:5]}", None, finish="length")
    yield case("cut behind the first markers", f"A{begin}", "A", None, finish="length")
    yield case("cut in the name", f"A{begin}wea", "A", None, finish="length")
    partial = "<thi"
    yield case("cut in a think tag", f"A{partial}", f"A{partial}", None, finish="length")
    yield case("cut behind a whole call", one, None, None, ("weather", OSLO), finish="length")


def shared_markers(w: Writer, one: str) -> Iterator[Case]:
    yield case("look-alikes in content", "<tool_cal> < think> <｜ x </ y <>", "<tool_cal> < think> <｜ x </ y <>", None)
    fence = 'So:\n```json\n{"name": "weather", "arguments": {}}\n```\n'
    yield case("JSON that is no call", fence, fence, None)
    tags = {"place": f"{TH}a{TE}"}
    seen = json.dumps(tags, ensure_ascii=False)
    yield case("think tags in arguments are text", w.section(("weather", tags)), None, None, ("weather", seen))
    if w.tokens:
        quoted = " ".join(f"⟦{marker}⟧" for marker in (*w.tokens, TH, TE))
        said = quoted.replace("⟦", "").replace("⟧", "")
        yield case("markers as ordinary tokens in content", f"A {quoted}", f"A {said}", None)
        yield case(
            "markers as ordinary tokens in a string",
            w.section(("weather", {"place": f"⟦{w.tokens[0]}⟧"})),
            None,
            None,
            ("weather", {"place": w.tokens[0]}),
        )
        yield case("a marker that means nothing there", f"A{w.tokens[1]}B", "AB", None)


def main() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    for family, writer in WRITERS.items():
        cases = [*shared_cases(writer), *[case(*args, **more) for args, more in OWN[family]]]
        lines = [json.dumps({"id": f"{family}-{n:02}", **c}, ensure_ascii=False) for n, c in enumerate(cases)]
        (DIRECTORY / f"{family}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
