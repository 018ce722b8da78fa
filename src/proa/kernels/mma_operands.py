"""Operands of the tensor cores that read the first from registers: codes as bf16, activations as terms of bf16.

Four neighbouring lanes hold 16 columns of a row of the first operand, two pairs each. The order of columns in a product
is free as long as both operands have the same, so a lane decodes one word of a row and multiplies what is in it: of
int4 and mxfp4 the columns `8 q + 4 e + 2 s + h` of every 32 stand at `16 s + 8 h + 2 q + e`, of fp8 the columns
`4 q + 2 e + h` of every 16 at `8 h + 2 q + e`. Codes without their scales are exact in bf16: those of
floats as numbers with another exponent's bias, 2^-126 (e2m1) or 2^-120 (e4m3) of what they stand for, which tensor
cores multiply below bf16's least normal number too. Half of that is made up for in the activations, half in the scales.

A float32 activation is the sum of three bf16 terms; two keep 16 bits of it. The terms of some tokens are columns of one
product, as tensor cores multiply at least 8.
"""

from __future__ import annotations

from proa.kernels.gluon_import import gl, gluon_constant, gluon_jit

__all__ = ["byte_pair", "code_values", "decoding", "group_scales", "in_order", "operand_words", "terms_of"]


def _moved(to: str, word: str, left: int) -> str:
    """PTX: `word` moved by `left` bits."""
    return f"shl.b32 {to}, {word}, {left};" if left >= 0 else f"shr.u32 {to}, {word}, {-left};"


def _float_pair(word: str, to: str, sign: int, rest: int, mask: int) -> str:
    """PTX: the signs of the codes in both halves of `word`, moved by `sign` bits, over what `mask` leaves of the other
    bits, moved by `rest`. Uses t and u."""
    return f"""
        {_moved("u", word, sign)}
        {_moved("t", word, rest)}
        and.b32 t, t, {mask:#x};
        lop3.b32 {to}, u, 0x80008000, t, 0xEA;"""


def byte_pair(word: str, place: int, to: str) -> str:
    """PTX: bf16x2 of the e4m3 codes at byte `place` of both halves of `word`, times 2^-120."""
    return _float_pair(word, to, 8 - 8 * place, 4 - 8 * place, 0x07F007F0)


def decoding(kind: str, place: int, last: str = "mov.b32 $0, t;") -> object:
    """PTX for `inline_asm_elementwise`: `last` with t, bf16x2, the codes in both halves of the word $1, as a constant.

    kind: "int4" and "e2m1" (times 2^-126), nibble `place` of each half; "e4m3" (times 2^-120), byte `place`.
    """
    if kind == "int4":  # 128 + code, less 136
        steps = f"""
        shr.u32 t, $1, {4 * place};
        mov.b32 u, 0xC308C308;
        lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;
        add.rn.bf16x2 t, t, u;"""
    elif kind == "e2m1":  # under bf16's exponent
        steps = _float_pair("$1", "t", 12 - 4 * place, 6 - 4 * place, 0x01C001C0)
    else:
        steps = byte_pair("$1", place, "t")
    ptx = f"""{{
        .reg .b32 t, u;{steps}
        {last}
        }}"""
    return ptx if gl is None else gl.constexpr(ptx)


_INT4_0, _INT4_1, _INT4_2, _INT4_3 = (decoding("int4", j) for j in range(4))
_E2M1_0, _E2M1_1, _E2M1_2, _E2M1_3 = (decoding("e2m1", j) for j in range(4))
_E4M3_EVEN, _E4M3_ODD = (decoding("e4m3", j) for j in range(2))


@gluon_constant
def operand_words(warps: int, chunks: int, rows: int) -> object:
    """The layout of words [warps * chunks, rows, 4, 2] for `code_values`: `chunks` of the first dimension a warp."""
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1]]
        + [[0, r, 0, 0] for r in (8, 16) if r < rows]
        + [[warps * c, 0, 0, 0] for c in (1, 2) if c < chunks],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[w, 0, 0, 0] for w in (1, 2, 4) if w < warps],
        [],
        [warps * chunks, rows, 4, 2],
    )


@gluon_jit
def _decode(words, PTX: gl.constexpr):
    """bf16 of two codes each; of words int32 of one shape, of which the last dimension, 2, repeats."""
    return gl.inline_asm_elementwise(PTX, "=r,r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon_jit
def code_values(words, KIND: gl.constexpr):
    """bf16 [B, R, 32], of fp8 16, columns in order: the codes of words int32 [B, R, 4, 2], each twice, unscaled and
    as small as `decoding` leaves them."""
    B: gl.constexpr = words.shape[0]
    R: gl.constexpr = words.shape[1]
    if KIND == 2:
        pairs = gl.join(_decode(words, _E4M3_EVEN), _decode(words, _E4M3_ODD))
        tile = gl.permute(pairs, (0, 1, 4, 2, 3)).reshape(B, R, 16)  # h, q, e
    else:
        if KIND == 5:
            low = gl.join(_decode(words, _E2M1_0), _decode(words, _E2M1_1))
            high = gl.join(_decode(words, _E2M1_2), _decode(words, _E2M1_3))
        else:
            low = gl.join(_decode(words, _INT4_0), _decode(words, _INT4_1))
            high = gl.join(_decode(words, _INT4_2), _decode(words, _INT4_3))
        tile = gl.permute(gl.join(low, high), (0, 1, 5, 4, 2, 3)).reshape(B, R, 32)  # s, h, q, e
    return tile


@gluon_jit
def group_scales(bits, KIND: gl.constexpr):
    """float32 of the scales of groups of 32 columns, int16; of mxfp4, int8, times 2^62 and up to 2^65."""
    bits = bits.to(gl.int32)
    if KIND == 5:
        scale = ((gl.minimum(bits & 0xFF, 192) + 62) << 23).to(gl.float32, bitcast=True)
    elif KIND == 4:
        scale = bits.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    else:
        scale = (bits << 16).to(gl.float32, bitcast=True)
    return scale


@gluon_jit
def _upper_half(x):
    """float32 of the upper 16 bits of float32."""
    return (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon_jit
def terms_of(x, TERMS: gl.constexpr):
    """bf16 [B, TERMS T, K]: terms whose sum is x float32 [B, T, K], all but three 0; of two, but for 2^-17 of it."""
    if TERMS == 2:
        high = ((x.to(gl.int32, bitcast=True) + 0x8000) & -65536).to(gl.float32, bitcast=True)
        terms = gl.permute(gl.join(high.to(gl.bfloat16), (x - high).to(gl.bfloat16)), (0, 3, 1, 2))
    else:
        zero = gl.full(x.shape, 0.0, gl.bfloat16, layout=x.type.layout)
        high = _upper_half(x)
        middle = _upper_half(x - high)
        outer = gl.join(high.to(gl.bfloat16), (x - high - middle).to(gl.bfloat16))
        terms = gl.join(outer, gl.join(middle.to(gl.bfloat16), zero))
        if TERMS == 4:
            terms = gl.permute(terms, (0, 3, 4, 1, 2))
        else:
            none = gl.join(zero, zero)
            terms = gl.permute(gl.join(terms, gl.join(none, none)), (0, 3, 4, 5, 1, 2))
    return terms.reshape(x.shape[0], TERMS * x.shape[1], x.shape[2])


@gluon_jit
def in_order(terms, KIND: gl.constexpr):
    """The columns of terms [B, N, K] in the order of `code_values`; K: 32, of fp8 16."""
    B: gl.constexpr = terms.shape[0]
    N: gl.constexpr = terms.shape[1]
    if KIND >= 3:
        terms = gl.permute(terms.reshape(B, N, 4, 2, 2, 2), (0, 1, 4, 5, 2, 3)).reshape(B, N, 32)
    elif KIND == 2:
        terms = gl.permute(terms.reshape(B, N, 4, 2, 2), (0, 1, 4, 2, 3)).reshape(B, N, 16)
    return terms
