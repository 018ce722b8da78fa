"""Rules on source text that no off-the-shelf linter knows: C++ include order, place of intrinsics, forbidden calls.

    python scripts/check_sources.py [ROOT]

Prints `path:line: rule: text` for every breach and exits with their number (at most 1).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Breach", "breaches"]

# Which csrc/ directories a directory may include from, itself aside. Tests, benches and bindings see everything.
CPP_LAYERS: dict[str, set[str]] = {
    "base": set(),
    "cpu": {"base"},
    "runtime": {"base", "cpu"},
    "format": {"base"},
    "gemm": {"base", "cpu", "runtime", "format"},
    "ops": {"base", "cpu", "runtime"},
    "moe": {"base", "cpu", "runtime", "format", "gemm", "ops"},
}
CPP_TOP = {"bindings", "tests", "bench"}
ISA_DIRS = re.compile(r"csrc/(gemm|ops)/(avx2|avx512|amx)/")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
MACHINE_PATH = re.compile(r"(?<![\w.])/(root|work|home/\w+)/\w")
TEXT_SUFFIXES = {".py", ".pyi", ".md", ".toml", ".txt", ".cc", ".h", ".sh", ".yaml", ".json", ".jsonl", ".cmake"}


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern that may stand only in files whose path `allowed` matches (None: nowhere)."""

    name: str
    where: re.Pattern[str]
    pattern: re.Pattern[str]
    allowed: re.Pattern[str] | None = None


@dataclass(frozen=True, slots=True)
class Breach:
    """One line that breaks a rule."""

    path: str
    line: int
    rule: str
    text: str


RULES = (
    Rule(
        "environment variables are read in core/env.py",
        re.compile(r"^src/proa/.*\.py$"),
        re.compile(r"\bos\.(environ|getenv|putenv)\b"),
        re.compile(r"^src/proa/core/env\.py$"),
    ),
    Rule(
        "no code or pickles from data",
        re.compile(r"^(src|scripts|benchmarks)/.*\.py$"),
        re.compile(
            r"^\s*(import|from)\s+(pickle|cloudpickle|dill|marshal|shelve)\b|\btorch\.load\((?!.*weights_only=True)|\byaml\.load\("
            r"|(?<![\w.])(eval|exec)\(|shell=True|trust_remote_code\s*=\s*True"
        ),
        re.compile(r"^scripts/check_sources\.py$"),
    ),
    Rule(
        "the native library prints nothing",
        re.compile(r"^csrc/(?!tests/|bench/).*\.(cc|h)$"),
        re.compile(r"\bstd::(cout|cerr|clog)\b|(?<![\w:])(std::)?f?printf\("),
    ),
    Rule(
        "environment variables are read in csrc/cpu",
        re.compile(r"^csrc/(?!tests/|bench/).*\.(cc|h)$"),
        re.compile(r"\b(secure_)?getenv\("),
        re.compile(r"^csrc/cpu/"),
    ),
    Rule("no `using namespace` in headers", re.compile(r"^csrc/.*\.h$"), re.compile(r"^\s*using namespace\b")),
    Rule("no machine's path", re.compile(r"."), MACHINE_PATH),
)


def include_breach(path: str, header: str) -> str | None:
    """Why the C++ file `path` may not include `header`, None when it may."""
    directory = path.split("/")[1]
    if re.fullmatch(r"\w*intrin\.h|arm_neon\.h", header) and not ISA_DIRS.match(path):
        return "intrinsics stand only under gemm/ and ops/ {avx2,avx512,amx}"
    if header.startswith("nanobind") and directory != "bindings":
        return "nanobind stands only under bindings/"
    if header.startswith(("torch/", "ATen/", "c10/", "cuda", "pybind11/", "Python.h")):
        return "no torch, CUDA or Python headers"
    if directory in CPP_TOP or "/" not in header:
        return None
    target = header.split("/", maxsplit=1)[0]
    known = target in CPP_LAYERS or target in CPP_TOP
    below = CPP_LAYERS.get(directory, set())
    if known and target != directory and target not in below:
        return f"{directory}/ may include {', '.join(sorted(below)) or 'nothing'}, not {target}/"
    return None


def source_files(root: Path) -> Iterator[Path]:
    """Text files of the project, build products and virtual environments left out."""
    skipped = {"build", "dist", "__pycache__", "node_modules"}
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if any(part in skipped or (part.startswith(".") and part != ".ci") for part in parts[:-1]):
            continue
        if path.is_file() and (path.suffix in TEXT_SUFFIXES or path.name in {"Makefile", "run"}):
            yield path


def breaches(root: Path) -> list[Breach]:
    """Every breach under `root`, in path order."""
    found: list[Breach] = []
    for path in source_files(root):
        name = path.relative_to(root).as_posix()
        rules = [r for r in RULES if r.where.search(name) and not (r.allowed and r.allowed.search(name))]
        cpp = name.startswith("csrc/") and path.suffix in {".cc", ".h"}
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            found += [Breach(name, number, r.name, line.strip()) for r in rules if r.pattern.search(line)]
            match = INCLUDE.match(line) if cpp else None
            if match and (reason := include_breach(name, match[1])):
                found.append(Breach(name, number, reason, line.strip()))
    return found


if __name__ == "__main__":
    result = breaches(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent)
    for b in result:
        print(f"{b.path}:{b.line}: {b.rule}: {b.text[:120]}")
    sys.exit(bool(result))
