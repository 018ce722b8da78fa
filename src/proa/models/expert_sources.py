"""Routed experts for a model whose other weights stay in its checkpoint directory."""

from __future__ import annotations

from pathlib import Path

from proa.core.errors import UnsupportedError
from proa.core.expert_directory import is_converted, is_kt_kernel
from proa.gguf.model import GgufModel
from proa.models.registry import checkpoint_config, decoder_spec
from proa.weights.checkpoint import Checkpoint
from proa.weights.converted_experts import ConvertedExperts
from proa.weights.expert_source import ExpertLayout, ExpertShape, ExpertSource
from proa.weights.gguf_experts import GgufExperts

__all__ = ["expert_layout", "open_experts", "open_gguf_experts"]


def expert_layout(checkpoint: Checkpoint) -> ExpertLayout:
    """The experts that config.json gives a model. CheckpointError or UnsupportedError for one proa cannot run."""
    config = checkpoint_config(checkpoint)
    moe = decoder_spec(config).moe
    blocks = {layer: f"model.layers.{layer}.{moe.block}" for layer in sorted(config.moe.layers)}
    return ExpertLayout(
        ExpertShape(moe.router.num_experts, moe.hidden, moe.intermediate),
        {layer: f"{block}.experts" for layer, block in blocks.items()},
        {"gate": moe.names.gate, "up": moe.names.up, "down": moe.names.down},
        {layer: f"{block}.gate" for layer, block in blocks.items()},
    )


def open_experts(checkpoint: Checkpoint, path: str | Path) -> ExpertSource:
    """The experts of the model that `checkpoint` describes, from GGUF or from what `proa convert` wrote.

    `path`: a GGUF file, a directory of one GGUF model, or a converted directory. Reads headers, and of converted
    experts the routers they belong to. CheckpointError for a damaged file or one of another model, UnsupportedError
    for a tensor type that cannot be read and for what kt-kernel converted.
    """
    directory = Path(path)
    if is_converted(directory):
        return ConvertedExperts.open(directory, checkpoint, expert_layout(checkpoint))
    if is_kt_kernel(directory):
        fix = f"proa convert {checkpoint.path} --method AMXINT4 (or AMXINT8) -o DIRECTORY, and name that one"
        expected = "experts that `proa convert` made, or GGUF"
        raise UnsupportedError(str(directory), expected, "kt-kernel's packed bytes, made for its NUMA count", fix)
    return open_gguf_experts(checkpoint, path)


def open_gguf_experts(checkpoint: Checkpoint, path: str | Path) -> GgufExperts:
    """The experts of the model that `checkpoint` describes, from a GGUF file, split files, or their directory.

    Reads headers only. Raises CheckpointError for a damaged file or one of another model, UnsupportedError for a
    tensor type that cannot be read.
    """
    config = checkpoint_config(checkpoint)
    layout = expert_layout(checkpoint)
    # GGUF numbers layers as the model does; layers behind its own predict further tokens.
    mtp_layers = range(config.num_layers, config.num_layers + config.num_mtp_layers)
    return GgufExperts(GgufModel.open(path), layout.prefixes, layout.names, layout.shape, optional_layers=mtp_layers)
