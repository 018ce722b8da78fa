"""The GGUF reader against the `gguf` package's writer, and against files that lie."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proa.core.errors import CheckpointError
from proa.gguf.header import MAX_METADATA, MAX_TENSORS, GgufArray
from proa.gguf.model import GgufFile, GgufModel
from proa.gguf.types import GGML_TYPES

U8, BOOL, STRING, ARRAY, U32, U64 = 0, 7, 8, 9, 4, 10
F32, Q4_0 = 0, 2


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def metadata(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, sizes: tuple[int, ...] = (8,), kind: int = F32, offset: int = 0, rank: int = -1) -> bytes:
    rank = len(sizes) if rank < 0 else rank
    return string(name) + struct.pack(f"<I{len(sizes)}QIQ", rank, *sizes, kind, offset)


def build(
    pairs: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    num_tensors, num_pairs = counts or (len(tensors), len(pairs))
    header = magic + struct.pack("<IQQ", version, num_tensors, num_pairs) + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


def write(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file of the gguf package with every kind of metadata and many tensor types."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63 + 1)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1e300)
    writer.add_bool("yes", True)
    writer.add_string("text", "héllo")
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("words", ["a", "", "中文"])
    writer.add_array("floats", [0.25, 0.5])
    rng = np.random.default_rng(0)
    for ggml_type in GGML_TYPES.values():
        name, shape = ggml_type.name, (3, 2, 2 * ggml_type.block_elements)
        if name in ("F32", "F16", "F64", "I8", "I16", "I32", "I64"):
            dtype = {"F32": "f4", "F16": "f2", "F64": "f8"}.get(name, f"i{ggml_type.block_bytes}")
            writer.add_tensor(f"t.{name}", rng.integers(-9, 9, shape).astype(dtype))
        else:
            raw = rng.integers(0, 256, (*shape[:-1], 2 * ggml_type.block_bytes), np.uint8)
            writer.add_tensor(f"t.{name}", raw, raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_type_table_is_that_of_the_gguf_package() -> None:
    ours = {number: (t.name, t.block_elements, t.block_bytes) for number, t in GGML_TYPES.items()}
    theirs = {t.value: (t.name, *sizes) for t, sizes in gguf.constants.GGML_QUANT_SIZES.items()}
    assert theirs.items() <= ours.items()


def test_metadata_equals_what_was_written(written: Path) -> None:
    values = GgufFile.open(written).metadata
    oracle = gguf.GGUFReader(written)
    for key, field in oracle.fields.items():
        if key.startswith("GGUF."):
            continue
        ours, theirs = values[key], field.contents()
        if isinstance(ours, GgufArray):
            ours = ours.values()
            ours = [item.decode() for item in ours] if isinstance(ours, list) else ours.tolist()
        assert ours == theirs, key
        assert type(ours) is type(theirs), key
    assert {"u64", "words", "floats", "general.architecture"} <= values.keys()


def test_tensors_equal_what_was_written_and_are_views(written: Path) -> None:
    file = GgufFile.open(written)
    oracle = gguf.GGUFReader(written)
    assert len(oracle.tensors) == len(file.entries) == len(GGML_TYPES)
    for theirs in oracle.tensors:
        ours = file.tensor(theirs.name)
        assert ours.type.name == theirs.tensor_type.name
        assert ours.shape == tuple(int(size) for size in reversed(theirs.shape))
        assert ours.data.shape[:-1] == ours.shape[:-1]
        assert ours.data.tobytes() == theirs.data.tobytes()
        assert not ours.data.flags.owndata
        assert not ours.data.flags.writeable
    before = file.tensor("t.Q4_K").data.copy()
    file.release_pages(file.entries["t.Q4_K"].begin, file.entries["t.Q4_K"].end)
    assert np.array_equal(file.tensor("t.Q4_K").data, before)


@pytest.mark.parametrize("alignment", [1, 8, 4096])
def test_general_alignment_is_honoured(tmp_path: Path, alignment: int) -> None:
    pair = metadata("general.alignment", U32, struct.pack("<I", alignment))
    second = 32 + -32 % alignment
    raw = build(
        (pair,),
        (tensor("a"), tensor("bc", (3, 2), offset=second)),
        bytes(range(32)).ljust(second, b"\0") + bytes(24),
        alignment=alignment,
    )
    file = GgufFile.open(write(tmp_path / "x.gguf", raw))
    assert file.tensor("a").data.tobytes() == bytes(range(32))
    assert file.tensor("bc").shape == (2, 3)


GOOD = (tensor("a"), tensor("b", (32, 2), Q4_0, 32))
DATA = bytes(range(68))
HUGE = 2**63
FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "a GGUF file, got 0 bytes"),
    "other_magic": (build(magic=b"GGML"), "starting with 'GGUF'"),
    "version_1": (build(version=1), "got version 1"),
    "big_endian": (build(version=3 << 24), "got a big-endian file"),
    "tensor_count": (build(counts=(HUGE, 0)), f"at most 0 tensors in 8 bytes, got {HUGE}"),
    "metadata_count": (build(counts=(0, HUGE)), f"at most 0 metadata entries in 8 bytes, got {HUGE}"),
    "one_tensor_missing": (build(tensors=GOOD, counts=(9, 0)), "at most"),
    "key_length": (build((struct.pack("<Q", HUGE) + bytes(40),)), "a metadata key of at most"),
    "key_beyond_file": (build((struct.pack("<Q", 1000) + bytes(40),)), "a metadata key inside the file"),
    "key_not_utf8": (build((metadata(b"\xff\xfe", U8, b"\1"),)), "a metadata key in UTF-8"),
    "key_unprintable": (build((metadata("a\x1b[2J", U8, b"\1"),)), "printable tensor names"),
    "key_twice": (build((metadata("k", U8, b"\1"),) * 2), "x.gguf: k] expected one metadata entry"),
    "value_type": (build((metadata("k", 13, bytes(16)),)), "x.gguf: k] expected a metadata type"),
    "value_bool": (build((metadata("k", BOOL, b"\2"),)), "x.gguf: k] expected booleans"),
    "value_beyond_file": (build((metadata("k", STRING, struct.pack("<Q", HUGE)),)), "x.gguf: k] expected a string"),
    "value_not_utf8": (build((metadata("k", STRING, string(b"\xc3\x28")),)), "x.gguf: k] expected a string in UTF-8"),
    "array_count": (
        build((metadata("k", ARRAY, struct.pack("<IQ", U64, HUGE) + bytes(64)),)),
        "x.gguf: k] expected an array inside the file",
    ),
    "array_strings": (
        build((metadata("k", ARRAY, struct.pack("<IQ", STRING, HUGE) + bytes(64)),)),
        r"x.gguf: k] expected at most \d+ strings",
    ),
    "array_string_length": (
        build((metadata("k", ARRAY, struct.pack("<IQQ", STRING, 1, HUGE) + bytes(64)),)),
        "x.gguf: k] expected a string inside the file",
    ),
    "array_nested": (
        build((metadata("k", ARRAY, struct.pack("<IQIQ", ARRAY, 1, ARRAY, HUGE) + bytes(64)),)),
        "got an array of arrays",
    ),
    "array_bool": (build((metadata("k", ARRAY, struct.pack("<IQ", BOOL, 2) + b"\1\7"),)), "booleans stored as 0 or 1"),
    "alignment_zero": (build((metadata("general.alignment", U32, bytes(4)),)), "general.alignment] expected a power"),
    "alignment_48": (build((metadata("general.alignment", U32, b"\x30\0\0\0"),)), "expected a power of two"),
    "alignment_huge": (build((metadata("general.alignment", U64, b"\0" * 7 + b"\x40"),)), "expected a power of two"),
    "alignment_text": (build((metadata("general.alignment", STRING, string("32")),)), "general.alignment.*got str"),
    "name_twice": (
        build(tensors=(tensor("a"), tensor("a", offset=32)), data=bytes(64)),
        "x.gguf: a] expected one tensor",
    ),
    "name_empty": (build(tensors=(tensor(""), tensor("b")), data=DATA), "printable tensor names"),
    "rank_0": (
        build(tensors=(tensor("a", ()), tensor("b")), data=DATA),
        "x.gguf: a] expected 1 to 4 dimensions, got 0",
    ),
    "rank_5": (build(tensors=(tensor("a", (1,) * 5),), data=DATA), "x.gguf: a] expected 1 to 4 dimensions, got 5"),
    "rank_huge": (build(tensors=(tensor("a", rank=2**32 - 1),), data=DATA), "x.gguf: a] expected 1 to 4 dimensions"),
    "size_0": (build(tensors=(tensor("a", (8, 0)),), data=DATA), "x.gguf: a] expected sizes from 1"),
    "size_2_63": (build(tensors=(tensor("a", (8, HUGE)),), data=DATA), "x.gguf: a] expected sizes from 1"),
    "product_overflows": (
        build(tensors=(tensor("a", (2**32, 2**32, 4)),), data=DATA),
        "x.gguf: a] expected a tensor inside the file",
    ),
    "row_of_no_block": (
        build(tensors=(tensor("a", (33,), Q4_0),), data=DATA),
        "x.gguf: a] expected rows of a multiple of 32",
    ),
    "type_unknown": (
        build(tensors=(tensor("a", kind=4),), data=DATA),
        "x.gguf: a] expected a tensor type.*type number 4",
    ),
    "type_huge": (build(tensors=(tensor("a", kind=2**32 - 1),), data=DATA), "type number 4294967295"),
    "offset_huge": (build(tensors=(tensor("a", offset=2**64 - 32),), data=DATA), "x.gguf: a] expected offset 0"),
    "offset_unaligned": (build(tensors=(tensor("a", offset=4),), data=DATA), "x.gguf: a] expected offset 0"),
    "overlap": (build(tensors=(tensor("a"), tensor("b")), data=DATA), "x.gguf: b] expected offset 32"),
    "truncated": (build(tensors=GOOD, data=DATA[:-1]), "x.gguf: b] expected a tensor inside the file.*truncated"),
    "too_many_tensors": (
        build(counts=(MAX_TENSORS + 1, 0), data=bytes(MAX_TENSORS * 40)),
        f"at most {MAX_TENSORS} tensors",
    ),
    "too_much_metadata": (
        build(counts=(0, MAX_METADATA + 1), data=bytes(MAX_METADATA * 20)),
        f"at most {MAX_METADATA} metadata entries",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lying_file_is_named_with_what_is_wrong(tmp_path: Path, fault: str) -> None:
    raw, message = FAULTS[fault]
    path = write(tmp_path / "x.gguf", raw)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message) as caught:
        GgufFile.open(path)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1500


def test_the_good_base_of_the_faults_opens(tmp_path: Path) -> None:
    file = GgufFile.open(write(tmp_path / "x.gguf", build((metadata("k", U8, b"\1"),), GOOD, DATA)))
    assert file.tensor("b").data.tobytes() == DATA[32:]
    assert file.metadata == {"k": 1}


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="a regular file"):
        GgufFile.open(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="got nothing"):
        GgufFile.open(tmp_path / "missing.gguf")


RICH = build(
    (
        metadata("general.alignment", U32, struct.pack("<I", 32)),
        metadata("words", ARRAY, struct.pack("<IQ", STRING, 2) + string("ab") + string("c")),
        metadata("numbers", ARRAY, struct.pack("<IQ3I", U32, 3, 1, 2, 3)),
        metadata("text", STRING, string("hello")),
        metadata("flag", BOOL, b"\1"),
    ),
    GOOD,
    DATA,
)
HEADER_BYTES = len(RICH) - len(DATA)
edits = st.lists(
    st.tuples(
        st.integers(0, HEADER_BYTES - 1),
        st.one_of(
            st.binary(min_size=1, max_size=2),
            st.sampled_from([struct.pack("<Q", n) for n in (0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)]),
        ),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=600, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=edits, cut=st.one_of(st.none(), st.integers(0, len(RICH))))
def test_a_damaged_header_opens_or_is_a_checkpoint_error(tmp_path: Path, edits: Any, cut: int | None) -> None:
    raw = bytearray(RICH)
    for position, patch in edits:
        raw[position : position + len(patch)] = patch
    path = write(tmp_path / "fuzz.gguf", bytes(raw[:cut]))
    try:
        model = GgufModel.open(path)
    except CheckpointError:
        return
    for name in model.names:
        assert model.tensor(name).data.nbytes == model.entry(name).nbytes
    for value in model.metadata.values():
        if isinstance(value, GgufArray):
            assert len(value.values()) == value.length


def split_pairs(number: int, count: int, total: int) -> tuple[bytes, ...]:
    return (
        metadata("split.no", 2, struct.pack("<H", number)),
        metadata("split.count", 2, struct.pack("<H", count)),
        metadata("split.tensors.count", 5, struct.pack("<i", total)),
    )


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """Three files: the first holds metadata alone, as `llama-gguf-split --no-tensor-first-split` leaves it."""
    parts = [(), (tensor("a"),), (tensor("b", (32, 2), Q4_0),)]
    for number, tensors in enumerate(parts):
        pairs = split_pairs(number, 3, 2) + ((metadata("k", U8, b"\1"),) if number == 0 else ())
        data = b"" if not tensors else bytes([number]) * (32 if number == 1 else 36)
        write(tmp_path / f"m-{number + 1:05}-of-00003.gguf", build(pairs, tensors, data))
    return tmp_path


@pytest.mark.parametrize("name", ["", "m-00001-of-00003.gguf", "m-00003-of-00003.gguf"])
def test_split_files_are_one_model(split: Path, name: str) -> None:
    model = GgufModel.open(split / name)
    assert set(model.names) == {"a", "b"}
    assert model.metadata["k"] == 1
    assert model.tensor("b").data.tobytes() == bytes([2]) * 36
    assert model.where("b") == f"{split / 'm-00003-of-00003.gguf'}: b"
    with pytest.raises(CheckpointError, match="a tensor 'c', got no such tensor"):
        model.tensor("c")


def test_split_files_that_do_not_belong_together_are_refused(split: Path) -> None:
    first, last = split / "m-00001-of-00003.gguf", split / "m-00003-of-00003.gguf"
    good = last.read_bytes()
    write(last, build(split_pairs(1, 3, 2), (tensor("b"),), bytes(32)))
    with pytest.raises(CheckpointError, match=r"m-00003-of-00003.gguf: split.no\] expected 2, got 1"):
        GgufModel.open(first)
    write(last, build(split_pairs(2, 3, 2), (tensor("a"),), bytes(32)))
    with pytest.raises(CheckpointError, match=r"m-00003.*: a\] expected a tensor no other file"):
        GgufModel.open(first)
    write(last, build((), (tensor("b"),), bytes(32)))
    with pytest.raises(CheckpointError, match=r"split.no\] expected 2, got none"):
        GgufModel.open(first)
    last.unlink()
    with pytest.raises(CheckpointError, match=r"m-00003-of-00003.gguf\] expected a file, got nothing"):
        GgufModel.open(first)
    write(last, good)
    write(first, build(split_pairs(0, 3, 7)))
    with pytest.raises(CheckpointError, match=r"split.tensors.count\] expected 2, what the 3 files hold, got 7"):
        GgufModel.open(first)
    write(first, build((metadata("split.count", STRING, string("3")),)))
    with pytest.raises(CheckpointError, match=r"split.count\] expected an integer"):
        GgufModel.open(first)
    with pytest.raises(CheckpointError, match="a name that ends in"):
        GgufModel.open(write(split / "renamed.gguf", build(split_pairs(0, 3, 2))))


def test_a_directory_holds_one_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"one GGUF model, got no \.gguf file"):
        GgufModel.open(tmp_path)
    write(tmp_path / "q4.gguf", build(tensors=GOOD, data=DATA))
    assert set(GgufModel.open(tmp_path).names) == {"a", "b"}
    write(tmp_path / "q8.gguf", build(tensors=GOOD, data=DATA))
    with pytest.raises(CheckpointError, match=r"got 2: q4\.gguf, q8\.gguf.*name the file"):
        GgufModel.open(tmp_path)
