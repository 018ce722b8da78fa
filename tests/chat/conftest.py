"""Where the handed data lies; tests that need it skip when it is absent."""

from pathlib import Path

import pytest
from hypothesis import settings

# `pytest tests/chat/test_family_output.py -k seed --hypothesis-profile long`: 100 000 examples over all families.
settings.register_profile("long", max_examples=12_500, deadline=None)

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
