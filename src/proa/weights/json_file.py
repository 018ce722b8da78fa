"""Bounded, strict reading of the JSON files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from proa.core.errors import CheckpointError

__all__ = ["parse_json_object", "read_json_object"]

MAX_JSON_FILE_BYTES = 256 << 20
# Values of three bytes each would take 30 times the memory of the file, entries of tensors 20 times. A checkpoint of a
# trillion parameters whose tensors all lie in one file has about 1.5 million commas in its header.
MAX_JSON_COMMAS = 4_000_000


def read_json_object(path: Path, max_bytes: int = MAX_JSON_FILE_BYTES) -> dict[str, Any]:
    """The JSON object in `path`. CheckpointError when missing, larger than `max_bytes`, or not a strict JSON object."""
    if not path.exists():
        raise CheckpointError(str(path), "a file", "nothing", "download the whole checkpoint directory")
    if not path.is_file():  # a pipe would block, a device never end
        raise CheckpointError(str(path), "a regular file", "something else")
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(str(path), "a readable file", error.strerror or error) from None
    if len(raw) > max_bytes:
        raise CheckpointError(str(path), f"a JSON file of at most {max_bytes} bytes", "a larger one")
    return parse_json_object(raw, str(path))


def parse_json_object(raw: bytes, where: str) -> dict[str, Any]:
    """Parse UTF-8 JSON with an object at its top. Duplicate keys, NaN, deep nesting and too many values are refused."""
    if raw.count(b",") > MAX_JSON_COMMAS:
        raise CheckpointError(where, f"JSON of at most {MAX_JSON_COMMAS} values", "more")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise CheckpointError(where, "UTF-8 JSON", f"bytes that are not UTF-8 at offset {error.start}") from None
    except RecursionError:
        raise CheckpointError(where, "shallow JSON", "nesting deeper than any checkpoint uses") from None
    except ValueError as error:
        raise CheckpointError(where, "valid JSON", str(error)) from None
    if not isinstance(value, dict):
        raise CheckpointError(where, "a JSON object", type(value).__name__)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"duplicate key {key[:200]!r}")
        result[key] = value
    return result


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
