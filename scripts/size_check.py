"""Keeps files and functions small enough to read: prints what is over a soft limit, fails on what is over a hard one.

    python scripts/size_check.py

A function's docstring does not count, nor do the arguments of a Triton kernel, one a line. C++ is checked by file only.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["long_functions"]

SOFT_FILE_LINES = 400
HARD_FILE_LINES = 700
HARD_FUNCTION_LINES = 60
EXCEPTIONS: dict[str, str] = {}  # path -> why it may be longer


def long_functions(source: str, limit: int) -> Iterator[tuple[str, int, int]]:
    """(name, first line, number of lines without the docstring) of every function longer than `limit`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0]
        docstring = 0
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            docstring = (first.end_lineno or first.lineno) - first.lineno + 1
        arguments = 0
        if any(isinstance(decorator, ast.Name) and decorator.id == "jit" for decorator in node.decorator_list):
            arguments = first.lineno - node.lineno - 1
        length = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring - arguments
        if length > limit:
            yield node.name, node.lineno, length


def source_files(root: Path) -> Iterator[Path]:
    """Python and C++ sources of the project."""
    for top in ("src", "csrc", "tests", "scripts", "benchmarks"):
        for path in sorted((root / top).rglob("*")):
            if path.suffix in {".py", ".cc", ".h"} and path.relative_to(root).as_posix() not in EXCEPTIONS:
                yield path


def main() -> int:
    """Check the tree: 1 when something is over a hard limit."""
    root = Path(__file__).parent.parent
    failed = False
    for path in source_files(root):
        name = path.relative_to(root).as_posix()
        source = path.read_text()
        lines = source.count("\n")
        if lines > HARD_FILE_LINES:
            failed = True
            print(f"{name}: {lines} lines, limit {HARD_FILE_LINES}")
        elif lines > SOFT_FILE_LINES:
            print(f"{name}: {lines} lines, better below {SOFT_FILE_LINES}")
        if path.suffix == ".py":
            for function, line, length in long_functions(source, HARD_FUNCTION_LINES):
                failed = True
                print(f"{name}:{line}: {function}: {length} lines, limit {HARD_FUNCTION_LINES}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
