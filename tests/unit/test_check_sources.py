from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


check = load("check_sources")
sizes = load("size_check")

HOME = "/" + "root"  # put together, or this file would be a breach itself
BREACHES = [
    ("csrc/moe/a.cc", "#include <immintrin.h>"),
    ("csrc/gemm/select.cc", "#include <emmintrin.h>"),
    ("csrc/gemm/ref/a.cc", "#include <immintrin.h>"),
    ("csrc/gemm/a.cc", "#include <nanobind/nanobind.h>"),
    ("csrc/base/a.h", '#include "cpu/isa.h"'),
    ("csrc/cpu/a.h", '#include "runtime/thread_pool.h"'),
    ("csrc/format/a.h", '#include "gemm/kernel.h"'),
    ("csrc/gemm/a.cc", '#include "moe/expert_layer.h"'),
    ("csrc/ops/a.cc", '#include "gemm/kernel.h"'),
    ("csrc/moe/a.cc", '#include "bindings/pool.h"'),
    ("csrc/gemm/a.cc", '#include "tests/check.h"'),
    ("csrc/bindings/a.cc", "#include <torch/extension.h>"),
    ("csrc/gemm/a.cc", 'std::printf("x");'),
    ("csrc/moe/a.cc", "std::cout << x;"),
    ("csrc/gemm/a.cc", 'getenv("X")'),
    ("csrc/gemm/a.h", "using namespace std;"),
    ("src/proa/models/a.py", "import os; os.environ['X']"),
    ("src/proa/models/a.py", "os.getenv('X')"),
    ("src/proa/weights/a.py", "import pickle"),
    ("src/proa/weights/a.py", "x = torch.load(path)"),
    ("src/proa/chat/a.py", "eval(text)"),
    ("src/proa/cli/a.py", "subprocess.run(text, shell=True)"),
    ("docs/a.md", f"see {HOME}/x for it"),
    ("Makefile", f"cat {HOME}/x"),
]
CLEAN = [
    ("csrc/gemm/avx512/a.cc", "#include <immintrin.h>"),
    ("csrc/ops/avx2/a.cc", "#include <immintrin.h>"),
    ("csrc/bindings/a.cc", "#include <nanobind/nanobind.h>"),
    ("csrc/moe/a.cc", '#include "gemm/kernel.h"'),
    ("csrc/moe/a.cc", '#include "moe/workspace.h"'),
    ("csrc/runtime/a.cc", "#include <sys/mman.h>"),
    ("csrc/tests/a.cc", 'std::printf("x");'),
    ("csrc/cpu/isa.cc", 'std::getenv("PROA_FORCE_ISA")'),
    ("csrc/gemm/a.cc", "std::snprintf(text, 8, f);"),
    ("src/proa/core/env.py", "os.environ.get('X')"),
    ("src/proa/models/a.py", "model.eval()"),
    ("docs/a.md", "pass /path/to/model or /models/x"),
]


def write(root, path, line):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"\n{line}\n")


@pytest.mark.parametrize(("path", "line"), BREACHES)
def test_each_breach_is_found_with_its_place(tmp_path, path, line):
    write(tmp_path, path, line)
    found = check.breaches(tmp_path)
    assert [(b.path, b.line) for b in found] == [(path, 2)]


@pytest.mark.parametrize(("path", "line"), CLEAN)
def test_what_is_allowed_is_not_found(tmp_path, path, line):
    write(tmp_path, path, line)
    assert check.breaches(tmp_path) == []


def test_build_products_and_virtual_environments_are_left_out(tmp_path):
    for path in ("build/a.py", ".venv/lib/a.py", "src/__pycache__/a.py"):
        write(tmp_path, path, "import pickle")
    assert check.breaches(tmp_path) == []


def test_this_tree_is_clean():
    assert check.breaches(SCRIPTS.parent) == []


def test_a_docstring_does_not_count_to_a_functions_length():
    body = "\n".join(["    x = 1"] * 8)
    assert list(sizes.long_functions(f"def f():\n{body}\n", 8)) == [("f", 1, 9)]
    docstring = '    """A\n    B\n    C."""'
    assert list(sizes.long_functions(f"def f():\n{docstring}\n{body}\n", 9)) == []
    assert list(sizes.long_functions(f"@jit\ndef f(\n    a,\n    b,\n):\n{body}\n", 8)) == [("f", 2, 9)]
