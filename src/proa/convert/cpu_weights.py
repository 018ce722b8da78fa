"""KTransformers' `convert_cpu_weights.py` command line in front of `proa convert`.

    python -m proa.convert.cpu_weights --input-path MODEL --input-type fp8 --output OUT --quant-method int4

Formats are proa's (`proa.weights.converted_format`); options that mean nothing here are named in a line each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proa.convert.experts import Conversion
from proa.core.errors import ProaError, UnsupportedError
from proa.weights.progress import LoadStatus

__all__ = ["main"]

_METHODS = {"int4": "AMXINT4", "moe_int4": "AMXINT4", "int8": "AMXINT8", "moe_int8": "AMXINT8"}


@dataclass(frozen=True, slots=True)
class _Ignored:
    names: tuple[str, ...]
    has_value: bool
    why: str


_IGNORED = (
    _Ignored(("--input-type",), True, "the source's format is detected, tensor by tensor"),
    _Ignored(("--threadpool-count",), True, "the output does not depend on NUMA nodes"),
    _Ignored(("--no-merge-safetensor",), False, "each layer is one safetensors file"),
    _Ignored(("--resume-layer",), True, "layers that are done are found and kept"),
    _Ignored(("--gpu",), False, "experts are converted on the CPU"),
    _Ignored(("--profile",), False, "progress always shows GB/s"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 an error that has been printed, 2 a wrong command line, 130 Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m proa.convert.cpu_weights", description=__doc__)
    parser.add_argument("--input-path", "-i", required=True, metavar="MODEL")
    parser.add_argument("--output", "-o", required=True, metavar="OUT")
    parser.add_argument("--quant-method", choices=[*_METHODS, "awq"], default="int4")
    parser.add_argument("--cpuinfer-threads", type=int, default=None, help="default: every CPU there is")
    parser.add_argument("--save-backward-weights", action="store_true", help="refused: proa does not train")
    for option in _IGNORED:
        if option.has_value:
            parser.add_argument(*option.names, default=None, help=f"ignored: {option.why}")
        else:
            parser.add_argument(*option.names, action="store_true", help=f"ignored: {option.why}")
    given = parser.parse_args(arguments)
    for option in _IGNORED:
        if getattr(given, option.names[0].lstrip("-").replace("-", "_")):
            sys.stderr.write(f"{option.names[0]} is ignored: {option.why}\n")
    try:
        return _convert(given)
    except ProaError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; finished layers are kept, the same command goes on with the next\n")
        return 130


def _convert(given: argparse.Namespace) -> int:
    if given.save_backward_weights:
        raise UnsupportedError("--save-backward-weights", "no option for training", "one", "leave it out")
    if given.quant_method == "awq":
        raise UnsupportedError("--quant-method", f"one of {', '.join(_METHODS)}", "awq", "use int4")
    method, threads = _METHODS[given.quant_method], given.cpuinfer_threads
    conversion = Conversion(given.input_path, method, Path(given.output), num_threads=threads, progress=_Lines())
    conversion.run()
    sys.stdout.write(f"{given.output}: serve it with --kt-weight-path {given.output} --kt-method {method}\n")
    return 0


class _Lines:
    """Progress as a line every few seconds."""

    _EVERY_S = 5.0

    def __init__(self) -> None:
        self._last_s = 0.0

    def __call__(self, status: LoadStatus) -> None:
        if status.elapsed_s - self._last_s >= self._EVERY_S or status.elapsed_s < self._last_s:
            self._last_s = status.elapsed_s
            left = "" if status.eta_s is None else f", {status.eta_s:.0f} s left"
            done, total = status.done_bytes / 1e9, status.total_bytes / 1e9
            sys.stderr.write(f"{status.stage}: {done:.2f} of {total:.2f} GB, {status.gb_per_s:.2f} GB/s{left}\n")


if __name__ == "__main__":
    sys.exit(main())
