"""Deltas as OpenAI text completions, whole or in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from proa.chat.detokenizer import TokenBytes
from proa.server.assembler import Delta, TokenEntry
from proa.server.framing import OPENAI_CHUNKS, Event, add_usage
from proa.server.generation import GenerationPlan, Usage
from proa.server.generation_request import StreamOptions

__all__ = ["CompletionFormat"]


class CompletionFormat:
    """Serializer of one text completion. `echoes`: text to put before the answers, one per prompt; empty for none."""

    framing = OPENAI_CHUNKS

    def __init__(
        self,
        plan: GenerationPlan,
        tokenizer: TokenBytes,
        *,
        with_logprobs: bool,
        echoes: Sequence[str] = (),
        options: StreamOptions | None = None,
    ) -> None:
        self._options = options or StreamOptions()
        self._plan = plan
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._echoes = echoes

    def opening(self, usage: Usage) -> Iterator[Event]:  # noqa: ARG002
        """Chunks with the echoed prompts."""
        for index in range(len(self._plan.prompts) * self._plan.n):
            if echo := self._echo(index):
                yield self._body([self._choice(Delta(index, echo), [])])

    def events(self, delta: Delta, usage: Callable[[], Usage]) -> Iterator[Event]:
        """The chunk of one delta."""
        chunk = self._body([self._choice(delta, delta.entries)])
        add_usage(chunk, self._options, usage)
        yield chunk

    def closing(self, usage: Usage) -> Iterator[Event]:
        """The last chunk of a stream that includes the usage."""
        if self._options.include_usage:
            yield {**self._body([]), "usage": usage.as_dict()}

    def silence(self) -> Iterator[Event]:
        """None: a comment will do."""
        return iter(())

    def failure(self, error: Event) -> Event:
        """The error itself."""
        return error

    def response(self, deltas: Iterable[Delta], usage: Usage) -> dict[str, Any]:
        """The whole completion."""
        by_index: dict[int, list[Delta]] = {index: [] for index in range(len(self._plan.prompts) * self._plan.n)}
        for delta in deltas:
            by_index[delta.index].append(delta)
        choices = []
        for index, parts in by_index.items():
            whole = Delta(
                index,
                self._echo(index) + "".join(part.text for part in parts),
                finish_reason=parts[-1].finish_reason,
                stop_reason=parts[-1].stop_reason,
            )
            choices.append(self._choice(whole, [entry for part in parts for entry in part.entries]))
        return {**self._body(choices), "usage": usage.as_dict()}

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._plan.n] if self._echoes else ""

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        plan = self._plan
        return {
            "id": plan.id,
            "object": "text_completion",
            "created": plan.created,
            "model": plan.model,
            "choices": choices,
        }

    def _choice(self, delta: Delta, entries: list[TokenEntry]) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(entries) if self._with_logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return choice

    def _logprobs(self, entries: list[TokenEntry]) -> dict[str, Any]:
        return {
            "tokens": [self._text(entry.logprob.token_id) for entry in entries],
            "token_logprobs": [max(entry.logprob.logprob, -9999.0) for entry in entries],
            "top_logprobs": [
                {self._text(token_id): max(value, -9999.0) for token_id, value in entry.logprob.top}
                for entry in entries
            ],
            "text_offset": [entry.text_offset for entry in entries],
        }

    def _text(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            # OpenAI's spelling of a token that is part of a character.
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
