"""Codes of experts in panels as the first operand of `mma`, read from memory straight into the registers that multiply.

A tile is two panels of 16 rows, of gate and of up or of down, and some chunks of columns; warps take chunks in turn.

4-bit codes: a chunk is a group of 32 columns, 16 rows of 4 words, word by word. A lane loads its word of two rows at
once: the rows 2 g and 2 g + 1 of a panel are the rows g and g + 8 of the tensor cores.
fp8: a chunk is 16 columns, and a word 4 rows of one. A lane, which has 4 rows of two panels, takes the word of those
for each of the columns `8 h + 4 e + q`, which stand at `8 h + 2 q + e`.
"""

from __future__ import annotations

from proa.kernels.gluon_import import gl, gluon_constant, gluon_jit, mma_v2
from proa.kernels.mma_operands import byte_pair, code_values, group_scales, operand_words
from proa.kernels.weight_tiles import code_columns

__all__ = ["BYTE_PAIRS", "add_product", "load_chunks", "panel_pointers", "standing_column"]

# Of the words of two columns ($4 and $6) the pairs of rows 0, 1, 2 and 3 as bf16, times 2^-120.
_BYTES = f"""{{
        .reg .b32 a, b, t, u;
        prmt.b32 a, $4, $6, 0x5410;
        prmt.b32 b, $4, $6, 0x7632;
        {byte_pair("a", 0, "$0")}{byte_pair("a", 1, "$1")}{byte_pair("b", 0, "$2")}{byte_pair("b", 1, "$3")}
        }}"""
BYTE_PAIRS = _BYTES if gl is None else gl.constexpr(_BYTES)


@gluon_constant
def _layout(registers: list[list[int]], lanes: list[list[int]], warps: int, chunks: int, shape: list[int]) -> object:
    """Chunks, the first dimension, after each other in `registers` and then in warps."""
    rest = [0] * len(shape)
    return gl.DistributedLinearLayout(
        registers + [[warps * c, *rest] for c in (1, 2) if c < chunks],
        lanes,
        [[w, *rest] for w in (1, 2, 4) if w < warps],
        [],
        [warps * chunks, *shape],
    )


@gluon_constant
def _group_words(warps: int, chunks: int) -> object:
    """Words [C, 2, 16, 4]."""
    lanes = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 8, 0]]
    return _layout([[0, 0, 1, 0], [0, 1, 0, 0]], lanes, warps, chunks, [2, 16, 4])


@gluon_constant
def _group_scales(warps: int, chunks: int) -> object:
    """Scales [C, 2, 16], in the lanes of their words."""
    lanes = [[0, 0, 0], [0, 0, 0], [0, 0, 2], [0, 0, 4], [0, 0, 8]]
    return _layout([[0, 0, 1], [0, 1, 0]], lanes, warps, chunks, [2, 16])


@gluon_constant
def _byte_words(warps: int, chunks: int) -> object:
    """Words [C, 8, 2, 4, 2]: the last dimension repeats them, for pairs of bf16."""
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 0, 0, 0]]
    return _layout([[0, 0, 0, 0, 1], [0, 0, 1, 0, 0]], lanes, warps, chunks, [8, 2, 4, 2])


@gluon_constant
def _byte_scales(warps: int, chunks: int) -> object:
    """Scales [C, 4, 8]: of the 4 rows of a lane, and its lanes."""
    lanes = [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    return _layout([[0, 1, 0], [0, 2, 0]], lanes, warps, chunks, [4, 8])


@gluon_jit
def standing_column(place, KIND: gl.constexpr):
    """The column that stands at `place` of a chunk."""
    if KIND == 2:
        return (place & 8) + 4 * (place & 1) + ((place >> 1) & 3)
    else:
        return code_columns(place)


@gluon_jit
def _panel(panel, n, other, out_features, panel_words, DOWN: gl.constexpr):
    """Words from the weight's begin to the two panels of a tile: of gate and up, `other` words apart, or of down."""
    if DOWN:
        return gl.minimum(n // 16 + panel, out_features // 16 - 1).to(gl.int64) * panel_words
    else:
        return (n // 16).to(gl.int64) * panel_words + panel * other


@gluon_jit
def _group_pointers(
    base, n, other, out_features, panel_words, DOWN: gl.constexpr, GROUPS: gl.constexpr, SCALE_BYTES: gl.constexpr,
    WARPS: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """Of the words [C, 2, 16, 4] of the first groups and their scales [C, 2, 16], and the columns of both."""
    C: gl.constexpr = WARPS * CHUNKS
    SUPER: gl.constexpr = GROUPS * (64 + 4 * SCALE_BYTES)  # words
    element: gl.constexpr = gl.int16 if SCALE_BYTES == 2 else gl.int8
    words: gl.constexpr = _group_words(WARPS, CHUNKS)
    scales: gl.constexpr = _group_scales(WARPS, CHUNKS)
    group = gl.arange(0, C, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, words))))[:, None, None, None]
    panel = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, words))))
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, words))))[None, None, :, None]
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, words))))[None, None, None, :]
    shift = _panel(panel, n, other, out_features, panel_words, DOWN)[None, :, None, None]
    w_ptrs = base + shift + (group // GROUPS * SUPER + group % GROUPS * 64 + word * 16 + row)
    s_group = gl.arange(0, C, layout=gl.SliceLayout(1, gl.SliceLayout(2, scales)))[:, None, None]
    panel = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, scales)))
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, scales)))[None, None, :]
    shift = _panel(panel, n, other, out_features, panel_words, DOWN)[None, :, None]
    at = s_group // GROUPS * (SUPER * 4 // SCALE_BYTES) + GROUPS * (256 // SCALE_BYTES) + s_group % GROUPS * 16 + row
    s_ptrs = base.to(gl.pointer_type(element)) + shift * (4 // SCALE_BYTES) + at
    return w_ptrs, s_ptrs, group * 32, s_group * 32


@gluon_jit
def _byte_pointers(
    base, n, other, out_features, in_features, panel_words, DOWN: gl.constexpr, WARPS: gl.constexpr,
    CHUNKS: gl.constexpr,
):  # fmt: skip
    """Of the words [C, 8, 2, 4] (rows of a lane, h, q) of the first columns with e = 0 and their scales [C, 8], and the
    columns of both."""
    C: gl.constexpr = WARPS * CHUNKS
    words: gl.constexpr = gl.SliceLayout(4, _byte_words(WARPS, CHUNKS))
    rows: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, words))
    scales: gl.constexpr = gl.SliceLayout(1, _byte_scales(WARPS, CHUNKS))
    lane = gl.arange(0, 8, layout=gl.SliceLayout(0, rows))
    h = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, words))))[None, None, :, None]
    q = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, words))))[None, None, None, :]
    column = gl.arange(0, C, layout=gl.SliceLayout(1, rows))[:, None, None, None] * 16
    shift = _panel(lane // 4, n, other, out_features, panel_words, DOWN) + lane % 4
    w_ptrs = base + shift[None, :, None, None] + (column * 4 + h * 32 + q * 4)
    panel = gl.arange(0, 8, layout=gl.SliceLayout(0, scales)) // 4
    shift = _panel(panel, n, other, out_features, panel_words, DOWN) + in_features * 4
    s_column = gl.arange(0, C, layout=gl.SliceLayout(1, scales))[:, None] * 16
    s_ptrs = base.to(gl.pointer_type(gl.float32)) + shift[None, :] + s_column // 128
    return w_ptrs, s_ptrs, column, s_column


@gluon_jit
def panel_pointers(
    base, n, other, out_features, in_features, panel_words, DOWN: gl.constexpr, KIND: gl.constexpr,
    GROUPS: gl.constexpr, SCALE_BYTES: gl.constexpr, WARPS: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """For `load_chunks`. base: int32 pointer to down, or to gate with up `other` words behind it."""
    if KIND == 2:
        return _byte_pointers(base, n, other, out_features, in_features, panel_words, DOWN, WARPS, CHUNKS)
    else:
        return _group_pointers(
            base, n, other, out_features, panel_words, DOWN, GROUPS, SCALE_BYTES, WARPS, CHUNKS
        )  # fmt: skip


@gluon_jit
def load_chunks(
    at, begin, in_features, KIND: gl.constexpr, GROUPS: gl.constexpr, SCALE_BYTES: gl.constexpr, RAGGED: gl.constexpr
):
    """Words and scales of the chunks from column `begin` on, zeros past `in_features`; for `add_product`.

    RAGGED: 0 where steps end with the row, so that one condition is that of all.
    """
    w_ptrs, s_ptrs, w_column, s_column = at
    inside, s_inside = begin + w_column * RAGGED < in_features, begin + s_column * RAGGED < in_features
    if KIND == 2:
        first = gl.load(w_ptrs + begin * 4, mask=inside, other=0)
        second = gl.load(w_ptrs + begin * 4 + 16, mask=inside, other=0)
        scale = gl.load(s_ptrs + begin // 128, mask=s_inside, other=0.0)
        return first, second, scale * 7.205759403792794e16  # 2^56
    else:
        SUPER: gl.constexpr = GROUPS * (64 + 4 * SCALE_BYTES)  # words
        at = begin // (32 * GROUPS) * SUPER
        words = gl.load(w_ptrs + at, mask=inside, other=0)
        at *= 4 // SCALE_BYTES
        if GROUPS > 1:
            # A shorter last super-block has its scales behind fewer codes.
            missing = (begin + s_column) // (32 * GROUPS) * GROUPS + GROUPS - in_features // 32
            at = at - gl.maximum(missing, 0) * (256 // SCALE_BYTES)
        return words, words, gl.load(s_ptrs + at, mask=s_inside, other=0)


@gluon_jit
def add_product(
    chunks, terms, acc, zero, mma: gl.constexpr, KIND: gl.constexpr, WARPS: gl.constexpr, CHUNKS: gl.constexpr
):
    """`acc` [C, 32, 8] and the product of `load_chunks` and terms, in shared memory [C, 8, columns]."""
    C: gl.constexpr = WARPS * CHUNKS
    first, second, scale = chunks
    if KIND == 2:
        pairs: gl.constexpr = _byte_words(WARPS, CHUNKS)
        none = gl.zeros([C, 8, 2, 4, 2], gl.int32, layout=pairs)
        r0, r1, r2, r3 = gl.inline_asm_elementwise(
            BYTE_PAIRS, "=r,=r,=r,=r,r,r,r,r", [gl.expand_dims(first, 4) + none, gl.expand_dims(second, 4) + none],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        # To rows: low or high pair of rows, row of these, lane; columns: h, q, e.
        tile = gl.join(gl.join(r0, r1), gl.join(r2, r3))
        tile = gl.permute(tile, (0, 6, 5, 1, 2, 3, 4)).reshape(C, 32, 16)
        scale = gl.expand_dims(scale, 1) + gl.zeros([C, 4, 8], gl.float32, layout=_byte_scales(WARPS, CHUNKS))
        scale = scale.reshape(C, 32)
    else:
        codes: gl.constexpr = operand_words(WARPS, CHUNKS, 32)
        rows = gl.permute(first.reshape(C, 2, 8, 2, 4), (0, 1, 3, 2, 4)).reshape(C, 32, 4)
        twice = gl.zeros([C, 32, 4, 2], gl.int32, layout=codes)
        twice += gl.expand_dims(gl.convert_layout(rows, gl.SliceLayout(3, codes)), 3)
        tile = code_values(twice, KIND)
        scale = group_scales(gl.permute(scale.reshape(C, 2, 8, 2), (0, 1, 3, 2)).reshape(C, 32), KIND)
    tile = gl.convert_layout(tile, gl.DotOperandLayout(0, mma, 2))
    part = mma_v2(tile, terms.permute((0, 2, 1)).load(gl.DotOperandLayout(1, mma, 2)), zero)
    return acc + part * gl.convert_layout(scale, gl.SliceLayout(2, mma))[:, :, None]
