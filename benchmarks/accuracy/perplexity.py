"""What int8 activations cost: perplexity of the demo model with its experts in several formats, both ways.

    python benchmarks/accuracy/perplexity.py [--formats int4_g32,int8_g32_f16,mxfp4] [--jsonl FILE]

The demo checkpoint (bf16) is read as it is, and every gated MLP, routed and shared experts and the dense layer, is
quantized to the format while it loads; everything else stays bf16. Text: the first 2000 tokens of text.txt (Lewis
Carroll, Alice's Adventures in Wonderland, 1865), as one sequence. Appends a line per format to
benchmarks/results/perplexity.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from proa.attention.batch import ForwardBatch
from proa.convert.demo_model import ensure_demo_model
from proa.device.cpu import CpuDevice
from proa.kvcache.pool import KVPool
from proa.layers.kernel_check import Activations
from proa.layers.parameters import ParameterReader
from proa.models.decoder import Decoder
from proa.models.registry import checkpoint_config, decoder_spec
from proa.native import _C
from proa.native.runtime import CpuRuntime
from proa.weights.checkpoint import Checkpoint
from proa.weights.linear import RawLinear
from proa.weights.progress import LoadProgress
from proa.weights.quantize import dequantize, quantize

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "perplexity.jsonl"
TOKENS = 2000
CHUNK = 500
ACTIVATIONS: tuple[Activations, ...] = ("bf16", "int8")


@dataclass(slots=True)
class QuantizingReader(ParameterReader):
    """Reads the linears of gated MLPs in another format than they are stored in; None: as stored."""

    to: str | None = None

    def raw_linear(
        self, name: str, out_features: int, in_features: int, activations: Activations = "int8"
    ) -> RawLinear:
        # No zero-argument super(): a dataclass with slots is a class made anew.
        raw = ParameterReader.raw_linear(self, name, out_features, in_features, activations)
        return raw if self.to is None or ".mlp." not in name else quantize(dequantize(raw), self.to)


def load(path: Path, runtime: CpuRuntime, weight_format: str | None, activations: Activations) -> Decoder:
    checkpoint = Checkpoint.open(str(path))
    reader = QuantizingReader(
        checkpoint, CpuDevice(runtime), LoadProgress(), expert_activations=activations, to=weight_format
    )
    spec = decoder_spec(checkpoint_config(checkpoint))
    return Decoder.load(reader, spec, max_tokens=CHUNK, max_positions=TOKENS, attention="cpu")


def losses(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """Negative log likelihood of tokens 1 .. of one sequence."""
    block_size = 16
    blocks = -(-len(ids) // block_size)
    kv = KVPool(model.layout, blocks, block_size, "float32")
    table = torch.arange(blocks, dtype=torch.int32)[None]
    parts = []
    for start in range(0, len(ids), CHUNK):
        tokens = ids[start : start + CHUNK]
        place = torch.arange(start, start + len(tokens), dtype=torch.int32)
        rows = torch.arange(len(tokens), dtype=torch.int32)
        batch = ForwardBatch(tokens, place, torch.zeros_like(rows), place, table, block_size, rows)
        logits = model.forward(batch, kv).double()
        following = ids[start + 1 : start + 1 + len(tokens)].long()
        picked = logits.log_softmax(dim=-1)[: len(following)].gather(1, following[:, None])
        parts.append(-picked[:, 0])
    return torch.cat(parts)


def compare(exact: torch.Tensor, rounded: torch.Tensor) -> dict[str, Any]:
    """Perplexities, the change and its standard error: that of the mean of the tokens' differences."""
    difference = rounded - exact
    error = difference.std().item() / math.sqrt(len(difference))
    perplexity = {"bf16": math.exp(exact.mean().item()), "int8": math.exp(rounded.mean().item())}
    return {
        "perplexity": perplexity,
        "int8_change": math.expm1(difference.mean().item()),
        "standard_error": error,
        "largest_share": difference.abs().max().item() / len(difference),
    }


def fingerprint() -> dict[str, Any]:
    info = _C.cpu_info()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=HERE
    )
    machine = {key: info[key] for key in ("vendor", "model_name", "isa", "isa_in_use")}
    return {"date": datetime.now(tz=UTC).date().isoformat(), "commit": commit.stdout.strip(), "machine": machine}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--formats", default="bf16,int4_g32,int8_g128,int8_g32_f16,mxfp4")
    parser.add_argument("--jsonl", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    path = ensure_demo_model()
    text = (HERE / "text.txt").read_text(encoding="utf-8")
    ids = torch.tensor(Tokenizer.from_file(str(path / "tokenizer.json")).encode(text).ids[:TOKENS], dtype=torch.int32)
    assert len(ids) == TOKENS
    with CpuRuntime() as runtime:
        for weight_format in arguments.formats.split(","):
            to = None if weight_format == "bf16" else weight_format
            exact, rounded = (losses(load(path, runtime, to, mode), ids) for mode in ACTIVATIONS)
            found = compare(exact, rounded)
            record = {**fingerprint(), "format": weight_format, "tokens": TOKENS, **found}
            with arguments.jsonl.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            values, change, error = found["perplexity"], found["int8_change"], found["standard_error"]
            before_after = f"float {values['bf16']:.4f}  int8 {values['int8']:.4f}"
            print(f"{weight_format:14} {before_after}  {change:+.3%} +- {error:.3%}")


if __name__ == "__main__":
    main()
