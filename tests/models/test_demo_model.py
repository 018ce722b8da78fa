"""The demo model, real language at full size, against transformers on the same files."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from tests.models.paging import Pager
from tests.models.test_oracle import NOISE_FACTOR, reference_logits
from tokenizers import Tokenizer

from proa.convert.demo_model import ensure_demo_model
from proa.models import load_model
from proa.weights.checkpoint import Checkpoint

NEW_TOKENS = 200
PROMPT = (
    "<|im_start|>user\nExplain in a few paragraphs how a sailing boat can travel against the wind.<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def demo():
    return ensure_demo_model()


@pytest.fixture(scope="module")
def greedy(demo, runtime):
    """Prompt and 200 greedy tokens `[P + 200]`, and the logits of each position but the last."""
    # Experts with one bf16 term (AMX) would be too far from the float32 oracle.
    options = {"max_tokens": 128, "max_positions": 512, "expert_activations": "trunk"}
    model = load_model(Checkpoint.open(demo), runtime, **options)
    ids = torch.tensor(Tokenizer.from_file(str(demo / "tokenizer.json")).encode(PROMPT).ids, dtype=torch.int32)
    pager = Pager(model, num_blocks=32)
    sequence = pager.sequence(512)
    logits = [pager.forward([(sequence, ids)])]
    for _ in range(NEW_TOKENS - 1):
        token = logits[-1][-1:].argmax(-1).int()
        ids = torch.cat([ids, token])
        logits.append(pager.forward([(sequence, token)]))
    return torch.cat([ids, logits[-1][-1:].argmax(-1).int()]), torch.cat(logits)


def logits_and_routing(model, ids):
    """Logits `[T, vocab]` and the router logits of all layers `[T, layers * experts]`."""
    routing = []
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(lambda _, __, out: routing.append(out[0].double())) for gate in gates]
    logits = reference_logits(model, ids)
    for hook in hooks:
        hook.remove()
    return logits, torch.cat(routing, dim=1)


@pytest.fixture(scope="module")
def reference(demo):
    return transformers.AutoModelForCausalLM.from_pretrained(
        demo, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def test_free_running_greedy_tokens_equal_those_of_generate(reference, greedy):
    """Each with its own cache and its own tokens fed back, 200 of them."""
    ids, _ = greedy
    inputs = ids[None, :-NEW_TOKENS].long()
    with torch.no_grad():
        answer = reference.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
        )
    assert torch.equal(answer[0].int(), ids)


def test_logits_and_greedy_tokens_equal_transformers(reference, greedy):
    """200 tokens, by induction: each is the argmax of transformers' logits after the same tokens.

    The demo's routers are meant to be saturated: sigmoid(x) is 1 or 0 in float32 from |x| = 17 on. A token with a
    router logit closer to 0 than that, noise included, goes where rounding sends it, and all later tokens attend to
    it: logits are compared up to the first such token.
    """
    ids, logits = greedy
    expected, routing = logits_and_routing(reference, ids[:-1])
    assert torch.equal(expected.argmax(-1)[-NEW_TOKENS:].int(), ids[-NEW_TOKENS:])

    exact, exact_routing = logits_and_routing(copy.deepcopy(reference).double(), ids[:-1])
    routing_noise = NOISE_FACTOR * (routing - exact_routing).abs().median()
    unsaturated = (exact_routing.abs().amin(1) < 17 + routing_noise).nonzero()
    end = int(unsaturated[0]) if len(unsaturated) else len(exact)
    assert end > 100
    noise = (expected - exact)[:end].abs().max().item()
    assert 0 < noise < 1e-4 * exact.abs().max().item()
    assert (logits.double() - exact)[:end].abs().max().item() <= NOISE_FACTOR * noise
