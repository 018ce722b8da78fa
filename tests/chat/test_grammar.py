"""From requests to grammars: what each family's calls look like, and what cannot be asked."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from proa.chat.dialect import AnswerReading
from proa.chat.grammar.build import AnswerRules, build_constraint
from proa.chat.grammar.check_messages import CheckRequest
from proa.chat.grammar.checker import check
from proa.chat.grammar.matcher import GrammarError, Matcher, TokenTable, Vocabulary, byte_table, token_table
from proa.chat.grammar.references import has_finite_text
from proa.chat.grammar.schema import schema_rule
from proa.chat.output.events import Answer
from proa.chat.output.parser import output_family
from proa.chat.output.tools import DeclaredTools
from proa.core.errors import UserError

END = 256
FIRST_MARKER = 257
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "first", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": 'se"cond', "parameters": {"type": "object"}}},
]
FAMILIES = [
    "kimi_k2", "deepseek_v31", "deepseek_v3", "qwen3", "qwen3_coder", "glm45", "glm47", "minimax_m2", "mistral",
]  # fmt: skip
# One call of each, as the model writes it; {} for the call's number.
CALLS = {
    "kimi_k2": '<|tool_call_begin|>functions.first:{}<|tool_call_argument_begin|>{{"n": 5}}<|tool_call_end|>',
    "deepseek_v31": '<｜tool▁call▁begin｜>first<｜tool▁sep｜>{{"n": 5}}<｜tool▁call▁end｜>',
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>first\n```json\n" + '{{"n": 5}}\n```<｜tool▁call▁end｜>',
    "qwen3": '<tool_call>\n{{"name": "first", "arguments": {{"n": 5}}}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=first>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>first\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
    "glm47": "<tool_call>first<arg_key>n</arg_key><arg_value>5</arg_value></tool_call>",
    "minimax_m2": '<invoke name="first">\n<parameter name="n">5</parameter>\n</invoke>\n',
    "mistral": '[TOOL_CALLS]first[ARGS]{{"n": 5}}',
}
SECTIONS = {
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "minimax_m2": ("<minimax:tool_call>\n", "</minimax:tool_call>"),
}


@dataclass
class Family:
    reading: AnswerReading
    vocabulary: Vocabulary

    def tokens(self, text: str) -> list[int]:
        """Markers as tokens, all else as bytes."""
        ids = {name: token_id for token_id, name in self.reading.marker_ids.items()}
        found: list[int] = []
        while text:
            name = next((name for name in ids if text.startswith(name)), None)
            found += [ids[name]] if name else list(text[0].encode())
            text = text[len(name) if name else 1 :]
        return found

    def accepts(self, grammar: str, text: str) -> bool:
        """Whether `text` is a whole answer."""
        matcher = self.vocabulary.compile(grammar)
        try:
            for token in self.tokens(text):
                assert token in allowed(matcher), (text, token)
                matcher.take(token)
        except (GrammarError, AssertionError):
            return False
        return matcher.may_end


def allowed(matcher: Matcher) -> set[int]:
    mask = np.zeros(-(-300 // 32), dtype=np.int32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def family_of(name: str, *, history_calls: int = 0, in_reasoning: bool = False) -> Family:
    family = output_family(name)
    markers = {FIRST_MARKER + i: marker for i, marker in enumerate(family.markers)}
    reading = AnswerReading(
        family=family, marker_ids=markers, tools=DeclaredTools(TOOLS), in_reasoning=in_reasoning,
        history_calls=history_calls, no_calls=False,
    )  # fmt: skip
    table = byte_table(300)
    return Family(reading, Vocabulary(TokenTable(table.tokens, table.special), END))


def answer_of(name: str, numbers: list[int]) -> str:
    begin, end = SECTIONS.get(name, ("", ""))
    separator = "\n" if name in {"qwen3", "qwen3_coder", "glm45", "deepseek_v3"} else ""
    return begin + separator.join(CALLS[name].format(number) for number in numbers) + end


@pytest.mark.parametrize("name", FAMILIES)
def test_required_calls_are_what_the_family_writes(name):
    family = family_of(name, history_calls=7)
    built = build_constraint(AnswerRules(tools=TOOLS, mode="required"), family.reading)
    grammar = built.constraint.grammar
    assert built.constraint.must_start and not built.constraint.starts
    for numbers in ([7], [7, 8, 9]):
        assert family.accepts(grammar, answer_of(name, numbers))
    for wrong in ("", "Hello", answer_of(name, [7]).replace("first", "third"), answer_of(name, [7]).replace("5", "x"),
                  "Hello" + answer_of(name, [7])):  # fmt: skip
        assert not family.accepts(grammar, wrong), wrong
    if name == "kimi_k2":
        for numbers in ([0], [8], [7, 7], [7, 9]):
            assert not family.accepts(grammar, answer_of(name, numbers))
    # The parser reads the same calls.
    parser = family.reading.parser()
    ids = dict(family.reading.marker_ids)
    events = []
    for token in family.tokens(answer_of(name, [7, 8])):
        events += parser.push([(ids.get(token, chr(token)), token in ids)])
    assert len(Answer.of(events + parser.finish()).calls) == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_one_call_when_one_is_named_or_parallel_calls_are_off(name):
    family = family_of(name)
    for fields in ({"name": "first"}, {"parallel_calls": False}):
        grammar = build_constraint(
            AnswerRules(tools=TOOLS, mode="required", **fields), family.reading
        ).constraint.grammar
        assert family.accepts(grammar, answer_of(name, [0]))
        assert not family.accepts(grammar, answer_of(name, [0, 1]))
    named = build_constraint(AnswerRules(tools=TOOLS, mode="required", name='se"cond'), family.reading)
    assert not family.accepts(named.constraint.grammar, answer_of(name, [0]))


def test_auto_starts_at_a_call_and_pauses_after_it():
    kimi = family_of("kimi_k2")
    ids = {name: token_id for token_id, name in kimi.reading.marker_ids.items()}
    section, call, end = (ids[f"<|tool_call{x}|>"] for x in ("s_section_begin", "_begin", "s_section_end"))
    built = build_constraint(AnswerRules(tools=TOOLS), kimi.reading)
    assert built.check is None, "there is nothing of the client's in it"
    assert built.constraint.starts == {section: (section,), call: (section, call)}
    assert built.constraint.pauses == (end,) and not built.constraint.must_start
    # A second section goes on counting, and arguments are any object.
    two = answer_of("kimi_k2", [0]) + answer_of("kimi_k2", [1]).replace('{"n": 5}', '{"m": []}')
    assert kimi.accepts(built.constraint.grammar, two)
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    held = build_constraint(AnswerRules(tools=strict), kimi.reading)
    assert held.check is not None
    assert not kimi.accepts(held.constraint.grammar, two)


def test_tools_that_the_prompt_shows_and_that_are_not_allowed():
    kimi = family_of("kimi_k2")
    built = build_constraint(AnswerRules(tools=TOOLS[:1], is_limited=True), kimi.reading)
    assert kimi.accepts(built.constraint.grammar, answer_of("kimi_k2", [0]))
    assert not kimi.accepts(built.constraint.grammar, answer_of("kimi_k2", [0]).replace("first", 'se"cond'))
    with pytest.raises(UserError, match="send only these"):
        build_constraint(AnswerRules(tools=TOOLS[:1], is_limited=True), replace(kimi.reading, marker_ids={}))


def test_numbers_of_a_conversation_do_not_make_a_new_check():
    checks = {
        build_constraint(AnswerRules(tools=TOOLS, mode="required"), family_of("kimi_k2", history_calls=k).reading).check
        for k in range(3)
    }
    assert len(checks) == 1


def test_reasoning_comes_first():
    kimi = family_of("kimi_k2", in_reasoning=True)
    ids = {name: token_id for token_id, name in kimi.reading.marker_ids.items()}
    content = build_constraint(
        AnswerRules(tools=TOOLS, mode="none", response_format={"type": "json_object"}), kimi.reading
    )
    assert content.constraint.starts == {ids["</think>"]: ()} and content.constraint.must_start
    assert ids["<|tool_call_begin|>"] in content.constraint.banned
    called = build_constraint(AnswerRules(tools=TOOLS, mode="required"), kimi.reading).constraint
    assert set(called.starts) == {ids["</think>"], ids["<|tool_calls_section_begin|>"], ids["<|tool_call_begin|>"]}
    assert not set(called.starts) & set(called.banned)


def test_a_format_beside_tools_is_either():
    kimi = family_of("kimi_k2")
    built = build_constraint(AnswerRules(tools=TOOLS, response_format={"type": "json_object"}), kimi.reading)
    assert kimi.accepts(built.constraint.grammar, '{"a": 1}')
    assert kimi.accepts(built.constraint.grammar, answer_of("kimi_k2", [0]))
    assert not kimi.accepts(built.constraint.grammar, "Hello")


def test_none_bans_what_opens_a_call():
    kimi = family_of("kimi_k2")
    banned = build_constraint(AnswerRules(tools=TOOLS, mode="none"), kimi.reading).constraint
    names = {kimi.reading.marker_ids[token_id] for token_id in banned.banned}
    assert names and not names & {"<think>", "</think>"} and not banned.grammar
    assert build_constraint(AnswerRules(), kimi.reading) is None


def test_a_family_without_a_frame_cannot_be_made_to_call():
    family = family_of("deepseek_v32")
    assert build_constraint(AnswerRules(tools=TOOLS), family.reading) is None
    with pytest.raises(UserError, match="can be constrained") as error:
        build_constraint(AnswerRules(tools=TOOLS, mode="required"), family.reading)
    assert error.value.param == "tool_choice"
    with pytest.raises(UserError) as error:
        build_constraint(AnswerRules(tools=TOOLS, mode="required"), None)
    assert error.value.param == "tool_choice"


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "kimi_k2"])
def test_auto_masks_the_names_of_every_family(name):
    family = family_of(name)
    built = build_constraint(AnswerRules(tools=TOOLS), family.reading)
    grammar, answer = built.constraint.grammar, answer_of(name, [0])
    assert built.check is None and next(iter(built.constraint.starts)) == family.tokens(answer)[0]
    assert family.accepts(grammar, answer) and family.accepts(grammar, answer.replace("5", '"x"'))
    assert not family.accepts(grammar, answer.replace("first", "third"))
    assert set(built.constraint.pauses) <= {family.tokens(answer)[-1]}


def test_mistral_without_a_token_before_arguments_writes_a_list():
    family = family_of("mistral")
    markers = {token_id: name for token_id, name in family.reading.marker_ids.items() if name != "[ARGS]"}
    reading = replace(family.reading, marker_ids=markers, spelled=frozenset({"[ARGS]"}))
    listed = Family(reading, family.vocabulary)
    grammar = build_constraint(AnswerRules(tools=TOOLS, mode="required"), reading).constraint.grammar
    call = '{"name": "first", "arguments": {"n": 5}}'
    assert listed.accepts(grammar, f"[TOOL_CALLS] [{call}, {call}]") and listed.accepts(
        grammar, f"[TOOL_CALLS][{call}]"
    )
    assert not listed.accepts(grammar, '[TOOL_CALLS]first{"n": 5}')


def test_a_call_id_of_mistrals_may_stand_before_the_arguments():
    family = family_of("mistral")
    grammar = build_constraint(AnswerRules(tools=TOOLS, mode="required"), family.reading).constraint.grammar
    assert family.accepts(grammar, '[TOOL_CALLS]first[CALL_ID]a1b2c3d4e[ARGS]{"n": 5}')
    assert not family.accepts(grammar, '[TOOL_CALLS]first[CALL_ID]a[ARGS]{"n": 5}')


@pytest.mark.parametrize("name", ["qwen3", "glm47"])
def test_calls_are_constrained_without_a_reasoning_parser(name):
    reading = replace(family_of(name).reading, family=output_family(name, has_reasoning=False))
    assert build_constraint(AnswerRules(tools=TOOLS, mode="required"), reading) is not None


def test_markers_that_are_no_tokens_are_spelled():
    qwen = family_of("qwen3")
    plain = AnswerReading(
        family=qwen.reading.family, marker_ids={}, tools=qwen.reading.tools, in_reasoning=False, history_calls=0,
        no_calls=False,
    )  # fmt: skip
    built = build_constraint(AnswerRules(tools=TOOLS, mode="required"), plain)
    assert Family(plain, qwen.vocabulary).accepts(built.constraint.grammar, answer_of("qwen3", [0, 1]))
    assert build_constraint(AnswerRules(tools=TOOLS), plain) is None


@pytest.mark.parametrize(
    ("regex", "fits", "fails"),
    [("a/b", "a/b", "ab"), (r"a\/b", "a/b", r"a\/b"), ("a\nb", "a\nb", "ab"), (r"[/]+\\", "//\\", "/"), ("a|", "", "b"),
     (r"\d{2}", "12", "1")],
)  # fmt: skip
def test_regular_expressions(regex, fits, fails):
    kimi = family_of("kimi_k2")
    built = build_constraint(AnswerRules(regex=regex), None)
    assert kimi.accepts(built.constraint.grammar, fits) and not kimi.accepts(built.constraint.grammar, fails)


LOOP = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    ("schema", "finite"),
    [
        ({"$ref": "#"}, False),
        ({**LOOP, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": LOOP}}, False),
        ({**LOOP, "$defs": {"a": {"allOf": [{"type": "object"}, LOOP]}}}, False),
        ({**LOOP, "$defs": {"a": {"anyOf": [LOOP, {"type": "null"}]}}}, True),
        ({**LOOP, "$defs": {"a": {"anyOf": [LOOP, LOOP]}}}, False),
        ({**LOOP, "$defs": {"a": {"type": "object", "properties": {"x": LOOP}, "required": ["x"]}}}, False),
        ({**LOOP, "$defs": {"a": {"type": "object", "properties": {"x": LOOP}}}}, True),
        ({**LOOP, "$defs": {"a": {"type": ["object", "null"], "properties": {"x": LOOP}, "required": ["x"]}}}, True),
        ({**LOOP, "$defs": {"a": {"type": "array", "items": LOOP, "minItems": 1}}}, False),
        ({**LOOP, "$defs": {"a": {"type": "array", "items": LOOP}}}, True),
        ({**LOOP, "$defs": {"a": {"type": "array", "prefixItems": [True], "items": LOOP, "minItems": 1}}}, True),
        ({"$ref": "#/absent"}, True),
        ({"type": "object", "properties": {"x": {"$ref": "#/properties/y"}, "y": True}, "required": ["x"]}, True),
    ],
)  # fmt: skip
def test_circles_of_references(schema, finite):
    assert has_finite_text(schema) is finite


def test_long_chains_are_settled_without_recursion():
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(20_000)}
    assert has_finite_text({"$ref": "#/$defs/d0", "$defs": {**chain, "d20000": {"type": "string"}}})
    assert not has_finite_text({"$ref": "#/$defs/d0", "$defs": {**chain, "d20000": {"$ref": "#/$defs/d0"}}})


@pytest.mark.parametrize("schema", [None, 5, "object", [], False])
def test_what_is_no_schema(schema):
    with pytest.raises(UserError) as error:
        schema_rule(schema, "here", strict=False)
    assert error.value.param == "here"


def test_schemas_are_prepared():
    kimi = family_of("kimi_k2")
    schema: dict[str, Any] = {
        "$id": "no base uri", "$schema": "x", "type": "object",
        "properties": {"minLength": {"type": "string", "minLength": 10**12}, "u": {"uniqueItems": True}},
        "required": ["u"], "x-guidance": {"bogus": 1},
    }  # fmt: skip
    lenient = build_constraint(AnswerRules(json_schema=json.dumps(schema)), None)
    assert kimi.accepts(lenient.constraint.grammar, '{"u":[1]}')
    strict = {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}
    built = build_constraint(AnswerRules(response_format=strict), None)
    with pytest.raises(GrammarError, match="uniqueItems"):
        kimi.vocabulary.compile(built.constraint.grammar)


def test_the_checker_says_what_is_wrong():
    vocabulary = Vocabulary(byte_table(258), 257)
    assert check(vocabulary, CheckRequest("start: <[163595]> <[5]>")).error == ""
    assert "unknown name" in check(vocabulary, CheckRequest("start: x")).error
    assert check(vocabulary, CheckRequest('start: %json {"$ref": "#"}')).error == "no text fits it"
    translated = check(vocabulary, CheckRequest('root ::= "a" | "b" c\nc ::= [0-9]+', is_ebnf=True))
    assert translated.error == "" and "start:" in translated.grammar
    # Replies are remembered: what the server has already does not come back.
    assert check(vocabulary, CheckRequest('start: "a"')).grammar == ""
    for bad in ("root ::= (", "root ::= unknown", "root ::= " + "(" * 50_000, 'root ::= "a"' * 3, "start: ("):
        assert check(vocabulary, CheckRequest(bad, is_ebnf=True)).error


def test_where_a_marker_is_due_nothing_else_is_allowed(kimi_tokenizer):
    """Kimi's vocabulary has a token for the byte that llguidance begins special tokens with."""
    vocabulary = Vocabulary(token_table(kimi_tokenizer, kimi_tokenizer.vocab_size), 163586)
    marker = {name: kimi_tokenizer.token_id(name) for name in output_family("kimi_k2").markers}
    begin, end, call, arguments, call_end, *_ = marker.values()
    reading = AnswerReading(
        family=output_family("kimi_k2"), marker_ids={token_id: name for name, token_id in marker.items()},
        tools=DeclaredTools(TOOLS), in_reasoning=False, history_calls=0, no_calls=False,
    )  # fmt: skip
    matcher = vocabulary.compile(
        build_constraint(AnswerRules(tools=TOOLS, mode="required"), reading).constraint.grammar
    )

    def following(*tokens: int) -> set[int]:
        for token in tokens:
            matcher.take(token)
        mask = np.zeros(-(-kimi_tokenizer.vocab_size // 32), dtype=np.int32)
        matcher.fill(mask)
        return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())

    assert following() == {begin}
    assert following(begin) == {call}
    assert following(call, *kimi_tokenizer.encode("functions.first:0")) == {arguments}
    assert not following(arguments, *kimi_tokenizer.encode('{"n": ')) & set(kimi_tokenizer.special_ids)
    assert call_end in following(*kimi_tokenizer.encode("5}"))
    assert following(call_end) == {call, end}
