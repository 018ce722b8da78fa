"""Every ISA gives the bits of the scalar reference, each in a process of its own under PROA_FORCE_ISA.

The AMX cells of bf16 and fp8 are compared with a model of their own in csrc/tests/split_act_test.cc.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.weight_cases import FORMATS, column_step

from proa.native import _C

NEEDS = {
    "ref": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
}
NEEDS["amx"] = NEEDS["avx512"] | {"amx_tile", "amx_int8"}


class Worker:
    """tests/kernels/isa_worker.py under one ISA."""

    def __init__(self, isa: str) -> None:
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.isa_worker"],
            cwd=root,
            env=os.environ | {"PROA_FORCE_ISA": isa},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.isa = self._read()

    def digest(self, case: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the worker died"
        return line

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, Worker]]:
    isa = set(_C.cpu_info()["isa"])
    started = {name: Worker(name) for name, needs in NEEDS.items() if needs <= isa}
    yield started
    for worker in started.values():
        worker.close()


def test_the_forced_isa_is_used(workers: dict[str, Worker]) -> None:
    assert {name: worker.isa for name, worker in workers.items()} == {name: name for name in workers}


def digests(workers: dict[str, Worker], case: dict[str, Any]) -> dict[str, str]:
    """Per ISA, those left out whose cell of this format has other bits (docs/decisions/0002)."""
    own_bits = {"amx"} if case["format"] in ("bf16", "fp8_block128", "fp8_channel", "mxfp8") else set()
    return {name: worker.digest(case) for name, worker in workers.items() if name not in own_bits}


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_linear_has_the_same_bits(workers: dict[str, Worker], data: st.DataObject) -> None:
    fmt = data.draw(st.sampled_from(FORMATS))
    step = column_step(fmt)
    columns = step * data.draw(st.integers(1, 300 // step))
    case = {
        "op": "linear",
        "format": fmt,
        "rows": data.draw(st.integers(1, 70)),
        "columns": columns,
        "tokens": data.draw(st.integers(1, 40)),
        "seed": data.draw(st.integers(0, 2**32)),
    }
    found = digests(workers, case)
    assert found == dict.fromkeys(found, found["ref"])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [1, 5, 150])
def test_experts_have_the_same_bits(workers: dict[str, Worker], fmt: str, tokens: int) -> None:
    case = {"op": "experts", "format": fmt, "tokens": tokens, "seed": tokens}
    found = digests(workers, case)
    assert found == dict.fromkeys(found, found["ref"])
