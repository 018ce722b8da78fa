"""Expert layers from GGUF blocks against float64 of the values the `gguf` package reads from them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import pytest
import torch
from tests.kernels.ggml_blocks import BLOCK_TYPES, HALVES, TYPES, plain_blocks, values_of
from tests.models.conftest import MAX_TOKENS
from tests.models.paging import Pager
from tests.models.test_gguf_experts import write_gguf
from tests.models.variants import COMMON, GQA, VOCAB, Variant

from proa.core.errors import CheckpointError
from proa.models import load_model, open_experts
from proa.native import _C
from proa.weights.checkpoint import Checkpoint
from proa.weights.gguf_blocks import NATIVE
from proa.weights.gguf_experts import GgufExperts

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 8, 3, 512, 256, 24
# What a layer may differ from float64 by what activations lose, relative L2, and its direction.
MAX_ERROR, MIN_COSINE = {"int8": 1.2e-2, "bf16": 4e-3}, 0.9999
# Where one activation rules a token and is rounded to bf16, gate and up are off by the same 2^-9, down by as much.
RULED_BY_ONE = 3 * 2.0**-9
# Weights have the standard deviation SIZE / sqrt(in), so the gates of normal inputs do not saturate.
SIZE = 0.5
SHAPES = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
WIDE = Variant(
    "qwen3_wide",
    "qwen3_moe",
    "f32",
    COMMON
    | GQA
    | {"hidden_size": HIDDEN, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "norm_topk_prob": True}
    | {"moe_intermediate_size": INTERMEDIATE},
)
Q4_K_M = {"gate": "Q4_K", "up": "Q4_K", "down": "Q4_K"}
# llama.cpp keeps the down projections of some layers in more bits.
LAYERS = [Q4_K_M | {"down": "Q6_K"}, Q4_K_M, {"gate": "Q2_K", "up": "Q2_K", "down": "Q3_K"}]
MIXES = [*(dict.fromkeys(SHAPES, name) for name in BLOCK_TYPES), *LAYERS, Q4_K_M | {"up": "Q5_K"}]
MIXES += [{"gate": "Q3_K", "up": "Q3_K", "down": "F16"}, {"gate": "F32", "up": "F32", "down": "Q5_0"}]


def stacked(type_name: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Random blocks `[EXPERTS, out, row bytes]`, or floats `[EXPERTS, out, in]`."""
    rng = np.random.default_rng(seed)
    if type_name in ("F32", "F16"):
        values = rng.standard_normal((EXPERTS, *shape)) * SIZE * shape[1] ** -0.5
        return values.astype(np.float32 if type_name == "F32" else np.float16)
    if type_name == "TQ2_0":
        values = rng.standard_normal((EXPERTS, *shape)).astype(np.float32)
        return np.asarray(gguf.quantize(values, gguf.GGMLQuantizationType.TQ2_0))
    return plain_blocks(type_name, EXPERTS * shape[0], shape[1], rng, SIZE).reshape(EXPERTS, shape[0], -1)


def tensors_of(layer: int, types: dict[str, str]) -> dict[str, tuple[np.ndarray, str]]:
    return {
        f"blk.{layer}.ffn_{projection}_exps.weight": (
            stacked(types[projection], shape, 10 * layer + i),
            types[projection],
        )
        for i, (projection, shape) in enumerate(SHAPES.items())
    }


def exact_layer(x: np.ndarray, ids: np.ndarray, weights: np.ndarray, values: dict[str, np.ndarray]) -> np.ndarray:
    out = np.zeros(x.shape)
    for token, slot in np.ndindex(*ids.shape):
        gate, up, down = (values[p][ids[token, slot]].astype(np.float64) for p in SHAPES)
        g = gate @ x[token]
        out[token] += weights[token, slot] * (down @ (g / (1 + np.exp(-g)) * (up @ x[token])))
    return out


@pytest.fixture(scope="module")
def directory(make_case) -> Path:
    path: Path = make_case(WIDE).path
    return path


def open_layer(pool: _C.ThreadPool, experts: GgufExperts, activations: Literal["int8", "bf16"]) -> _C.ExpertLayer:
    native: _C.ExpertLayer | None = None
    for expert in range(EXPERTS):
        prefix = f"model.layers.1.mlp.experts.{expert}"
        gate, up, down = (experts.linear(f"{prefix}.{p}_proj", shape) for p, shape in SHAPES.items())
        if native is None:
            native = _C.ExpertLayer(
                _C.ExpertWorkspace(pool, TOKENS),
                EXPERTS,
                HIDDEN,
                INTERMEDIATE,
                gate.format,
                max_top_k=TOP_K,
                activations=activations,
                down_format=down.format,
            )
        native.load(expert, gate, up, down)
    assert native is not None
    return native


def rounds_to_int8(types: dict[str, str]) -> bool:
    """Whether a type has no kernel but those with int8 activations."""
    reports = [_C.kernel_report(NATIVE[name].format, 256, 256, "bf16") for name in types.values()]
    chosen = [next(row["name"] for row in report if row["chosen"]) for report in reports]
    int8 = [
        next(row["name"] for row in _C.kernel_report(NATIVE[n].format, 256, 256) if row["chosen"])
        for n in types.values()
    ]
    plain = ("F32", "F16", "BF16")
    return any(a == b and name not in plain for a, b, name in zip(chosen, int8, types.values(), strict=True))


@pytest.mark.parametrize("activations", ["int8", "bf16"])
@pytest.mark.parametrize("types", MIXES, ids=lambda types: "-".join(types.values()))
def test_a_layer_is_as_accurate_as_its_activations_allow(types, activations, directory, runtime, tmp_path):
    """Normal inputs; where activations stay floats also some 64 times larger than the rest."""
    if activations == "bf16" and rounds_to_int8(types):
        pytest.skip("no kernel of the type that keeps activations as floats")
    tensors = {name: item for layer in range(3) for name, item in tensors_of(layer, types).items()}
    experts = open_experts(Checkpoint.open(directory), write_gguf(tmp_path / "experts.gguf", tensors))
    layer = open_layer(runtime.pool, experts, activations)
    values = {p: values_of(types[p], tensors[f"blk.1.ffn_{p}_exps.weight"][0]) for p in SHAPES}
    if types["gate"] != types["up"]:  # both become bf16, which activations are not to blame for
        values |= {p: torch.from_numpy(values[p]).bfloat16().double().numpy() for p in ("gate", "up")}
    rng = np.random.default_rng(0)
    for outliers in (1, 64) if activations == "bf16" else (1,):
        x = rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
        x[rng.random(x.shape) < 1 / 256] *= outliers
        ids = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
        weights = rng.random((TOKENS, TOP_K)).astype(np.float32)
        out = np.empty_like(x)
        layer.forward(x, ids, weights, out)
        exact = exact_layer(x.astype(np.float64), ids, weights, values)
        allowed = RULED_BY_ONE if outliers > 1 and layer.kernel == "amx.bf16" else MAX_ERROR[activations]
        assert np.linalg.norm(out - exact) <= allowed * np.linalg.norm(exact)
        assert (out * exact).sum() >= MIN_COSINE * np.linalg.norm(out) * np.linalg.norm(exact)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_a_scale_that_is_not_finite_is_named(name, directory, tmp_path):
    """Every fp16 number of a block, inf and NaN; the NaN of E8M0."""
    tensors = {key: item for layer in range(3) for key, item in tensors_of(layer, dict.fromkeys(SHAPES, name)).items()}
    blocks = tensors["blk.2.ffn_down_exps.weight"][0]
    block = INTERMEDIATE // TYPES[name].block_elements - 1
    place = block * TYPES[name].block_bytes
    patches = [(at, bits) for at in HALVES.get(name, (0,)) for bits in (b"\x00\x7c", b"\x00\xfc", b"\x01\x7e")]
    for at, bits in patches or [(0, b"\xff")]:
        before = blocks[5, 100].copy()
        blocks[5, 100, place + at : place + at + len(bits)] = np.frombuffer(bits, np.uint8)
        file = write_gguf(tmp_path / "experts.gguf", tensors)
        experts = open_experts(Checkpoint.open(directory), file)
        experts.linear("model.layers.2.mlp.experts.4.down_proj", SHAPES["down"])
        with pytest.raises(CheckpointError, match=rf"expert 5, row 100, block {block}\.") as caught:
            experts.linear("model.layers.2.mlp.experts.5.down_proj", SHAPES["down"])
        assert f"{file}: blk.2.ffn_down_exps.weight" in str(caught.value)
        blocks[5, 100] = before


def test_layers_of_different_types_are_one_model(directory, runtime, tmp_path):
    """A mix as llama.cpp's Q4_K_M: the logits of the same experts in float32 but for what activations lose."""
    tensors = {name: item for layer, types in enumerate(LAYERS) for name, item in tensors_of(layer, types).items()}
    plain = {name: (values_of(kind, blocks), "F32") for name, (blocks, kind) in tensors.items()}
    results = []
    for number, stored in enumerate((tensors, plain)):
        checkpoint = Checkpoint.open(directory)
        experts = open_experts(checkpoint, write_gguf(tmp_path / f"{number}.gguf", stored))
        model = load_model(checkpoint, runtime, experts=experts, max_tokens=MAX_TOKENS, max_positions=256)
        ids = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
        pager = Pager(model, num_blocks=8)
        results.append(pager.forward([(pager.sequence(len(ids)), ids)]))
    mixed, exact = results
    # Experts of a wrong layer or type would make an error of the order of 1.
    assert 0 < torch.linalg.norm(mixed - exact) < 0.05 * torch.linalg.norm(exact)


def test_each_type_is_logged_once_with_what_becomes_of_it(directory, runtime, tmp_path, caplog):
    """TQ2_0 has no kernel of its own; where gate and up are of two types they are rounded."""
    layers = [Q4_K_M | {"down": "TQ2_0"}, Q4_K_M | {"down": "TQ2_0"}, {"gate": "Q8_0", "up": "Q5_K", "down": "Q8_0"}]
    tensors = {name: item for layer, types in enumerate(layers) for name, item in tensors_of(layer, types).items()}
    checkpoint = Checkpoint.open(directory)
    experts = open_experts(checkpoint, write_gguf(tmp_path / "experts.gguf", tensors))
    with caplog.at_level(logging.INFO, "proa.weights"):
        load_model(checkpoint, runtime, experts=experts, max_tokens=MAX_TOKENS, max_positions=256)
    lines = [record.getMessage() for record in caplog.records if "experts in" in record.getMessage()]
    expected = ("Q4_K (4 tensors) load as q4_k, exactly", "TQ2_0 (2 tensors) load as bf16, rounded: it has no kernel")
    expected += ("Q8_0 (2 tensors) load as bf16, rounded, as gate", "Q8_0 (2 tensors) load as int8_g32_f16, exactly")
    expected += ("Q5_K (1 tensors) load as bf16, rounded, as gate",)
    assert len(lines) == len(expected)
    assert all(any(text in line for line in lines) for text in expected)
