"""Prints requirement lines of pyproject.toml, so that a dependency is written down once.

    python scripts/requirements.py build runtime demo dev

`build` is build-system.requires and the dependency group of that name; `runtime` is project.dependencies; any other
name is an extra or a dependency group.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

__all__ = ["requirement_lines"]


def requirement_lines(pyproject: dict, names: list[str]) -> list[str]:
    """Requirement strings of the named sets, in order. Raises KeyError for a name pyproject.toml does not have."""
    groups = pyproject["dependency-groups"]
    sets = {
        **pyproject["project"]["optional-dependencies"],
        **groups,
        "build": pyproject["build-system"]["requires"] + groups["build"],
        "runtime": pyproject["project"]["dependencies"],
    }
    return [line for name in names for line in sets[name]]


if __name__ == "__main__":
    config = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    print("\n".join(requirement_lines(config, sys.argv[1:])))
