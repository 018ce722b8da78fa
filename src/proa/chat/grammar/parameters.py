"""Grammars of arguments that are written parameter by parameter (qwen3_coder, glm45, minimax_m2).

A string is written as it is, up to what ends it; another value is JSON. What the grammar allows is what the parser
makes that value of: where a parameter may be either, text that would be read as JSON is no string.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from proa.chat.grammar.forms import ObjectForm, SchemaForms, StringForm
from proa.chat.grammar.frames import ParameterFrame
from proa.chat.grammar.guarded import NOTES, guarded
from proa.chat.grammar.references import has_finite_text, resolver
from proa.chat.grammar.rules import RuleBook, Spelling, escaped, inside_slashes, literal
from proa.chat.grammar.schema import check_schema, schema_rule
from proa.chat.output.value_types import parameter_types, schema_types
from proa.chat.output.xml_body import as_json
from proa.core.constraint import MAX_GRAMMAR_CHARACTERS
from proa.core.errors import UserError

__all__ = ["ParameterRules"]

_BLANKS = r"[ \t\r\n]*"
_INTEGER = "-?(0|[1-9][0-9]*)"
_EXPONENT = r"[eE][\-+]?[0-9]+"
_FRACTION = rf"{_INTEGER}(\.[0-9]+({_EXPONENT})?|{_EXPONENT})"  # a number that is not written as an integer
_ANYTHING = "(?s:.*)"
# What is read as JSON where a string is possible too, by type.
_READ_AS = {
    "null": "null|None",
    "boolean": "(?i:true|false)",
    "integer": f"{_INTEGER}|{_FRACTION}",
    "number": f"{_INTEGER}|{_FRACTION}",
    "object": rf"\{{{_ANYTHING}",
    "array": rf"\[{_ANYTHING}",
}
_SCALARS = frozenset({"null", "boolean", "integer", "number"})
# Keywords that say nothing about scalars, and those that say nothing at all.
_OF_OTHERS = frozenset(
    {"type", "minLength", "maxLength", "pattern", "format", "properties", "required", "additionalProperties", "items",
     "minItems", "maxItems", "nullable"}
)  # fmt: skip
_MAX_LENGTH = 1_000_000  # of a string that a regular expression counts
_DEFINITIONS = re.compile(r"#/(\$defs|definitions)/[^/]+(/.*)?\Z", re.DOTALL)


class ParameterRules:
    """Rules of a family's parameters in one vocabulary."""

    def __init__(self, frame: ParameterFrame, spelling: Spelling, rules: RuleBook) -> None:
        self._frame = frame
        self._spelling = spelling
        self._rules = rules
        self._end = spelling.text_at_begin(frame.behind)
        # Beside what ends a value, text that the parser would take for another end.
        self._stops = sorted(stop for stop in frame.stops if stop not in spelling.marker_ids and stop != self._end)

    def free(self) -> str:
        """Any parameters."""
        return f"({self._parameter(self._any_key(()), self._text(StringForm(), is_wrapped=False))})*"

    def of_schema(self, schema: Mapping[str, Any], where: str, *, strict: bool) -> str:
        """Parameters by the schema of an object, in its order; other ones only where it says that there may be.

        Raises:
            UserError: a schema that is none, that no object fits, or whose parameters cannot be written.
        """
        check_schema(schema, where)
        reader = _Reader(schema, where, strict=strict)
        forms = reader.forms.objects()
        if not forms:
            raise UserError(where, "the schema of an object", "one that no object fits")
        return "\n | ".join(dict.fromkeys(self._object(form, reader) or literal("") for form in forms))

    def _object(self, form: ObjectForm, reader: _Reader) -> str:
        if form.max_properties == 0 and not form.required:
            return ""
        parts = []
        for name in dict.fromkeys((*form.properties, *form.required)):
            is_required = name in form.required
            value = self._value(name, form.schema_of(name), reader) if self._is_writable(name) else ""
            if value:
                parameter = self._rules.rule(self._parameter(literal(name), value), "parameter")
                parts.append(parameter if is_required else f"{parameter}?")
            elif is_required:
                expected = f"parameters that this model can write: names without {self._frame.forbidden!r}"
                raise UserError(reader.where, expected, repr(name)[:100])
        if form.extra not in (None, False) and (value := self._value("\0", form.extra, reader)):
            parts.append(f"({self._parameter(self._any_key(form.properties), value)})*")
        return " ".join(parts)

    def _is_writable(self, name: str) -> bool:
        return bool(name) and not set(name) & set(self._frame.forbidden)

    def _any_key(self, names: Iterable[str]) -> str:
        key = rf"/[^\s{escaped(self._frame.forbidden)}]{{1,64}}/"
        declared = "|".join(escaped(name) for name in sorted(names))
        return self._rules.terminal(f"{key} & ~/{declared}/" if declared else key)

    def _parameter(self, key: str, value: str) -> str:
        """A whole parameter; `value` with what ends it."""
        of, frame = self._spelling.of, self._frame
        return " ".join(filter(None, (of(frame.before), key, of(frame.between), value, of(frame.after))))

    def _value(self, name: str, schema: Any, reader: _Reader) -> str:
        """The rule of a value and what ends it, "" when nothing fits."""
        if schema is False:
            return ""
        read_as = parameter_types(reader.root, name)  # by the parser
        kinds = reader.kinds(schema) & read_as
        forms = reader.strings(schema) if "string" in read_as else []
        if read_as == {"string"} and forms == [StringForm()]:
            return self._text(StringForm(), "", is_wrapped=False)
        is_open = any(form.values is None for form in forms)
        if is_open:
            # A text is one lexeme and goes on as long as it can: JSON beside it must differ in its first character.
            written = reader.free_scalars(schema) & kinds
            excluded = [_excluded(kind, written, kinds) for kind in sorted(read_as - {"string"})]
            kinds = kinds - written - {"null", "boolean"}
        else:
            excluded = []
        ways = [
            self._text(form, "|".join(dict.fromkeys(filter(None, excluded))), read_as, is_wrapped=True)
            for form in forms
        ]
        if kinds:
            tags = [tag for tag in (self._end, *self._stops) if tag]
            rule = reader.json_rule(schema, kinds, tags)
            ways += [self._ended(self._rules.rule(rule))] if rule else []
        found = list(dict.fromkeys(filter(None, ways)))
        if not found:
            return ""
        value = found[0] if len(found) == 1 else self._rules.rule("\n | ".join(found))
        return f'"\\n" {value}' if self._frame.has_line_breaks else value

    def _ended(self, value: str) -> str:
        line = ' "\\n"' if self._frame.has_line_breaks else ""
        return f"{value}{line} {self._spelling.of(self._frame.behind)}"

    # ---- strings ----

    def _text(
        self, form: StringForm, excluded: str = "", types: frozenset[str] = frozenset(), *, is_wrapped: bool
    ) -> str:
        """A string and what ends it; `excluded`: what is read as JSON; `types`: those the parser tells apart."""
        end = escaped(self._end)
        tail = rf"\n{end}" if is_wrapped and self._frame.has_line_breaks else end
        found = [_found(pattern, tail) for pattern in form.patterns]
        if form.values is not None:
            values = [value for value in form.values if self._fits(value, form, types)]
            if not values:
                return ""
            if not found:
                return self._ended(f"({' | '.join(map(literal, values))})")
            conditions, excluded = [f"/({'|'.join(map(escaped, values))}){tail}/", *found], ""
        else:
            conditions = [f"/(?s:.{_repeat(form)}){tail}/", *found]
        if self._end and conditions != [f"/{_ANYTHING}{end}/"]:
            conditions.append(f"~/{_ANYTHING}{end}(?s:.+)/")
        if self._stops:
            conditions.append(f"~/{_ANYTHING}({'|'.join(map(escaped, self._stops))}){_ANYTHING}/")
        if excluded:
            conditions.append(f"~/{_BLANKS}({excluded}){_BLANKS}{tail}/")
        body = " & ".join(conditions)
        if not self._end:  # a token ends it
            return f"{self._rules.terminal(body)} {self._spelling.of(self._frame.behind)}"
        return f"{self._rules.lazy(body)} {self._spelling.of(self._frame.behind[1:])}".rstrip()

    def _fits(self, value: str, form: StringForm, types: frozenset[str]) -> bool:
        if not form.min_length <= len(value) <= (len(value) if form.max_length is None else form.max_length):
            return False
        if any(stop in value for stop in (self._end, *self._stops) if stop):
            return False
        return len(types) == 1 or as_json(value, types) is None


class _Reader:
    """The schema of a tool, and rules for its parts."""

    def __init__(self, root: Mapping[str, Any], where: str, *, strict: bool) -> None:
        self.root = root
        self.where = where
        self._strict = strict
        self._resolve = resolver(root)
        self.forms = SchemaForms(root, where)
        self._characters_left = MAX_GRAMMAR_CHARACTERS

    def strings(self, schema: Any) -> list[StringForm]:
        """The forms of strings that fit `schema`."""
        if self._strict and isinstance(schema, Mapping) and "format" in schema:
            raise UserError(self.where, "strict schemas without keywords that cannot be enforced", "format")
        return self.forms.strings(schema)

    def kinds(self, schema: Any) -> frozenset[str]:
        """The types other than string that `schema` allows."""
        return schema_types(self.root, schema) - {"string"}

    def free_scalars(self, schema: Any, depth: int = 8) -> frozenset[str]:
        """The types of which `schema` takes every null, boolean, integer or number."""
        if schema is True or not depth:
            return _SCALARS if depth else frozenset()
        if not isinstance(schema, Mapping):
            return frozenset()
        keys = set(schema) - NOTES
        parts = schema.get("anyOf")
        if keys == {"anyOf"} and isinstance(parts, list):
            return frozenset().union(*(self.free_scalars(part, depth - 1) for part in parts))
        if keys == {"$ref"}:
            return self.free_scalars(self._resolve(schema["$ref"]), depth - 1)
        return _SCALARS & schema_types(self.root, schema) if keys <= _OF_OTHERS else frozenset()

    def json_rule(self, schema: Any, kinds: frozenset[str], tags: Sequence[str]) -> str:
        """What fits `schema` and is of one of `kinds`, as JSON without `tags`; "" for nothing of finite length."""
        whole = self._with_definitions(self._narrowed(schema, kinds))
        if not has_finite_text(whole):
            return ""
        rule = schema_rule(guarded(whole, tags), self.where, strict=self._strict)
        # What many parameters refer to is in the rule of each.
        self._characters_left -= len(rule)
        if self._characters_left < 0:
            expected = f"schemas that make a grammar of at most {MAX_GRAMMAR_CHARACTERS} characters"
            raise UserError(self.where, expected, "a longer one", "fewer references")
        return rule

    def _narrowed(self, schema: Any, kinds: frozenset[str], depth: int = 8) -> dict[str, Any]:
        """`schema` for values of `kinds` only, of which it allows some."""
        if not isinstance(schema, Mapping):
            return {"type": sorted(kinds)}
        types = schema_types(self.root, schema)
        if types <= kinds:
            return dict(schema)
        combining = set(schema) & {"$ref", "allOf", "anyOf", "oneOf"}
        if not combining:
            return {**schema, "type": sorted(types & kinds)}
        (key, *others) = combining
        if depth and not others and key == "$ref" and set(schema) <= {"$ref", *NOTES}:
            return self._narrowed(self._resolve(schema["$ref"]), kinds, depth - 1)
        if depth and not others and key in ("anyOf", "oneOf") and isinstance(schema[key], list):
            parts = [part for part in schema[key] if part is not False and self.kinds(part) & kinds]
            return {**schema, key: [self._narrowed(part, kinds, depth - 1) for part in parts]}
        return {"allOf": [schema, {"type": sorted(kinds)}]}

    def _with_definitions(self, schema: dict[str, Any]) -> dict[str, Any]:
        """`schema` with all it refers to, which is somewhere in the root."""
        references = _references(schema)
        if not references:
            return schema
        known = {key: self.root[key] for key in ("$defs", "definitions") if key in self.root}
        if all(map(_DEFINITIONS.match, references | _references(known))):
            return {**schema, **known}
        moved = _moved(schema)
        assert isinstance(moved, dict)
        return {**moved, "$defs": {"root": _moved(self.root)}}


def _references(schema: Any) -> set[str]:
    found: set[str] = set()
    level = [schema]
    while level:
        value = level.pop()
        if isinstance(value, Mapping):
            if isinstance(reference := value.get("$ref"), str):
                found.add(reference)
            level += value.values()
        elif isinstance(value, list):
            level += value
    return found


def _moved(value: Any) -> Any:
    """A copy in which local references lead to where the root has been moved."""
    if isinstance(value, list):
        return [_moved(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: f"#/$defs/root{item[1:]}" if key == "$ref" and isinstance(item, str) and item[:1] == "#" else _moved(item)
        for key, item in value.items()
    }


def _repeat(form: StringForm) -> str:
    """How often, as regular expressions write it; bounds that no answer reaches are lowered."""
    if not form.min_length and form.max_length is None:
        return "*"
    least = min(form.min_length, _MAX_LENGTH)
    most = "" if form.max_length is None or form.max_length > _MAX_LENGTH else form.max_length
    return f"{{{least},{most}}}"


def _found(pattern: str, tail: str) -> str:
    """`pattern` somewhere in a value that `tail` follows."""
    begin = end = _ANYTHING
    if pattern.startswith("^"):
        pattern, begin = pattern[1:], ""
    if pattern.endswith("$") and not pattern.endswith("\\$"):
        pattern, end = pattern[:-1], ""
    return f"/{begin}(?:{inside_slashes(pattern)}){end}{tail}/"


def _excluded(kind: str, written: frozenset[str], kinds: frozenset[str]) -> str:
    """What a text must not be because it is read as `kind`; `written`: the kinds that texts may be read as."""
    if kind in {"object", "array"}:
        return _READ_AS[kind]
    if kind in {"integer", "number"}:
        if "number" in written:
            return ""
        if "integer" in written:
            return _FRACTION
        return rf"[\-0-9]{_ANYTHING}" if kinds & {"integer", "number"} else _READ_AS[kind]
    return "" if kind in written else _READ_AS[kind]
