"""Writes docs/gateway_keys.md from the schema of gateway.yaml. tests/gateway/test_documents.py checks it is current.

python scripts/gen_gateway_keys.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from proa.gateway.yaml_config import schema

__all__ = ["DOCUMENT", "render"]

DOCUMENT = Path(__file__).parent.parent / "docs" / "gateway_keys.md"


def _row(name: str, entry: dict[str, Any], definitions: dict[str, Any]) -> str:
    referred = definitions[entry["$ref"].rsplit("/", 1)[1]] if "$ref" in entry else {}
    value = entry.get("title") or referred.get("title") or " \\| ".join(map(str, entry.get("enum", ())))
    value = value or {"boolean": "true or false", "string": "a text"}.get(str(entry.get("type")), "")
    default = entry.get("default", "")
    shown = "" if default in ("", None) else str(default).lower() if isinstance(default, bool) else str(default)
    text = entry.get("description") or referred.get("description", "")
    return f"| `{name}` | {value} | {shown} | {text} |"


def _table(title: str, entries: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    yield from ("", f"## {title}", "", "| key | value | default | what it does |", "|---|---|---|---|")
    yield from (_row(name, entry, definitions) for name, entry in entries.items())


def render() -> str:
    """The document as text."""
    whole = schema()
    definitions = whole["$defs"]
    lines = [
        "# Keys of gateway.yaml",
        "",
        "Made by `make flags` from `src/proa/gateway/gateway.schema.json`; do not edit.",
        *_table("The file", whole["properties"], definitions),
        *_table("A model", definitions["model"]["properties"], definitions),
        *_table("A model, or `defaults` for all", definitions["settings"]["properties"], definitions),
        *_table("A group", definitions["group"]["properties"], definitions),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
