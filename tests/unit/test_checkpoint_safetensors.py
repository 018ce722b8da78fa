"""A damaged or lying safetensors file is a CheckpointError naming the file, and the tensor where there is one."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proa.core.errors import CheckpointError
from proa.weights.safetensors import MAX_HEADER_BYTES, SafetensorsFile

DATA = bytes(range(48))


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write(path: Path, header: dict[str, Any] | bytes, data: bytes = DATA, header_bytes: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if header_bytes is None else header_bytes) + raw + data)
    return path


def good_header() -> dict[str, Any]:
    return {"a": entry(), "b": entry("BF16", (3, 4), (24, 48)), "__metadata__": {"format": "pt"}}


def test_arrays_are_views_of_the_file(tmp_path: Path) -> None:
    file = SafetensorsFile.open(write(tmp_path / "x.safetensors", json.dumps(good_header()).ljust(256).encode()))
    assert file.array("a").tobytes() == DATA[:24]
    assert file.array("a").dtype == np.float32
    assert (file.array("b").dtype, file.array("b").shape) == (np.uint16, (3, 4))
    assert not file.array("a").flags.owndata
    assert not file.array("a").flags.writeable


def test_misaligned_tensor_is_copied_into_alignment(tmp_path: Path) -> None:
    header = {"a": entry("U8", (1,), (0, 1)), "b": entry("F32", (2,), (1, 9))}
    file = SafetensorsFile.open(write(tmp_path / "x.safetensors", header, b"\x07" + struct.pack("<ff", 1.5, -2.0)))
    assert file.array("b").tolist() == [1.5, -2.0]
    assert file.array("b").flags.aligned


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    header = {"e": entry("F32", (0, 5), (0, 0)), "s": entry("F32", (), (0, 4))}
    file = SafetensorsFile.open(write(tmp_path / "x.safetensors", header, struct.pack("<f", 3.0)))
    assert file.array("e").shape == (0, 5)
    assert file.array("s").shape == ()
    assert float(file.array("s")) == 3.0


def test_released_pages_read_the_same_again(tmp_path: Path) -> None:
    values = np.arange(1 << 16, dtype=np.float32)
    header = {"a": entry("F32", values.shape, (0, values.nbytes))}
    file = SafetensorsFile.open(write(tmp_path / "x.safetensors", header, values.tobytes()))
    held = file.array("a")
    file.release_pages()
    assert np.array_equal(held, values)
    assert np.array_equal(file.array("a"), values)


ENTRY_FAULTS: dict[str, Any] = {
    "negative offset": entry(offsets=(-24, 0)),
    "begin after end": entry(offsets=(24, 0)),
    "outside the file": entry("F32", (12, 3), (0, 144)),
    "offsets and shape disagree": entry(shape=(2, 4)),
    "shape product overflows 64 bits": entry(shape=(1 << 62, 1 << 62), offsets=(0, 0)),
    "shape wraps to the right size": entry(shape=(1 << 62, 4, 6), offsets=(0, 96)),
    "huge dimension": entry(shape=(10**30,)),
    "negative dimension": entry(shape=(-2, -3)),
    "boolean dimension": entry(shape=(True, 6)),
    "float dimension": entry(shape=(2.0, 3)),
    "rank": entry(shape=[1] * 9, offsets=(0, 4)),
    "unknown dtype": entry(dtype="F128"),
    "dtype of another type": entry(dtype=["F32"]),
    "three offsets": entry(offsets=(0, 12, 24)),
    "string offsets": {"dtype": "F32", "shape": [2, 3], "data_offsets": "0-24"},
    "no shape": {"dtype": "F32", "data_offsets": [0, 24]},
    "extra key": {**entry(), "stride": [1]},
    "not an object": [1, 2],
}


@pytest.mark.parametrize("fault", ENTRY_FAULTS)
def test_faulty_entry_names_file_and_tensor(tmp_path: Path, fault: str) -> None:
    path = write(tmp_path / "x.safetensors", {"the.tensor": ENTRY_FAULTS[fault]}, DATA[:24])
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile.open(path)
    assert str(path) in str(caught.value)
    assert "the.tensor" in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (entry("U8", (24,), (23, 47)), "overlap"),
        (entry("U8", (24,), (0, 24)), "overlap"),
        (entry("U8", (8,), (40, 48)), "hole"),
    ],
)
def test_tensors_must_lie_side_by_side(tmp_path: Path, second: dict[str, Any], text: str) -> None:
    path = write(tmp_path / "x.safetensors", {"first": entry(), "second": second})
    with pytest.raises(CheckpointError, match=text) as caught:
        SafetensorsFile.open(path)
    assert str(path) in str(caught.value)


HEADER_FAULTS: dict[str, tuple[bytes, int | None, str]] = {
    "size above the limit": (b"{}", MAX_HEADER_BYTES + 1, "header of at most"),
    "size of 2^64 - 1": (b"{}", (1 << 64) - 1, "header of at most"),
    "size beyond the file": (b"{}", 1000, "inside the file"),
    "not JSON": (b"{]", None, "JSON"),
    "empty": (b"", None, "JSON"),
    "not UTF-8": (b'{"\xff\xfe": 1}', None, "UTF-8"),
    "deep": (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", None, "nesting"),
    "nine million empty lists": (b'{"a":[' + b"[]," * 9_000_000 + b"0]}", None, "at most 4000000 values"),
    "list": (b"[]", None, "JSON object"),
    "duplicate keys": (b'{"a": 1, "a": 2}', None, "duplicate"),
    "NaN": (b'{"a": NaN}', None, "NaN"),
    "integer of a million digits": (b'{"a": ' + b"9" * 1_000_000 + b"}", None, "JSON"),
    "metadata of another type": (b'{"__metadata__": {"a": 1}}', None, "__metadata__"),
    "metadata list": (b'{"__metadata__": []}', None, "__metadata__"),
}


@pytest.mark.parametrize("fault", HEADER_FAULTS)
def test_faulty_header_names_the_file(tmp_path: Path, fault: str) -> None:
    raw, size, text = HEADER_FAULTS[fault]
    path = write(tmp_path / "x.safetensors", raw, b"", size)
    with pytest.raises(CheckpointError, match=text) as caught:
        SafetensorsFile.open(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["", "x" * 600, "a\x1b[2Jb", "a\nb", "lone \ud800 surrogate"])
def test_unprintable_names_are_refused_in_a_printable_message(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "x.safetensors", {name: entry()}, DATA[:24])
    with pytest.raises(CheckpointError, match="printable tensor names") as caught:
        SafetensorsFile.open(path)
    assert str(caught.value).isprintable()
    str(caught.value).encode()


def test_duplicate_tensor_names_are_refused(tmp_path: Path) -> None:
    one = json.dumps(entry())
    path = write(tmp_path / "x.safetensors", f'{{"a": {one}, "a": {one}}}'.encode(), DATA[:24])
    with pytest.raises(CheckpointError, match="duplicate"):
        SafetensorsFile.open(path)


@pytest.mark.parametrize("keep", [0, 7, 8, 40, -1, -24, -25])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "x.safetensors", good_header())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        SafetensorsFile.open(path)


def test_file_longer_than_its_header_says(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", good_header(), DATA + b"\0")
    with pytest.raises(CheckpointError, match="as its header says"):
        SafetensorsFile.open(path)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "no.safetensors", tmp_path):
        with pytest.raises(CheckpointError):
            SafetensorsFile.open(path)


def test_pipes_and_devices_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="regular file"):
        SafetensorsFile.open(tmp_path / "x.safetensors")


fuzzed_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), children, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzzed_entries_open_or_raise_typed_errors(tmp_path: Path, data: st.DataObject) -> None:
    header = good_header()
    victim = header[data.draw(st.sampled_from(["a", "b"]))]
    victim[data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "x"]))] = data.draw(fuzzed_json)
    _open_or_typed_error(write(tmp_path / "x.safetensors", header))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzzed_bytes_open_or_raise_typed_errors(tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(write(tmp_path / "x.safetensors", good_header()).read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - len(DATA) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "y.safetensors"
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    _open_or_typed_error(path)


def _open_or_typed_error(path: Path) -> None:
    """Opening either fails with a CheckpointError or gives tensors whose bytes all lie in the file."""
    try:
        file = SafetensorsFile.open(path)
    except CheckpointError as error:
        if str(path) not in str(error):
            raise
        return
    for name, found in file.entries.items():
        assert 0 <= found.begin <= found.end <= path.stat().st_size
        assert file.array(name).nbytes == found.nbytes
        file.array(name).tobytes()
