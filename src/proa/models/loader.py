"""From an opened checkpoint to a model that runs."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch

from proa.attention.batch import ForwardBatch, StillWanted
from proa.core.errors import ConfigError
from proa.device.backend import Device
from proa.device.cpu import CpuDevice
from proa.kvcache.layout import KVLayout
from proa.kvcache.pool import KVPool
from proa.layers.kernel_check import Activations, check_kernels
from proa.layers.parameters import ParameterReader
from proa.layers.workspace import ExpertPlan
from proa.models.decoder import Decoder
from proa.models.needs import ignored_tensors
from proa.models.registry import checkpoint_config, decoder_spec
from proa.moe.traffic import ExpertTraffic, HybridTraffic
from proa.moe.usage import ExpertUsage
from proa.native.runtime import CpuRuntime
from proa.weights.checkpoint import Checkpoint
from proa.weights.expert_source import ExpertSource
from proa.weights.progress import LoadProgress

__all__ = ["Model", "load_model"]

logger = logging.getLogger("proa.models")


class Model(Protocol):
    """A loaded model, as the engine drives it."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def workspace_bytes(self) -> int: ...

    @property
    def gpu_scratch_bytes(self) -> int: ...

    @property
    def is_capturable(self) -> bool:
        """Whether a forward of few tokens can be captured in a CUDA graph."""

    @property
    def expert_traffic(self) -> ExpertTraffic: ...

    @property
    def expert_usage(self) -> ExpertUsage:
        """Of the routed experts; told of every step by who drives the model."""

    @property
    def hybrid_traffic(self) -> HybridTraffic | None:
        """None where the CPU and a GPU share no experts."""

    @property
    def expert_faults(self) -> int:
        """Ids of experts that the CPU was handed and does not have, since loading: each is a wrong sum."""

    def forward(self, batch: ForwardBatch, kv: KVPool, still_wanted: StillWanted | None = None) -> torch.Tensor:
        """Writes the batch's keys and values to `kv` and returns float32 logits `[L, vocab]` of `logit_rows`.

        Rows that `still_wanted` leaves out between layers are dropped, their logits too.
        """

    def layers(
        self, batch: ForwardBatch, kv: KVPool, still_wanted: StillWanted | None = None
    ) -> Generator[float, None, torch.Tensor]:
        """`forward` layer by layer: see `Decoder.layers`."""

    def wake(self) -> None:
        """Before a captured forward is replayed: the CPU's experts may be asleep."""

    def recover(self) -> None:
        """After a forward that raised, once the device has nothing to do: the next one begins from a clean state."""


def load_model(
    checkpoint: Checkpoint,
    runtime: CpuRuntime,
    *,
    max_tokens: int,
    max_positions: int,
    progress: LoadProgress | None = None,
    experts: ExpertSource | None = None,
    expert_activations: Activations = "int8",
    device: Device | None = None,
    attention: str = "cpu",
    expert_plan: ExpertPlan | None = None,
) -> Model:
    """Packs every weight, tensor by tensor, into its place.

    `experts`: where the routed experts come from instead of `checkpoint`, see `open_experts`.
    `expert_activations`: what the inputs of gated MLPs may be rounded to; "bf16" trades speed for accuracy, "trunk"
    gives them the precision of the other linears.
    `device`: of the trunk, around the same `runtime`; None: the CPU. `attention`: a backend for it.
    `expert_plan`: of a trunk on a GPU; None: routed experts are in RAM and run there.
    `max_tokens`: largest forward; `max_positions`: longest sequence, at most the model's own limit (else ConfigError).
    Raises CheckpointError naming a tensor that is missing, unexpected or of a wrong shape, and KernelFaultError when a
    kernel fails its self-test.
    """
    config = checkpoint_config(checkpoint)
    if not 0 < max_positions <= config.max_position_embeddings:
        raise ConfigError("max_positions", f"1 .. {config.max_position_embeddings}, the model's limit", max_positions)
    ignored = ignored_tensors(config, experts)
    progress = progress or LoadProgress()
    expert_bytes = 0 if experts is None else experts.stored_bytes
    progress.start(sum(checkpoint.nbytes(n) for n in checkpoint.names if not ignored(n)) + expert_bytes, "weights")
    reader = ParameterReader(checkpoint, device or CpuDevice(runtime), progress, experts, expert_activations)
    spec = decoder_spec(config)
    with ExitStack() as stack:
        stack.enter_context(_without_garbage_collection())
        stack.enter_context(checkpoint.read_ahead(skip=ignored))
        if experts is not None:
            stack.enter_context(experts.read_ahead())
        model = Decoder.load(
            reader,
            spec,
            max_tokens=max_tokens,
            max_positions=max_positions,
            attention=attention,
            expert_plan=expert_plan,
        )
    reader.finish(ignored)
    progress.finish()
    _check_kernels(reader)
    logger.info(
        "%s: %s, expert activations %s, %.2f GB of packed weights, %.2f GB of scratch memory",
        checkpoint.path,
        config.family,
        expert_activations,
        model.weight_bytes / 1e9,
        model.workspace_bytes / 1e9,
    )
    return model


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Hundreds of thousands of tensors are looked at while nothing becomes garbage: collecting is 5 % of the work."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_kernels(reader: ParameterReader) -> None:
    """Raises KernelFaultError when a kernel that the model runs on does not compute what it should."""
    start = time.perf_counter()
    checks = check_kernels(reader.device.runtime.pool, reader.kernel_uses)
    names = ", ".join(check.kernel for check in checks)
    logger.info("self-test of %s passed in %.0f ms", names, (time.perf_counter() - start) * 1e3)
