"""The JSON types that a tool's schema allows a parameter to have."""

import pytest

from proa.chat.output.value_types import ALL_TYPES, parameter_types

DEFINITIONS = {
    "city": {"type": "string"},
    "a/b~c": {"type": "array"},
    "loop": {"$ref": "#/$defs/loop"},
    "wide": {"anyOf": [{"$ref": "#/$defs/wide"}] * 50},
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": "integer"}, {"integer"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, {"boolean", "null"}),
        ({"oneOf": [{"type": "object"}, {"type": "array"}]}, {"object", "array"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["null", "boolean"]}]}, {"null"}),
        ({"enum": ["a", "b"]}, {"string"}),
        ({"enum": ["a", 1, None, True, [], {}, 1.5]}, ALL_TYPES),
        ({"enum": [1.5]}, {"number"}),
        ({"const": 3}, {"integer", "number"}),
        ({"type": "number", "enum": [1, 2]}, {"integer", "number"}),
        ({"$ref": "#/$defs/city"}, {"string"}),
        ({"$ref": "#/$defs/a~1b~0c"}, {"array"}),
        ({"$ref": "#/$defs/none"}, ALL_TYPES),
        ({"$ref": "https://example.com"}, ALL_TYPES),
        ({"$ref": "#/$defs/loop"}, ALL_TYPES),
        ({"$ref": "#/$defs/wide"}, ALL_TYPES),
        ({"type": "string", "enum": [1]}, ALL_TYPES),
        ({"type": "nonsense"}, ALL_TYPES),
        ({"type": 5, "anyOf": 5, "allOf": 5, "enum": 5, "$ref": 5}, ALL_TYPES),
        ({}, ALL_TYPES),
        (True, ALL_TYPES),
    ],
)
def test_types_of_a_schema(schema, types):
    assert parameter_types({"properties": {"x": schema}, "$defs": DEFINITIONS}, "x") == types


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, ALL_TYPES),
        ({"properties": []}, ALL_TYPES),
        ({"additionalProperties": {"type": "string"}}, {"string"}),
        ({"properties": {"y": {}}, "additionalProperties": False}, ALL_TYPES),
    ],
)
def test_types_of_what_is_not_declared(schema, types):
    assert parameter_types(schema, "x") == types
