"""What a schema says about objects and strings, spread out so that a grammar can write them without JSON.

References, `allOf`, `anyOf` and `oneOf` are multiplied out: a schema becomes a list of plain forms, of which a value
has to have one. A reference that leads back to itself adds nothing to the forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from proa.chat.grammar.references import resolver
from proa.core.errors import UserError

__all__ = ["ObjectForm", "SchemaForms", "StringForm"]

MAX_FORMS = 64
MAX_NODES = 50_000


@dataclass(frozen=True, slots=True)
class StringForm:
    """patterns: regular expressions, each found somewhere. values: the only ones, None: any."""

    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[str, ...] = ()
    values: tuple[str, ...] | None = None

    @property
    def is_free(self) -> bool:
        """Whether any string has this form."""
        return self == StringForm()

    def merged(self, other: StringForm) -> StringForm | None:
        """The form of strings that have both; None: there are none."""
        lengths = [length for length in (self.max_length, other.max_length) if length is not None]
        values = self.values if other.values is None else other.values
        if self.values is not None and other.values is not None:
            values = tuple(value for value in self.values if value in other.values)
        form = StringForm(
            max(self.min_length, other.min_length),
            min(lengths, default=None),
            self.patterns + tuple(pattern for pattern in other.patterns if pattern not in self.patterns),
            values,
        )
        is_empty = values == () or (form.max_length is not None and form.max_length < form.min_length)
        return None if is_empty else form


@dataclass(frozen=True, slots=True)
class ObjectForm:
    """properties: schemas by name, in order. extra: the schema of other ones; None: nothing is said, False: none."""

    properties: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    extra: Any = None
    max_properties: int | None = None

    def merged(self, other: ObjectForm) -> ObjectForm | None:
        """The form of objects that have both; None: there are none."""
        properties: dict[str, Any] = {}
        for name in (*self.properties, *other.properties):
            both = [form.schema_of(name) for form in (self, other)]
            if False not in both:
                schemas = [schema for schema in both if schema is not True]
                properties[name] = True if not schemas else schemas[0] if len(schemas) == 1 else {"allOf": schemas}
        extras = [form.extra for form in (self, other) if form.extra is not None]
        limits = [form.max_properties for form in (self, other) if form.max_properties is not None]
        form = ObjectForm(
            properties,
            tuple(dict.fromkeys((*self.required, *other.required))),
            False if False in extras else {"allOf": extras} if len(extras) > 1 else extras[0] if extras else None,
            min(limits, default=None),
        )
        return None if any(form.schema_of(name) is False for name in form.required) else form

    def schema_of(self, name: str) -> Any:
        """What `name` has to be; True: anything, False: it must not be there."""
        if name in self.properties:
            return self.properties[name]
        return True if self.extra is None else self.extra


# The form of a schema without what it combines, None: nothing fits.
_OwnForm = Callable[[Mapping[str, Any]], Any]


class SchemaForms:
    """The forms of parts of a tool's schema. `where`: its field, for errors."""

    def __init__(self, root: Mapping[str, Any], where: str) -> None:
        self._root = root
        self._resolve = resolver(root)
        self._where = where
        self._nodes_left = MAX_NODES

    def objects(self) -> list[ObjectForm]:
        """The forms of the objects that fit the root; UserError when they are too many."""
        return self._forms(self._root, frozenset(), _own_object)

    def strings(self, schema: Any) -> list[StringForm]:
        """The forms of the strings that fit `schema`, a part of the root; UserError when they are too many."""
        return self._forms(schema, frozenset(), _own_string)

    def _forms(self, schema: Any, seen: frozenset[str], own_form: _OwnForm) -> list[Any]:
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise UserError(self._where, f"at most {MAX_NODES} parts that combine schemas", "more of them")
        if schema is False:
            return []
        own = own_form(schema if isinstance(schema, Mapping) else {})
        if own is None:
            return []
        forms = [own]
        if not isinstance(schema, Mapping):
            return forms
        reference = schema.get("$ref")
        if isinstance(reference, str):
            target = self._resolve(reference)
            if reference in seen:
                return []
            forms = self._both(forms, self._forms(True if target is None else target, seen | {reference}, own_form))
        for part in _list(schema.get("allOf")):
            forms = self._both(forms, self._forms(part, seen, own_form))
        for key in ("anyOf", "oneOf"):
            if parts := _list(schema.get(key)):
                forms = self._both(forms, [form for part in parts for form in self._forms(part, seen, own_form)])
        return forms

    def _both(self, first: list[Any], second: list[Any]) -> list[Any]:
        if len(first) * len(second) > MAX_FORMS:
            raise UserError(self._where, f"a schema with at most {MAX_FORMS} alternatives", "more of them")
        forms = [merged for a in first for b in second if (merged := a.merged(b)) is not None]
        return [form for index, form in enumerate(forms) if form not in forms[:index]]


def _own_object(schema: Mapping[str, Any]) -> ObjectForm | None:
    if not _allows(schema, "object"):
        return None
    properties = schema.get("properties")
    required = tuple(dict.fromkeys(name for name in _list(schema.get("required")) if isinstance(name, str)))
    form = ObjectForm(
        properties if isinstance(properties, Mapping) else {},
        required,
        schema.get("additionalProperties"),
        _length(schema.get("maxProperties")),
    )
    return None if any(form.schema_of(name) is False for name in required) else form


def _own_string(schema: Mapping[str, Any]) -> StringForm | None:
    if not _allows(schema, "string"):
        return None
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    values = tuple(value for value in given if isinstance(value, str)) if isinstance(given, list) else None
    pattern = schema.get("pattern")
    form = StringForm(
        _length(schema.get("minLength")) or 0,
        _length(schema.get("maxLength")),
        (pattern,) if isinstance(pattern, str) else (),
        values,
    )
    return form.merged(StringForm())


def _allows(schema: Mapping[str, Any], kind: str) -> bool:
    named = schema.get("type")
    return named is None or named == kind or (isinstance(named, list) and kind in named)


def _length(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18 else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
