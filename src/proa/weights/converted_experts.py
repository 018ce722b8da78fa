"""Reads the routed experts that `proa convert` wrote, and believes nothing it has not checked."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from proa.core.errors import CheckpointError
from proa.core.expert_directory import MANIFEST
from proa.native import _C
from proa.weights.checkpoint import Checkpoint
from proa.weights.converted_format import LayerRecord, Manifest, Origin, checksum_text, shard_name
from proa.weights.expert_source import CheckpointExperts, ExpertLayout, ExpertShape
from proa.weights.experts import expert_linear_tensors
from proa.weights.identity import model_hash, router_hash
from proa.weights.json_file import parse_json_object
from proa.weights.quantization import Quantization
from proa.weights.raw_linear import RawLinear
from proa.weights.safetensors import SafetensorsFile

__all__ = ["ConvertedExperts", "Shard", "open_shard", "read_manifest", "tensor_checksum"]

logger = logging.getLogger("proa.weights")

_MAX_MANIFEST_BYTES = 16 << 20
_CONVERT_AGAIN = "run `proa convert` again: it keeps the files that are whole"


@dataclass(frozen=True, slots=True)
class Shard:
    """The file of one layer. `checksums`: by tensor."""

    file: SafetensorsFile
    record: LayerRecord
    checksums: dict[str, str]


def read_manifest(directory: Path) -> Manifest:
    """CheckpointError when it is missing or damaged."""
    path = directory / MANIFEST
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise CheckpointError(str(path), "a readable file", error.strerror or error, _CONVERT_AGAIN) from None
    if len(data) > _MAX_MANIFEST_BYTES:
        raise CheckpointError(str(path), f"at most {_MAX_MANIFEST_BYTES} bytes", "more", _CONVERT_AGAIN)
    return Manifest.from_json(data, str(path))


def open_shard(path: Path, origin: Origin, layer: int) -> Shard:
    """Maps the file of one layer. CheckpointError when it is damaged or was converted from or to something else."""
    file = SafetensorsFile.open(path)
    metadata = file.metadata
    for key, expected in (("origin", origin.to_json()), ("layer", str(layer))):
        if metadata.get(key) != expected:
            got = str(metadata.get(key))[:600]
            raise CheckpointError(f"{path}: __metadata__.{key}", expected, got, _CONVERT_AGAIN)
    checksums = parse_json_object(metadata.get("xxh64", "").encode(), f"{path}: __metadata__.xxh64")
    if checksums.keys() != file.entries.keys() or not all(isinstance(text, str) for text in checksums.values()):
        raise CheckpointError(f"{path}: __metadata__.xxh64", "a checksum of every tensor", "others", _CONVERT_AGAIN)
    errors = [_number(metadata, key, path) for key in ("relative_error", "max_error")]
    header = checksum_text(_C.xxh64(np.frombuffer(file.header, np.uint8)))
    return Shard(file, LayerRecord(path.name, file.nbytes, header, *errors), checksums)


def tensor_checksum(data: np.ndarray) -> str:
    """XXH64 of the bytes of a tensor."""
    return checksum_text(_C.xxh64(np.ascontiguousarray(data).reshape(-1).view(np.uint8)))


class ConvertedExperts:
    """The experts of a converted directory under the names of the model's own linears (an `ExpertSource`).

    Opening checks manifest, headers, and that the experts belong to the model; reading a linear checks shape, format
    and checksum of its tensors.
    """

    def __init__(self, directory: Path, manifest: Manifest, shards: list[Shard], layout: ExpertLayout) -> None:
        self.origin = manifest.origin
        self._files = Checkpoint(directory, {}, Quantization(), [shard.file for shard in shards])
        self._experts = CheckpointExperts(self._files, layout)
        self._checksums = {name: text for shard in shards for name, text in shard.checksums.items()}
        self.replaces = self._experts.replaces
        self.read_ahead = self._experts.read_ahead
        self.packed = self._experts.packed
        self.has_bias = self._experts.has_bias
        self._check_names(layout)

    @classmethod
    def open(cls, directory: Path, checkpoint: Checkpoint, layout: ExpertLayout) -> ConvertedExperts:
        """The experts in `directory` for the model of `checkpoint`; reads headers and two routers.

        CheckpointError for damaged files, and for experts of another model: dimensions, layers and routers must agree.
        A checkpoint that stores the same model otherwise than the one converted is said in the log.
        """
        manifest = read_manifest(directory)
        _check_shape(directory, manifest, layout)
        _check_model(directory, manifest.origin, checkpoint, layout)
        shards = []
        for layer, record in sorted(manifest.layers.items()):
            shard = open_shard(directory / shard_name(layer), manifest.origin, layer)
            if shard.record != record:
                where = f"{directory / MANIFEST}: layers.{layer}"
                raise CheckpointError(where, f"{shard.record}, as in the file", record, _CONVERT_AGAIN)
            shards.append(shard)
        return cls(directory, manifest, shards, layout)

    def __contains__(self, name: object) -> bool:
        return name in self._experts

    @property
    def stored_bytes(self) -> int:
        return self._experts.stored_bytes

    @property
    def max_packed_bytes(self) -> int:
        return self._experts.max_packed_bytes

    def linear(self, name: str, shape: tuple[int, int]) -> RawLinear:
        """CheckpointError naming file and tensor for another shape, format or checksum than converted."""
        self._check_bytes(name)
        linear = self._experts.linear(name, shape)
        if linear.format != self.origin.format:
            raise CheckpointError(f"{self._files.path}: {name}", self.origin.format, linear.format, _CONVERT_AGAIN)
        return linear

    def _check_bytes(self, name: str) -> None:
        for tensor in expert_linear_tensors(self._files, name):
            found = tensor_checksum(self._files.tensor(tensor).data)
            if found != self._checksums[tensor]:
                expected = f"bytes with XXH64 {self._checksums[tensor]}"
                raise CheckpointError(self._files.where(tensor), expected, found, _CONVERT_AGAIN)

    def _check_names(self, layout: ExpertLayout) -> None:
        known = {
            tensor
            for layer in layout.prefixes
            for name, _ in layout.linears(layer)
            for tensor in expert_linear_tensors(self._files, name)
        }
        for tensor in self._files.names:
            if tensor not in known:
                raise CheckpointError(self._files.where(tensor), "only tensors of the model's experts", tensor)


def _number(metadata: dict[str, str], key: str, path: Path) -> float:
    try:
        value = float(metadata.get(key, ""))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise CheckpointError(f"{path}: __metadata__.{key}", "a number", repr(metadata.get(key))[:200], _CONVERT_AGAIN)
    return value


def _check_shape(directory: Path, manifest: Manifest, layout: ExpertLayout) -> None:
    origin = manifest.origin
    where = str(directory / MANIFEST)
    fix = "name the directory converted from this model"
    found = ExpertShape(origin.num_experts, origin.hidden, origin.intermediate)
    if found != layout.shape:
        raise CheckpointError(where, f"experts as config.json says ({layout.shape})", found, fix)
    if manifest.layers.keys() != layout.prefixes.keys():
        missing = sorted(layout.prefixes.keys() ^ manifest.layers.keys())
        raise CheckpointError(
            where, f"experts of {len(layout.prefixes)} layers", f"others: layers {missing}"[:200], fix
        )


def _check_model(directory: Path, origin: Origin, checkpoint: Checkpoint, layout: ExpertLayout) -> None:
    routers = router_hash(checkpoint, layout)
    if routers != origin.routers:
        fix = f"convert this model: its experts go with its routers (these came from {origin.source!r})"
        expected = f"experts of the model at {checkpoint.path}, whose routers have hash {routers}"
        raise CheckpointError(str(directory / MANIFEST), expected, origin.routers, fix)
    if model_hash(checkpoint) != origin.model:
        logger.warning(
            "%s: converted from %r, which stores this model otherwise than %s; the routers are the same, so it fits",
            directory,
            origin.source,
            checkpoint.path,
        )
