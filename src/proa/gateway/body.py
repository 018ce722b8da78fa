"""What a gateway reads of a JSON request, and the few fields it writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from proa.core.errors import UserError

__all__ = ["RequestFields", "read_fields", "rewrite"]


class _Fields(msgspec.Struct):
    model: str | msgspec.UnsetType = msgspec.UNSET
    stream: Any = False


@dataclass(frozen=True, slots=True)
class RequestFields:
    """The model that is asked for, and whether the answer is to be a stream."""

    model: str
    is_stream: bool


_fields_decoder = msgspec.json.Decoder(_Fields)
_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_fields(body: bytes) -> RequestFields:
    """The fields of a request body that decide where it goes.

    Raises:
        UserError: no JSON object, or one without a model.
    """
    try:
        fields = _fields_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UserError("body", "a JSON object with `model`", str(error)[:200], code="invalid_json") from None
    if isinstance(fields.model, msgspec.UnsetType):
        raise UserError("model", "the name of a model", "none", "see /v1/models", code="missing_required_parameter")
    return RequestFields(fields.model, fields.stream is True)


def rewrite(body: bytes, changes: Mapping[str, Any]) -> bytes:
    """`body` with the top-level fields `changes` set; every other value keeps its bytes."""
    if not changes:
        return body
    fields: dict[str, Any] = _raw_decoder.decode(body)
    return msgspec.json.encode({**fields, **changes})
