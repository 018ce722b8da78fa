"""Counting, recording and averaging of routed tokens; files of counts."""

import json
import zipfile

import numpy as np
import pytest
import torch

from proa.core.errors import ConfigError
from proa.moe.stats import ExpertStats, MovingAverage, Recorder, RoutingCounts


def test_counts_are_taken_once():
    counts = RoutingCounts(2, 5, torch.device("cpu"))
    assert counts.shape == (2, 5)
    counts.of_layer(1)[3] += 7
    assert counts.take().tolist() == [[0.0] * 5, [0.0, 0.0, 0.0, 7.0, 0.0]]
    assert not counts.take().any()


def test_recorder_follows_sglang():
    recorder, one = Recorder(1, 2), np.array([[1.0, 2.0]])
    recorder.add(one)
    assert recorder.dump() is None
    recorder.start()
    recorder.add(one)
    recorder.add(one)
    assert recorder.dump().counts.tolist() == [[2.0, 4.0]]  # and goes on
    recorder.add(one)
    recorder.add(one)
    recorder.stop()
    recorder.add(one)
    assert not recorder.recording
    assert recorder.dump().counts.tolist() == [[2.0, 4.0]]
    assert recorder.dump() is None
    recorder.start()
    recorder.add(one)
    recorder.start()
    assert not recorder.dump().counts.any()


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"logical_count": t, "rank": 0}])
def test_counts_from_torch_files_are_summed_over_passes(tmp_path, wrap):
    counts = torch.arange(12).reshape(2, 2, 3)
    torch.save(wrap(counts), tmp_path / "counts.pt")
    assert ExpertStats.load(tmp_path / "counts.pt").counts.tolist() == counts.sum(0).tolist()


def test_saved_counts_come_back(tmp_path):
    stats = ExpertStats(np.array([[1.0, 0.0], [2.5, 3.0]]))
    stats.save(tmp_path / "counts.json")
    assert np.array_equal(ExpertStats.load(tmp_path / "counts.json").counts, stats.counts)


class Trap:
    """Unpickled, it would leave a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_file_with_code_is_refused_and_not_run(tmp_path):
    torch.save({"logical_count": Trap(str(tmp_path / "ran"))}, tmp_path / "trap.pt")
    with pytest.raises(ConfigError, match="init-expert-location"):
        ExpertStats.load(tmp_path / "trap.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "value", [[], [1.0], [[1.0, -1.0]], [[1.0, float("nan")]], {"counts": []}, [[1], [2, 3]], {"logical_count": "many"}]
)
def test_other_files_are_refused(tmp_path, value):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match=r"counts\.json"):
        ExpertStats.load(path)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(1).expand(10**5, 60, 384),  # 4 bytes of storage, 18 GB of counts
        torch.ones(2, 3).to_sparse(),
        torch.empty(2, 3, device="meta"),
        torch.full((2, 3), -1),
        torch.tensor([[[1.0, 2.0]], [[3.0, -4.0]]]),
        torch.full((1000, 1, 2), 1e308, dtype=torch.float64),  # finite, their sum is not
        torch.tensor(3.0),
        {"logical_count": None},
        [torch.ones(2, 3), "text"],
    ],
    ids=str,
)
def test_hostile_tensors_are_refused(tmp_path, value):
    torch.save(value, tmp_path / "counts.pt")
    with pytest.raises(ConfigError, match=r"counts\.pt"):
        ExpertStats.load(tmp_path / "counts.pt")


def test_a_file_that_unpacks_to_more_is_refused(tmp_path):
    torch.save(torch.ones(2, 3), tmp_path / "counts.pt")
    with zipfile.ZipFile(tmp_path / "counts.pt", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("counts/data/1", bytes(2**29))
    assert (tmp_path / "counts.pt").stat().st_size < 2**20
    with pytest.raises(ConfigError, match="at most 536870912 bytes"):
        ExpertStats.load(tmp_path / "counts.pt")


def test_what_never_ends_is_no_file(tmp_path):
    (tmp_path / "counts.json").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="no such file"):
        ExpertStats.load(tmp_path / "counts.json")


def test_rows_of_dense_layers_are_left_out():
    """SGLang's recorder has a row for every layer of the model, those of dense ones zeros."""
    stats = ExpertStats(np.array([[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]))
    assert stats.of_moe_layers(2, 2, (0,)).counts.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert stats.of_moe_layers(3, 2).counts.tolist() == stats.counts.tolist()
    for layers, experts, dense in ((2, 2, (1,)), (2, 3, (0,)), (2, 2, ()), (1, 2, (0,)), (4, 2, ())):
        with pytest.raises(ConfigError, match=f"counts of {layers} x {experts} experts"):
            stats.of_moe_layers(layers, experts, dense)


def test_missing_and_damaged_files_are_refused(tmp_path):
    (tmp_path / "damaged.pt").write_bytes(b"PK not a checkpoint")
    for name in ("missing.pt", "damaged.pt", "missing.json"):
        with pytest.raises(ConfigError, match=name):
            ExpertStats.load(tmp_path / name)


def test_average_follows_a_change_in_its_half_life():
    average = MovingAverage(1, 2, top_k=1, half_life=100)
    assert not average.shares.any()
    average.add(np.array([[10.0, 0.0]]))
    assert average.shares[0] == pytest.approx([1.0, 0.0])  # the first tokens count fully
    for _ in range(100):
        average.add(np.array([[10.0, 0.0]]))
    assert average.shares[0] == pytest.approx([1.0, 0.0])
    average.add(np.array([[0.0, 100.0]]))
    assert average.shares[0] == pytest.approx([0.5, 0.5], abs=1e-3)
    average.add(np.zeros((1, 2)))
    assert average.tokens == 1110


def test_layers_that_see_fewer_tokens_keep_their_shares():
    """The last layer routes the rows whose logits are wanted."""
    average = MovingAverage(2, 4, top_k=2, half_life=100)
    average.add(np.array([[50.0, 50.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]))
    assert average.shares == pytest.approx(np.array([[1.0, 1.0, 0.0, 0.0]] * 2))
    average.add(np.array([[0.0, 0.0, 100.0, 100.0], [0.0, 0.0, 0.0, 0.0]]))
    assert average.shares[1] == pytest.approx([1.0, 1.0, 0.0, 0.0])
    assert average.shares[0, 2] > 0.5


def test_an_average_begins_with_what_is_expected():
    expected = ExpertStats(np.array([[3.0, 1.0, 0.0, 0.0], [0.0] * 4])).shares(2)
    assert expected.tolist() == [[1.5, 0.5, 0.0, 0.0], [0.5] * 4]
    average = MovingAverage(2, 4, top_k=2, half_life=100)
    average.expect(expected, 100)
    assert average.shares == pytest.approx(expected)
    average.add(np.array([[0.0, 0.0, 100.0, 100.0], [0.0] * 4]))
    # Of the weight that 200 tokens have the last 100 have two thirds.
    assert average.shares[0] == pytest.approx([0.5, 1 / 6, 2 / 3, 2 / 3])
    assert average.shares[1] == pytest.approx(expected[1])
