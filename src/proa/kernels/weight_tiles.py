"""Tiles of weights in the formats of checkpoints, read and turned into values inside the kernels that multiply them.

A weight `[out, in]` lies in one of two layouts, and both are read in words of 32 bits:

  rows    as the checkpoint has it, row-major: elements or nibbles, and a matrix of scales (docs/weight_formats.md)
  panels  as the experts lie in the machine's memory: runs of 16 rows with their scales (csrc/format/weight_format.h,
          grouped.h, bf16.h and fp8_block128.h), so that an expert comes to the GPU by plain copies

A word holds, lowest bits first (n: row, k: column):

  int4, mxfp4   both     k .. k+7 of one row
  fp8_block128  rows     k .. k+3 of one row            panels   n .. n+3 of one column
  bf16          rows     -  (elements are read)         panels   k, k+1 of one row
  f32           both     one element

Values for float32 products are exact. For tensor cores they are rounded to bf16; bf16 and mxfp4 need no rounding.
e4m3 codes that stand for NaN are read as 480 and -480.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proa.core.errors import UnsupportedError
from proa.kernels.triton_import import jit, tl

__all__ = [
    "KINDS",
    "PANEL_ROWS",
    "WeightKind",
    "as_words",
    "code_columns",
    "find_weight",
    "kind_of",
    "load_scales",
    "load_words",
    "panel_bytes",
    "tile_values",
]

PANEL_ROWS = 16
_FP8_BLOCK = 128

# What kernels branch on.
F32, BF16, FP8, INT4, INT4_F16, MXFP4 = range(6)


@dataclass(frozen=True, slots=True)
class WeightKind:
    """A format as kernels know it. `groups`: groups of 32 columns in a super-block of a panel; 0: no groups."""

    code: int
    groups: int
    scale_bytes: int


KINDS = {
    "f32": WeightKind(F32, 0, 0),
    "bf16": WeightKind(BF16, 0, 0),
    "fp8_block128": WeightKind(FP8, 0, 4),
    "int4_g32": WeightKind(INT4, 1, 2),
    "int4_g32_f16": WeightKind(INT4_F16, 2, 2),
    "mxfp4": WeightKind(MXFP4, 4, 1),
}


def kind_of(weight_format: str) -> WeightKind:
    """Raises UnsupportedError for a format that the kernels do not read."""
    if weight_format not in KINDS:
        raise UnsupportedError("GPU kernel", f"a weight format of {sorted(KINDS)}", weight_format)
    return KINDS[weight_format]


def panel_bytes(weight_format: str, in_features: int) -> int:
    """Bytes from one panel to the next, `proa.native`'s."""
    kind = kind_of(weight_format)
    if kind.groups:
        size = in_features // 32 * PANEL_ROWS * (16 + kind.scale_bytes)
    elif kind.code == FP8:
        size = in_features * PANEL_ROWS + 4 * -(-in_features // _FP8_BLOCK)
    elif kind.code == BF16:
        size = -(-in_features // 32) * 32 * PANEL_ROWS * 2
    else:
        size = in_features * PANEL_ROWS * 4
    return -(-size // 64) * 64


def as_words(data: torch.Tensor) -> torch.Tensor:
    """Rows of a checkpoint as kernels read them: bf16 as it is, others in words of 32 bits, int32."""
    return data if data.dtype == torch.bfloat16 else data.view(torch.int32)


@jit
def code_columns(place):
    """The column of every 32 of 4-bit codes that stands at `place`, in the order of `mma_operands`."""
    return 8 * ((place >> 1) & 3) + 4 * (place & 1) + 2 * ((place >> 4) & 1) + ((place >> 3) & 1)


@jit
def _panel_rows(n, other, PAIRED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows of a tile as a column, and how far behind `data` the weight of each begins, in words.

    A paired tile has rows of two weights of one shape, `n ..` of the first and `n ..` of the one `other` words behind.
    """
    place = tl.arange(0, BLOCK_N)[:, None]
    if PAIRED:
        row = n + place % (BLOCK_N // 2)
        shift = tl.where(place < BLOCK_N // 2, 0, other)
    else:
        row = n + place
        shift = tl.zeros([BLOCK_N, 1], tl.int64)
    return row, shift


@jit
def _fp8_panel_words(n, other, BLOCK_N: tl.constexpr, PAIRED: tl.constexpr):
    """Panels and shifts of the words `4 rows x 1 column` of a tile, [1, BLOCK_N / 4], and their place in a column."""
    place = tl.arange(0, BLOCK_N // 4)[None, :]
    if PAIRED:
        panel = n // 16 + place // 4 % (BLOCK_N // 32)
        shift = tl.where(place < BLOCK_N // 8, 0, other)
    else:
        panel = n // 16 + place // 4
        shift = tl.zeros([1, BLOCK_N // 4], tl.int64)
    return panel, shift, place % 4


@jit
def find_weight(arena, place, DOWN: tl.constexpr):
    """Where an expert's down begins, or its gate and how many words behind it up; `place`: its row of the table."""
    begin = tl.multiple_of(tl.load(place + (2 if DOWN else 0)) // 4, 16)
    other = tl.multiple_of(tl.load(place + 1) // 4 - begin, 16)
    return arena + begin, other


@jit
def load_words(
    data, other, n, k, valid_n, columns, row_words, KIND: tl.constexpr, GROUPS: tl.constexpr,
    SCALE_BYTES: tl.constexpr, PANELS: tl.constexpr, PAIRED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, VECTOR: tl.constexpr = 2,
):  # fmt: skip
    """The words of a tile of BLOCK_N rows from `n` on and columns `k + arange(BLOCK_K)`, zeros outside.

    data: int32 pointer (bf16 for rows of bf16) to element 0 of the weight; other: see _panel_rows; row_words: words or
    elements from a row to the next, in panels words from a panel to the next. k and columns are multiples of what a
    word or group holds. Shape: [N, words], panels of fp8_block128 [BLOCK_K, N / 4].
    """
    PER_WORD: tl.constexpr = 8 if KIND >= 3 else 4 if KIND == 2 else 2 if KIND == 1 and PANELS else 1
    if KIND == 2 and PANELS:
        panel, shift, place = _fp8_panel_words(n, other, BLOCK_N, PAIRED)
        column = k + tl.arange(0, BLOCK_K)[:, None]
        at = shift + panel * row_words.to(tl.int64) + column * 4 + place
        inside = (panel * 16 < valid_n) & (column < columns)
    elif PANELS:
        row, shift = _panel_rows(n, other, PAIRED, BLOCK_N)
        word = k // PER_WORD + tl.arange(0, BLOCK_K // PER_WORD)[None, :]
        inside = (row < valid_n) & (word * PER_WORD < columns)
        if KIND >= 3:
            # A shorter last super-block starts where a whole one would.
            SUPER_WORDS: tl.constexpr = GROUPS * (64 + 4 * SCALE_BYTES)
            inner = word // 4 // GROUPS * SUPER_WORDS + word // 4 % GROUPS * 64 + word % 4 * 16
        else:
            inner = word * 16
        at = shift + row // 16 * row_words.to(tl.int64) + inner + row % 16
        # VECTOR rows a thread. On the way to shared memory two: with four, lanes would write to fewer banks.
        at = tl.max_contiguous(at, [VECTOR, 1])
    else:
        row = n + tl.arange(0, BLOCK_N)[:, None]
        word = k // PER_WORD + tl.arange(0, BLOCK_K // PER_WORD)[None, :]
        inside = (row < valid_n) & (word * PER_WORD < columns)
        at = row * row_words.to(tl.int64) + word
    return tl.load(data + at, mask=inside, other=0)


@jit
def _block_scales(
    data, scales, other, n, k, valid_n, columns, row_words, row_scales, PANELS: tl.constexpr, PAIRED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of fp8_block128, int32 bits of floats: of rows [N, 1], in panels of words [1, N / 4]."""
    if PANELS:
        panel, shift, _ = _fp8_panel_words(n, other, BLOCK_N, PAIRED)
        at = data + (shift + panel * row_words.to(tl.int64) + columns * 4 + k // 128)
        inside = panel * 16 < valid_n
    else:
        row = n + tl.arange(0, BLOCK_N)[:, None]
        at = scales.to(tl.pointer_type(tl.int32)) + ((row // 128).to(tl.int64) * row_scales + k // 128)
        inside = row < valid_n
    return tl.load(at, mask=inside & (k < columns), other=0)


@jit
def _group_scales(
    data, scales, other, n, k, valid_n, columns, row_words, row_scales, GROUPS: tl.constexpr,
    SCALE_BYTES: tl.constexpr, PANELS: tl.constexpr, PAIRED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Of formats with groups of 32 columns: one for each word, int32, shaped as the words."""
    if PANELS:
        SUPER_BYTES: tl.constexpr = GROUPS * (256 + 16 * SCALE_BYTES)
        row, shift = _panel_rows(n, other, PAIRED, BLOCK_N)
        word = k // 8 + tl.arange(0, BLOCK_K // 8)[None, :]
        group = word // 4
        codes = tl.minimum(GROUPS, columns // 32 - group // GROUPS * GROUPS) * 256
        at = (shift + row // 16 * row_words.to(tl.int64)) * 4 + group // GROUPS * SUPER_BYTES + codes
        at += (group % GROUPS * 16 + row % 16) * SCALE_BYTES
        at = tl.max_contiguous(at, [VECTOR * SCALE_BYTES, 1])  # laid out as the words
        base = data.to(tl.pointer_type(tl.uint8))
        inside = (row < valid_n) & (word * 8 < columns)
    else:
        row = n + tl.arange(0, BLOCK_N)[:, None]
        word = k // 8 + tl.arange(0, BLOCK_K // 8)[None, :]
        at = (row.to(tl.int64) * row_scales + word // 4) * SCALE_BYTES
        base = scales.to(tl.pointer_type(tl.uint8))
        inside = (row < valid_n) & (word * 8 < columns)
    if SCALE_BYTES == 1:
        bits = tl.load(base + at, mask=inside, other=0).to(tl.int32)
    else:
        bits = tl.load((base + at).to(tl.pointer_type(tl.uint16)), mask=inside, other=0).to(tl.int32)
    return bits


@jit
def load_scales(
    data, scales, other, n, k, valid_n, columns, row_words, row_scales, KIND: tl.constexpr, GROUPS: tl.constexpr,
    SCALE_BYTES: tl.constexpr, PANELS: tl.constexpr, PAIRED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, VECTOR: tl.constexpr = 2,
):  # fmt: skip
    """The int32 bits of the scales of a tile, for tile_values; of fp8_block128, BLOCK_K divides 128.

    data, other, row_words: as in load_words. scales: pointer to the bytes of scale 0 (rows), row_scales: scales of a
    row.
    """
    if KIND < 2:
        bits = tl.zeros([1, 1], tl.int32)
    elif KIND == 2:
        bits = _block_scales(
            data, scales, other, n, k, valid_n, columns, row_words, row_scales, PANELS, PAIRED, BLOCK_N
        )
    else:
        bits = _group_scales(
            data, scales, other, n, k, valid_n, columns, row_words, row_scales,
            GROUPS, SCALE_BYTES, PANELS, PAIRED, BLOCK_N, BLOCK_K, VECTOR,
        )  # fmt: skip
    return bits


@jit
def _bits(values, OPERAND: tl.constexpr):
    """Tiles are put together as integers: Triton would move a reshape of floats behind the copy to shared memory."""
    return values.to(tl.int32 if OPERAND == tl.float32 else tl.int16, bitcast=True)


@jit
def _pair(low, high, OPERAND: tl.constexpr):
    """Tiles of the even and odd places of the last dimension as one tile."""
    joined = tl.join(_bits(low, OPERAND), _bits(high, OPERAND)).reshape(low.shape[0], 2 * low.shape[1])
    return joined.to(OPERAND, bitcast=True)


@jit
def _half(words, high: tl.constexpr):
    """The upper or lower half of each word as bf16."""
    bits = (words >> 16) if high else words
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@jit
def _four(v0, v1, v2, v3, OPERAND: tl.constexpr):
    """Tiles [N, W] as one of bits [N, W, 2, 2], v0 .. v3 in order."""
    even = tl.join(_bits(v0, OPERAND), _bits(v2, OPERAND))
    return tl.join(even, tl.join(_bits(v1, OPERAND), _bits(v3, OPERAND)))


@jit
def _interleave(v0, v1, v2, v3, v4, v5, v6, v7, OPERAND: tl.constexpr):
    """Eight tiles [N, W] as one [N, 8 W]: tile i holds the columns 8 w + i."""
    even = tl.join(tl.join(_bits(v0, OPERAND), _bits(v4, OPERAND)), tl.join(_bits(v2, OPERAND), _bits(v6, OPERAND)))
    odd = tl.join(tl.join(_bits(v1, OPERAND), _bits(v5, OPERAND)), tl.join(_bits(v3, OPERAND), _bits(v7, OPERAND)))
    return tl.join(even, odd).reshape(v0.shape[0], 8 * v0.shape[1]).to(OPERAND, bitcast=True)


@jit
def _nibble_scale(bits, KIND: tl.constexpr, OPERAND: tl.constexpr):
    """The scale values of int4 and mxfp4."""
    if KIND == 3:
        return (bits << 16).to(tl.float32, bitcast=True).to(OPERAND)
    elif KIND == 4:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(OPERAND)
    else:
        return tl.where(bits == 0, 0x400000, bits << 23).to(tl.float32, bitcast=True).to(OPERAND)


@jit
def _nibble(words, scale, i: tl.constexpr, KIND: tl.constexpr):
    """The float32 values of the nibbles at bits 4 i."""
    code = (words >> (4 * i)) & 15
    if KIND == 5:
        magnitude = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
        value = tl.where(code >= 8, -magnitude, magnitude)
    else:
        value = (code - 8).to(tl.float32)
    return value * scale


@jit
def _nibble_pairs(words, i: tl.constexpr, KIND: tl.constexpr):
    """The nibbles i and i + 4 of each word as two bf16 in a word, yet to be scaled."""
    codes = (words >> (4 * i)) & 0x000F000F
    if KIND == 5:
        bits = ((codes & 0x00080008) << 12) | ((codes & 0x00070007) << 6)
    else:
        bits = codes | 0x43004300  # 128 + code
    return bits


@jit
def _scaled(bits, scale, high: tl.constexpr, KIND: tl.constexpr):
    value = _half(bits, high)
    if KIND == 5:
        value = value * tl.full([], 8.507059173023462e37, tl.bfloat16)  # 2^126
    else:
        value = value - tl.full([], 136.0, tl.bfloat16)
    return value * scale


@jit
def _nibble_tile(words, scale_bits, KIND: tl.constexpr, OPERAND: tl.constexpr):
    scale = _nibble_scale(scale_bits, KIND, OPERAND)
    if OPERAND == tl.float32:
        tile = _interleave(
            _nibble(words, scale, 0, KIND), _nibble(words, scale, 1, KIND), _nibble(words, scale, 2, KIND),
            _nibble(words, scale, 3, KIND), _nibble(words, scale, 4, KIND), _nibble(words, scale, 5, KIND),
            _nibble(words, scale, 6, KIND), _nibble(words, scale, 7, KIND), OPERAND,
        )  # fmt: skip
    else:
        p0, p1 = _nibble_pairs(words, 0, KIND), _nibble_pairs(words, 1, KIND)
        p2, p3 = _nibble_pairs(words, 2, KIND), _nibble_pairs(words, 3, KIND)
        tile = _interleave(
            _scaled(p0, scale, False, KIND), _scaled(p1, scale, False, KIND), _scaled(p2, scale, False, KIND),
            _scaled(p3, scale, False, KIND), _scaled(p0, scale, True, KIND), _scaled(p1, scale, True, KIND),
            _scaled(p2, scale, True, KIND), _scaled(p3, scale, True, KIND), OPERAND,
        )  # fmt: skip
    return tile


@jit
def _byte(words, i: tl.constexpr, scale):
    """The float32 values of the e4m3 codes at bits 8 i."""
    # An arithmetic shift moves the seven bits of the number to their place and leaves the sign where it is.
    bits = ((words << (24 - 8 * i)) >> 4) & -0x78100000
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36 * scale  # 2^120: the exponents' biases


@jit
def _fp8_tile(words, scale_bits, PANELS: tl.constexpr, OPERAND: tl.constexpr):
    scale = scale_bits.to(tl.float32, bitcast=True)
    v0, v1 = _byte(words, 0, scale).to(OPERAND), _byte(words, 1, scale).to(OPERAND)
    v2, v3 = _byte(words, 2, scale).to(OPERAND), _byte(words, 3, scale).to(OPERAND)
    tile = _four(v0, v1, v2, v3, OPERAND).reshape(words.shape[0], 4 * words.shape[1]).to(OPERAND, bitcast=True)
    if PANELS:
        tile = tl.trans(tile)
    return tile


@jit
def tile_values(words, scale_bits, KIND: tl.constexpr, PANELS: tl.constexpr, OPERAND: tl.constexpr):
    """[BLOCK_N, BLOCK_K] values in OPERAND, float32 or bf16, from what load_words and load_scales gave."""
    if KIND == 0:
        tile = words.to(tl.float32, bitcast=True).to(OPERAND)
    elif KIND == 1 and PANELS:
        low = (words << 16).to(tl.float32, bitcast=True).to(OPERAND)
        tile = _pair(low, (words & -65536).to(tl.float32, bitcast=True).to(OPERAND), OPERAND)
    elif KIND == 1:
        tile = words.to(OPERAND)
    elif KIND == 2:
        tile = _fp8_tile(words, scale_bits, PANELS, OPERAND)
    else:
        tile = _nibble_tile(words, scale_bits, KIND, OPERAND)
    return tile
