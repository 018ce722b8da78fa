"""Reads the parameters of a model one by one, checks them, and packs them straight into their final place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from proa.core.errors import CheckpointError
from proa.device.backend import Device, HeadsWeight, Weight
from proa.layers.kernel_check import Activations, KernelUse
from proa.native.ops import PackedWeight
from proa.weights.checkpoint import Checkpoint
from proa.weights.expert_source import ExpertSource
from proa.weights.experts import check_num_experts, expert_linear_tensors, read_expert_linear
from proa.weights.linear import RawLinear, linear_tensor_names, read_array, read_linear
from proa.weights.progress import LoadProgress
from proa.weights.quantization import FP8_BLOCK

__all__ = ["ParameterReader"]


@dataclass(slots=True)
class ParameterReader:
    """Parameters of one checkpoint by name; names are those of config.json's model, without wrapper prefixes.

    `expert_activations`: what the inputs of gated MLPs may be rounded to.
    Linears that `experts` holds are read from there and not from the checkpoint.
    Tensors are mapped views whose pages are dropped once packed: memory grows by what is packed and little else.
    Every method raises CheckpointError naming the tensor when it is missing or has another shape.
    """

    checkpoint: Checkpoint
    device: Device
    progress: LoadProgress
    experts: ExpertSource | None = None
    expert_activations: Activations = "int8"
    kernel_uses: set[KernelUse] = field(default_factory=set)
    _used: set[str] = field(default_factory=set)

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A norm weight or bias as float32 `[size]`, on the CPU."""
        values = read_array(self.checkpoint, name, (size,))
        self._finish_tensor(name)
        return torch.from_numpy(values)

    def table(self, name: str, rows: int, columns: int) -> np.ndarray:
        """An embedding `[rows, columns]` as stored: float32, or bf16 as uint16; float16 is widened to float32.

        A view of the mapped file (float16 aside), so only the rows that are read take memory.
        """
        tensor = self.checkpoint.mapped_tensor(name)
        if tensor.shape == (rows, columns) and tensor.dtype in ("F32", "BF16"):
            self._used.add(name)
            self.progress.add(tensor.data.nbytes)
            return tensor.data
        values = read_array(self.checkpoint, name, (rows, columns))
        self._finish_tensor(name)
        return values

    def raw_linear(
        self, name: str, out_features: int, in_features: int, activations: Activations = "trunk"
    ) -> RawLinear:
        """The weight of a linear `[out_features, in_features]` as stored. Call `packed` once it is copied."""
        shape = (out_features, in_features)
        if self.experts is not None and name in self.experts:
            linear = self.experts.linear(name, shape)
        else:
            expert = read_expert_linear(self.checkpoint, name, shape)
            linear = expert or read_linear(self.checkpoint, name, shape)
        self.kernel_uses.add(KernelUse(linear.format, *shape, activations))
        return linear

    def storage_order(self, prefixes: Sequence[str]) -> Sequence[int]:
        """Indices of experts in the order they are read fastest."""
        return range(len(prefixes)) if self.experts is not None else self.checkpoint.storage_order(prefixes)

    def packed(self, name: str) -> None:
        """The linear `name` is copied: counts its bytes and drops its pages."""
        if self.experts is not None and name in self.experts:
            self.progress.add(self.experts.packed(name))
            return
        for tensor in expert_linear_tensors(self.checkpoint, name) or linear_tensor_names(self.checkpoint, name):
            self._finish_tensor(tensor)

    def expect_experts(self, prefix: str, num_experts: int) -> None:
        """CheckpointError when fused tensors below `prefix` hold another number of experts."""
        if self.experts is None:
            check_num_experts(self.checkpoint, prefix, num_experts)

    def pack(self, names: Sequence[str], out_features: Sequence[int], in_features: int) -> list[Weight]:
        """Packs linears that read the same input, stacked along their rows into one where their formats allow it."""
        raws = [self.raw_linear(n, rows, in_features) for n, rows in zip(names, out_features, strict=True)]
        parts = [self.device.pack(raw) for raw in ([_stack(raws)] if _can_stack(raws) else raws)]
        for name in names:
            self.packed(name)
        return parts

    def pack_raw(self, raw: RawLinear) -> Weight:
        return self.device.pack(raw)

    def pack_heads(self, raws: Sequence[RawLinear]) -> HeadsWeight:
        return self.device.pack_heads(raws)

    def values(self, raw: RawLinear) -> np.ndarray:
        """What `raw` stands for, float32 `[out, in]`."""
        return PackedWeight.pack(self.device.runtime.pool, raw).dequantize()

    def finish(self, ignore: Callable[[str], bool]) -> None:
        """Raises CheckpointError for tensors nobody read, but those that `ignore(name)` excuses."""
        unexpected = sorted(n for n in self.checkpoint.names if n not in self._used and not ignore(n))
        if unexpected:
            shown = ", ".join(unexpected[:5]) + (", ..." if len(unexpected) > 5 else "")
            raise CheckpointError(
                str(self.checkpoint.path),
                "only tensors that config.json accounts for",
                f"{len(unexpected)} unexpected: {shown}",
                "check that config.json belongs to these weights",
            )

    def _finish_tensor(self, name: str) -> None:
        if name not in self._used:
            self._used.add(name)
            self.progress.add(self.checkpoint.nbytes(name))
        self.checkpoint.release(name)


def _can_stack(raws: Sequence[RawLinear]) -> bool:
    """fp8 scales cover 128 rows, so only blocks that end on a multiple of 128 can have others stacked below."""
    if len({(raw.format, raw.layout, raw.global_scale) for raw in raws}) != 1 or any(r.bias is not None for r in raws):
        return False
    return raws[0].format != "fp8_block128" or all(raw.out_features % FP8_BLOCK == 0 for raw in raws[:-1])


def _stack(raws: Sequence[RawLinear]) -> RawLinear:
    if len(raws) == 1:
        return raws[0]
    scales = [raw.scales for raw in raws if raw.scales is not None]
    return replace(
        raws[0],
        out_features=sum(raw.out_features for raw in raws),
        data=np.concatenate([raw.data for raw in raws]),
        scales=np.concatenate(scales) if scales else None,
    )
