"""Where the handed data lies; tests that need it skip when it is absent."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2].parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip("the shared data is not there")
    return SHARED


@pytest.fixture(scope="session")
def kimi_tokenizer(shared):
    from proa.chat.tiktoken_tokenizer import TiktokenTokenizer

    return TiktokenTokenizer.load(shared / "data/kimi-tokenizer")
