"""Sizes planned before a download are those of the model that is loaded."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from tests.models.variants import VARIANTS

from proa.convert.random_model import DIMENSIONS, write_random_model
from proa.models import load_model
from proa.plan.model_sizes import read_sizes
from proa.weights.checkpoint import Checkpoint

# config.json declares nothing of what `proa convert` makes.
UNDECLARED = {"glm_int8"}
DESCRIBING = (".weight_shape", ".g_idx", ".qzeros")
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def declare(source, directory):
    """config.json and an index alone, with the dtype that is stored: transformers writes that of the model it saved."""
    checkpoint = Checkpoint.open(source)
    config = json.loads((source / "config.json").read_text())
    config["dtype"] = DTYPES[checkpoint.dtype("model.embed_tokens.weight")]
    (directory / "config.json").write_text(json.dumps(config))
    index = {"weight_map": dict.fromkeys(checkpoint.names, "model-00001-of-00001.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.name not in UNDECLARED], ids=str)
def test_an_index_says_what_headers_say(variant, make_case, tmp_path):
    path = make_case(variant).path
    declare(path, tmp_path)
    planned, stored = read_sizes(tmp_path), read_sizes(path)
    assert (planned.source, stored.source) == ("shapes", "headers")
    assert planned.info == stored.info
    # Of what only describes packed weights nothing is kept.
    names = [name for name in Checkpoint.open(path).names if name.endswith(DESCRIBING)]
    left_out = sum(Checkpoint.open(path).nbytes(name) for name in names)
    experts = sum(Checkpoint.open(path).nbytes(name) for name in names if ".experts." in name)
    assert planned.expert_bytes == pytest.approx(stored.expert_bytes - experts, rel=0.01)
    assert planned.packed_bytes == pytest.approx(stored.packed_bytes - left_out, rel=0.01)
    assert planned.gpu_trunk_bytes == pytest.approx(stored.gpu_trunk_bytes - left_out + experts, rel=0.01)
    assert planned.embedding_bytes == stored.embedding_bytes


@pytest.mark.parametrize("weight_format", ["bf16", "f32", "int4_g32", "fp8_block128", "mxfp4", "nvfp4"])
def test_shapes_say_what_loading_reports(weight_format, runtime, tmp_path):
    """With dimensions that kernels hardly pad, and formats whose scales take more there than in the file."""
    tokenizer, source, declared = (tmp_path / name for name in ("tokenizer", "source", "declared"))
    tokenizer.mkdir()
    vocab = {"model": {"type": "BPE", "vocab": {str(token): token for token in range(512)}, "merges": []}}
    (tokenizer / "tokenizer.json").write_text(json.dumps(vocab))
    dimensions = replace(DIMENSIONS["tiny"], hidden_size=1024, moe_intermediate_size=512, num_kv_heads=4)
    write_random_model(source, dimensions, tokenizer, format=weight_format)
    shutil.copytree(source, declared, ignore=shutil.ignore_patterns("*.safetensors"))
    declare(source, declared)
    model = load_model(Checkpoint.open(source), runtime, max_tokens=16, max_positions=64)
    sizes = read_sizes(declared)
    assert sizes.source == "shapes"
    # The embedding stays in its file.
    assert sizes.packed_bytes - sizes.embedding_bytes == pytest.approx(model.weight_bytes, rel=0.002)
    assert read_sizes(source).packed_bytes == pytest.approx(sizes.packed_bytes, rel=0.002)


def test_a_random_model_without_experts_is_the_rest_of_the_same_model(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    for name, experts in (("whole", True), ("trunk", False)):
        write_random_model(tmp_path / name, DIMENSIONS["tiny"], tmp_path, format="int4_g32", experts=experts)
    whole, trunk = (Checkpoint.open(tmp_path / name) for name in ("whole", "trunk"))
    assert set(trunk.names) == {name for name in whole.names if ".experts." not in name}
    assert all(np.array_equal(trunk.tensor(name).data, whole.tensor(name).data) for name in trunk.names)
    assert trunk.config == whole.config
