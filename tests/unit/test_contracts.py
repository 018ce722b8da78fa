"""The rules of the source tree that tools check: each has to hold, and each has to be able to fail."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for path in (ROOT / "src" / "proa").rglob("*.py") if path.stem not in {"__init__", "__main__"})
MAX_PUBLIC_NAMES = 12
# The whole of one interface in one place: the link between the processes, the extension's operators.
LARGER = {"messages.py": 20, "ops.py": 20}

# lint-imports on a copy of the tree: the installed package's own finder would lead back to the original.
LINT = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
from importlinter.cli import lint_imports
sys.exit(lint_imports(config_filename="pyproject.toml", no_cache=True))
"""


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, "-c", LINT]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


@pytest.fixture
def tree(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_import_contracts_hold_and_a_breach_of_each_is_found(tree):
    done = lint_imports(tree)
    assert done.returncode == 0, done.stdout + done.stderr

    (tree / "src/proa/weights/breach.py").write_text("import proa.models.registry\n")
    (tree / "src/proa/server/breach.py").write_text("import torch\n")
    done = lint_imports(tree)
    assert done.returncode == 1
    assert "proa.weights is not allowed to import proa.models" in done.stdout
    assert "proa.server is not allowed to import torch" in done.stdout


def test_a_package_without_a_place_in_the_layers_is_found(tree):
    (tree / "src/proa/somewhere").mkdir()
    (tree / "src/proa/somewhere/__init__.py").touch()
    done = lint_imports(tree)
    assert done.returncode == 1
    assert "somewhere" in done.stdout


def exported(module: ast.Module) -> list[str] | None:
    for node in module.body:
        if isinstance(node, ast.Assign) and [t.id for t in node.targets if isinstance(t, ast.Name)] == ["__all__"]:
            return [element.value for element in node.value.elts]
    return None


def bound_names(module: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT / "src").as_posix())
def test_every_module_says_what_it_exports(path):
    module = ast.parse(path.read_text())
    names = exported(module)
    assert names is not None, "no __all__"
    assert not set(names) - bound_names(module)
    assert len(names) <= LARGER.get(path.name, MAX_PUBLIC_NAMES)
