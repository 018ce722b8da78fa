"""What a gateway reads of a JSON request, and the few fields it writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from proa.core.errors import UserError

__all__ = ["RequestFields", "read_fields", "rewrite"]


_Decoded = TypeVar("_Decoded")


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
    fields = _decoded(_fields_decoder, body)
    if isinstance(fields.model, msgspec.UnsetType):
        raise UserError("model", "the name of a model", "none", "see /v1/models", code="missing_required_parameter")
    return RequestFields(fields.model, fields.stream is True)


def rewrite(body: bytes, changes: Mapping[str, Any]) -> bytes:
    """`body` with the top-level fields `changes` set; every other value keeps its bytes.

    Raises:
        UserError: no JSON object. Names of fields are looked at here for the first time.
    """
    if not changes:
        return body
    fields = _decoded(_raw_decoder, body)
    return msgspec.json.encode({**fields, **changes})


def _decoded(decoder: msgspec.json.Decoder[_Decoded], body: bytes) -> _Decoded:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UserError("body", "a JSON object with `model`", str(error)[:200], code="invalid_json") from None
