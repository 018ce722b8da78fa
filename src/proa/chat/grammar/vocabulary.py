"""The vocabulary of a checkpoint, for the process that has its logits and not its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from proa.chat.grammar.matcher import Vocabulary, token_table
from proa.chat.tokenizer_files import TokenizerFiles
from proa.core.errors import UnsupportedError

__all__ = ["load_vocabulary"]


def load_vocabulary(files: TokenizerFiles, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Read the tokenizer among `files` for a model with `vocab_size` logits.

    Raises:
        CheckpointError: a missing or damaged tokenizer.
        UnsupportedError: a tokenizer proa does not have, or without a token to end with.
    """
    tokenizer = files.tokenizer()
    special = sorted(token_id for token_id in {*eos_token_ids, *tokenizer.control_ids} if 0 <= token_id < vocab_size)
    end_id = next((token_id for token_id in eos_token_ids if token_id in special), special[0] if special else None)
    if end_id is None:
        raise UnsupportedError("tokenizer", "a special token, for constrained answers to end with", "none")
    return Vocabulary(token_table(tokenizer, vocab_size), end_id)
