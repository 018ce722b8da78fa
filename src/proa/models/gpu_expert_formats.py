"""Whether the experts of a checkpoint can lie on a GPU, by what its headers say."""

from __future__ import annotations

from proa.core.errors import UnsupportedError
from proa.models.registry import checkpoint_config, decoder_spec
from proa.weights.checkpoint import Checkpoint
from proa.weights.expert_source import ExpertSource
from proa.weights.experts import read_expert_linear
from proa.weights.formats import ROW_FORMATS
from proa.weights.linear import read_linear

__all__ = ["check_gpu_experts"]

# The kernels read panels of 16 rows.
_PANEL_ROWS = 16


def check_gpu_experts(checkpoint: Checkpoint, experts: ExpertSource | None = None) -> None:
    """Looks at the first expert of every layer.

    Raises:
        UnsupportedError: a format the GPU's kernels lack, formats that change from layer to layer, sizes that fill no
            panel, or biases.
        CheckpointError: one that cannot be read.
    """
    from proa.kernels.weight_tiles import kind_of  # slow to import

    spec = decoder_spec(checkpoint_config(checkpoint))
    moe = spec.moe
    shapes = {moe.names.gate: (moe.intermediate, moe.hidden), moe.names.up: (moe.intermediate, moe.hidden)}
    shapes[moe.names.down] = (moe.hidden, moe.intermediate)
    first: tuple[str, ...] = ()
    for layer in sorted(spec.moe_layers):
        formats = []
        for name, shape in shapes.items():
            linear = f"model.layers.{layer}.{moe.block}.experts.0.{name}"
            if experts is not None and linear in experts:
                raw = experts.linear(linear, shape)
            else:
                raw = read_expert_linear(checkpoint, linear, shape) or read_linear(checkpoint, linear, shape)
            if raw.bias is not None:
                raise UnsupportedError("GPU experts", "experts without biases", f"a bias of {linear}")
            kind_of(raw.format)
            formats.append(raw.format)
        first = first or tuple(formats)
        if tuple(formats) != first:
            raise UnsupportedError("GPU experts", f"{first} in all layers", f"{tuple(formats)} in layer {layer}")
    step = max((ROW_FORMATS[name].group for name in first if not ROW_FORMATS[name].ragged), default=0) or _PANEL_ROWS
    for size in (moe.hidden, moe.intermediate):
        if size % step:
            raise UnsupportedError("GPU experts", f"sizes in multiples of {step}", size)
