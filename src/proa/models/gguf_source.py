"""Routed experts from GGUF files for a model whose other weights stay in its checkpoint directory."""

from __future__ import annotations

from pathlib import Path

from proa.models.registry import checkpoint_config, decoder_spec
from proa.weights.checkpoint import Checkpoint
from proa.weights.gguf import GgufModel
from proa.weights.gguf_experts import ExpertShape, GgufExperts

__all__ = ["open_gguf_experts"]


def open_gguf_experts(checkpoint: Checkpoint, path: str | Path) -> GgufExperts:
    """The experts of the model that `checkpoint` describes, from a GGUF file, split files, or their directory.

    Reads headers only. Raises CheckpointError for a damaged file or one of another model, UnsupportedError for a
    tensor type that cannot be read.
    """
    config = checkpoint_config(checkpoint)
    moe = decoder_spec(config).moe
    # GGUF numbers layers as the model does; layers behind its own predict further tokens.
    mtp_layers = range(config.num_layers, config.num_layers + config.num_mtp_layers)
    return GgufExperts(
        GgufModel.open(path),
        {layer: f"model.layers.{layer}.{moe.block}.experts" for layer in sorted(config.moe.layers)},
        {"gate": moe.names.gate, "up": moe.names.up, "down": moe.names.down},
        ExpertShape(moe.router.num_experts, moe.hidden, moe.intermediate),
        optional_layers=mtp_layers,
    )
