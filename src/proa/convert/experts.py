"""Converts the routed experts of a model, layer by layer, in a few experts' memory.

Each layer becomes one file that is there whole or not at all. What is there already is kept if it is whole and was made
from the same source with the same options, so a conversion that was stopped, however it was, goes on where it was and
ends with the same bytes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from proa import __version__
from proa.convert.encoding import stored_tensors
from proa.convert.requantize import QuantizationError, check_width, empty_linear, requantize
from proa.convert.shard_writer import PlannedTensor, ShardWriter, partial_path, sync_directory
from proa.core.errors import CheckpointError, ConfigError, StorageError
from proa.core.expert_directory import MANIFEST
from proa.gguf.model import GgufModel
from proa.models.expert_sources import expert_layout, open_gguf_experts
from proa.native import _C
from proa.weights.checkpoint import Checkpoint
from proa.weights.converted_experts import Shard, open_shard, read_manifest, tensor_checksum
from proa.weights.converted_format import LAYOUT, METHODS, Manifest, Origin, shard_name
from proa.weights.expert_source import CheckpointExperts, ExpertLayout, ExpertSource
from proa.weights.formats import ROW_FORMATS
from proa.weights.identity import gguf_hash, model_hash, router_hash
from proa.weights.progress import LoadProgress, LoadStatus
from proa.weights.raw_linear import RawLinear
from proa.weights.read_ahead import WINDOW_BYTES
from proa.weights.safetensors import SafetensorsFile

__all__ = ["Conversion", "Converted", "default_threads"]

logger = logging.getLogger("proa.convert")

_OWN_FILE = re.compile(r"\.?experts-layer-[0-9]{5,9}\.safetensors(\.partial)?")
_LATE = ("relative_error", "max_error")


@dataclass(frozen=True, slots=True)
class Converted:
    """`kept`: layers that were there already."""

    manifest: Manifest
    kept: int


def default_threads() -> int:
    """Every CPU this process may use."""
    return len(_C.cpu_info()["cpus"])


class Conversion:
    """The routed experts of the checkpoint directory `model` to `method`, written to `output`.

    `experts`: a GGUF file, or directory of one GGUF model, that the experts are read from instead.
    `progress`: called with the state of the stages "checking" and "converting", in bytes of the output and the source.

    Raises:
        CheckpointError, UnsupportedError: the source cannot be read, or its experts do not take the format.
        ConfigError: an unknown method, or no positive number of threads.
    """

    def __init__(
        self,
        model: str | Path,
        method: str,
        output: str | Path,
        *,
        experts: str | Path | None = None,
        num_threads: int | None = None,
        progress: Callable[[LoadStatus], None] | None = None,
    ) -> None:
        if method not in METHODS:
            raise ConfigError("--method", f"one of {', '.join(METHODS)}", repr(method))
        self.num_threads = default_threads() if num_threads is None else num_threads
        if self.num_threads < 1:
            raise ConfigError("--threads", "at least 1", self.num_threads)
        self.output = Path(output)
        self.checkpoint = Checkpoint.open(model)
        self.layout = expert_layout(self.checkpoint)
        self.source: ExpertSource = CheckpointExperts(self.checkpoint, self.layout)
        if experts is not None:
            self.source = open_gguf_experts(self.checkpoint, experts)
        gguf = None if experts is None else GgufModel.open(experts)
        self.origin = _origin(self.checkpoint, self.layout, method, gguf)
        for layer in self.layout.prefixes:
            for name, (_, in_features) in self.layout.expert(layer, 0):
                check_width(in_features, self.origin.format, name)
        self._progress = LoadProgress(progress)
        self._release_lock = threading.Lock()

    def run(self) -> Converted:
        """Convert what is not there yet, then write the manifest.

        Raises:
            ConfigError: the directory holds something else, or is being written by another process.
            CheckpointError: a tensor of the source is damaged.
            StorageError: the disk is full or fails; the layers that are done stay.
        """
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            with _locked(self.output):
                return self._run()
        except OSError as error:
            raise self._storage_error(error) from error

    def _run(self) -> Converted:
        self._check_output()
        done = self._kept_layers()
        kept = len(done)
        writers = {layer: self._writer(layer) for layer in self.layout.prefixes if layer not in done}
        self._check_space(sum(writer.nbytes for writer in writers.values()))
        if writers:
            source = self._source_of(tuple(writers))
            total = self.source.stored_bytes * len(writers) // len(self.layout.prefixes)
            self._progress.start(total, "converting")
            linear_bytes = total // (len(writers) * len(self.layout.linears(min(writers))))
            with ExitStack() as stack:
                pool = stack.enter_context(ThreadPoolExecutor(self.num_threads, "proa-convert"))
                stack.enter_context(source.read_ahead(min(WINDOW_BYTES, total // len(writers))))
                for layer, writer in writers.items():
                    self._convert_layer(layer, writer, pool, partial(self._convert_expert, source, linear_bytes))
                    done[layer] = open_shard(self._path(layer), self.origin, layer)
            self._progress.finish()
        return Converted(self._write_manifest(done), kept)

    def _convert_layer(
        self, layer: int, writer: ShardWriter, pool: ThreadPoolExecutor, convert_expert: _ConvertExpert
    ) -> None:
        prefixes = [f"{self.layout.prefixes[layer]}.{expert}" for expert in range(self.layout.shape.num_experts)]
        with writer:
            futures = [
                pool.submit(convert_expert, layer, expert, writer) for expert in self.checkpoint.storage_order(prefixes)
            ]
            try:
                errors = [error for future in futures for error in future.result()]
            except BaseException:  # Ctrl-C too: nobody may write to a file that is about to be closed
                for future in futures:
                    future.cancel()
                wait(futures)
                raise
            error = QuantizationError.total(errors)
            writer.finish(dict(zip(_LATE, (f"{error.relative:.6e}", f"{error.max_abs:.6e}"), strict=True)))

    def _convert_expert(
        self, source: ExpertSource, linear_bytes: int, layer: int, expert: int, writer: ShardWriter
    ) -> list[QuantizationError]:
        errors = []
        for name, shape in self.layout.expert(layer, expert):
            converted, error = requantize(source.linear(name, shape), self.origin.format, name)
            for suffix, (_, values) in _tensors(converted).items():
                writer.write(f"{name}.{suffix}", values)
            errors.append(error)
            with self._release_lock:
                source.packed(name)
            self._progress.add(linear_bytes)
        return errors

    def _writer(self, layer: int) -> ShardWriter:
        """Plans the file of a layer: expert after expert, each tensor aligned where sizes allow it."""
        tensors = []
        for name, shape in self.layout.linears(layer):
            linear = empty_linear(self.origin.format, shape, bias=self.source.has_bias(name))
            for suffix, (dtype, values) in _tensors(linear).items():
                tensors.append(PlannedTensor(f"{name}.{suffix}", dtype, values.shape))
        metadata = {"origin": self.origin.to_json(), "layer": str(layer)}
        return ShardWriter(self._path(layer), tensors, metadata, _LATE)

    def _write_manifest(self, shards: dict[int, Shard]) -> Manifest:
        manifest = Manifest(self.origin, {layer: shards[layer].record for layer in sorted(shards)})
        path = self.output / MANIFEST
        with partial_path(path).open("wb") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
        partial_path(path).rename(path)
        sync_directory(self.output)
        return manifest

    def _check_output(self) -> None:
        """ConfigError when the directory holds anything else; removes what an interrupted run left half written."""
        own = {MANIFEST, partial_path(Path(MANIFEST)).name}
        names = sorted(item.name for item in self.output.iterdir())
        foreign = [name for name in names if name not in own and not _OWN_FILE.fullmatch(name)]
        if foreign:
            got = f"{', '.join(foreign[:5])} in it"
            raise ConfigError("--output", "a new directory, or one of an earlier conversion", got, "name another one")
        if MANIFEST in names:
            self._check_origin(self.output / MANIFEST, read_manifest(self.output).origin.to_json())
        for name in names:
            if name.endswith(".partial"):
                (self.output / name).unlink()

    def _check_origin(self, path: Path, found: str) -> None:
        """ConfigError when `path` was converted from or to something else, by another proa or by somebody else."""
        if found == self.origin.to_json():
            return
        fix = "give the options of the conversion begun there, or another -o"
        try:
            other = msgspec.json.decode(found.encode(), type=Origin)
        except msgspec.MsgspecError:
            raise ConfigError(str(path), "experts converted by this proa", "others", fix) from None
        fields = [field for field in Origin.__struct_fields__ if getattr(other, field) != getattr(self.origin, field)]
        expected, got = (
            ", ".join(f"{field} {getattr(item, field)!r}" for field in fields) for item in (self.origin, other)
        )
        raise ConfigError(str(path), expected, got, fix)

    def _kept_layers(self) -> dict[int, Shard]:
        """The layers that are there, their checksums compared; damaged files are removed."""
        paths = {layer: self._path(layer) for layer in self.layout.prefixes if self._path(layer).exists()}
        shards: dict[int, Shard] = {}
        self._progress.start(sum(path.stat().st_size for path in paths.values()), "checking")
        with ThreadPoolExecutor(self.num_threads, "proa-check") as pool:
            for layer, path in paths.items():
                try:
                    self._check_origin(path, SafetensorsFile.open(path).metadata.get("origin", ""))
                    shards[layer] = open_shard(path, self.origin, layer)
                    check_shard(shards[layer], pool, self._progress.add)
                except CheckpointError as error:
                    logger.warning("%s: not whole, is converted again: %s", path, error)
                    shards.pop(layer, None)
                    path.unlink()
        if paths:
            self._progress.finish()
        return shards

    def _check_space(self, needed_bytes: int) -> None:
        free_bytes = shutil.disk_usage(self.output).free
        if needed_bytes > free_bytes:
            expected = f"{needed_bytes / 1e9:.2f} GB free for what is left to convert"
            raise StorageError(
                str(self.output), expected, f"{free_bytes / 1e9:.2f} GB", "free space, or name another -o"
            )

    def _storage_error(self, error: OSError) -> StorageError:
        done = sum(self._path(layer).exists() for layer in self.layout.prefixes)
        fix = f"mend that and run the same command again: {done} of {len(self.layout.prefixes)} layers are done"
        return StorageError(str(error.filename or self.output), "a disk to write to", error.strerror or error, fix)

    def _source_of(self, layers: tuple[int, ...]) -> ExpertSource:
        """The source with no others than these layers, for its read-ahead."""
        if not isinstance(self.source, CheckpointExperts):
            return self.source
        prefixes = {layer: self.layout.prefixes[layer] for layer in layers}
        return CheckpointExperts(self.checkpoint, replace(self.layout, prefixes=prefixes))

    def _path(self, layer: int) -> Path:
        return self.output / shard_name(layer)


_ConvertExpert = Callable[[int, int, ShardWriter], list[QuantizationError]]


def check_shard(shard: Shard, pool: ThreadPoolExecutor, on_bytes: Callable[[int], None]) -> None:
    """CheckpointError naming the first tensor whose bytes have another checksum than the header says."""

    def check(name: str) -> None:
        found = tensor_checksum(shard.file.stored_bytes(name))
        if found != shard.checksums[name]:
            expected = f"bytes with XXH64 {shard.checksums[name]}"
            raise CheckpointError(f"{shard.file.path}: {name}", expected, found, "convert again")
        on_bytes(shard.file.entries[name].nbytes)

    for _ in pool.map(check, shard.file.entries):
        pass
    shard.file.release_pages()


def _origin(checkpoint: Checkpoint, layout: ExpertLayout, method: str, gguf: GgufModel | None) -> Origin:
    row_format = ROW_FORMATS[METHODS[method]]
    return Origin(
        layout=LAYOUT,
        method=method,
        format=METHODS[method],
        group=(1, 1) if row_format.plain else (row_format.rows, row_format.group),
        tool=f"proa {__version__}",
        source=checkpoint.path.resolve().name,
        model=model_hash(checkpoint),
        experts="" if gguf is None else gguf_hash(gguf),
        routers=router_hash(checkpoint, layout),
        num_experts=layout.shape.num_experts,
        hidden=layout.shape.hidden,
        intermediate=layout.shape.intermediate,
    )


def _tensors(linear: RawLinear) -> dict[str, tuple[str, np.ndarray]]:
    """Suffix -> (safetensors type, values), wide types first."""
    tensors = stored_tensors(linear)
    if linear.bias is not None:
        tensors["bias"] = ("F32", linear.bias)
    return dict(sorted(tensors.items(), key=lambda item: -item[1][1].itemsize))


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """ConfigError when another process converts into `directory`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "wait for it, or name another directory"
            raise ConfigError("--output", "a directory nobody writes to", f"{directory}, in use", fix) from None
        yield
    finally:
        os.close(descriptor)
