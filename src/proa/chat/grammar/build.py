"""From what a request asks of its answer to the constraint that enforces it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from proa.chat.dialect import AnswerReading
from proa.chat.grammar.calls import CallGrammar, ToolRule
from proa.chat.grammar.frames import call_frame
from proa.chat.grammar.parameters import ParameterRules
from proa.chat.grammar.rules import RuleBook, Spelling, inside_slashes
from proa.chat.grammar.schema import ANY_OBJECT, schema_rule
from proa.chat.output.output_format import THINK, THINK_END
from proa.core.constraint import MAX_GRAMMAR_CHARACTERS, Constraint
from proa.core.errors import UserError

__all__ = ["AnswerRules", "BuiltConstraint", "build_constraint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRules:
    """What a request asks of its answer, whatever API it came through.

    tools: OpenAI's; those that are no functions are not called. is_limited: the prompt shows more of them.
    mode, name: `tool_choice`, `name` with `required` only. response_format: as in chat completions.
    regex, ebnf, json_schema (a schema as text): SGLang's; one of the four.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    parallel_calls: bool = True
    is_limited: bool = False
    response_format: Mapping[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | None = None


@dataclass(frozen=True, slots=True)
class BuiltConstraint:
    """A constraint and the grammar to check before it is used, None when there is nothing of the client's in it.

    where: the field that a grammar in error came from. is_ebnf: `check` may be written in the GBNF dialect; then what
    the checker gives back is the constraint's grammar.
    """

    constraint: Constraint
    check: str | None = None
    where: str = ""
    is_ebnf: bool = False


@dataclass(frozen=True, slots=True)
class _Content:
    """The grammar of an answer's content. rule: the body of a rule; None: all of `text` is the grammar."""

    where: str
    rule: str | None = None
    text: str = ""
    is_ebnf: bool = False


def build_constraint(rules: AnswerRules, reading: AnswerReading | None) -> BuiltConstraint | None:
    """What `rules` mean for an answer that is read as `reading` says; None: nothing.

    Raises:
        UserError: rules that contradict each other, a schema that is none, or calls that this model cannot be held to.
    """
    content = _content(rules)
    calls = _calls(rules, reading)
    markers = _Markers(reading)
    if rules.mode == "required":
        assert calls is not None
        return _whole(calls, None, markers, in_reasoning=markers.in_reasoning)
    if content is not None:
        if calls is not None and content.rule is None:
            raise UserError(content.where, 'no tools beside it, or tool_choice: "none"', "both")
        return _whole(calls, content, markers, in_reasoning=markers.in_reasoning)
    if calls is not None:
        if rules.is_limited and not calls.starts:
            expected, fix = "a model with tokens that begin a call", "send only these tools"
            raise UserError("tool_choice", expected, "another one", fix, code="unsupported_parameter")
        return _when_called(calls)
    openers = markers.openers
    if rules.mode == "none" and rules.tools and openers:
        return BuiltConstraint(Constraint(banned=openers))
    return None


class _Markers:
    """The markers of a family by what they are to a grammar."""

    def __init__(self, reading: AnswerReading | None) -> None:
        self.ids = {} if reading is None else {name: token_id for token_id, name in reading.marker_ids.items()}
        self.in_reasoning = reading is not None and reading.in_reasoning

    @property
    def openers(self) -> tuple[int, ...]:
        """All but the think tags: none of them belongs into an answer without calls."""
        return tuple(sorted(token_id for name, token_id in self.ids.items() if name not in {THINK, THINK_END}))

    @property
    def think_end(self) -> int:
        if (token_id := self.ids.get(THINK_END)) is None:
            raise UserError(
                "response_format", f"a model with a token {THINK_END!r}", "one without", "turn thinking off"
            )
        return token_id


def _whole(
    calls: CallGrammar | None, content: _Content | None, markers: _Markers, *, in_reasoning: bool
) -> BuiltConstraint:
    """The answer after the reasoning is calls or content, and nothing else."""
    starts: dict[int, tuple[int, ...]] = {}
    if in_reasoning:
        starts = {markers.think_end: ()} | (calls.starts if calls is not None else {})

    def constraint(grammar: str) -> Constraint:
        banned = tuple(token_id for token_id in markers.openers if token_id not in starts) if in_reasoning else ()
        return Constraint(grammar=grammar, starts=starts, banned=banned, must_start=True)

    if content is None:
        assert calls is not None
        return BuiltConstraint(
            constraint(_sized(calls.text("calls"), "tools")),
            check=calls.text("calls", first_number=0),
            where=calls.where,
        )
    if content.rule is None:
        built = constraint(_sized(content.text, content.where))
        return BuiltConstraint(built, check=content.text, where=content.where, is_ebnf=content.is_ebnf)
    if calls is None:
        text = _sized(f"start: content\ncontent: {content.rule}\n", content.where)
        return BuiltConstraint(constraint(text), check=text, where=content.where)
    start, rule = "content | calls", f"content: {content.rule}\n"
    return BuiltConstraint(
        constraint(_sized(calls.text(start) + rule, content.where)),
        check=calls.text(start, first_number=0) + rule,
        where=content.where,
    )


def _when_called(calls: CallGrammar) -> BuiltConstraint | None:
    """Free text, and calls as declared wherever the model opens one."""
    if not calls.starts:
        return None  # the markers are ordinary text in this checkpoint: nothing says where a call begins
    constraint = Constraint(grammar=_sized(calls.text("calls"), "tools"), starts=calls.starts, pauses=calls.pauses)
    check = calls.text("calls", first_number=0) if calls.has_schemas else None
    return BuiltConstraint(constraint, check=check, where=calls.where)


def _calls(rules: AnswerRules, reading: AnswerReading | None) -> CallGrammar | None:
    """The grammar of tool calls; None when none are to be made or nothing is known of how they are written."""
    functions = [tool["function"] for tool in rules.tools if isinstance(tool.get("function"), Mapping)]
    is_required = rules.mode == "required"
    if is_required and not functions:
        raise UserError("tool_choice", "tools beside it", "none")
    if is_required and rules.name is not None:
        functions = [function for function in functions if function["name"] == rules.name]
        if not functions:
            raise UserError("tool_choice", "a function of tools", repr(rules.name[:200]))
    if not functions or rules.mode == "none":
        return None
    marker_ids = {} if reading is None else {name: token_id for token_id, name in reading.marker_ids.items()}
    frame = None if reading is None else call_frame(reading.family.name, marker_ids)
    if reading is None or frame is None:
        if is_required or rules.is_limited or not rules.parallel_calls:
            where = "tool_choice" if is_required or rules.is_limited else "parallel_tool_calls"
            expected = "a model whose calls can be constrained"
            raise UserError(where, expected, "another one", "use tool_choice auto", code="unsupported_parameter")
        return None
    spelling, book = Spelling(marker_ids), RuleBook()
    written = None if frame.parameters is None else ParameterRules(frame.parameters, spelling, book)
    tools = [
        _tool_rule(function, f"tools.{index}.function.parameters", book, written, is_required=is_required)
        for index, function in enumerate(functions)
    ]
    return CallGrammar(
        frame,
        spelling,
        book,
        tools,
        first_number=reading.history_calls,
        # A named function is called once, as OpenAI's API does.
        only_one=not rules.parallel_calls or rules.name is not None,
    )


def _tool_rule(
    function: Mapping[str, Any], where: str, book: RuleBook, written: ParameterRules | None, *, is_required: bool
) -> ToolRule:
    """A function's rule; `written`: its arguments are written one by one."""
    is_strict = function.get("strict") is True
    schema = function.get("parameters") if is_required or is_strict else None
    if written is None:
        rule = schema_rule(ANY_OBJECT if schema is None else schema, where, strict=is_strict)
    elif schema is None:
        rule = written.free()
    else:
        rule = written.of_schema(schema, where, strict=is_strict)
    return ToolRule(str(function["name"]), book.rule(rule, "arguments"), has_schema=schema is not None)


def _content(rules: AnswerRules) -> _Content | None:
    """What the content is to be; None: free text."""
    found = [content for content in (_format(rules.response_format), *_extras(rules)) if content is not None]
    if len(found) > 1:
        raise UserError(found[1].where, f"no {found[0].where} beside it", "both")
    return found[0] if found else None


def _format(response_format: Mapping[str, Any] | None) -> _Content | None:
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return _Content("response_format", schema_rule(ANY_OBJECT, "response_format", strict=False))
    if kind != "json_schema":
        raise UserError("response_format.type", "text, json_object or json_schema", str(kind)[:100])
    # Chat completions nest the schema, Responses do not.
    body = response_format.get("json_schema", response_format)
    schema = body.get("schema") if isinstance(body, Mapping) else None
    where = "response_format.json_schema"
    if schema is None:
        raise UserError(where, "an object with a schema", "none")
    return _Content(where, schema_rule(schema, where, strict=body.get("strict") is True))


def _extras(rules: AnswerRules) -> list[_Content | None]:
    json_content = None
    if rules.json_schema is not None:
        try:
            schema = json.loads(rules.json_schema)
        except (ValueError, RecursionError) as error:
            raise UserError("json_schema", "a JSON schema as text", str(error)[:200]) from error
        json_content = _Content("json_schema", schema_rule(schema, "json_schema", strict=False))
    regex = None if rules.regex is None else _Content("regex", f"/{inside_slashes(rules.regex) or '(?:)'}/")
    ebnf = None if rules.ebnf is None else _Content("ebnf", text=rules.ebnf, is_ebnf=True)
    return [json_content, regex, ebnf]


def _sized(grammar: str, where: str) -> str:
    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        expected = f"schemas that make a grammar of at most {MAX_GRAMMAR_CHARACTERS} characters"
        raise UserError(where, expected, len(grammar), "fewer or smaller schemas")
    return grammar
