"""The sizes of a model that memory and speed follow from, read from headers or, before a download, from shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from proa.core.errors import CheckpointError
from proa.models import GpuBytes, ModelInfo, gpu_bytes, inspect, packed_bytes
from proa.models.decoder import cpu_scratch_bytes, gpu_expanded_bytes, gpu_scratch_bytes
from proa.models.decoder_layer import DecoderSpec
from proa.models.registry import checkpoint_config, decoder_spec
from proa.plan.declared import declared_tensors, is_complete, open_declared
from proa.weights.checkpoint import Checkpoint
from proa.weights.formats import ROW_FORMATS

__all__ = ["EXPERT_FORMATS", "ModelSizes", "read_sizes", "sizes_of"]

# What experts can be made smaller to, by quality: bytes per weight, and how. GGUF's: blocks of 256 weights.
EXPERT_FORMATS: dict[str, tuple[float, str]] = {
    "int8": (ROW_FORMATS["int8_g128"].bytes_per_element, "proa convert MODEL --method AMXINT8 -o OUT"),
    "int4": (ROW_FORMATS["int4_g32"].bytes_per_element, "proa convert MODEL --method AMXINT4 -o OUT"),
    "Q3_K": (110 / 256, "--kt-weight-path with a Q3_K GGUF file"),
    "Q2_K": (84 / 256, "--kt-weight-path with a Q2_K GGUF file"),
}


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Bytes are those of weights in memory.

    source: "headers" or "shapes". packed_bytes: all weights in RAM. gpu_trunk_bytes: the trunk in GPU memory, where a
    tied head is a copy. embedding_bytes: of which a token reads one row. trunk_parameters: multiplied with per token.
    """

    source: str
    info: ModelInfo
    spec: DecoderSpec
    packed_bytes: int
    expert_bytes: int
    gpu_trunk_bytes: int
    embedding_bytes: int
    trunk_parameters: int

    @property
    def trunk_bytes(self) -> int:
        """In RAM."""
        return self.packed_bytes - self.expert_bytes

    @property
    def expert_parameters(self) -> int:
        """Of all routed experts."""
        experts = self.info.experts
        return experts.layers * experts.experts * 3 * experts.hidden * experts.intermediate

    @property
    def bytes_per_expert(self) -> int:
        """Of one expert of one layer."""
        return self.expert_bytes // max(1, self.info.experts.layers * self.info.experts.experts)

    @property
    def bytes_per_expert_weight(self) -> float:
        """Scales included."""
        return self.expert_bytes / max(1, self.expert_parameters)

    def gpu_trunk(self, max_tokens: int) -> GpuBytes:
        """With the scratch of forwards of up to `max_tokens`."""
        expanded = gpu_expanded_bytes(self.spec, self.info.max_position_embeddings)
        return GpuBytes(self.gpu_trunk_bytes, gpu_scratch_bytes(self.spec, max_tokens), expanded)

    def cpu_scratch_bytes(self, max_tokens: int) -> int:
        """Of forwards of up to `max_tokens` on the CPU alone."""
        return cpu_scratch_bytes(self.spec, max_tokens)

    def with_expert_format(self, name: str) -> ModelSizes:
        """The same model with its experts in one of `EXPERT_FORMATS`."""
        expert_bytes = int(self.expert_parameters * EXPERT_FORMATS[name][0])
        return replace(self, expert_bytes=expert_bytes, packed_bytes=self.trunk_bytes + expert_bytes)


def read_sizes(path: str | Path) -> ModelSizes:
    """Of the checkpoint directory `path`; config.json is enough, an index tells more, complete weights all.

    Raises:
        CheckpointError: no config.json, or one or other file is damaged. UnsupportedError: what proa cannot run.
    """
    directory = Path(path)
    try:
        if (directory / "config.json").exists() and is_complete(directory):
            return sizes_of(Checkpoint.open(directory), "headers")
        return sizes_of(open_declared(directory), "shapes")
    except OSError as error:
        raise CheckpointError(str(directory), "a readable directory", error.strerror or error) from error


def sizes_of(checkpoint: Checkpoint, source: str) -> ModelSizes:
    """Of an opened checkpoint. Reads headers only."""
    spec = decoder_spec(checkpoint_config(checkpoint))
    routed = f".{spec.moe.block}.experts."
    trunk = [tensor for tensor in declared_tensors(spec) if tensor.part not in ("", "experts")]
    parameters = sum(prod(tensor.shape) for tensor in trunk)
    parameters += spec.hidden * spec.moe.router.num_experts * len(spec.moe_layers)
    if spec.tied_head:
        parameters += spec.vocab_size * spec.hidden
    gpu_trunk = gpu_bytes(checkpoint, max_tokens=1).weights
    packed = packed_bytes(checkpoint)
    embedding = checkpoint.nbytes("model.embed_tokens.weight")
    # Experts are never in float16 vectors, so their stored size is their size in memory.
    mtp = tuple(f"model.layers.{layer}." for layer in _behind(checkpoint, spec))
    experts = sum(checkpoint.nbytes(n) for n in checkpoint.names if routed in n and not n.startswith(mtp))
    return ModelSizes(source, inspect(checkpoint), spec, packed, experts, gpu_trunk, embedding, parameters)


def _behind(checkpoint: Checkpoint, spec: DecoderSpec) -> range:
    """Layers behind the model's own, which predict further tokens and are not loaded."""
    return range(spec.num_layers, spec.num_layers + checkpoint_config(checkpoint).num_mtp_layers)
