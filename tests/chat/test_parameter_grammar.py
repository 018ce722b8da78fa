"""Calls whose parameters are written one by one: noise that follows the grammar is read as calls that fit."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from proa.chat.dialect import AnswerReading
from proa.chat.grammar.build import AnswerRules, build_constraint
from proa.chat.grammar.matcher import TokenTable, Vocabulary, byte_table
from proa.chat.output.events import Answer
from proa.chat.output.parser import output_family
from proa.chat.output.tools import DeclaredTools
from proa.core.errors import UserError

FAMILIES = ["qwen3_coder", "glm45", "minimax_m2"]
END, FIRST_MARKER = 256, 257
STEP = 1 if os.environ.get("PROA_ALL_SCHEMAS") else 16
OTHER: dict[str, Any] = {"type": "object", "maxProperties": 0}
WALLE = Path(__file__).parents[2].parent / "shared/data/walle/validator_cases"
# Text that ends things, or is read as something else.
CLOSING = [
    "</parameter>\n",
    "\n</parameter>\n",
    "</function>\n",
    "</invoke>\n",
    "\n",
    "}",
    "]",
    '"',
    "null",
    "true",
    "12",
]


@pytest.fixture(scope="module")
def vocabulary():
    table = byte_table(300)
    return Vocabulary(TokenTable(table.tokens, table.special), END)


def reading_of(name: str, tools: list[dict[str, Any]], *, spelled: bool = False) -> AnswerReading:
    family = output_family(name)
    ids = {} if spelled else {FIRST_MARKER + i: marker for i, marker in enumerate(family.markers)}
    return AnswerReading(
        family=family, marker_ids=ids, tools=DeclaredTools(tools), in_reasoning=False, history_calls=0, no_calls=False,
        spelled=frozenset(family.markers) if spelled else frozenset(),
    )  # fmt: skip


def tool(schema: Any, name: str = "first", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


def noise(matcher, seed: int) -> list[int] | None:
    """Allowed tokens, at random; None when that does not end."""
    rng = random.Random(seed)
    mask = np.zeros(-(-300 // 32), dtype=np.int32)
    tokens: list[int] = []

    def allowed() -> list[int]:
        matcher.fill(mask)
        return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()

    while len(tokens) < 3000:
        if matcher.must_end or (matcher.may_end and rng.random() < 0.7):
            return tokens
        choices = allowed()
        markers = [token for token in choices if token >= FIRST_MARKER]
        if markers and rng.random() < 0.3:
            tokens.append(rng.choice(markers))
            matcher.take(tokens[-1])
        elif rng.random() < 0.25 + len(tokens) / 1000:
            for byte in rng.choice(CLOSING).encode():
                if byte not in allowed():
                    break
                tokens.append(byte)
                matcher.take(byte)
        else:
            tokens.append(rng.choice(choices))
            matcher.take(tokens[-1])
    return None


def read(reading: AnswerReading, tokens: list[int]) -> Answer:
    parser = reading.parser()
    events, held = [], b""
    for token in tokens:
        if token >= FIRST_MARKER:
            events += parser.push([(held.decode(), False), (reading.marker_ids[token], True)])
            held = b""
        else:
            held += bytes([token])
    return Answer.of(events + parser.push([(held.decode(), False)]) + parser.finish())


def calls_of(vocabulary, name: str, tools: list[dict[str, Any]], seed: int, *, spelled: bool = False, **rules: Any):
    """(name, arguments) of the calls in noise; None when it does not end."""
    reading = reading_of(name, tools, spelled=spelled)
    built = build_constraint(AnswerRules(tools=tools, mode="required", **rules), reading)
    tokens = noise(vocabulary.compile(built.constraint.grammar), seed)
    if tokens is None:
        return None
    answer = read(reading, tokens)
    assert answer.content is None and answer.calls, (answer, bytes(t for t in tokens if t < 256))
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


def objects(schema: Any) -> Any:
    """A schema of objects: others become that of a parameter."""
    forms = schema.get("anyOf", [schema])
    if any(form.get("type") in ("object", ["object"]) for form in forms) or "properties" in schema:
        return schema
    definitions = {key: value for key, value in schema.items() if key in ("$defs", "definitions")}
    inner = {key: value for key, value in schema.items() if key not in (*definitions, "$id")}
    return {"type": "object", "properties": {"it": inner}, "required": ["it"], **definitions}


def walle() -> list[Any]:
    found = [json.loads(line) for f in sorted(WALLE.glob("*/valid.jsonl")) for line in f.read_text().splitlines()]
    return [objects(schema) for schema in found if schema.get("minLength") != 999_999_999_999]


@pytest.mark.parametrize("name", FAMILIES)
def test_noise_fits_every_schema(vocabulary, name):
    if not WALLE.is_dir():
        pytest.skip("the shared data is not there")
    num_cut, schemas = 0, walle()[::STEP]
    for number, schema in enumerate(schemas):
        used = {"first": schema, "other_tool": OTHER}
        tools = [tool(parameters, called) for called, parameters in used.items()]
        calls = calls_of(vocabulary, name, tools, number, spelled=number % 5 == 4)
        num_cut += calls is None
        for called, arguments in calls or ():
            jsonschema.Draft202012Validator(used[called]).validate(arguments)
    assert num_cut <= 0.15 * len(schemas)


ANY_OF = {"anyOf": [{"type": "string", "minLength": 3}, {"type": "integer", "minimum": 5}]}
MIXED = [
    {},
    True,
    {"type": ["string", "null"]},
    {"type": ["string", "integer"]},
    {"type": ["string", "boolean"]},
    ANY_OF,
    {"enum": ["a", "true", 1, None, "</parameter>", "</arg_value>"]},
    {"type": "string", "enum": ["", "\n", " a ", "12"]},
    {"type": "string", "pattern": "^[a-z/]{2,5}$"},
    {"type": "string", "pattern": "b"},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"$ref": "#/$defs/leaf"},
    {"$ref": "#/properties/first"},
    {"anyOf": [{"type": "string"}, {"$ref": "#"}]},
    {"type": "array", "items": {"$ref": "#/$defs/leaf"}},
    {"oneOf": [{"type": "string", "enum": ["x"]}, {"type": "object"}]},
    {"allOf": [{"type": "string"}, {"maxLength": 2}]},
    {"type": "string", "maxLength": 5_000_000},
    {"const": "x y"},
    {"type": "boolean"},
    {"type": "null"},
    {"anyOf": [{"type": "null"}, {"type": "string", "enum": ["null", "a"]}]},
    {"type": ["number", "string"], "maximum": 3},
]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("number", range(len(MIXED)))
def test_values_that_may_be_text_or_json(vocabulary, name, number):
    schema = {
        "type": "object", "properties": {"first": {"type": "integer"}, "value": MIXED[number]}, "required": ["value"],
        "additionalProperties": False, "$defs": {"leaf": {"enum": ["leaf", 7]}},
    }  # fmt: skip
    ended = 0
    for seed in range(6):
        for calls in (calls_of(vocabulary, name, [tool(schema)], seed, spelled=seed % 3 == 2, parallel_calls=False),):
            ended += calls is not None
            for _, arguments in calls or ():
                jsonschema.Draft202012Validator(schema).validate(arguments)
    assert ended >= 1


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "additionalProperties": {"type": "integer"}, "properties": {"a": {"type": "string"}}},
        {"type": "object", "required": ["undeclared"]},
        {
            "anyOf": [
                {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]},
            ]
        },
        {
            "allOf": [
                {"properties": {"a": {"type": "string"}}},
                {"required": ["a"], "properties": {"a": {"maxLength": 2}}},
            ],
            "type": "object",
        },
        {
            "$ref": "#/$defs/it",
            "$defs": {"it": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}},
        },
        {"type": "object", "properties": {"odd <name>": {"type": "string"}, "é b": {"type": "string"}, "b": False}},
    ],
)
def test_forms_of_objects(vocabulary, name, schema):
    for seed in range(5):
        for _, arguments in calls_of(vocabulary, name, [tool(schema)], seed) or ():
            jsonschema.Draft202012Validator(schema).validate(arguments)


END_TAGS = {"type": "object", "properties": {"a": {"enum": ["</parameter>", "x</parameter>"]}}, "required": ["a"]}
MANY = [{"anyOf": [{"type": "object", "properties": {f"{i}.{j}": {}}} for i in range(9)]} for j in range(9)]


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax_m2"])
@pytest.mark.parametrize(
    "schema",
    [
        5,
        {"type": "string"},
        {"type": "object", "properties": {"a<b>": {}}, "required": ["a<b>"]},
        {"$ref": "#"},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"allOf": MANY},
        END_TAGS,
    ],
)
def test_what_cannot_be_written_is_refused(name, schema):
    tools = [tool(schema)]
    with pytest.raises(UserError) as error:
        build_constraint(AnswerRules(tools=tools, mode="required"), reading_of(name, tools))
    assert error.value.param == "tools.0.function.parameters"


def test_where_a_token_ends_a_value_any_text_can_be_one():
    tools = [tool(END_TAGS)]
    assert build_constraint(AnswerRules(tools=tools, mode="required"), reading_of("glm45", tools))


def test_strict_says_what_it_cannot_hold():
    schema = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
    tools = [tool(schema, strict=True)]
    with pytest.raises(UserError, match="format"):
        build_constraint(AnswerRules(tools=tools), reading_of("glm45", tools))


SHARED_LIST = {"b": {"type": "array", "items": {"enum": list(range(20_000))}}}
SHARED_PARTS = {"b": {"allOf": [{"type": "string"}] * 3000}}
HOSTILE = [
    {"properties": {f"p{i}": {"$ref": "#/$defs/b"} for i in range(2000)}, "$defs": SHARED_LIST},
    {"properties": {f"p{i}": {"$ref": "#/$defs/b"} for i in range(2000)}, "$defs": SHARED_PARTS},
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_work_does_not_multiply(number):
    tools = [tool({"type": "object", **HOSTILE[number]})]
    with pytest.raises(UserError, match="at most"):
        build_constraint(AnswerRules(tools=tools, mode="required"), reading_of("qwen3_coder", tools))


@pytest.mark.parametrize("name", FAMILIES)
def test_patterns_of_clients_are_for_the_grammar_alone(vocabulary, name):
    """Python's expressions take exponential time for some."""
    value = {"type": "string", "enum": ["a" * 30 + "!", "aaa"], "pattern": "^(a+)+$"}
    schema = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    for seed in range(3):
        for _, arguments in calls_of(vocabulary, name, [tool(schema)], seed) or ():
            assert arguments == {"a": "aaa"}
