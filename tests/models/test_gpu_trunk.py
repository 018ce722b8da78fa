"""The trunk as a GPU computes it, in plain torch on the CPU, against the native kernels and transformers.

Experts stay on the native kernels. What a real GPU computes is compared in tests/gpu.
"""

from __future__ import annotations

import copy

import pytest
import torch
from tests.models.conftest import MAX_TOKENS
from tests.models.paging import Pager, all_logits
from tests.models.storages import STORAGES
from tests.models.test_oracle import NOISE_FACTOR, reference_logits, rounding_noise, tokens
from tests.models.variants import VARIANTS, VOCAB

from proa.attention.expanded import ExpandedChunk
from proa.device.gpu import GpuDevice
from proa.kernels import reference
from proa.models import load_model
from proa.weights.checkpoint import Checkpoint

EXACT = (
    "deepseek_groups_yarn",
    "deepseek_fp8_blocks",
    "deepseek_direct_q",
    "deepseek_halves",
    "kimi_fp8",
    "glm_norm_bias",
    "qwen3",
    "qwen3_fp8",
    "mixtral_bf16",
    "mixtral_tied",
    "mixtral_mxfp8",
)
# Formats whose experts take int8 activations by default: a rounding that float noise can flip.
INTEGER = ("kimi_int4", "kimi_int4_g128_f16", "glm_tied_int4", "glm_int8", "glm_mxfp4", "qwen3_nvfp4")
PROMPT, ANSWER = 24, 16


def named(names):
    return pytest.mark.parametrize("variant", [v for v in VARIANTS if v.name in names], ids=str)


def load(path, runtime, device=None, **options):
    attention = "cpu" if device is None else "torch"
    checkpoint = Checkpoint.open(path)
    return load_model(
        checkpoint, runtime, max_tokens=MAX_TOKENS, max_positions=256, device=device, attention=attention, **options
    )


def greedy(model, ids, count):
    """The tokens that `model` continues `ids` with."""
    pager = Pager(model, num_blocks=8)
    sequence = pager.sequence(len(ids) + count)
    found = []
    for _ in range(count):
        ids = pager.forward([(sequence, ids)], last_only=True)[-1:].argmax(-1).int()
        found.append(int(ids))
    return found


@named(EXACT)
def test_logits_and_greedy_tokens(variant, make_case, runtime, device):
    """Logits within the bound that the native kernels are held to, and the native kernels' tokens."""
    case = make_case(variant, "trunk")
    model = load(case.path, runtime, device, expert_activations="trunk")
    ids = tokens()
    exact = reference_logits(copy.deepcopy(case.reference).double(), ids)
    pager = Pager(model, num_blocks=8)
    served = pager.forward([(pager.sequence(len(ids)), ids)])
    assert (served.double() - exact).abs().max().item() <= NOISE_FACTOR * rounding_noise(case, ids, exact)
    assert greedy(model, ids[:PROMPT], ANSWER) == greedy(case.model, ids[:PROMPT], ANSWER)


@named(INTEGER)
def test_greedy_tokens_with_integer_weights(variant, make_case, runtime, device):
    assert STORAGES[variant.storage].int8_activations or STORAGES[variant.storage].int16_activations
    case = make_case(variant)
    ids = tokens()[:PROMPT]
    on_cpu = load(case.path, runtime, expert_activations="bf16")
    on_gpu = load(case.path, runtime, device, expert_activations="bf16")
    assert greedy(on_gpu, ids, ANSWER) == greedy(on_cpu, ids, ANSWER)


@named(("deepseek_bf16",))
def test_many_tokens_are_multiplied_in_bf16(variant, make_case, runtime):
    """Activations and weights are rounded to 8 bits: an error of that size, and not of float32's."""
    case = make_case(variant)
    few = GpuDevice(runtime, torch.device("cpu"), reference, few_tokens=1)
    pager = Pager(load(case.path, runtime, few, expert_activations="trunk"), num_blocks=8)
    ids = tokens()
    exact = reference_logits(copy.deepcopy(case.reference).double(), ids)
    served = pager.forward([(pager.sequence(len(ids)), ids)])
    relative = ((served.double() - exact).norm() / exact.norm()).item()
    assert 2.0**-12 < relative < 2.0**-3


@named(("kimi_fp8", "qwen3_bias_bf16"))
def test_sequences_leave_between_layers(variant, make_case, runtime, device):
    case = make_case(variant, "trunk")
    model = load(case.path, runtime, device, expert_activations="trunk")
    ids = tokens()
    pager = Pager(model, num_blocks=8)
    pair = [(pager.sequence(9), ids[:9]), (pager.sequence(20), ids[9:29])]
    answers = iter([torch.arange(9, 29), None])
    left = pager.forward(pair, still_wanted=lambda: next(answers))
    alone = Pager(model, num_blocks=8)
    expected = alone.forward([(alone.sequence(20), ids[9:29])])
    # Sums of a matrix product may be split another way for another number of rows.
    exact = reference_logits(copy.deepcopy(case.reference).double(), ids[9:29])
    bound = NOISE_FACTOR * rounding_noise(case, ids[9:29], exact)
    torch.testing.assert_close(left, expected, rtol=0, atol=bound)
    empty = torch.tensor([], dtype=torch.long)
    assert pager.forward([(pager.sequence(4), ids[:4])], still_wanted=lambda: empty).shape == (0, VOCAB)


@named(("deepseek_groups_yarn", "deepseek_fp8_blocks", "deepseek_direct_q"))
def test_long_chunks_of_a_latent_cache_are_expanded(variant, make_case, runtime, monkeypatch):
    """Single tokens, a short chunk and two long ones, one with a past: as transformers has them, up to bf16's 2^-9.

    The cache, its keys and its values are rounded three times in each of three layers.
    """
    monkeypatch.setattr("proa.layers.mlp.MLP_TOKENS", 100)  # in parts
    monkeypatch.setattr("proa.layers.mla.ATTEND_TOKENS", 16)
    chunks = []
    expanded = ExpandedChunk.expanded
    monkeypatch.setattr(ExpandedChunk, "expanded", lambda *a: chunks.append(a[0]) or expanded(*a))
    monkeypatch.setattr("proa.attention.expanded._EXPANDED_BYTES", 150_000)  # heads in several groups
    case = make_case(variant, "trunk")
    device = GpuDevice(runtime, torch.device("cpu"), reference, few_tokens=512)
    checkpoint = Checkpoint.open(case.path)
    options = {"max_positions": 256, "attention": "torch", "expert_activations": "trunk"}
    model = load_model(checkpoint, runtime, max_tokens=512, device=device, **options)
    prompts = [tokens(count, seed) for seed, count in enumerate((6, 21, 150, 40, 200))]
    pages = Pager(model, num_blocks=80, dtype="bfloat16")
    sequences = [pages.sequence(224) for _ in prompts]
    for index, cut in ((0, 5), (4, 30)):  # what is left: a single token, 170 tokens behind 30
        pages.forward([(sequences[index], prompts[index][:cut])])
    rest = [prompts[0][5:], *prompts[1:4], prompts[4][30:]]
    pages.forward(list(zip(sequences, rest, strict=True)))
    assert len({id(chunk) for chunk in chunks}) == 2
    errors = []
    for sequence, ids in zip(sequences, prompts, strict=True):
        exact = reference_logits(copy.deepcopy(case.reference).double(), ids)
        errors.append((all_logits(sequence).double() - exact).norm(dim=-1) / exact.norm(dim=-1))
    # Most tokens: one that a rounding sends to other experts is far off.
    assert torch.cat(errors).median().item() < 9 * 2.0**-9
