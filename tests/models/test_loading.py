"""What a checkpoint may and may not hold, and what loading reports."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.conftest import MAX_TOKENS, splits_activations
from tests.models.paging import Pager
from tests.models.test_batch_independence import in_one_forward, prompt
from tests.models.variants import VARIANTS

from proa.core.errors import CheckpointError, ConfigError, KernelFaultError, UnsupportedError
from proa.kvcache.layout import KVLayout
from proa.models import inspect, load_model, model_needs
from proa.native import _C
from proa.weights.checkpoint import Checkpoint
from proa.weights.progress import LoadProgress

BY_NAME = {variant.name: variant for variant in VARIANTS}


@pytest.fixture
def edit(tmp_path, make_case, runtime):
    """`edit(variant name, tensors=..., config=...)`: a loader of a checkpoint changed by the given functions."""

    def load(name, *, tensors=lambda t: None, config=lambda c: None, **options):
        source = make_case(BY_NAME[name]).path
        directory = tmp_path / f"checkpoint{len(list(tmp_path.iterdir()))}"
        shutil.copytree(source, directory, ignore=shutil.ignore_patterns("reference"))
        values = load_file(source / "model.safetensors")
        tensors(values)
        save_file(values, directory / "model.safetensors")
        settings = json.loads((source / "config.json").read_text())
        config(settings)
        (directory / "config.json").write_text(json.dumps(settings))
        options = {"max_tokens": MAX_TOKENS, "max_positions": 256} | options
        return load_model(Checkpoint.open(directory), runtime, **options)

    return load


REQUIRED = {
    "deepseek_fp8": [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.self_attn.kv_b_proj.weight_scale_inv",
        "model.layers.1.self_attn.q_a_layernorm.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.2.mlp.experts.15.up_proj.weight",
        "model.layers.2.mlp.shared_experts.gate_proj.weight",
    ],
    "kimi_int4": [
        "model.layers.1.mlp.experts.0.gate_proj.weight_packed",
        "model.layers.2.mlp.experts.3.down_proj.weight_scale",
    ],
    "glm_norm_bias": ["model.layers.1.self_attn.k_proj.bias", "model.layers.1.self_attn.q_norm.weight"],
    "mixtral_bf16": ["model.layers.1.block_sparse_moe.experts.1.w3.weight"],
}


@pytest.mark.parametrize(("variant", "name"), [(v, n) for v, names in REQUIRED.items() for n in names])
def test_missing_tensor_is_named(edit, variant, name):
    with pytest.raises(CheckpointError) as caught:
        edit(variant, tensors=lambda t: t.pop(name))
    assert name.rsplit(".", 1)[0] in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.experts.2.down_proj.weight",
        "lm_head.weight",
    ],
)
def test_wrong_shape_is_named(edit, name):
    def shrink(tensors):
        tensors[name] = tensors[name][..., :-32].contiguous()

    with pytest.raises(CheckpointError) as caught:
        edit("deepseek_groups_yarn", tensors=shrink)
    assert name in str(caught.value)
    assert "shape" in str(caught.value)


def test_unexpected_tensors_are_named(edit):
    def add(tensors):
        tensors["model.layers.0.self_attn.sinks"] = torch.zeros(4)
        tensors["model.layers.3.mlp.gate.weight"] = torch.zeros(8, 64)

    with pytest.raises(CheckpointError, match=r"2 unexpected: model\.layers\.0\.self_attn\.sinks, model\.layers\.3"):
        edit("qwen3", tensors=add)


def test_a_bias_the_config_does_not_mention_is_not_dropped(edit):
    def forget(config):
        config["attention_bias"] = False

    with pytest.raises(CheckpointError, match=r"unexpected: .*bias"):
        edit("glm_bias_bf16", config=forget)


def test_mtp_layers_vision_and_tied_head_are_ignored(edit):
    def add(tensors):
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
        tensors["model.layers.3.mlp.experts.0.gate_proj.weight"] = torch.zeros(32, 64)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(4, 4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def mtp(config):
        config["num_nextn_predict_layers"] = 1

    edit("glm_tied_int4", tensors=add, config=mtp)


def test_multimodal_wrapper_gives_the_same_bits(edit, make_case):
    """Kimi K2.5's layout: the text model below `language_model.`, its configuration in `text_config`."""

    def wrap(tensors):
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["mm_projector.proj.0.weight"] = torch.zeros(4, 4)

    def nest(config):
        text = dict(config)
        config.clear()
        config |= {"model_type": "kimi_k25", "text_config": text}

    wrapped = edit("kimi_int4", tensors=wrap, config=nest)
    expected = in_one_forward(make_case(BY_NAME["kimi_int4"]).model, prompt(1))
    assert torch.equal(in_one_forward(wrapped, prompt(1)), expected)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_fused_experts_must_be_as_many_as_the_router_knows(edit, name):
    name = f"model.layers.1.mlp.experts.{name}"

    def duplicate(tensors):
        tensors[name] = torch.cat([tensors[name], tensors[name][:1]])

    with pytest.raises(CheckpointError, match="8 experts") as caught:
        edit("qwen3_fused", tensors=duplicate)
    assert name in str(caught.value)


def test_fused_experts_beside_one_of_its_own_are_not_passed_over(edit):
    def add(tensors):
        tensors["model.layers.1.mlp.experts.0.extra.weight"] = torch.zeros(2, 2)

    with pytest.raises(CheckpointError, match="1 unexpected"):
        edit("qwen3_fused", tensors=add)


def test_experts_of_two_formats_are_refused(edit):
    def widen(tensors):
        name = "model.layers.1.mlp.experts.2.down_proj.weight"
        tensors[name] = tensors[name].float()

    with pytest.raises(UnsupportedError, match=r"layers\.1\.mlp\.experts\.\d.*down of a layer in one format"):
        edit("deepseek_bf16", tensors=widen)


def test_projections_of_two_formats_are_not_stacked_but_served(edit, make_case):
    """q as float32 of the same values, k and v as bf16: two weights instead of one, the same bits."""
    if splits_activations():
        pytest.skip("float32 and bf16 weights take different roundings on this machine, by design")

    def widen(tensors):
        for layer in range(3):
            name = f"model.layers.{layer}.self_attn.q_proj.weight"
            tensors[name] = tensors[name].float()

    expected = in_one_forward(make_case(BY_NAME["glm_bias_bf16"]).model, prompt(1))
    assert torch.equal(in_one_forward(edit("glm_bias_bf16", tensors=widen), prompt(1)), expected)


def test_float16_checkpoint_serves_its_exact_values(edit):
    def halve(tensors, widen):
        for name, value in tensors.items():
            tensors[name] = value.half().float() if widen else value.half()

    halves = edit("glm_bias_bf16", tensors=lambda t: halve(t, widen=False))
    floats = edit("glm_bias_bf16", tensors=lambda t: halve(t, widen=True))
    assert torch.equal(in_one_forward(halves, prompt(1)), in_one_forward(floats, prompt(1)))


def test_positions_beyond_the_model_are_refused(edit):
    with pytest.raises(ConfigError, match="max_positions"):
        edit("qwen3", max_positions=257)


def test_progress_ends_at_the_bytes_that_were_read(edit):
    reports = []

    def add(tensors):
        tensors["vision_tower.weight"] = torch.zeros(1000)

    edit("kimi_int4", tensors=add, progress=LoadProgress(reports.append, interval_s=0))
    done = [report.done_bytes for report in reports]
    assert done == sorted(done)
    assert len(done) > 100
    assert done[-1] == reports[-1].total_bytes > 0


@pytest.mark.parametrize(
    ("name", "family", "layout"),
    [
        ("kimi_int4", "deepseek_v3", KVLayout(3, 1, 40, 32, latent=True)),
        ("glm_norm_bias", "glm4_moe", KVLayout(3, 2, 16, 16)),
        ("mixtral_tied", "mixtral", KVLayout(3, 1, 16, 16)),
    ],
)
def test_inspect_needs_no_weights(name, family, layout, make_case):
    case = make_case(BY_NAME[name])
    info = inspect(Checkpoint.open(case.path))
    assert (info.family, info.layout, info.vocab_size, info.max_position_embeddings) == (family, layout, 96, 256)
    assert case.model.layout == layout
    assert case.model.vocab_size == 96
    assert case.model.weight_bytes > 0


@pytest.mark.parametrize("name", ["qwen3", "glm_norm_bias"])
def test_expert_traffic_counts_routed_experts_only(name, make_case):
    """Both models have one dense layer and two of experts of three float32 matrices 32 x 64, glm shared experts too."""
    model = make_case(BY_NAME[name]).model
    expert_bytes, layers, top_k = 3 * 32 * 64 * 4, 2, 3
    pager = Pager(model, num_blocks=4)
    sequence = pager.sequence(20)
    before = model.expert_traffic
    pager.forward([(sequence, torch.tensor([1], dtype=torch.int32))])
    after = model.expert_traffic
    assert after.bytes_read - before.bytes_read == layers * top_k * expert_bytes
    assert after.seconds > before.seconds
    # A token twice at one position goes to the same experts, which are read once for both.
    twins = [pager.sequence(1), pager.sequence(1)]
    pager.forward([(twin, torch.tensor([1], dtype=torch.int32)) for twin in twins])
    assert model.expert_traffic.bytes_read - after.bytes_read == layers * top_k * expert_bytes


def test_scratch_memory_is_reported_and_grows_with_the_largest_forward_only(make_case, runtime):
    case = make_case(BY_NAME["kimi_int4"])
    sizes = []
    for max_tokens in (64, 512):  # both with room for the gathered rows of experts with many tokens
        model = load_model(Checkpoint.open(case.path), runtime, max_tokens=max_tokens, max_positions=64)
        sizes.append(model.workspace_bytes)
        pager = Pager(model, num_blocks=1)
        pager.forward([(pager.sequence(16), torch.arange(16, dtype=torch.int32))])
        assert model.workspace_bytes == sizes[-1]
    assert 0 < sizes[0] < sizes[1] <= 8 * sizes[0]


def test_token_ids_beyond_the_vocabulary_raise(make_case):
    pager = Pager(make_case(BY_NAME["qwen3"]).model, num_blocks=2)
    with pytest.raises(ValueError, match="embedding_rows"):
        pager.forward([(pager.sequence(4), torch.tensor([1, 96], dtype=torch.int32))])


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_weights_take_what_was_foreseen(variant, make_case):
    case = make_case(variant)
    checkpoint = Checkpoint.open(case.path)
    foreseen = model_needs(checkpoint).packed_bytes
    # Padding: rows to a multiple of 16 in every linear, and whole cache lines; the tiny matrices have 8 rows at least.
    assert case.model.weight_bytes <= 2 * foreseen
    # No more than the files have, or than was taken where panels repeat scales: what the model reports, without vectors
    # and the embedding, which stays in its file.
    others = [n for n in checkpoint.names if len(checkpoint.shape(n)) == 1 or n == "model.embed_tokens.weight"]
    taken = case.model.weight_bytes + sum(checkpoint.nbytes(name) for name in others)
    assert foreseen <= max(checkpoint.total_bytes, taken)


def test_float16_takes_twice_its_file_where_it_becomes_float32(tmp_path, make_case):
    source = make_case(BY_NAME["mixtral_bf16"]).path
    shutil.copy(source / "config.json", tmp_path)
    values = load_file(source / "model.safetensors")
    extra = {"model.layers.9.self_attn.rotary_emb.inv_freq": torch.zeros(1 << 20)}  # nobody reads it
    save_file({name: tensor.half() for name, tensor in values.items()} | extra, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    widened = {name for name, tensor in values.items() if tensor.dim() == 1 or "embed_tokens" in name}
    expected = sum((4 if name in widened else 2) * tensor.numel() for name, tensor in values.items())
    assert model_needs(checkpoint).packed_bytes == expected


def test_a_model_on_a_broken_kernel_is_refused(edit, monkeypatch):
    linear = _C.linear

    def broken(*arguments):
        linear(*arguments)
        arguments[3][:] *= 2

    monkeypatch.setattr(_C, "linear", broken)
    with pytest.raises(KernelFaultError, match="PROA_FORCE_ISA"):
        edit("mixtral_bf16")
