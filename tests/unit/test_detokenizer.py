from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from proa.chat.detokenizer import Detokenizer, StopStrings
from proa.chat.tokenizer import Tokenizer
from proa.core.errors import CheckpointError, UnsupportedError


class Bytes:
    """Token id = byte value; 256 is special."""

    special_ids = frozenset({256})

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == 256 else bytes([token_id])


def push_all(data: bytes) -> list[str]:
    detokenizer = Detokenizer(Bytes())
    return [*(detokenizer.push(byte) for byte in data), detokenizer.finish()]


@given(st.text())
def test_byte_by_byte_gives_the_text(text: str):
    pieces = push_all(text.encode())
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces) or "�" in text


@given(st.binary())
def test_any_bytes_equal_the_whole_decode(data: bytes):
    pieces = push_all(data)
    assert "".join(pieces) == data.decode("utf-8", "replace")
    assert all(piece.encode() for piece in pieces if piece)


def test_incomplete_characters_are_held_back():
    assert push_all("é🙂".encode()) == ["", "é", "", "", "", "🙂", ""]
    assert push_all("🙂".encode()[:3]) == ["", "", "", "�"]
    assert push_all("🙂".encode()[:2] + b"a") == ["", "", "�a", ""]


def test_special_tokens():
    hidden, shown = Detokenizer(Bytes()), Detokenizer(Bytes(), skip_special_tokens=False)
    assert (hidden.push(256), shown.push(256)) == ("", "<end>")
    # One between the bytes of a character does not break it.
    assert [hidden.push(token) for token in (0xC3, 256, 0xA9)] == ["", "", "é"]


def reference(text: str, stops: list[str]) -> str | None:
    """Text before the stop string that ends first, the longest of those; None without one."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))]
    return None


@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.integers(0, 40), max_size=12),
)
def test_stop_strings_whatever_the_pieces(text: str, stops: list[str], cuts: list[int]):
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    matcher = StopStrings(stops)
    sent = ""
    for start, end in itertools.pairwise(bounds):
        sent += matcher.push(text[start:end])
        # Nothing of a stop string that is complete by now was sent.
        before = reference(text[:end], stops)
        assert before is None or sent == before
    sent += matcher.finish()
    expected = reference(text, stops)
    assert sent == (text if expected is None else expected)
    assert (matcher.found is None) == (expected is None)


def test_stop_string_is_never_sent_in_part():
    matcher = StopStrings(["STOP"])
    assert [matcher.push(piece) for piece in ("a ST", "O", "X STO", "P b", "c")] == ["a ", "", "STOX ", "", ""]
    assert matcher.found == "STOP" and matcher.finish() == ""


def test_unarmed_stop_strings_do_not_count():
    matcher = StopStrings(["ab"])
    assert matcher.push("xab", armed=False) + matcher.push("ya") + matcher.push("b") == "xaby"
    assert matcher.found == "ab"


def sentence_piece() -> Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁the": 256, "▁": 257, "fox": 258, "</s>": 259}
    backend = Backend(models.BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["</s>"])
    return Tokenizer.from_definition(_definition(backend))


def _definition(backend: Backend) -> dict:
    import json

    return json.loads(backend.to_str())


def test_sentence_piece_vocabulary():
    tokenizer = sentence_piece()
    ids = [256, 257, 258, *"é🙂".encode(), 259, 256]
    assert tokenizer.decode(ids) == "the foxé🙂 the"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the foxé🙂</s> the"
    # As the continuation of a prompt the first blank is text.
    assert Detokenizer(tokenizer).push(256) == " the"


def test_other_decoders_are_refused():
    backend = Backend(models.WordLevel({"a": 0}, "a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedError, match="WordPiece"):
        Tokenizer.from_definition(_definition(backend))


@pytest.mark.parametrize(
    "definition", [{}, {"added_tokens": [], "model": {"type": "BPE", "vocab": 5}}, {"added_tokens": 1}]
)
def test_damaged_definitions(definition: dict):
    with pytest.raises(CheckpointError, match="tokenizer"):
        Tokenizer.from_definition(definition)


def test_random_ids_of_a_byte_level_vocabulary_decode_as_in_tokenizers(tiny_backend: Backend):
    tokenizer = Tokenizer.from_definition(_definition(tiny_backend))
    generator = random.Random(1)
    for _ in range(300):
        ids = [generator.randrange(tiny_backend.get_vocab_size()) for _ in range(generator.randrange(30))]
        for skip in (True, False):
            detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
            text = "".join(detokenizer.push(token) for token in ids) + detokenizer.finish()
            assert (
                text
                == tiny_backend.decode(ids, skip_special_tokens=skip)
                == tokenizer.decode(ids, skip_special_tokens=skip)
            )


@pytest.fixture(scope="module")
def tiny_backend() -> Backend:
    from tokenizers import AddedToken, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox", "Grüße 你好世界 🙂 the fox"] * 5, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("你好", normalized=False)])
    return backend
