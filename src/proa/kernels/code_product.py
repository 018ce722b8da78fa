"""Products of sorted pairs with experts of 4-bit codes on Hopper: codes become bf16 in the tensor cores' own registers.

The first operand of Hopper's tensor cores may lie in registers. A word of a panel has 8 columns of a row, so a thread
with one word of each 32 columns has what two steps of 16 take of it, in another order (`mma_operands`); activations are
laid out in the same (`reorder`; the first product writes the second's so). No weight passes through shared memory as a
value.
"""

from __future__ import annotations

import torch

from proa.kernels.activation import activate
from proa.kernels.gluon_import import async_copy, gl, gluon_jit, has_gluon, hopper
from proa.kernels.mma_operands import decoding
from proa.kernels.triton_import import jit, tl
from proa.kernels.weight_tiles import WeightKind, code_columns, kind_of

__all__ = ["launch_product", "reorder", "rows_of_block", "takes_codes"]

_FORMATS = ("int4_g32", "mxfp4")
_COLUMNS = 1024
_WARPS = 4


def takes_codes(hidden: int, intermediate: int, gate_up: str, down: str, device: torch.device) -> bool:
    """Whether `launch_product` computes experts of these dimensions and formats."""
    tile = 32 * _WARPS
    return (
        has_gluon(device)
        and gate_up in _FORMATS
        and down in _FORMATS
        and hidden % tile == 0
        and intermediate % (tile // 2) == 0
    )


def rows_of_block(pairs: int) -> int:
    """Pairs of a block for `pairs` an expert on average: what is not filled is multiplied all the same."""
    return 16 if pairs < 16 else 32 if pairs < 32 else 64 if pairs < 64 else 128


def reorder(x: torch.Tensor, out: torch.Tensor) -> None:
    """`out` bf16 is `x`, float32 or bf16 `[T, columns]`, with its columns in the order of the products."""
    tokens, columns = x.shape
    _reorder[(tokens, -(-columns // _COLUMNS))](
        x, out, columns, x.stride(0), out.stride(0), COLUMNS=_COLUMNS, num_warps=4
    )


def launch_product(
    x: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    blocks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    num_blocks: int,
    block_m: int,
    sizes: tuple[int, int, int],
    top_k: int,
    activation: tuple[float, float, int],
    *,
    weight_format: str,
    down: bool,
) -> None:
    """One of the products of `proa.kernels.experts`, over `blocks` (pairs, expert, rows) of `block_m` pairs.

    x: bf16, reordered; arena: int32; sizes: out and in features, words of a panel; activation: limit, alpha and code.
    """
    kind: WeightKind = kind_of(weight_format)
    width = 32 * _WARPS if down else 16 * _WARPS
    _code_product[(sizes[0] // width, num_blocks)](
        x,
        arena,
        table,
        weights,
        out,
        *blocks,
        *sizes[1:],
        top_k,
        x.stride(0),
        out.stride(0),
        table.stride(0),
        *activation[:2],
        GATING=activation[2],
        DOWN=down,
        KIND=kind.code,
        GROUPS=kind.groups,
        SCALE_BYTES=kind.scale_bytes,
        M=block_m,
        STAGES=5 if block_m == 128 else 4,
        WARPS=_WARPS,
        num_warps=_WARPS,
    )


@jit
def _reorder(x, out, columns, x_row, out_row, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    to = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column = (to & -32) + code_columns(to)
    values = tl.load(x + row * x_row + column, mask=to < columns, other=0.0)
    tl.store(out + row * out_row + to, values.to(tl.bfloat16), mask=to < columns)


_SCALED = "mul.rn.bf16x2 $0, t, $3;"
_E2M1_SCALED = f"mov.b32 u, 0x7E807E80; mul.rn.bf16x2 t, t, u; {_SCALED}"
_INT4_0, _INT4_1, _INT4_2, _INT4_3 = (decoding("int4", j, _SCALED) for j in range(4))
_E2M1_0, _E2M1_1, _E2M1_2, _E2M1_3 = (decoding("e2m1", j, _E2M1_SCALED) for j in range(4))


@gluon_jit
def _decode(words, scale, PTX: gl.constexpr):
    """bf16 of two codes each: words and scale int32 of one shape, of which the last dimension, 2, repeats."""
    return gl.inline_asm_elementwise(PTX, "=r,r,r,r,r", [words, scale], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon_jit
def _values(words, scale, KIND: gl.constexpr, K: gl.constexpr):
    """The tile [N, K], columns in the order of the products, of words [N, groups, 4, 2]."""
    if KIND == 5:
        h0 = gl.join(_decode(words, scale, _E2M1_0), _decode(words, scale, _E2M1_1))
        h1 = gl.join(_decode(words, scale, _E2M1_2), _decode(words, scale, _E2M1_3))
    else:
        h0 = gl.join(_decode(words, scale, _INT4_0), _decode(words, scale, _INT4_1))
        h1 = gl.join(_decode(words, scale, _INT4_2), _decode(words, scale, _INT4_3))
    tile = gl.permute(gl.join(h0, h1), (0, 1, 5, 4, 2, 3))  # row, group, q, e, h, s
    return tile.reshape(words.shape[0], K)


@gluon_jit
def _read_words(mem, codes: gl.constexpr, N: gl.constexpr, WARPS: gl.constexpr):
    """Words [N, groups, 4, 2], twice each, of a stage [panels, groups, 4, 16]; in the threads that multiply them."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 8, 0, 0], [0, 0, 1, 0], [N // 32, 0, 0, 0]],
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0]] if WARPS == 4 else [[1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [], [N // 16, 16, 2, 4],
    )  # fmt: skip
    words = mem.permute((0, 3, 1, 2)).load(layout).reshape(N, 2, 4)
    words = gl.convert_layout(words, gl.SliceLayout(3, codes))
    return gl.expand_dims(words, 3) + gl.zeros([N, 2, 4, 2], gl.int32, layout=codes)


@gluon_jit
def _read_scales(mem, codes: gl.constexpr, KIND: gl.constexpr, N: gl.constexpr, WARPS: gl.constexpr):
    """Scales of these words, two equal bf16 in an int32, of a stage [panels, groups, 16]."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 8, 0], [0, 0, 1], [N // 32, 0, 0]],
        [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0]] if WARPS == 4 else [[1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [], [N // 16, 16, 2],
    )  # fmt: skip
    bits = mem.permute((0, 2, 1)).load(layout).to(gl.int32)
    if KIND == 5:
        bits = bits & 0xFF
        bits = gl.where(bits == 0, 0x40, bits << 7)
    else:
        bits = bits & 0xFFFF
    scale = (bits | (bits << 16)).reshape(N, 2)
    scale = gl.convert_layout(scale, gl.SliceLayout(2, gl.SliceLayout(3, codes)))
    return gl.expand_dims(gl.expand_dims(scale, 2), 3) + gl.zeros([N, 2, 4, 2], gl.int32, layout=codes)


@gluon_jit
def _panel_shift(panel, n, other, panel_words, P: gl.constexpr, DOWN: gl.constexpr):
    """Words from the weight's begin to each panel of a tile; gate and up are `other` words apart."""
    if DOWN:
        return (n // 16 + panel).to(gl.int64) * panel_words
    else:
        return (n // 16 + panel % (P // 2)).to(gl.int64) * panel_words + gl.where(panel < P // 2, 0, other)


@gluon_jit
def _word_pointers(
    base, n, other, panel_words, P: gl.constexpr, DOWN: gl.constexpr, GROUPS: gl.constexpr, SCALE_BYTES: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Of two groups of 32 columns [panels, 2, 4, 16]."""
    panel = gl.arange(0, P, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    group = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    GROUP_WORDS: gl.constexpr = 64 if GROUPS > 1 else 64 + 4 * SCALE_BYTES
    inner = group[None, :, None, None] * GROUP_WORDS + word[None, None, :, None] * 16 + row[None, None, None, :]
    return base + _panel_shift(panel, n, other, panel_words, P, DOWN)[:, None, None, None] + inner


@gluon_jit
def _scale_pointers(
    base, n, other, panel_words, P: gl.constexpr, DOWN: gl.constexpr, GROUPS: gl.constexpr, SCALE_BYTES: gl.constexpr,
    element: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Of the same groups [panels, 2, 16], counted from the panel's begin."""
    panel = gl.arange(0, P, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    group = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    GROUP_SCALES: gl.constexpr = 16 if GROUPS > 1 else 16 + 256 // SCALE_BYTES
    shift = _panel_shift(panel, n, other, panel_words, P, DOWN) * (4 // SCALE_BYTES)
    inner = group[None, :, None] * GROUP_SCALES + row[None, None, :]
    return base.to(gl.pointer_type(element)) + shift[:, None, None] + inner


@gluon_jit
def _fetch(
    a_ptrs, w_ptrs, s_ptrs, a_mem, w_mem, s_mem, buffer, step, in_features, GROUPS: gl.constexpr,
    SCALE_BYTES: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a step: activations, and the words and scales of two groups of 32 columns."""
    group = 2 * step
    inner = group // GROUPS * (GROUPS * (64 + 4 * SCALE_BYTES)) + group % GROUPS * 64
    # A shorter last super-block has its scales behind fewer codes.
    codes = gl.minimum(GROUPS, in_features // 32 - group // GROUPS * GROUPS) * 256
    at = group // GROUPS * (GROUPS * (256 + 16 * SCALE_BYTES)) + codes + group % GROUPS * 16 * SCALE_BYTES
    wanted = step * K < in_features
    async_copy.async_copy_global_to_shared(a_mem.index(buffer), a_ptrs + step * K, mask=wanted)
    async_copy.async_copy_global_to_shared(w_mem.index(buffer), w_ptrs + gl.multiple_of(inner, 16), mask=wanted)
    scale = gl.multiple_of(at // SCALE_BYTES, 16 // SCALE_BYTES)
    async_copy.async_copy_global_to_shared(s_mem.index(buffer), s_ptrs + scale, mask=wanted)
    async_copy.commit_group()


@gluon_jit
def _write(
    acc, weights, out, order, block, count, n, out_row, limit, alpha, GATING: gl.constexpr, DOWN: gl.constexpr,
    mma: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Stores a tile [rows of weights, pairs] in the rows of its pairs."""
    M: gl.constexpr = acc.shape[1]
    WIDTH: gl.constexpr = acc.shape[0] if DOWN else acc.shape[0] // 2
    written: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    token = gl.arange(0, M, layout=gl.SliceLayout(0, written))
    pair = gl.load(order + block * M + token, mask=token < count, other=0)
    if DOWN:
        weight = gl.load(weights + pair, mask=token < count, other=0.0)
        result = acc * gl.convert_layout(weight, gl.SliceLayout(0, mma))[None, :]
    else:
        gate, up = gl.split(gl.permute(acc.reshape(2, WIDTH, M), (1, 2, 0)))
        result = activate(gate, up, limit, alpha, GATING)
        # q, e, s, h: as the second product takes them
        result = gl.permute(result.reshape(WIDTH // 32, 4, 2, 2, 2, M), (0, 3, 4, 1, 2, 5)).reshape(WIDTH, M)
    column = n + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, written))
    at = out + pair.to(gl.int64)[None, :] * out_row + column[:, None]
    gl.store(at, gl.convert_layout(result.to(out.dtype.element_ty), written), mask=(token < count)[None, :])


@gluon_jit
def _code_product(
    x, arena, table, weights, out, order, block_expert, block_rows, in_features, panel_words, top_k, x_row, out_row,
    table_row, limit, alpha, GATING: gl.constexpr, DOWN: gl.constexpr, KIND: gl.constexpr, GROUPS: gl.constexpr,
    SCALE_BYTES: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    N: gl.constexpr = 32 * WARPS  # rows of weights, gate and up together
    K: gl.constexpr = 64
    P: gl.constexpr = N // 16
    element: gl.constexpr = gl.int16 if SCALE_BYTES == 2 else gl.int8
    block = gl.program_id(1)
    expert = gl.load(block_expert + block)
    if expert < 0:
        return
    n = gl.program_id(0) * (N if DOWN else N // 2)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, M, 16])
    # Row, group of 32 columns, word, half of it: the registers of the first operand.
    codes: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [8, 0, 0, 0], [0, 1, 0, 0], [N // 2, 0, 0, 0]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [[16, 0, 0, 0], [32, 0, 0, 0]] if WARPS == 4 else [[16, 0, 0, 0], [32, 0, 0, 0], [64, 0, 0, 0]],
        [], [N, 2, 4, 2],
    )  # fmt: skip
    a_copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    w_copy: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 2, 4, 4], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    s_copy: gl.constexpr = gl.BlockedLayout([1, 1, 16 // SCALE_BYTES], [8, 2, 2], [WARPS, 1, 1], [2, 1, 0])

    count = gl.load(block_rows + block)
    row = gl.arange(0, M, layout=gl.SliceLayout(1, a_copy))
    pair = gl.load(order + block * M + row, mask=row < count, other=0)
    a_row = x + (pair if DOWN else pair // top_k).to(gl.int64) * x_row
    a_ptrs = a_row[:, None] + gl.arange(0, K, layout=gl.SliceLayout(0, a_copy))[None, :]
    place = table + expert.to(gl.int64) * table_row
    begin = gl.multiple_of(gl.load(place + (2 if DOWN else 0)) // 4, 16)
    other = gl.multiple_of(gl.load(place + 1) // 4 - begin, 16)
    w_ptrs = _word_pointers(arena + begin, n, other, panel_words, P, DOWN, GROUPS, SCALE_BYTES, w_copy)
    s_ptrs = _scale_pointers(arena + begin, n, other, panel_words, P, DOWN, GROUPS, SCALE_BYTES, element, s_copy)
    a_mem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, M, K], gl.NVMMASharedLayout(128, 16, 2))
    w_mem = gl.allocate_shared_memory(gl.int32, [STAGES, P, 2, 4, 16], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
    s_mem = gl.allocate_shared_memory(element, [STAGES, P, 2, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    for i in gl.static_range(STAGES - 1):
        _fetch(a_ptrs, w_ptrs, s_ptrs, a_mem, w_mem, s_mem, i, i, in_features, GROUPS, SCALE_BYTES, K)
    acc = gl.zeros([N, M], gl.float32, layout=mma)
    for step in range(in_features // K):
        async_copy.wait_group(STAGES - 2)
        buffer = step % STAGES
        words = _read_words(w_mem.index(buffer), codes, N, WARPS)
        scale = _read_scales(s_mem.index(buffer), codes, KIND, N, WARPS)
        tile = gl.convert_layout(_values(words, scale, KIND, K), gl.DotOperandLayout(0, mma, 2))
        acc = hopper.warpgroup_mma(tile, a_mem.index(buffer).permute((1, 0)), acc, is_async=True)
        # After the product began: the fence before it would wait for these.
        ahead = step + STAGES - 1
        _fetch(a_ptrs, w_ptrs, s_ptrs, a_mem, w_mem, s_mem, ahead % STAGES, ahead, in_features, GROUPS, SCALE_BYTES, K)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)
    _write(acc, weights, out, order, block, count, n, out_row, limit, alpha, GATING, DOWN, mma, WARPS)
