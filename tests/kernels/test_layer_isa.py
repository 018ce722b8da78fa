"""Expert layers of every weight format on every ISA: the bits of the scalar reference, odd scales and ids included."""

from __future__ import annotations

import numpy as np
import pytest
from tests.kernels.layer_cases import FORMATS, ODD_SCALES, make_layer, odd_rows, run
from tests.kernels.test_gemm_isa import Worker, digests, workers

from proa.native import _C

__all__ = ["workers"]

ODD = [(fmt, kind) for fmt in FORMATS for kind in ODD_SCALES if odd_rows(fmt, kind) is not None]


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_has_the_bits_of_the_reference(workers: dict[str, Worker], fmt: str) -> None:
    found = digests(workers, {"op": "layer", "format": fmt, "seed": 3, "odd": None})
    assert found == dict.fromkeys(found, found["ref"])


@pytest.mark.parametrize(("fmt", "kind"), ODD)
def test_odd_scales_have_the_bits_of_the_reference(workers: dict[str, Worker], fmt: str, kind: str) -> None:
    found = digests(workers, {"op": "layer", "format": fmt, "seed": 4, "odd": kind})
    assert found == dict.fromkeys(found, found["ref"])


@pytest.mark.parametrize("tokens", [1, 3, 50])
@pytest.mark.parametrize(("fmt", "kind"), ODD)
def test_odd_scales_reach_their_own_outputs_only(pool: _C.ThreadPool, fmt: str, kind: str, tokens: int) -> None:
    ids, odd = run(make_layer(pool, fmt, 5, kind), fmt, tokens, 5)
    _, plain = run(make_layer(pool, fmt, 5), fmt, tokens, 5)
    reached = odd_rows(fmt, kind)
    assert reached is not None
    with_expert = (ids == 1).any(axis=1)
    assert np.isfinite(plain).all()
    others = np.setdiff1d(np.arange(plain.shape[1]), reached)
    assert np.array_equal(odd[:, others], plain[:, others])
    assert np.array_equal(odd[~with_expert], plain[~with_expert])
    if kind == "denormal":
        assert np.isfinite(odd).all() and not np.array_equal(odd, plain)
    else:
        assert not np.isfinite(odd[with_expert][:, reached]).any()
