"""Reading ahead, releasing pages and progress change speed and memory, never what is read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from proa.weights import checkpoint as checkpoint_module
from proa.weights.checkpoint import Checkpoint
from proa.weights.progress import LoadProgress, LoadStatus


def layered(directory: Path, layers: int = 12) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tensors = {f"model.layers.{layer}.w": rng.integers(0, 256, 10_007, np.uint8) for layer in range(layers)}
    tensors |= {"lm_head.weight": rng.integers(0, 256, 999, np.uint8), "empty": np.empty((0, 3), np.float32)}
    tensors["model.embed_tokens.weight"] = rng.integers(0, 256, 5000, np.uint8)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    return tensors


@pytest.mark.parametrize("window_bytes", [1, 15_000, 1 << 30])
@pytest.mark.parametrize("order", [1, -1])
def test_reading_ahead_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window_bytes: int, order: int
) -> None:
    expected = layered(tmp_path)
    monkeypatch.setattr(checkpoint_module, "RELEASE_BYTES", 20_000)
    checkpoint = Checkpoint.open(tmp_path)
    with checkpoint.read_ahead(window_bytes):
        for name in list(expected)[::order]:
            assert np.array_equal(checkpoint.tensor(name).data, expected[name])
            checkpoint.release(name)
    assert np.array_equal(checkpoint.tensor("lm_head.weight").data, expected["lm_head.weight"])


def test_a_loader_that_fails_ends_the_thread(tmp_path: Path) -> None:
    layered(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(ZeroDivisionError), checkpoint.read_ahead(1):
        raise ZeroDivisionError
    assert checkpoint.tensor("lm_head.weight").data.size == 999


def test_order_is_embedding_layers_by_number_then_the_rest(tmp_path: Path) -> None:
    layered(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    names = sorted(checkpoint.names, key=checkpoint._read_order)
    layers = [f"model.layers.{layer}.w" for layer in range(12)]
    assert names[:13] == ["model.embed_tokens.weight", *layers]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_progress_counts_bytes_rate_and_time_left() -> None:
    clock, reports = Clock(), list[LoadStatus]()
    progress = LoadProgress(reports.append, interval_s=0.5, clock=clock)
    progress.start(4_000_000_000, "weights")
    progress.add(500_000_000)  # at once: too early to report
    assert reports == []
    clock.now += 1.0
    progress.add(500_000_000)
    assert len(reports) == 1
    status = reports[0]
    assert (status.done_bytes, status.total_bytes, status.stage) == (1_000_000_000, 4_000_000_000, "weights")
    assert (status.gb_per_s, status.eta_s, status.elapsed_s) == (1.0, 3.0, 1.0)
    assert str(status) == "weights: 1.00 of 4.00 GB in 1.0 s, 1.00 GB/s, 3 s left"
    clock.now += 0.1
    progress.add(3_000_000_000)
    progress.finish()
    assert reports[-1].done_bytes == 4_000_000_000
    assert reports[-1].eta_s == 0.0


def test_progress_before_the_first_byte_has_no_eta() -> None:
    clock = Clock()
    progress = LoadProgress(clock=clock)
    progress.start(10)
    assert progress.status.eta_s is None
    clock.now += 5
    assert progress.status.eta_s is None
    assert progress.status.gb_per_s == 0.0
    progress.finish()  # no callback: nothing to do
