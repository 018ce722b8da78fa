"""What memory a model takes, from the headers of its checkpoint alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proa.kvcache.layout import KVLayout
from proa.models.config import ModelConfig
from proa.models.decoder import cpu_scratch_bytes, gpu_scratch_bytes, gpu_transient_bytes
from proa.models.decoder_layer import DecoderSpec
from proa.models.registry import checkpoint_config, decoder_spec
from proa.weights.checkpoint import Checkpoint
from proa.weights.expert_source import ExpertSource
from proa.weights.packed_size import packed_size

__all__ = [
    "EMBEDDING",
    "ExpertInfo",
    "GpuBytes",
    "ModelInfo",
    "ModelNeeds",
    "ignored_tensors",
    "inspect",
    "model_needs",
]

EMBEDDING = "model.embed_tokens.weight"
# Parts of multimodal checkpoints that text does not need.
VISION_PREFIXES = ("vision_tower.", "mm_projector.")


@dataclass(frozen=True, slots=True)
class ExpertInfo:
    """The routed experts: `layers` of `experts` each, `top_k` of them per token; `dense_layers` have none."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What can be known of a model without loading its weights."""

    family: str
    layout: KVLayout
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    has_float32_trunk: bool
    experts: ExpertInfo


@dataclass(frozen=True, slots=True)
class GpuBytes:
    """`weights`: trunk, embedding included. `scratch`: of forwards, from loading on; `transient`: while one runs."""

    weights: int
    scratch: int
    transient: int = 0


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """Bytes are those of weights in memory.

    packed_bytes: all weights in RAM, expert_bytes: the routed experts' of them. gpu_trunk_bytes: the trunk in GPU
    memory, where a tied head is a copy.
    """

    info: ModelInfo
    spec: DecoderSpec
    packed_bytes: int
    expert_bytes: int
    gpu_trunk_bytes: int

    @property
    def trunk_bytes(self) -> int:
        """In RAM."""
        return self.packed_bytes - self.expert_bytes

    def gpu_trunk(self, max_tokens: int, context: int | None = None) -> GpuBytes:
        """With forwards of up to `max_tokens` and sequences of up to `context`, None: as long as the model has."""
        positions = min(context or self.info.max_position_embeddings, self.info.max_position_embeddings)
        scratch = gpu_scratch_bytes(self.spec, max_tokens, positions)
        return GpuBytes(self.gpu_trunk_bytes, scratch, gpu_transient_bytes(self.spec, max_tokens, positions))

    def cpu_scratch(self, max_tokens: int, num_threads: int | None = None) -> int:
        """At most what forwards of up to `max_tokens` take on the CPU alone.

        Raises:
            ConfigError: more threads than this process may use.
        """
        return cpu_scratch_bytes(self.spec, max_tokens, num_threads)


def inspect(checkpoint: Checkpoint) -> ModelInfo:
    """Reads config.json only. Raises CheckpointError or UnsupportedError for one that proa cannot run."""
    config = checkpoint_config(checkpoint)
    spec = decoder_spec(config)
    return ModelInfo(
        family=config.family,
        layout=spec.layout,
        vocab_size=spec.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        eos_token_ids=config.eos_token_ids,
        has_float32_trunk=checkpoint.dtype("model.embed_tokens.weight") == "F32",
        experts=ExpertInfo(
            len(spec.moe_layers),
            spec.moe.router.num_experts,
            spec.moe.router.top_k,
            spec.moe.hidden,
            spec.moe.intermediate,
            tuple(layer for layer in range(spec.num_layers) if layer not in spec.moe_layers),
        ),
    )


def model_needs(checkpoint: Checkpoint, experts: ExpertSource | None = None) -> ModelNeeds:
    """`experts`: where the routed experts come from instead of `checkpoint`.

    In RAM linears take their `packed_size`; vectors and an embedding in float16 become float32. The embedding is
    counted although it stays in its file on the CPU: it has to be in memory to be fast.
    """
    config = checkpoint_config(checkpoint)
    spec = decoder_spec(config)
    ignored, routed = ignored_tensors(config, experts), f".{spec.moe.block}.experts."
    trunk = gpu_trunk = 0
    expert_bytes = 0 if experts is None else experts.max_packed_bytes
    for name in checkpoint.names:
        if ignored(name):
            continue
        if routed in name:
            expert_bytes += packed_size(checkpoint, name)
            continue
        is_linear = len(checkpoint.shape(name)) > 1 and name != EMBEDDING
        trunk += packed_size(checkpoint, name) * (2 if checkpoint.dtype(name) == "F16" and not is_linear else 1)
        gpu_trunk += checkpoint.nbytes(name)
    if spec.tied_head:
        gpu_trunk += checkpoint.nbytes(EMBEDDING)
    return ModelNeeds(inspect(checkpoint), spec, trunk + expert_bytes, expert_bytes, gpu_trunk)


def ignored_tensors(config: ModelConfig, experts: ExpertSource | None) -> Callable[[str], bool]:
    """Tensors a checkpoint may hold that the model does without.

    MTP layers, vision, what is derived anyway, and routed experts that come from elsewhere.
    """
    mtp = tuple(f"model.layers.{config.num_layers + i}." for i in range(config.num_mtp_layers))
    prefixes = mtp + VISION_PREFIXES + (("lm_head.",) if config.tie_word_embeddings else ())
    suffix = ".rotary_emb.inv_freq"
    if experts is None:
        return lambda name: name.startswith(prefixes) or name.endswith(suffix)
    return lambda name: name.startswith(prefixes) or name.endswith(suffix) or experts.replaces(name)
