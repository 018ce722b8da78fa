from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa.chat import name_scanner
from proa.chat.name_scanner import NameScanner

NAMES = st.lists(st.text("<|a>", min_size=1, max_size=5), max_size=8)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(name_scanner, "_WINDOW", 3)


@given(NAMES, st.text("<|a>", max_size=40))
def test_equals_a_plain_pattern(names: list[str], text: str):
    plain = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or "(?!)"
    assert NameScanner(names).replace(text, "({})".format) == re.sub(plain, lambda match: f"({match[0]})", text)


def test_membership_and_special_characters():
    scanner = NameScanner(["a.b", "a*", "[x]", ""])
    assert "a*" in scanner and "aa" not in scanner and "" not in scanner
    assert scanner.replace("a.b axb a* [x] x", lambda _: "!") == "! axb ! ! x"


def test_thousands_of_long_names():
    names = [f"<|reserved_{index}|>" for index in range(5000)] + ["<" * 2000]
    scanner = NameScanner(names)
    assert scanner.replace("<|reserved_77|><|reserved_5000|>", lambda _: "!") == "!<|reserved_5000|>"
