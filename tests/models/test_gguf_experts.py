"""Routed experts from GGUF: the same bits as a checkpoint directory that stores the same experts itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.kernels.ggml_blocks import plain_blocks, values_of
from tests.models.conftest import MAX_TOKENS
from tests.models.paging import Pager
from tests.models.storages import STORAGES
from tests.models.variants import VARIANTS, VOCAB

from proa.core.errors import CheckpointError, ProaError, UnsupportedError
from proa.engine.config import EngineConfig
from proa.engine.load import load_checkpoint
from proa.gguf.types import GGML_TYPES
from proa.models import Model, load_model, open_experts
from proa.native.ops import PackedWeight
from proa.weights.checkpoint import Checkpoint
from proa.weights.gguf_blocks import NATIVE, NativeFormat, to_linear
from proa.weights.progress import LoadProgress

BY_NAME = {variant.name: variant for variant in VARIANTS}
TYPES = {item.name: item for item in GGML_TYPES.values()}
MOE_LAYERS = {"qwen3": (0, 2), "mixtral_bf16": (0, 1, 2), "deepseek_bf16": (1, 2), "kimi_int4": (1, 2)}
EXPERTS = {"qwen3": "mlp.experts", "mixtral_bf16": "block_sparse_moe.experts"}
NAMES = {"mixtral_bf16": {"gate": "w1", "up": "w3", "down": "w2"}}
PROJECTIONS = ("gate", "up", "down")
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def linear_name(variant: str, layer: int, expert: int, projection: str) -> str:
    name = NAMES.get(variant, {}).get(projection, f"{projection}_proj")
    return f"model.layers.{layer}.{EXPERTS.get(variant, 'mlp.experts')}.{expert}.{name}"


def expert_values(variant: str, source: Path) -> dict[tuple[int, str], np.ndarray]:
    """float32 `[E, out, in]` by layer and projection, from the reference's tensors."""
    tensors = load_file(source / "reference" / "model.safetensors")
    values = {}
    for layer in MOE_LAYERS[variant]:
        count = sum(f"model.layers.{layer}." in n and ".experts." in n for n in tensors) // 3
        for projection in PROJECTIONS:
            stack = [tensors[f"{linear_name(variant, layer, e, projection)}.weight"].float() for e in range(count)]
            values[layer, projection] = torch.stack(stack).numpy()
    return values


def blocks_of(values: np.ndarray, type_name: str) -> np.ndarray:
    """Of a type the package cannot quantize to: random blocks of that order of magnitude."""
    try:
        blocks = gguf.quantize(values, gguf.GGMLQuantizationType[type_name])
    except NotImplementedError:
        rows, columns = values.shape[0] * values.shape[1], values.shape[2]
        blocks = plain_blocks(type_name, rows, columns, np.random.default_rng(columns))
        blocks = blocks.reshape(*values.shape[:2], -1)
    return np.ascontiguousarray(blocks)


def write_gguf(path: Path, tensors: dict[str, tuple[np.ndarray, str]], *, split_after: int = 0) -> Path:
    """`split_after`: tensors per file, as gguf-split does; 0 writes one file."""
    writer = gguf.GGUFWriter(path, "test", split_max_tensors=split_after)
    for name, (blocks, type_name) in tensors.items():
        if type_name in ("F32", "F16"):
            writer.add_tensor(name, blocks)
        else:
            writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Source:
    """A tiny checkpoint directory, and its experts as GGUF tensors of given types, by projection or all the same."""

    def __init__(self, variant: str, path: Path, types: dict[str, str] | str) -> None:
        self.variant, self.path = variant, path
        self.tensors: dict[str, tuple[np.ndarray, str]] = {}
        for (layer, projection), values in expert_values(variant, path).items():
            type_name = types if isinstance(types, str) else types[projection]
            blocks = blocks_of(values, type_name)
            self.tensors[f"blk.{layer}.ffn_{projection}_exps.weight"] = (blocks, type_name)

    def write_same(self, directory: Path, weight_format: str) -> Path:
        """A checkpoint that stores the dequantized experts itself, in F32, F16 or BF16 (nearest), or int4 (Q4_0)."""
        tensors = {n: t for n, t in load_file(self.path / "model.safetensors").items() if ".experts." not in n}
        for name, (blocks, type_name) in self.tensors.items():
            layer, projection = int(name.split(".")[1]), name.split("_")[1]
            exact = torch.from_numpy(values_of(type_name, blocks))
            for expert, values in enumerate(exact):
                linear = linear_name(self.variant, layer, expert, projection)
                if weight_format == "int4":
                    tensors |= {f"{linear}.{key}": t for key, t in int4_tensors(values, blocks[expert]).items()}
                else:
                    tensors[f"{linear}.weight"] = values.to(DTYPES[weight_format]).contiguous()
        shutil.copytree(self.path, directory, ignore=shutil.ignore_patterns("reference", "*.safetensors"))
        save_file(tensors, directory / "model.safetensors")
        if weight_format == "int4":
            config = json.loads((directory / "config.json").read_text())
            (directory / "config.json").write_text(
                json.dumps(config | {"quantization_config": STORAGES["int4"].quantization})
            )
        return directory


def int4_tensors(values: torch.Tensor, blocks: np.ndarray) -> dict[str, torch.Tensor]:
    """compressed-tensors int4 of dequantized Q4_0: the scale is the block's own, the nibbles follow from the values."""
    scales = np.ascontiguousarray(blocks.reshape(values.shape[0], -1, 18)[..., :2]).view(np.float16)[..., 0]
    scale = torch.from_numpy(scales.astype(np.float32))
    divisor = scale.where(scale != 0, 1.0)[..., None]
    nibbles = (values.unflatten(1, (-1, 32)) / divisor).round().to(torch.int64) + 8
    words = (nibbles.reshape(values.shape[0], -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    return {
        "weight_packed": words.to(torch.uint32).view(torch.int32),
        "weight_scale": scale.to(torch.float16),
        "weight_shape": torch.tensor(values.shape),
    }


@pytest.fixture
def load(runtime) -> Callable[..., Model]:
    def load(directory: Path, experts: Path | None = None, progress: LoadProgress | None = None) -> Model:
        checkpoint = Checkpoint.open(directory)
        source = None if experts is None else open_experts(checkpoint, experts)
        options = {"max_tokens": MAX_TOKENS, "max_positions": 256, "progress": progress}
        return load_model(checkpoint, runtime, experts=source, **options)

    return load


def logits(model: Model) -> torch.Tensor:
    ids = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    pager = Pager(model, num_blocks=8)
    return pager.forward([(pager.sequence(len(ids)), ids)])


CASES = [
    ("qwen3", "F32", "F32"),
    ("qwen3", "F16", "F16"),
    ("qwen3", "Q4_0", "int4"),
    ("qwen3", {"gate": "Q4_0", "up": "F16", "down": "F32"}, "F32"),
    ("qwen3", {"gate": "Q4_0", "up": "Q8_0", "down": "BF16"}, "BF16"),
    ("mixtral_bf16", "BF16", "BF16"),
    ("mixtral_bf16", {"gate": "Q4_1", "up": "Q5_0", "down": "BF16"}, "BF16"),
    ("deepseek_bf16", "Q4_0", "int4"),
]


@pytest.mark.parametrize(("variant", "types", "weight_format"), CASES, ids=str)
def test_gguf_experts_give_the_bits_of_the_same_experts_in_safetensors(
    variant, types, weight_format, make_case, load, tmp_path
):
    source = Source(variant, make_case(BY_NAME[variant]).path, types)
    file = write_gguf(tmp_path / "experts.gguf", source.tensors)
    same = load(source.write_same(tmp_path / "same", weight_format))
    served = load(source.path, file)
    assert served.weight_bytes == same.weight_bytes
    result = logits(served)
    assert torch.equal(result, logits(same))
    if types in ("F32", "BF16"):  # what was stored in the directory in the first place
        assert torch.equal(result, logits(make_case(BY_NAME[variant]).model))
    else:
        assert not torch.equal(result, logits(make_case(BY_NAME[variant]).model))


@pytest.mark.parametrize("variant", ["qwen3", "mixtral_bf16"])
def test_a_directory_of_split_files_and_a_trunk_without_experts(variant, make_case, load, tmp_path):
    case = make_case(BY_NAME[variant])
    source = Source(variant, case.path, "F32" if variant == "qwen3" else "BF16")
    (tmp_path / "split").mkdir()
    write_gguf(tmp_path / "split" / "experts.gguf", source.tensors, split_after=2)
    assert len(list((tmp_path / "split").iterdir())) > 2
    trunk = tmp_path / "trunk"
    shutil.copytree(case.path, trunk, ignore=shutil.ignore_patterns("reference", "*.safetensors"))
    tensors = load_file(case.path / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if ".experts." not in n}, trunk / "model.safetensors")
    statuses = []
    model = load(trunk, tmp_path / "split", LoadProgress(statuses.append))
    assert torch.equal(logits(model), logits(case.model))
    assert statuses[-1].done_bytes == statuses[-1].total_bytes


def test_experts_of_the_directory_are_neither_read_nor_counted(make_case, load, tmp_path):
    source = Source("qwen3", make_case(BY_NAME["qwen3"]).path, "Q8_0")
    file = write_gguf(tmp_path / "experts.gguf", source.tensors)
    statuses = []
    load(source.path, file, LoadProgress(statuses.append))
    tensors = load_file(source.path / "model.safetensors")
    trunk = sum(t.nbytes for n, t in tensors.items() if ".experts." not in n)
    stored = sum(blocks.nbytes for blocks, _ in source.tensors.values())
    assert statuses[-1].done_bytes == statuses[-1].total_bytes == trunk + stored


@pytest.mark.parametrize("types", ["F32", "F16", "BF16", "Q8_0", "Q5_1", {"gate": "F32", "up": "BF16", "down": "Q4_1"}])
def test_the_memory_plan_is_what_loads(types, make_case, runtime, tmp_path):
    source = Source("qwen3", make_case(BY_NAME["qwen3"]).path, types)
    file = write_gguf(tmp_path / "experts.gguf", source.tensors)
    experts = open_experts(Checkpoint.open(source.path), file)
    packed = sum(
        PackedWeight.pack(runtime.pool, experts.linear(linear_name("qwen3", layer, expert, p), v.shape[1:])).nbytes
        for (layer, p), v in expert_values("qwen3", source.path).items()
        for expert in range(v.shape[0])
    )
    assert packed == experts.max_packed_bytes


def test_a_format_of_its_own_is_one_entry_in_the_table(monkeypatch):
    ggml_type, blocks = TYPES["IQ4_XS"], np.zeros((2, 136), np.uint8)
    assert to_linear(ggml_type, blocks, "bf16").format == "bf16"
    monkeypatch.setitem(NATIVE, "IQ4_XS", NativeFormat("iq4_xs"))
    assert np.shares_memory(to_linear(ggml_type, blocks, "iq4_xs").data, blocks)


def without(name: str) -> Callable[[dict], None]:
    return lambda tensors: tensors.pop(name)


def with_shape(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict], None]:
    def edit(tensors: dict) -> None:
        blocks, type_name = tensors[name]
        tensors[name] = (np.ascontiguousarray(change(blocks)), type_name)

    return edit


def added(name: str, type_name: str = "F32") -> Callable[[dict], None]:
    def edit(tensors: dict) -> None:
        if type_name == "F32":
            tensors[name] = (np.zeros((8, 32, 64), np.float32), "F32")
        else:
            tensors[name] = (np.zeros((8, 64, TYPES[type_name].block_bytes), np.uint8), type_name)

    return edit


GATE, DOWN = "blk.0.ffn_gate_exps.weight", "blk.2.ffn_down_exps.weight"
WRONG = {
    "missing_projection": (without(DOWN), CheckpointError, f"{DOWN}, got no such tensor"),
    "too_few_experts": (
        with_shape(GATE, lambda b: b[:7]),
        CheckpointError,
        rf"{GATE}\] expected 8 experts of 32 x 64.*\[7, 32, 64\]",
    ),
    "too_many_experts": (with_shape(DOWN, lambda b: np.concatenate([b, b])), CheckpointError, "expected 8 experts"),
    "other_hidden": (with_shape(GATE, lambda b: b[..., :32]), CheckpointError, r"32 x 64.*shape \[8, 32, 32\]"),
    "other_intermediate": (with_shape(GATE, lambda b: b[:, :16]), CheckpointError, r"shape \[8, 16, 64\]"),
    "transposed": (with_shape(DOWN, lambda b: b.transpose(0, 2, 1)), CheckpointError, r"shape \[8, 32, 64\]"),
    "a_matrix": (with_shape(GATE, lambda b: b.reshape(-1, 64)), CheckpointError, r"shape \[256, 64\]"),
    "layer_beyond": (added("blk.3.ffn_up_exps.weight"), CheckpointError, r"layers .*\(0, 2\), got layer 3"),
    "dense_layer": (added("blk.1.ffn_up_exps.weight"), CheckpointError, "got layer 1"),
    "bias": (added("blk.0.ffn_gate_exps.bias"), UnsupportedError, "a tensor blk.0.ffn_gate_exps.bias"),
    "fused": (added("blk.0.ffn_gate_up_exps.weight"), UnsupportedError, "ffn_gate_up_exps"),
    "per_expert": (added("blk.0.ffn_gate.0.weight"), UnsupportedError, "with a current llama.cpp"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_gguf_of_another_model_is_refused_before_anything_loads(fault, make_case, tmp_path):
    edit, error, message = WRONG[fault]
    source = Source("qwen3", make_case(BY_NAME["qwen3"]).path, "F32")
    edit(source.tensors)
    file = write_gguf(tmp_path / "experts.gguf", source.tensors)
    with pytest.raises(error, match=message) as caught:
        open_experts(Checkpoint.open(source.path), file)
    assert str(file) in str(caught.value)


def test_other_tensors_and_shared_experts_do_not_disturb(make_case, load, tmp_path):
    case = make_case(BY_NAME["qwen3"])
    source = Source("qwen3", case.path, "F32")
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_gate_inp.weight", "blk.1.ffn_gate.weight"):
        added(name)(source.tensors)
    added("blk.0.ffn_gate_shexp.weight", "Q8_0")(source.tensors)
    file = write_gguf(tmp_path / "experts.gguf", source.tensors)
    assert torch.equal(logits(load(case.path, file)), logits(case.model))


def test_the_engine_takes_the_path_from_its_configuration(make_case, tmp_path):
    case = make_case(BY_NAME["qwen3"])
    file = write_gguf(tmp_path / "experts.gguf", Source("qwen3", case.path, "Q8_0").tensors)
    addresses = {"to_engine": "", "from_engine": ""}
    settings = {"max_running_requests": 2, "max_total_tokens": 512, "num_threads": 1, "expert_method": "LLAMAFILE"}
    config = EngineConfig(model_path=str(case.path), expert_path=str(file), **addresses, **settings)
    loaded = load_checkpoint(EngineConfig.from_json(config.to_json()), lambda done, total: None)
    assert loaded.model.weight_bytes < case.model.weight_bytes  # bf16 experts instead of float32
    missing = EngineConfig(model_path=str(case.path), **addresses, **settings)
    with pytest.raises(ProaError, match="--kt-weight-path with LLAMAFILE"):
        EngineConfig.from_json(missing.to_json())
