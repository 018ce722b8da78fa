"""Texts whose ids are remembered."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from proa.chat.encoded_texts import EncodedTexts


class Counted:
    """An encoding that counts how often it is asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, text):
        self.asked.append(text)
        return [ord(character) for character in text]


def test_a_text_is_encoded_once():
    encode = Counted()
    texts = EncodedTexts(encode)
    for text in ("a", "b", "a", "", "a"):
        assert list(texts.encode(text)) == [ord(character) for character in text]
    assert encode.asked == ["a", "b", ""]


def test_the_least_recently_used_text_is_forgotten_first():
    encode = Counted()
    texts = EncodedTexts(encode, max_characters=800)
    for text in ("a" * 150, "b" * 150, "c" * 150, "a" * 150, "d" * 150):
        texts.encode(text)
    encode.asked.clear()
    for letter in "acdb":
        texts.encode(letter * 150)
    assert encode.asked == ["b" * 150]


def test_a_text_too_long_to_keep_pushes_nothing_out():
    encode = Counted()
    texts = EncodedTexts(encode, max_characters=400)
    texts.encode("short")
    assert list(texts.encode("x" * 101)) == [ord("x")] * 101
    texts.encode("short")
    assert encode.asked == ["short", "x" * 101]


@given(st.lists(st.text(max_size=300), max_size=60))
def test_what_is_remembered_stays_bounded(parts):
    texts = EncodedTexts(Counted(), max_characters=2000)
    for part in parts:
        assert list(texts.encode(part)) == [ord(character) for character in part]
        assert texts.characters <= 2000


def test_threads_agree():
    texts = EncodedTexts(lambda text: [int(text)], max_characters=5000)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: list(texts.encode(str(n % 60))), range(4000)))
    assert found == [[n % 60] for n in range(4000)]
    assert texts.characters <= 5000
