"""Logits of every family and storage format against transformers in float32."""

from __future__ import annotations

import copy
import math
import types

import pytest
import torch
import transformers
from tests.models.conftest import MAX_TOKENS, splits_activations
from tests.models.paging import Pager
from tests.models.storages import STORAGES
from tests.models.variants import VARIANTS, VOCAB, build

# transformers sums in float32 in blocks of 16 lanes or more, proa one product after the other. Rounding errors of n
# sequential additions grow like sqrt(n), of n/16 additions in 16 lanes like sqrt(n/16): a factor of 4 for the same
# data. Twice that, as the two maxima are of different samples of the noise.
NOISE_FACTOR = 8


def served_logits(case, ids):
    pager = Pager(case.model, num_blocks=8)
    return pager.forward([(pager.sequence(len(ids)), ids)])


def reference_logits(model, ids):
    with torch.no_grad():
        return model(ids[None].long()).logits[0].double()


def tokens(count=MAX_TOKENS, seed=1):
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def int8_round_trip(x, budget=5.6e-3):
    """Per row and 32 columns: q = round half to even(x / d); returns q * d. d = absmax / 127, or / 1016 where needed.

    That is in the groups with the largest absmax, as few as keep the row's error within `budget`
    (csrc/gemm/act_budget.h).
    """
    groups = x.unflatten(-1, (-1, 32))
    absmax = groups.abs().amax(-1)
    largest, order = absmax.square().sort(-1, descending=True)
    allowed = 12 * (127 * budget) ** 2 * groups.square().mean(-1).sum(-1, keepdim=True)
    over = largest.flip(-1).cumsum(-1).flip(-1) > allowed
    fine = torch.zeros_like(over).scatter(-1, order, over)
    return _rounded(groups, (absmax / torch.where(fine, 1016, 127))[..., None]).flatten(-2)


def int8_product_round_trip(x):
    """The same for the inputs of down."""
    return int8_round_trip(x, 8.6e-3)


def _rounded(groups, d):
    return (groups / d.where(d > 0, 1.0)).round() * d


def int16_round_trip(x):
    """Per token and 128 columns, the last of which may be fewer: d = absmax / 32512, v = round half to even(x / d)."""
    parts = []
    for group in x.split(128, -1):
        d = group.abs().amax(-1, keepdim=True) / 32512
        parts.append((group / d.where(d > 0, 1.0)).round() * d)
    return torch.cat(parts, -1)


def two_bf16_terms(x):
    """The sum of the two bf16 numbers that proa's AMX cells take for x (docs/decisions/0002-amx-cells.md)."""
    high = x.bfloat16().to(x.dtype)
    return high + (x - high).bfloat16().to(x.dtype)


def with_rounded_expert_inputs(model, rounding, rounding_down=None):
    """A copy whose routed experts see the inputs of their linears through `rounding`, of down through another."""
    rounding_down = rounding_down or rounding

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        x = rounding(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, slot = torch.where(top_k_index == expert)
            gate, up = (x[token] @ self.gate_up_proj[expert].T).chunk(2, dim=-1)
            y = rounding_down(torch.nn.functional.silu(gate) * up) @ self.down_proj[expert].T
            out.index_add_(0, token, y * top_k_weights[token, slot, None].to(y.dtype))
        return out

    model = copy.deepcopy(model)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.forward = types.MethodType(forward, layer.mlp.experts)
    return model


def with_split_activations(model):
    """A copy in which every linear sees its input as two bf16 terms."""
    model = with_rounded_expert_inputs(model, two_bf16_terms)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: (two_bf16_terms(inputs[0]),))
    return model


def rounding_noise(case, ids, exact):
    """What rounding does to the logits: float32's, and that of activations to int16 or two terms where kernels do."""
    noise = (reference_logits(case.reference, ids) - exact).abs().max().item()
    if splits_activations(STORAGES[case.variant.storage].float_formats):
        split = reference_logits(with_split_activations(copy.deepcopy(case.reference).double()), ids)
        noise += (split - exact).abs().max().item()
    if STORAGES[case.variant.storage].int16_activations:
        rounded = with_rounded_expert_inputs(copy.deepcopy(case.reference).double(), int16_round_trip)
        noise += (reference_logits(rounded, ids) - exact).abs().max().item()
    return noise


@pytest.mark.parametrize("variant", [v for v in VARIANTS if not STORAGES[v.storage].int8_activations], ids=str)
def test_logits_equal_transformers(variant, make_case):
    # int8_g128 takes one plane of int8 where it may.
    case = make_case(variant, "bf16" if STORAGES[variant.storage].int16_activations else "trunk")
    ids = tokens()
    exact = reference_logits(copy.deepcopy(case.reference).double(), ids)
    noise = rounding_noise(case, ids, exact)
    assert 0 < noise < 1e-4 * exact.abs().max().item()  # a noisy oracle would prove nothing
    error = (served_logits(case, ids).double() - exact).abs().max().item()
    assert error <= NOISE_FACTOR * noise


@pytest.mark.parametrize("variant", [v for v in VARIANTS if STORAGES[v.storage].int8_activations], ids=str)
def test_logits_equal_transformers_with_int8_activations(variant, make_case):
    """Float32 noise moves few activations over a rounding boundary; the rest must agree.

    An activation a has noise of at most nu * absmax of its group (nu: relative noise), that is 127 nu steps, and so
    changes its int8 value with probability 2 * 127 nu, by one step. The rounding error of int8 has a variance of 1/12
    step, so flips amount to sqrt(12 * 254 nu) of the effect of all int8 rounding.
    """
    if splits_activations(STORAGES[variant.storage].float_formats):
        pytest.skip("two terms in the trunk flip too many int8 roundings; int4 itself has the same bits as avx512")
    case = make_case(variant, "trunk")
    ids = tokens()
    unquantized = reference_logits(copy.deepcopy(case.reference).double(), ids)
    noise = NOISE_FACTOR * (reference_logits(case.reference, ids) - unquantized).abs().max().item()
    simulated = with_rounded_expert_inputs(case.reference, int8_round_trip, int8_product_round_trip)
    effect = (reference_logits(simulated, ids) - unquantized).abs().max().item()
    relative = noise / unquantized.abs().max().item()
    bound = noise + math.sqrt(12 * 254 * relative) * effect
    assert bound < effect / 3  # or the test could not tell quantized activations from plain ones
    error = (served_logits(case, ids).double() - reference_logits(simulated, ids)).abs().max().item()
    assert error <= bound


# Those that transformers itself can load on a CPU, without further packages.
NATIVE = ("kimi_int4", "qwen3_int4_g64", "kimi_int4_g128_f16", "glm_mxfp4", "glm_fp8_channel")


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.name in NATIVE], ids=str)
def test_transformers_reads_our_checkpoint_as_the_same_values(variant, tmp_path):
    """The layout under test is the published one, not an idea of our own: the library reads it bit for bit alike."""
    reference = build(variant, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "reference")
    config.quantization_config = STORAGES[variant.storage].quantization
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.float32)
    native_weights = dict(native.named_parameters())
    for name, expected in reference.named_parameters():
        # compressed-tensors keeps the product of an integer and its scale in the type of the scale.
        assert torch.equal(native_weights[name], expected.to(native_weights[name].dtype)), name
