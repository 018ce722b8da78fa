"""SGLang's command line, as people have it in their launch scripts: what proa honours, what has no meaning here.

Honoured spellings stand beside each flag in `proa.cli.flags`; this table holds the others. A flag that would change
what the model answers and that proa does not have is refused, never passed over.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from proa.cli.flag import Flag
from proa.cli.flags import FLAGS
from proa.core.errors import ConfigError, UnsupportedError
from proa.core.expert_directory import is_converted, is_kt_kernel

__all__ = ["FOREIGN", "ForeignFlag", "Launch", "parse"]

MODEL_FLAGS = ("--model-path", "--model")
_ATTENTION_BACKENDS = ("auto", "triton", "torch", "flashinfer")
DEFAULT_PORT = 30000  # SGLang's: clients of a launch script without --port look there


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag of SGLang that sets nothing here. `values`: how many words follow it."""

    names: tuple[str, ...]
    values: Literal[0, 1, "+"]
    meaning: str
    refused: bool = False


_ONE_GPU = "one GPU is used"
_FORMAT = "the weight format is read from the checkpoint, tensor by tensor"
_NOT_SPECULATIVE = "proa has no speculative decoding; answers are the same without it"
_ONE_MACHINE = "proa is one process on one machine; nothing is split"

FOREIGN: tuple[ForeignFlag, ...] = (
    ForeignFlag(("--kt-threadpool-count",), 1, "threads are pinned to cores found at start; see `proa doctor`"),
    ForeignFlag(("--kt-numa-nodes",), "+", "threads are pinned to cores found at start; see `proa doctor`"),
    ForeignFlag(
        ("--record-kt-gpu-expert-distribution",), 0, "routing is recorded on /start_expert_distribution_record"
    ),
    ForeignFlag(
        ("--expert-distribution-recorder-mode",), 1, "routing is counted always; /start_expert_distribution_record"
    ),
    ForeignFlag(("--kt-lora-path", "--kt-expert-lora-path"), 1, "proa has no LoRA", refused=True),
    ForeignFlag(("--enable-lora",), 0, "proa has no LoRA", refused=True),
    ForeignFlag(("--lora-paths",), "+", "proa has no LoRA", refused=True),
    ForeignFlag(("--json-model-override-args",), 1, "config.json is used as it is", refused=True),
    ForeignFlag(("--speculative-algorithm",), 1, _NOT_SPECULATIVE),
    ForeignFlag(("--speculative-draft-model-path",), 1, _NOT_SPECULATIVE),
    ForeignFlag(("--speculative-num-steps",), 1, _NOT_SPECULATIVE),
    ForeignFlag(("--speculative-eagle-topk",), 1, _NOT_SPECULATIVE),
    ForeignFlag(("--speculative-num-draft-tokens",), 1, _NOT_SPECULATIVE),
    ForeignFlag(("--trust-remote-code",), 0, "proa never runs code from a model directory, and needs none"),
    ForeignFlag(("--sleep-on-idle",), 0, "an idle engine always sleeps"),
    ForeignFlag(("--enable-metrics",), 0, "/metrics is always on"),
    ForeignFlag(
        ("--enable-mixed-chunk",),
        0,
        "short passes over prompts take decode tokens along; between the layers of long ones decode steps run",
    ),
    ForeignFlag(
        ("--disable-chunked-prefix-cache",), 0, "there is one prefix cache; --disable-radix-cache turns it off"
    ),
    ForeignFlag(("--disable-shared-experts-fusion",), 0, "shared experts are never fused with routed ones"),
    ForeignFlag(("--tensor-parallel-size", "--tp-size", "--tp"), 1, _ONE_MACHINE),
    ForeignFlag(("--data-parallel-size", "--dp-size", "--dp"), 1, _ONE_MACHINE),
    ForeignFlag(("--expert-parallel-size", "--ep-size", "--ep"), 1, _ONE_MACHINE),
    ForeignFlag(("--pipeline-parallel-size", "--pp-size", "--pp"), 1, _ONE_MACHINE),
    ForeignFlag(("--enable-p2p-check",), 0, _ONE_GPU),
    ForeignFlag(("--sampling-backend",), 1, "there is one sampler"),
    ForeignFlag(("--fp8-gemm-backend",), 1, "kernels are chosen per machine and format; see `proa doctor`"),
    ForeignFlag(("--moe-runner-backend",), 1, "kernels are chosen per machine and format; see `proa doctor`"),
    ForeignFlag(("--cuda-graph-bs",), "+", "every batch size up to --cuda-graph-max-bs is captured"),
    ForeignFlag(("--dtype",), 1, "activations are float32, weights stay as they are in the checkpoint"),
    ForeignFlag(("--quantization",), 1, _FORMAT),
    ForeignFlag(("--load-format",), 1, "checkpoints are safetensors, never pickles"),
    ForeignFlag(("--tokenizer-path",), 1, "the tokenizer is read from the model directory"),
    ForeignFlag(("--schedule-policy",), 1, "requests are served in the order they came"),
    ForeignFlag(("--schedule-conservativeness",), 1, "a request starts when its KV blocks are there"),
    ForeignFlag(("--stream-interval",), 1, "every token is sent as soon as it is there"),
    ForeignFlag(("--skip-server-warmup",), 0, "there is no warm-up to skip"),
    ForeignFlag(("--enable-cache-report",), 0, "cached prompt tokens are always reported in usage"),
    ForeignFlag(("--disable-overlap-schedule",), 0, "scheduling never overlaps a forward pass"),
)


@dataclass(frozen=True, slots=True)
class Launch:
    """A parsed command line: values by flag name of `proa.cli.flags`; by SGLang's name what is done instead."""

    model: str
    values: dict[str, Any]
    notes: dict[str, str]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError("launch_server", "a valid command line", message, "see --help, or `proa serve --help`")


def parse(arguments: Sequence[str]) -> Launch:
    """Parse SGLang's flags, spelled with dashes or underscores.

    Raises:
        ConfigError: an unknown flag (the nearest known one is named), a missing or wrong value, no model.
        UnsupportedError: a flag proa cannot pass over without changing the answers.
    """
    parser = _build_parser()
    known, rest = parser.parse_known_args([_with_dashes(argument) for argument in arguments])
    if rest:
        raise _unknown(rest[0])
    given = vars(known)
    if given["model"] is None:
        raise ConfigError("launch_server", "--model-path DIRECTORY", "none", "name the model directory, or demo")
    values = {flag.name: given[flag.name] for flag in FLAGS if given.get(flag.name) is not None}
    values.setdefault("--port", DEFAULT_PORT)
    notes: dict[str, str] = {}
    for flag in FOREIGN:
        if given[flag.names[0]] is None:
            continue
        if flag.refused:
            raise UnsupportedError(flag.names[0], "a flag proa has", f"this one: {flag.meaning}", "leave it out")
        notes[flag.names[0]] = flag.meaning
    _expert_source(values, notes)
    _attention(values, notes)
    _expert_location(values, notes)
    _limit_threads(values, notes)
    return Launch(given["model"], values, notes)


def _with_dashes(argument: str) -> str:
    """`--max_total_tokens=8` as `--max-total-tokens=8`; values are left alone."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _build_parser() -> _Parser:
    parser = _Parser(
        prog="python -m proa.launch_server",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Starts `proa serve` with SGLang's command line. Flags without a meaning here say so at start.",
    )
    parser.add_argument(*MODEL_FLAGS, dest="model", metavar="DIR", help="Model directory, or demo.")
    for flag in FLAGS:
        if flag.sglang:
            _add_honoured(parser, flag)
    for foreign in FOREIGN:
        options: dict[str, Any] = {"dest": foreign.names[0], "help": foreign.meaning.replace("%", "%%")}
        if foreign.values == 0:
            parser.add_argument(*foreign.names, action="store_const", const=True, **options)
        else:
            nargs = None if foreign.values == 1 else "+"
            parser.add_argument(*foreign.names, nargs=nargs, metavar="X", **options)
    return parser


def _add_honoured(parser: _Parser, flag: Flag) -> None:
    options: dict[str, Any] = {"dest": flag.name, "default": None, "help": f"{flag.doc} [{flag.name}]"}
    if flag.kind is bool:
        parser.add_argument(*flag.sglang, action="store_const", const=True, **options)
    else:
        kind = flag.number if flag.may_be_auto else flag.kind
        parser.add_argument(*flag.sglang, type=kind, choices=flag.choices or None, metavar="X", **options)


def _unknown(argument: str) -> ConfigError:
    """The error for a word that is no flag, with the flag that looks most like it."""
    name = argument.partition("=")[0]
    if not name.startswith("-"):
        return ConfigError("launch_server", "flags and their values", repr(name), "remove it, or put a flag before it")
    names = [n for flag in FLAGS for n in flag.sglang] + [n for flag in FOREIGN for n in flag.names] + list(MODEL_FLAGS)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return ConfigError("launch_server", "a known flag", repr(name), f"did you mean {nearest[0]}? --help lists all")


def _expert_source(values: dict[str, Any], notes: dict[str, str]) -> None:
    """Experts come from the path for LLAMAFILE, converted experts, and GGUF without a method; else from the model.

    What kt-kernel converted is not read; the model directory has the same experts in the format they were published in.
    """
    method = str(values.pop("--kt-method", "auto"))
    if method != "auto":
        values["--kt-method"] = method = method.upper()
    path = values.get("--kt-weight-path")
    if path is None or method == "LLAMAFILE" or is_converted(Path(path)):
        return
    if is_kt_kernel(Path(path)):
        del values["--kt-weight-path"]
        notes["--kt-weight-path"] = (
            "kt-kernel's packed bytes are not read, experts come from the model directory (`proa convert` makes others)"
        )
        return
    if method != "auto" or not _holds_gguf(Path(path)):
        del values["--kt-weight-path"]
        notes["--kt-weight-path"] = "experts are read from the model directory as they are, nothing is converted"


def _attention(values: dict[str, Any], notes: dict[str, str]) -> None:
    """SGLang has more backends; what they compute is the same."""
    asked = values.get("--attention-backend", "auto")
    if asked not in _ATTENTION_BACKENDS:
        notes["--attention-backend"] = f"{asked} is taken for auto"
        del values["--attention-backend"]


def _expert_location(values: dict[str, Any], notes: dict[str, str]) -> None:
    """SGLang's default is a word, not a file."""
    if values.get("--expert-location") == "trivial":
        del values["--expert-location"]
        notes["--init-expert-location"] = "trivial is no file of counts, none are taken"


def _holds_gguf(path: Path) -> bool:
    try:
        return path.suffix == ".gguf" or any(item.suffix == ".gguf" for item in path.iterdir())
    except OSError:
        return False


def _limit_threads(values: dict[str, Any], notes: dict[str, str]) -> None:
    """A launch line written for a larger machine still starts: more threads than CPUs are cut, and it is said."""
    allowed = len(os.sched_getaffinity(0))
    if values.get("--threads", 0) > allowed:
        notes["--kt-cpuinfer"] = f"{values['--threads']} threads asked for, {allowed} CPUs here: {allowed} threads"
        values["--threads"] = allowed
