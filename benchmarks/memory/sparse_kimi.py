"""A checkpoint of Kimi K2's dimensions that takes little disk: its large tensors are holes in a sparse file.

Memory depends on shapes and formats, not on values. Embedding rows, routers and norms are written, so that tokens
differ and choose different experts; every other weight reads as zeros.

    python benchmarks/memory/sparse_kimi.py OUT --layers 5 [--experts 384] [--vocab 163840] [--dense]
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.plan.models import KIMI_K2

from proa.models.config import ModelConfig
from proa.models.registry import decoder_spec, read_config
from proa.plan.declared import DeclaredTensor, declared_tensors

GROUP = 32


def stored(tensor: DeclaredTensor) -> list[tuple[str, str, tuple[int, ...], int]]:
    """(name, dtype, shape, bytes) of what holds a tensor: routed experts in int4, everything else in bf16."""
    if tensor.part != "experts":
        is_bias = tensor.name.endswith("e_score_correction_bias")
        size = int(np.prod(tensor.shape))
        return [(tensor.name, "F32" if is_bias else "BF16", tensor.shape, size * (4 if is_bias else 2))]
    rows, columns = tensor.shape
    stem = tensor.name.removesuffix("weight")
    return [
        (f"{stem}weight_packed", "I32", (rows, columns // 8), rows * columns // 2),
        (f"{stem}weight_scale", "BF16", (rows, columns // GROUP), rows * columns // GROUP * 2),
        (f"{stem}weight_shape", "I64", (2,), 16),
    ]


def values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray | None:
    """What is written for a tensor; None: it stays a hole."""
    if name.endswith("norm.weight"):
        return np.full(shape, 0x3F80, np.uint16)  # ones in bf16
    if name.endswith((".gate.weight", "embed_tokens.weight")):
        count = min(shape[0], 4096)
        numbers = rng.standard_normal((count, shape[1]), dtype=np.float32) * np.float32(0.02)
        rows = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        return np.resize(rows, shape)  # every token chooses experts, each 4096 of them the same ones
    return None


def write(directory: Path, config: dict, seed: int = 0) -> int:
    """Bytes of the checkpoint."""
    directory.mkdir(parents=True)
    parsed: ModelConfig = read_config(config, "config.json")
    rng = np.random.default_rng(seed)
    header: dict[str, object] = {}
    parts, offset = [], 0
    for tensor in declared_tensors(decoder_spec(parsed)):
        for name, dtype, shape, nbytes in stored(tensor):
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
            parts.append((name, shape, offset, tensor.shape))
            offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 4096 + 4096 - 8)  # data begins on a page
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        file.truncate(start + offset)
        for name, shape, place, whole in parts:
            array = values(name, shape, rng)
            if name.endswith("weight_shape"):
                array = np.array(whole, np.int64)
            if array is not None:
                file.seek(start + place)
                file.write(array.tobytes())
    (directory / "config.json").write_text(json.dumps(config))
    tokens = {f"t{i}": i for i in range(config["vocab_size"])}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
    return offset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=5, help="the first is dense")
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--vocab", type=int, default=163840)
    given = parser.parse_args()
    config = KIMI_K2 | {
        "num_hidden_layers": given.layers,
        "n_routed_experts": given.experts,
        "vocab_size": given.vocab,
    }
    print(f"{given.out}: {write(given.out, config) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
