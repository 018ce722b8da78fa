"""A bf16 model on a GPU is held to what the same type costs transformers."""

from __future__ import annotations

import torch
import transformers


def oracle_logits(directory, prompts, device):
    """Float64 logits `[rows of all prompts, vocab]` by transformers, computed in float64 and in bf16 on `device`."""
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).to(device)
        with torch.no_grad():
            rows = [model(torch.as_tensor(ids, device=device)[None].long()).logits[0].double() for ids in prompts]
        found.append(torch.cat(rows).cpu())
    return found


def check_no_further_from_exact(served, exact, oracle):
    """`served`: logits of bf16 weights. Its residual stream and sums are float32, so its median row diverges less.

    Best tokens differ where a router or two tokens are close to a tie, by chance: the count is held to the oracle's, up
    to three standard deviations of the difference of two such counts.
    """
    assert 0 < _divergence(served, exact) <= _divergence(oracle, exact)
    missed, expected = ((logits.argmax(-1) != exact.argmax(-1)).sum().item() for logits in (served, oracle))
    assert missed <= expected + 3 * (2 * max(expected, 1)) ** 0.5


def _divergence(logits, exact):
    """Kullback-Leibler divergence of the median row, in nats."""
    of_rows = torch.nn.functional.kl_div(
        logits.double().log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="none"
    )
    return of_rows.sum(-1).median().item()
