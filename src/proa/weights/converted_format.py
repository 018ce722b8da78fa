"""What `proa convert` writes: routed experts in the tensors that checkpoints of the same format have.

A directory holds one safetensors file per layer and `proa_experts.json`, the manifest, which is written last. Rows lie
as in a checkpoint, so nothing depends on the machine, its instruction sets or its NUMA nodes. Tensors of a linear
[out, in], named as the model names its experts:

    method   format        tensors
    AMXINT4  int4_g32      weight_packed I32 [out, in / 8], weight_scale BF16 [out, in / 32], weight_shape I64 [2]
    AMXINT8  int8_g128     weight I8 [out, in], weight_scale BF16 [out, ceil(in / 128)]
    BF16     bf16          weight BF16 [out, in]
    FP8      fp8_block128  weight F8_E4M3 [out, in], weight_scale_inv F32 [ceil(out / 128), ceil(in / 128)]

and, where the model has one, bias F32 [out]. The metadata of each file repeats what the manifest says of all layers and
adds the XXH64 of every tensor's bytes, 16 hexadecimal digits.
"""

from __future__ import annotations

import msgspec

from proa.core.errors import CheckpointError

__all__ = ["LAYOUT", "METHODS", "LayerRecord", "Manifest", "Origin", "checksum_text", "shard_name"]

LAYOUT = "proa-experts-1"
METHODS = {"AMXINT4": "int4_g32", "AMXINT8": "int8_g128", "BF16": "bf16", "FP8": "fp8_block128"}

_CONVERT_AGAIN = "run `proa convert` again"


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which experts these are, and what made them.

    group: elements that share a scale, [rows, columns]; [1, 1] without scales.     tool: program and version.
    source: name of the model's directory.    model: hash of its config.json and of the headers of its weight files.
    experts: hash of the headers of the GGUF files the experts came from; "" when they came from the model.
    routers: hash of the values of the model's first and last router, which stay the same in every quantization.
    """

    layout: str
    method: str
    format: str
    group: tuple[int, int]
    tool: str
    source: str
    model: str
    experts: str
    routers: str
    num_experts: int
    hidden: int
    intermediate: int

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()


class LayerRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer's file: its size, XXH64 of its header, and the error against the source.

    relative_error: L2 norm of the difference over that of the source.    max_error: the largest absolute difference.
    """

    file: str
    bytes: int
    header: str
    relative_error: float
    max_error: float


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`proa_experts.json`; `layers` by layer number."""

    origin: Origin
    layers: dict[int, LayerRecord]

    @staticmethod
    def from_json(data: bytes, where: str) -> Manifest:
        """CheckpointError for what is no manifest, or one of a newer layout."""
        try:
            manifest = msgspec.json.decode(data, type=Manifest)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointError(where, "the manifest of converted experts", error, _CONVERT_AGAIN) from None
        origin = manifest.origin
        if origin.layout != LAYOUT:
            raise CheckpointError(where, f"layout {LAYOUT}", repr(origin.layout)[:200], "use a newer proa")
        if METHODS.get(origin.method) != origin.format:
            expected = f"method and format out of {', '.join(f'{m} = {f}' for m, f in METHODS.items())}"
            raise CheckpointError(where, expected, f"{origin.method!r} = {origin.format!r}"[:200], _CONVERT_AGAIN)
        return manifest

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def shard_name(layer: int) -> str:
    """File name of a layer."""
    return f"experts-layer-{layer:05d}.safetensors"


def checksum_text(value: int) -> str:
    """As `xxhsum -H64` prints it."""
    return f"{value:016x}"
