"""Serving what `proa convert` wrote: the right bits, and a refusal of everything else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.conftest import MAX_TOKENS
from tests.models.paging import Pager
from tests.models.test_gguf_experts import Source, linear_name, write_gguf
from tests.models.variants import VARIANTS, VOCAB

from proa.convert.experts import Conversion
from proa.core.errors import CheckpointError, ConfigError, ProaError, UnsupportedError
from proa.engine.config import EngineConfig
from proa.engine.load import load_checkpoint
from proa.models import Model, check_expert_method, expert_layout, load_model, open_experts
from proa.weights.checkpoint import Checkpoint
from proa.weights.converted_format import METHODS
from proa.weights.expert_source import CheckpointExperts
from proa.weights.quantize import dequantize, quantize

BY_NAME = {variant.name: variant for variant in VARIANTS}


class NumpyExperts(CheckpointExperts):
    """The oracle: every expert of the checkpoint, quantized by numpy as it is asked for."""

    def __init__(self, checkpoint: Checkpoint, weight_format: str) -> None:
        super().__init__(checkpoint, expert_layout(checkpoint))
        self._format = weight_format

    def linear(self, name, shape):
        linear = super().linear(name, shape)
        return linear if linear.format == self._format else quantize(dequantize(linear), self._format)

    def read_ahead(self, window_bytes=0):
        return nullcontext()  # the checkpoint's own is open


@pytest.fixture
def logits(runtime) -> Callable[..., torch.Tensor]:
    def logits(directory: Path, experts=None) -> torch.Tensor:
        checkpoint = Checkpoint.open(directory)
        source = experts(checkpoint) if callable(experts) else experts and open_experts(checkpoint, experts)
        model: Model = load_model(checkpoint, runtime, max_tokens=MAX_TOKENS, max_positions=256, experts=source)
        ids = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
        pager = Pager(model, num_blocks=8)
        return pager.forward([(pager.sequence(len(ids)), ids)])

    return logits


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("variant", ["qwen3", "deepseek_bf16", "kimi_int4", "mixtral_bf16", "glm_fp8"])
def test_served_logits_are_those_of_experts_quantized_by_numpy(variant, method, make_case, logits, tmp_path):
    path = make_case(BY_NAME[variant]).path
    if variant == "glm_fp8" and method in ("AMXINT4", "AMXINT8"):  # 144 wide
        with pytest.raises(UnsupportedError, match="multiple of 32"):
            Conversion(path, method, tmp_path / "out")
        return
    Conversion(path, method, tmp_path / "out").run()
    served = logits(path, tmp_path / "out")
    assert torch.equal(served, logits(path, lambda checkpoint: NumpyExperts(checkpoint, METHODS[method])))


@pytest.mark.parametrize(
    ("variant", "method"), [("kimi_int4", "AMXINT4"), ("glm_fp8", "FP8"), ("mixtral_bf16", "BF16")]
)
def test_a_source_in_the_format_already_is_taken_over_bit_for_bit(variant, method, make_case, logits, tmp_path):
    path = make_case(BY_NAME[variant]).path
    converted = Conversion(path, method, tmp_path / "out").run()
    assert all(r.relative_error == r.max_error == 0.0 for r in converted.manifest.layers.values())
    stored = load_file(path / "model.safetensors")
    files = [load_file(file) for file in sorted((tmp_path / "out").glob("*.safetensors"))]
    taken = {name: tensor for file in files for name, tensor in file.items()}
    assert taken.keys() == {name for name in stored if ".experts." in name}
    for name, tensor in taken.items():
        assert tensor.dtype == stored[name].dtype
        assert torch.equal(tensor.view(torch.uint8), stored[name].view(torch.uint8)), name
    assert torch.equal(logits(path, tmp_path / "out"), logits(path))


def test_the_trunk_may_come_without_experts_or_stored_otherwise(make_case, logits, tmp_path, caplog):
    path = make_case(BY_NAME["deepseek_bf16"]).path
    Conversion(path, "AMXINT8", tmp_path / "out").run()
    expected = logits(path, tmp_path / "out")
    assert "otherwise" not in caplog.text
    trunk = shutil.copytree(path, tmp_path / "trunk", ignore=shutil.ignore_patterns("reference", "*.safetensors"))
    stored = load_file(path / "model.safetensors")
    save_file({n: t for n, t in stored.items() if ".experts." not in n}, trunk / "model.safetensors")
    assert torch.equal(logits(trunk, tmp_path / "out"), expected)
    assert "stores this model otherwise" in caplog.text


@pytest.fixture
def converted(make_case, tmp_path) -> tuple[Path, Path]:
    """A model, and its experts in int8."""
    path = make_case(BY_NAME["qwen3"]).path
    Conversion(path, "AMXINT8", tmp_path / "out").run()
    return path, tmp_path / "out"


def rewrite_header(path: Path, change: Callable[[dict], None]) -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= size
    path.write_bytes(data[:8] + text.ljust(size) + data[8 + size :])


UP = "model.layers.2.mlp.experts.5.up_proj"


def swap_names(header: dict) -> None:
    other = "model.layers.2.mlp.experts.4.up_proj.weight"
    header[other], header[f"{UP}.weight"] = header[f"{UP}.weight"], header[other]


def set_shape(header: dict) -> None:
    header[f"{UP}.weight"]["shape"] = header[f"{UP}.weight"]["shape"][::-1]


def set_type(header: dict) -> None:
    header[f"{UP}.weight"]["dtype"] = "F8_E4M3"


def set_scale_type(header: dict) -> None:
    header[f"{UP}.weight_scale"]["dtype"] = "F16"


def rename(header: dict) -> None:
    header["model.layers.2.mlp.experts.9.up_proj.weight"] = header.pop(f"{UP}.weight")


def set_layer(header: dict) -> None:
    header["__metadata__"]["layer"] = "1"


def set_error(header: dict) -> None:
    header["__metadata__"]["relative_error"] = "nan"


def drop_checksums(header: dict) -> None:
    header["__metadata__"].pop("xxh64")


@pytest.mark.parametrize(
    "change", [swap_names, set_shape, set_type, set_scale_type, rename, set_layer, set_error, drop_checksums]
)
def test_a_header_that_lies_is_refused(converted, logits, change):
    path, output = converted
    rewrite_header(output / "experts-layer-00002.safetensors", change)
    with pytest.raises(CheckpointError, match=r"experts-layer-00002.*expected .*got |proa_experts.json.*layers.2"):
        logits(path, output)


@pytest.mark.parametrize("tensor", [f"{UP}.weight", f"{UP}.weight_scale"])
def test_a_flipped_bit_names_file_tensor_and_checksums(converted, logits, tensor):
    path, output = converted
    file = output / "experts-layer-00002.safetensors"
    data = bytearray(file.read_bytes())
    size = int.from_bytes(data[:8], "little")
    data[8 + size + json.loads(data[8 : 8 + size])[tensor]["data_offsets"][0]] ^= 1
    file.write_bytes(data)
    expected = (
        rf"experts-layer-00002\.safetensors: {tensor}\] expected bytes with XXH64 [0-9a-f]{{16}}, got [0-9a-f]{{16}}"
    )
    with pytest.raises(CheckpointError, match=expected):
        logits(path, output)


@pytest.mark.parametrize("kept", [0, 7, 4096, -1])
def test_a_truncated_file_is_refused(converted, logits, kept):
    path, output = converted
    file = output / "experts-layer-00000.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"experts-layer-00000.safetensors.*expected .*got "):
        logits(path, output)


def drop_layer(manifest: dict) -> None:
    manifest["layers"].pop("2")


def add_layer(manifest: dict) -> None:
    manifest["layers"]["1"] = manifest["layers"]["2"]


def other_size(manifest: dict) -> None:
    manifest["layers"]["2"]["bytes"] += 1


def other_experts(manifest: dict) -> None:
    manifest["origin"]["num_experts"] = 9


def other_method(manifest: dict) -> None:
    manifest["origin"]["method"] = "AMXINT4"


def other_format(manifest: dict) -> None:
    manifest["origin"] |= {"method": "FP8", "format": "fp8_block128"}


def newer_layout(manifest: dict) -> None:
    manifest["origin"]["layout"] = "proa-experts-2"


def other_field(manifest: dict) -> None:
    manifest["numa_nodes"] = 2


@pytest.mark.parametrize(
    "change",
    [drop_layer, add_layer, other_size, other_experts, other_method, other_format, newer_layout, other_field],
)
def test_a_manifest_that_lies_is_refused(converted, logits, change):
    path, output = converted
    manifest = json.loads((output / "proa_experts.json").read_text())
    change(manifest)
    (output / "proa_experts.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"expected .*got "):
        logits(path, output)


def test_a_manifest_that_is_none_is_refused(converted, logits):
    path, output = converted
    for content in (b"", b"{", b"[]", b"\xff\xfe", b"{}" * 10):
        (output / "proa_experts.json").write_bytes(content)
        with pytest.raises(CheckpointError, match="the manifest of converted experts"):
            logits(path, output)


def test_experts_of_another_model_are_refused(converted, make_case, logits, tmp_path):
    path, output = converted
    with pytest.raises(CheckpointError, match="experts as config.json says"):
        logits(make_case(BY_NAME["mixtral_bf16"]).path, output)
    # The same dimensions and other weights: a finetune.
    other = shutil.copytree(path, tmp_path / "other")
    stored = load_file(other / "model.safetensors")
    stored["model.layers.0.mlp.gate.weight"][3, 5] += 0.01
    save_file(stored, other / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"whose routers have hash [0-9a-f]{32}, got [0-9a-f]{32}.*convert this"):
        logits(other, output)


@pytest.mark.parametrize("stored", ["folders", "safetensors", "index"])
def test_what_kt_kernel_converted_is_recognised(make_case, tmp_path, stored):
    path = make_case(BY_NAME["qwen3"]).path
    name = "blk.0.ffn_up_exps.0.numa.0.weight"
    if stored == "folders":
        (tmp_path / "kt" / "_layer_0" / "_numa_0").mkdir(parents=True)
    else:
        (tmp_path / "kt").mkdir()
        save_file({name: torch.zeros(8, dtype=torch.uint8)}, tmp_path / "kt" / "model-00001-of-00001.safetensors")
    if stored == "index":
        index = {"weight_map": {name: "model-00001-of-00001.safetensors"}}
        (tmp_path / "kt" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedError, match=r"kt-kernel's packed bytes.*proa convert .* --method AMXINT4"):
        open_experts(Checkpoint.open(path), tmp_path / "kt")


@pytest.mark.parametrize(("asked", "fits"), [("auto", True), ("AMXINT8", True), ("AMXINT4", False), ("FP8", False)])
def test_the_method_is_held_to_what_is_there(converted, asked, fits):
    path, output = converted
    checkpoint = Checkpoint.open(path)
    experts = open_experts(checkpoint, output)
    with nullcontext() if fits else pytest.raises(ConfigError, match=r"--kt-method.*int8_g128"):
        check_expert_method(checkpoint, asked, experts)


def test_the_engine_serves_them(converted):
    path, output = converted
    config = EngineConfig(
        model_path=str(path),
        to_engine="",
        from_engine="",
        expert_path=str(output),
        expert_method="AMXINT8",
        num_threads=1,
        max_total_tokens=256,
        chunked_prefill_size=32,
    )
    reports: list[tuple[int, int]] = []
    loaded = load_checkpoint(config, lambda done, total: reports.append((done, total)))
    assert reports[-1][0] == reports[-1][1] > 0
    assert loaded.info["family"] == "qwen3_moe"
    with pytest.raises(ProaError, match="proa_experts.json|expected"):
        load_checkpoint(EngineConfig.from_json(config.to_json().replace(b"AMXINT8", b"AMXINT4")), lambda *_: None)


@pytest.mark.parametrize("types", ["Q4_0", "Q8_0", "F16", {"gate": "Q4_0", "up": "Q5_1", "down": "MXFP4"}], ids=str)
def test_gguf_experts_are_converted(make_case, logits, tmp_path, types):
    path = make_case(BY_NAME["qwen3"]).path
    source = Source("qwen3", path, types)
    file = write_gguf(tmp_path / "experts.gguf", source.tensors)
    for method in ("AMXINT8", "AMXINT4"):
        output = tmp_path / method
        Conversion(path, method, output, experts=file).run()
        ours = open_experts(Checkpoint.open(path), output)
        for tensor, (blocks, type_name) in source.tensors.items():
            layer, projection = int(tensor.split(".")[1]), tensor.split("_")[1]
            values = gguf.dequantize(blocks, gguf.GGMLQuantizationType[type_name]).astype(np.float32)
            for expert, exact in enumerate(values):
                found = dequantize(ours.linear(linear_name("qwen3", layer, expert, projection), exact.shape))
                # Half a step of the group's largest, and what bf16 makes of the scale: 2^-9 of it. AMXINT4 keeps the
                # integers of Q4_0, whose largest is 8.
                step = 2.0**-9 + (0.5 / 127 if method == "AMXINT8" else 0.5 / 7.5)
                # Types that share a layer may be read as bf16: 2^-9 once more.
                bound = np.abs(exact).max() * (step + 2.0**-9) + 1e-30
                assert np.abs(found - exact).max() <= bound
                if types == "Q4_0" and method == "AMXINT4":
                    assert np.abs(found - exact).max() <= np.abs(exact).max() * 2.0**-8
        assert logits(path, output).isfinite().all()
