"""The sizes of a model that memory and speed follow from, read from headers or, before a download, from shapes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path

from proa.core.errors import CheckpointError
from proa.models import ModelNeeds, model_needs, open_experts
from proa.models.needs import EMBEDDING
from proa.plan.declared import declared_tensors, is_complete, open_declared
from proa.weights.checkpoint import Checkpoint
from proa.weights.expert_source import ExpertSource
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
class ModelSizes(ModelNeeds):
    """Those that memory follows from, and those of speed.

    source: "headers" or "shapes". embedding_bytes: of which a token reads one row. trunk_parameters: multiplied with
    per token.
    """

    source: str
    embedding_bytes: int
    trunk_parameters: int

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

    def with_expert_format(self, name: str) -> ModelSizes:
        """The same model with its experts in one of `EXPERT_FORMATS`."""
        expert_bytes = int(self.expert_parameters * EXPERT_FORMATS[name][0])
        return replace(self, expert_bytes=expert_bytes, packed_bytes=self.trunk_bytes + expert_bytes)


def read_sizes(path: str | Path, expert_path: str | Path | None = None) -> ModelSizes:
    """Of the checkpoint directory `path`; config.json is enough, an index tells more, complete weights all.

    `expert_path`: where the routed experts are instead.

    Raises:
        CheckpointError: no config.json, or one or other file is damaged. UnsupportedError: what proa cannot run.
    """
    directory = Path(path)
    if directory.is_file():
        fix = "name the model's directory, and GGUF experts with --kt-weight-path"
        raise CheckpointError(str(directory), "a directory with config.json", "a file", fix)
    try:
        is_here = (directory / "config.json").exists() and is_complete(directory)
        checkpoint = Checkpoint.open(directory) if is_here else open_declared(directory)
        experts = None if expert_path is None else open_experts(checkpoint, expert_path)
        return sizes_of(checkpoint, "headers" if is_here else "shapes", experts)
    except OSError as error:
        raise CheckpointError(str(directory), "a readable directory", error.strerror or error) from error


def sizes_of(checkpoint: Checkpoint, source: str, experts: ExpertSource | None = None) -> ModelSizes:
    """Of an opened checkpoint. Reads headers only."""
    needs = model_needs(checkpoint, experts)
    spec = needs.spec
    trunk = [tensor for tensor in declared_tensors(spec) if tensor.part not in ("", "experts")]
    parameters = sum(prod(tensor.shape) for tensor in trunk)
    parameters += spec.hidden * spec.moe.router.num_experts * len(spec.moe_layers)
    if spec.tied_head:
        parameters += spec.vocab_size * spec.hidden
    return ModelSizes(
        **{field.name: getattr(needs, field.name) for field in fields(needs)},
        source=source,
        embedding_bytes=checkpoint.nbytes(EMBEDDING),
        trunk_parameters=parameters,
    )
