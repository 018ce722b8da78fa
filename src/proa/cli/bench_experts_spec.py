"""What `proa bench experts` measures: dimensions, weight formats, and how many bytes and operations a call is.

Imports nothing heavy: the command line is built from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from proa.core.errors import ConfigError

__all__ = ["METHODS", "MODELS", "PEERS", "ExpertDims", "ExpertSpec", "Method", "make_spec", "parse_tokens"]

PEERS = ("torch", "kt-kernel")
# The limits of proa.native.
MAX_DIM = 1 << 20
MAX_EXPERTS = 1 << 16
MAX_TOKENS = 1 << 16
MAX_TOP_K = 1 << 10


@dataclass(frozen=True, slots=True)
class Method:
    """A weight format: the name users know it by, the native name, and the checkpoint bytes of a linear [out, in].

    `layout`: how the random weights are given, see `RawLinear`.
    """

    name: str
    format: str
    linear_bytes: Callable[[int, int], int]
    in_multiple: int = 1
    layout: str = "rows"


def _rows(name: str, weight_format: str, bits: int, scale_bytes: int = 0, group: int = 0, multiple: int = 0) -> Method:
    """Elements of `bits` bits and a scale per row and `group` columns; group 0 with a scale: one per row."""

    def linear_bytes(out_features: int, in_features: int) -> int:
        scales = -(-in_features // group) if group else 1
        return out_features * (in_features * bits // 8 + scale_bytes * scales)

    return Method(name, weight_format, linear_bytes, multiple or group or 1)


def _fp8_bytes(out_features: int, in_features: int) -> int:
    return out_features * in_features + 4 * -(-out_features // 128) * -(-in_features // 128)


def _blocks(name: str, elements: int, nbytes: int) -> Method:
    """A GGUF type: blocks of `elements` columns."""
    return Method(name, name.lower(), lambda out, columns: out * columns // elements * nbytes, elements, "ggml")


METHODS = {
    method.name: method
    for method in (
        _rows("RAWINT4", "int4_g32", 4, 2, 32),
        _rows("RAWINT4_G64", "int4_g64", 4, 2, 64),
        _rows("RAWINT4_G128", "int4_g128", 4, 2, 128),
        Method("FP8", "fp8_block128", _fp8_bytes),
        _rows("FP8_PERCHANNEL", "fp8_channel", 8, 4),
        _rows("BF16", "bf16", 16),
        _rows("MXFP4", "mxfp4", 4, 1, 32),
        _rows("MXFP8", "mxfp8", 8, 1, 32),
        _rows("NVFP4", "nvfp4", 4, 1, 16, multiple=32),
        _rows("GPTQ_INT4", "int4_g128_f16", 4, 2, 128),
        _rows("AMXINT8", "int8_g128", 8, 2, 128, multiple=32),
        _rows("AMXINT4", "int4_g32", 4, 2, 32),
        _rows("Q4_0", "int4_g32_f16", 4, 2, 32),
        _rows("Q8_0", "int8_g32_f16", 8, 2, 32),
        _blocks("IQ4_NL", 32, 18),
        _blocks("Q4_1", 32, 20),
        _blocks("Q5_0", 32, 22),
        _blocks("Q5_1", 32, 24),
        _blocks("Q2_K", 256, 84),
        _blocks("Q3_K", 256, 110),
        _blocks("Q4_K", 256, 144),
        _blocks("Q5_K", 256, 176),
        _blocks("Q6_K", 256, 210),
        _rows("F16", "f16", 16),
        _rows("F32", "f32", 32),
    )
}


@dataclass(frozen=True, slots=True)
class ExpertDims:
    """Dimensions of the routed experts of one layer."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int


# From the published configurations. gpt-oss is timed with SiLU and without its biases: the bytes differ by 0.1 %.
MODELS = {
    "kimi-k2": ExpertDims(7168, 2048, 384, 8),
    "deepseek-v3": ExpertDims(7168, 2048, 256, 8),
    "qwen3-30b": ExpertDims(2048, 768, 128, 8),
    "glm-4.6": ExpertDims(5120, 1536, 160, 8),
    "minimax-m2": ExpertDims(3072, 1536, 256, 8),
    "gpt-oss-120b": ExpertDims(2880, 2880, 128, 4),
}


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """One run. `seconds`: per cell and side, warm-up not counted; `threads` None: one per physical core.

    `activations`: "int8", or "bf16" to pass over kernels that round activations to int8 where others run.
    """

    method: Method
    dims: ExpertDims
    tokens: tuple[int, ...]
    threads: int | None = None
    peer: str | None = None
    seconds: float = 1.0
    activations: Literal["int8", "bf16"] = "int8"

    @property
    def bytes_per_expert(self) -> int:
        """Gate, up and down with their scales, as in a checkpoint: what a call must read of an expert it touches."""
        hidden, intermediate = self.dims.hidden, self.dims.intermediate
        return 2 * self.method.linear_bytes(intermediate, hidden) + self.method.linear_bytes(hidden, intermediate)

    @property
    def parameters_per_expert(self) -> int:
        return 3 * self.dims.hidden * self.dims.intermediate

    def flops(self, tokens: int) -> int:
        """Multiplications and additions of the three products of every expert chosen by every token."""
        return 2 * tokens * self.dims.top_k * self.parameters_per_expert


def parse_tokens(text: str) -> tuple[int, ...]:
    """`1,4,16` -> (1, 4, 16).

    Raises:
        ConfigError: something that is no positive integer, or too large a one.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= MAX_TOKENS for part in parts):
        raise ConfigError("--tokens", f"integers from 1 to {MAX_TOKENS}, separated by commas", repr(text))
    return tuple(int(part) for part in parts)


def make_spec(
    *,
    method: str,
    tokens: Sequence[int],
    model: str | None = None,
    hidden: int | None = None,
    intermediate: int | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    threads: int | None = None,
    peer: str | None = None,
    seconds: float = 1.0,
    activations: str = "int8",
) -> ExpertSpec:
    """The run that was asked for: `model` gives the dimensions that are None; without it, 8 of 32 experts.

    `method` is a name of METHODS in any case, or a native format name.

    Raises:
        ConfigError: an unknown name, dimensions missing, out of range, or impossible in the format.
    """
    chosen = _method(method)
    if model is not None and model not in MODELS:
        raise ConfigError("--model", " | ".join(MODELS), repr(model))
    if peer is not None and peer not in PEERS:
        raise ConfigError("--peer", " | ".join(PEERS), repr(peer))
    base = MODELS[model] if model is not None else ExpertDims(hidden or 0, intermediate or 0, 32, 8)
    dims = ExpertDims(
        _given(hidden, base.hidden),
        _given(intermediate, base.intermediate),
        _given(experts, base.experts),
        _given(top_k, base.top_k),
    )
    _check(dims, chosen)
    if not tokens:
        raise ConfigError("--tokens", "at least one number of tokens", "none")
    if not 0 < seconds <= 3600:
        raise ConfigError("--seconds", "above 0, at most 3600", seconds)
    if activations not in ("int8", "bf16"):
        raise ConfigError("--expert-activations", "int8 | bf16", repr(activations))
    kind: Literal["int8", "bf16"] = "bf16" if activations == "bf16" else "int8"
    return ExpertSpec(chosen, dims, tuple(tokens), threads, peer, seconds, kind)


def _given(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _method(name: str) -> Method:
    for method in METHODS.values():
        if name.upper() == method.name or name == method.format:
            return method
    raise ConfigError("--method", " | ".join(METHODS), repr(name))


def _check(dims: ExpertDims, method: Method) -> None:
    limits = (
        ("--hidden", dims.hidden, MAX_DIM),
        ("--intermediate", dims.intermediate, MAX_DIM),
        ("--experts", dims.experts, MAX_EXPERTS),
        ("--top-k", dims.top_k, min(dims.experts, MAX_TOP_K)),
    )
    for flag, value, largest in limits:
        if not 1 <= value <= largest:
            raise ConfigError(flag, f"1 to {largest}", value, "give the dimensions, or --model")
    for flag, value, _ in limits[:2]:
        if value % method.in_multiple:
            raise ConfigError(flag, f"a multiple of {method.in_multiple}, the group of {method.name}", value)
