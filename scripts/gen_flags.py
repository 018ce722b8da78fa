"""Writes docs/flags.md from the flag tables. tests/cli/test_flags.py checks that it is current.

python scripts/gen_flags.py
"""

from __future__ import annotations

from pathlib import Path

from proa.cli.flag import Flag, default_text
from proa.cli.flags import FLAGS
from proa.cli.sglang_flags import DEFAULT_PORT, FOREIGN, MODEL_FLAGS

__all__ = ["DOCUMENT", "render"]

DOCUMENT = Path(__file__).parent.parent / "docs" / "flags.md"


def _row(flag: Flag) -> str:
    kind = " \\| ".join(flag.choices) if flag.choices else flag.kind.__name__ + flag.may_be_auto * " \\| auto"
    return f"| `{flag.name}` | {kind} | {default_text(flag)} | {flag.owner} | {flag.doc} |"


def render() -> str:
    """The document as text."""
    honoured = [(name, flag) for flag in FLAGS for name in flag.sglang]
    lines = [
        "# Flags",
        "",
        "Made by `make flags` from `proa.cli.server_flags`, `engine_flags` and `sglang_flags`; do not edit.",
        "",
        "## proa serve MODEL",
        "",
        "| flag | value | default | owner | what it does |",
        "|---|---|---|---|---|",
        *map(_row, FLAGS),
        "",
        "Exit status: 0 after SIGTERM or Ctrl-C, 1 when serving failed, 2 for a wrong command line, 3 for a model or",
        "an engine configuration that cannot be served.",
        "",
        "## python -m proa.launch_server: SGLang's flags",
        "",
        f"Spelled with dashes or underscores. The port is {DEFAULT_PORT} unless `--port` says otherwise, as in SGLang.",
        "An unknown flag is an error that names the nearest known one. Honoured:",
        "",
        "| SGLang | proa serve |",
        "|---|---|",
        f"| {', '.join(f'`{name}`' for name in MODEL_FLAGS)} | MODEL |",
        *(f"| `{name}` | `{flag.name}` |" for name, flag in honoured),
        "",
        "Accepted, with one line at start that says what they mean here:",
        "",
        "| SGLang | here |",
        "|---|---|",
        *(f"| {', '.join(f'`{n}`' for n in f.names)} | {f.meaning} |" for f in FOREIGN if not f.refused),
        "",
        "Refused, as leaving them out would change what the model answers:",
        "",
        "| SGLang | why |",
        "|---|---|",
        *(f"| {', '.join(f'`{n}`' for n in f.names)} | {f.meaning} |" for f in FOREIGN if f.refused),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    DOCUMENT.write_text(render())
