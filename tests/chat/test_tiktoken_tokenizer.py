"""Kimi's tokenizer against its golden encodings, and damaged files."""

import base64
import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.chat.detokenizer import Detokenizer
from proa.chat.tiktoken_tokenizer import TiktokenTokenizer
from proa.core.errors import CheckpointError

BYTES = {bytes([value]): value for value in range(256)}
MERGED = BYTES | {b"he": 256, b"ll": 257, b"hell": 258}


def small_tokenizer():
    return TiktokenTokenizer(MERGED, {"<|end|>": 259, "<think>": 260})


def write_model(directory, ranks=MERGED, added=None):
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (directory / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    added = {"259": {"content": "<|end|>"}} if added is None else added
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))


def test_golden_encodings(shared):
    from proa.chat.replay import main

    directory = shared / "data/kimi-tokenizer"
    assert main(["--tokenizer", str(directory), str(directory / "golden.jsonl")]) == 0


def test_merges_and_markers():
    tokenizer = small_tokenizer()
    assert tokenizer.encode("hello<|end|>") == [258, ord("o"), 259]
    assert tokenizer.encode("h<|end|>", with_control=False) == [ord(c) for c in "h<|end|>"]
    pieces = [("hell<|end|>", False), ("<|end|>", True)]
    assert tokenizer.encode_pieces(pieces) == [258, *map(ord, "<|end|>"), 259]
    assert tokenizer.decode([258, 259, 260]) == "hell<|end|><think>"
    assert tokenizer.decode([258, 259], skip_special_tokens=True) == "hell"
    assert tokenizer.marker_name(259) == "<|end|>" and tokenizer.marker_name(258) is None
    assert tokenizer.token_bytes(9999) == b"" and tokenizer.vocab_size == 261
    with pytest.raises(CheckpointError, match="nowhere"):
        tokenizer.encode_pieces([("nowhere", True)])


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_comes_back(text):
    tokenizer = small_tokenizer()
    ids = tokenizer.encode(text, with_control=False)
    assert tokenizer.decode(ids) == text
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    assert "".join([detokenizer.push(token) for token in ids]) + detokenizer.finish() == text


def test_any_unicode_through_the_real_ranks(kimi_tokenizer):
    every = [chr(c) for c in range(0x20000) if unicodedata.category(chr(c)) != "Cs"]
    for text in ("".join(every), "".join(every[::7]), " \n".join(every[::101])):
        assert kimi_tokenizer.decode(kimi_tokenizer.encode(text, with_control=False)) == text


@pytest.mark.parametrize("unit", [" ", "a", "中", "\n", "!", "é"])
def test_huge_runs_take_linear_time(kimi_tokenizer, unit):
    text = unit * 1_000_000
    assert kimi_tokenizer.decode(kimi_tokenizer.encode(text, with_control=False)) == text


def test_load(tmp_path):
    write_model(tmp_path)
    tokenizer = TiktokenTokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 259 + 256
    assert tokenizer.encode("hell<|end|>") == [258, 259]
    assert tokenizer.marker_name(300) == "<|reserved_token_300|>"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 lines"),
        (b"!!!! 0\n", "line 1"),
        (b"YQ== zero\n", "line 1"),
        (b"YQ==\n", "line 1"),
        (b"\n".join(base64.b64encode(bytes([v])) + b" %d" % (v + 1) for v in range(256)), "ranks"),
        (b"\n".join(base64.b64encode(b"x") + b" %d" % v for v in range(256)), "1 distinct"),
    ],
)
def test_damaged_ranks(tmp_path, content, message):
    write_model(tmp_path)
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        TiktokenTokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "added",
    [
        {"5": {"content": "x"}},
        {"259": {}},
        {"x": {"content": "y"}},
        {"259": {"content": "a"}, "260": {"content": "a"}},
        [],
    ],
)
def test_damaged_control_tokens(tmp_path, added):
    write_model(tmp_path, added=added)
    with pytest.raises(CheckpointError, match=r"tokenizer"):
        TiktokenTokenizer.load(tmp_path)


def test_missing_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"tiktoken\.model"):
        TiktokenTokenizer.load(tmp_path)
