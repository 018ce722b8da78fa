"""Turns request text into token ids, in worker threads so that no stream waits for a long prompt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from proa.chat.answer_style import choose_style, refuse_other_than_kimi
from proa.chat.dialect import ChatPrompt, ChatTurn, Dialect, KimiDialect, TemplateDialect
from proa.chat.kimi_prompt import kimi_style
from proa.chat.templates import ChatTemplate, read_json
from proa.chat.tiktoken_tokenizer import TiktokenTokenizer
from proa.chat.tokenizer import Tokenizer
from proa.chat.tokenizer_files import TokenizerFiles
from proa.core.errors import QueueFullError, UnavailableError
from proa.server.errors import PromptTooLongError

__all__ = ["Frontend"]

logger = logging.getLogger("proa.server.frontend")

_NUM_THREADS = 2
_MAX_PENDING = 256
# A normalizer may shorten text before it is tokenized: composing characters at most halves it, 4 is on the safe side.
_NORMALIZED_SHRINK = 4

_Result = TypeVar("_Result")


class Frontend:
    """Tokenizer and chat template of the served model.

    Loading takes a moment for large vocabularies, so it runs in a thread beside the engine's; until `load` is done
    every method raises UnavailableError.
    """

    def __init__(
        self,
        model_path: Path,
        template_override: Path | None,
        *,
        expert_path: Path | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        self._model_path = model_path
        self._template_override = template_override
        self._expert_path = expert_path
        self._parsers = (tool_call_parser, reasoning_parser)
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="frontend")
        self._pending = 0
        self._tokenizer: Tokenizer | TiktokenTokenizer | None = None
        self._dialect: Dialect | None = None
        self._longest_token_bytes = 1
        self.eos_token_ids: frozenset[int] = frozenset()
        self.generation_config: dict[str, Any] = {}

    @property
    def is_loaded(self) -> bool:
        """Whether prompts can be tokenized."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer | TiktokenTokenizer:
        """The tokenizer; UnavailableError while it loads."""
        if self._tokenizer is None:
            raise UnavailableError("tokenizer", "a loaded tokenizer", "one that is loading", "watch /readyz and retry")
        return self._tokenizer

    async def load(self) -> None:
        """Read tokenizer, template and generation config. Raises CheckpointError and UnsupportedError."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._load)

    def _load(self) -> None:
        files = TokenizerFiles(self._model_path, self._expert_path)
        source = files.template_source(self._template_override)
        special = files.special_tokens()
        tokenizer = files.tokenizer(source or "")
        if isinstance(tokenizer, TiktokenTokenizer) and self._template_override is None:
            refuse_other_than_kimi(*self._parsers)
            style = kimi_style(read_json(self._model_path / "config.json"), self._model_path.name, source or "")
            self._dialect = KimiDialect(tokenizer, style)
        else:
            template = None if source is None else ChatTemplate(source, tokenizer.control, special_tokens=special)
            self._dialect = TemplateDialect(tokenizer, template, choose_style(template, *self._parsers))
        self.generation_config = read_json(self._model_path / "generation_config.json")
        self.eos_token_ids = _eos_token_ids(self.generation_config, tokenizer, special.get("eos_token"))
        self._longest_token_bytes = tokenizer.longest_token_bytes()
        self._tokenizer = tokenizer

    def close(self) -> None:
        """Drop what waits; running threads end by themselves."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def in_worker(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Run `function` in a worker thread. QueueFullError when too many wait."""
        if self._pending >= _MAX_PENDING:
            raise QueueFullError(_MAX_PENDING)
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
        finally:
            self._pending -= 1

    async def encode_text(self, text: str, *, max_tokens: int | None, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw prompt that may have at most `max_tokens`."""
        tokenizer = self.tokenizer
        self._refuse_hopeless(len(text), max_tokens, "prompt")
        return await self.in_worker(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def encode_chat(self, turn: ChatTurn, *, max_tokens: int | None, where: str = "messages") -> ChatPrompt:
        """The prompt of a conversation that may have at most `max_tokens`, and how its answer is read.

        `where`: the field of the request that holds the conversation, for errors.
        """
        _ = self.tokenizer
        dialect = self._dialect
        assert dialect is not None
        self._refuse_hopeless(sum(len(message["content"]) for message in turn.messages), max_tokens, where)
        return await self.in_worker(
            lambda: dialect.prompt(turn, lambda size: self._refuse_hopeless(size, max_tokens, where))
        )

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `token_ids`."""
        tokenizer = self.tokenizer
        return await self.in_worker(lambda: tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def _refuse_hopeless(self, num_characters: int, max_tokens: int | None, where: str) -> None:
        """Refuse text that cannot fit however it is tokenized, before the work of doing so."""
        if max_tokens is None:
            return
        fewest = num_characters // (self._longest_token_bytes * _NORMALIZED_SHRINK)
        if fewest > max_tokens:
            raise PromptTooLongError(where, num_characters, fewest, max_tokens)


def _eos_token_ids(
    generation_config: dict[str, Any], tokenizer: Tokenizer | TiktokenTokenizer, eos_token: str | None
) -> frozenset[int]:
    ids = generation_config.get("eos_token_id")
    found = {ids} if isinstance(ids, int) else set(ids) if isinstance(ids, list) else set()
    if eos_token is not None and (token_id := tokenizer.token_id(eos_token)) is not None:
        found.add(token_id)
    return frozenset(token_id for token_id in found if isinstance(token_id, int))
