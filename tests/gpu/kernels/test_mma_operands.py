"""Codes in the registers of the tensor cores: the PTX that decodes them, instruction by instruction, for every code."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from proa.kernels.gluon_import import gl
from proa.kernels.mma_operands import decoding
from proa.kernels.panel_operands import BYTE_PAIRS
from proa.weights.float_codes import f32_from_e2m1, f32_from_e4m3

pytestmark = pytest.mark.skipif(gl is None, reason="the kernels were written for another Triton's Gluon")


def run(ptx: str, **registers: int) -> dict[str, int]:
    """The registers after the instructions of `ptx`; only those that decode."""

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in re.findall(r"(\w+(?:\.\w+)+) ([^;]+);", ptx):
        operation, (to, *names) = line[0], [name.strip() for name in line[1].split(",")]
        match operation, [value(name) for name in names]:
            case "mov.b32", [a]:
                result = a
            case "shl.b32", [a, n]:
                result = a << n
            case "shr.u32", [a, n]:
                result = a >> n
            case "and.b32", [a, b]:
                result = a & b
            case "lop3.b32", [a, b, c, 0xEA]:
                result = a & b | c
            case "prmt.b32", [a, b, order]:
                both = a | b << 32
                result = sum((both >> 8 * (order >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))
            case "add.rn.bf16x2", [a, b]:
                result = bits((halves(a).bfloat16() + halves(b).bfloat16()).float())
            case _:
                raise AssertionError(line)
        registers[to] = result & 0xFFFFFFFF
    return registers


def halves(word: int) -> torch.Tensor:
    """The two bf16 of a register, as float32."""
    return torch.from_numpy(np.array([word << 16 & 0xFFFFFFFF, word & 0xFFFF0000], np.uint32).view(np.float32).copy())


def bits(values: torch.Tensor) -> int:
    low, high = values.numpy().view(np.uint32) >> 16
    return int(low) | int(high) << 16


def text(constant: object) -> str:
    return str(getattr(constant, "value", constant))


@pytest.mark.parametrize("place", range(4))
def test_nibbles(place):
    four = f32_from_e2m1(np.arange(16, dtype=np.uint8))
    for low in range(16):
        high = (5 * low + 3) % 16
        word = (low << 4 * place | high << 16 + 4 * place) | (0x76543210 & ~(0x000F000F << 4 * place))
        assert halves(run(text(decoding("int4", place)), **{"$1": word})["$0"]).tolist() == [low - 8, high - 8]
        found = halves(run(text(decoding("e2m1", place)), **{"$1": word})["$0"]).double() * 2.0**126
        assert found.tolist() == [four[low], four[high]]


@pytest.mark.parametrize("place", range(2))
def test_bytes(place):
    values = f32_from_e4m3(np.arange(256, dtype=np.uint8))
    for low in range(256):
        high = (77 * low + 5) % 256
        if {low & 0x7F, high & 0x7F} & {0x7F}:  # NaN
            continue
        word = low << 8 * place | high << 16 + 8 * place | 0xA5A5A5A5 & ~(0x00FF00FF << 8 * place)
        found = halves(run(text(decoding("e4m3", place)), **{"$1": word})["$0"]).double() * 2.0**120
        assert found.tolist() == [values[low], values[high]]


def test_byte_pairs_of_two_columns():
    values = f32_from_e4m3(np.arange(256, dtype=np.uint8))
    first, second = 0x12F3C405, 0x7AB81D9E
    registers = run(text(BYTE_PAIRS), **{"$4": first, "$6": second})
    for row in range(4):
        expected = [values[word >> 8 * row & 0xFF] for word in (first, second)]
        assert (halves(registers[f"${row}"]).double() * 2.0**120).tolist() == expected
