"""Deltas as OpenAI chat completions, whole or in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from proa.chat.detokenizer import TokenBytes
from proa.chat.output.events import Answer, CallStart, ContentDelta, ReasoningDelta
from proa.chat.output.events import Event as OutputEvent
from proa.server.assembler import Delta, TokenEntry
from proa.server.framing import OPENAI_CHUNKS, Event, add_usage
from proa.server.generation import GenerationPlan, Usage
from proa.server.generation_request import StreamOptions

__all__ = ["ChatFormat"]


class ChatFormat:
    """Serializer of one chat completion."""

    framing = OPENAI_CHUNKS

    def __init__(
        self,
        plan: GenerationPlan,
        tokenizer: TokenBytes,
        *,
        with_logprobs: bool,
        options: StreamOptions | None = None,
    ) -> None:
        self._options = options or StreamOptions()
        self._plan = plan
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs

    def opening(self, usage: Usage) -> Iterator[Event]:  # noqa: ARG002
        """Chunks that open every choice."""
        for index in range(self._plan.n):
            yield self._chunk([self._choice_delta(index, {"role": "assistant", "content": ""})])

    def events(self, delta: Delta, usage: Callable[[], Usage]) -> Iterator[Event]:
        """The chunks of one delta: one for each thing that is new."""
        parts = [_event_delta(event) for event in delta.events]
        if not parts:
            parts = [{"content": delta.text} if delta.text or delta.entries else {}]
        for position, part in enumerate(parts):
            choice = self._choice_delta(delta.index, part)
            if position == 0 and self._with_logprobs and delta.entries:
                choice["logprobs"] = self._logprobs(delta.entries)
            if position == len(parts) - 1:
                choice["finish_reason"] = delta.finish_reason
                if delta.finish_reason is not None:
                    choice["stop_reason"] = delta.stop_reason
            chunk = self._chunk([choice])
            add_usage(chunk, self._options, usage)
            yield chunk

    def closing(self, usage: Usage) -> Iterator[Event]:
        """The last chunk of a stream that includes the usage."""
        if self._options.include_usage:
            yield {**self._chunk([]), "usage": usage.as_dict()}

    def silence(self) -> Iterator[Event]:
        """None: a comment will do."""
        return iter(())

    def failure(self, error: Event) -> Event:
        """The error itself."""
        return error

    def response(self, deltas: Iterable[Delta], usage: Usage) -> dict[str, Any]:
        """The whole completion."""
        choices = []
        by_index: dict[int, list[Delta]] = {index: [] for index in range(self._plan.n)}
        for delta in deltas:
            by_index[delta.index].append(delta)
        for index, parts in by_index.items():
            entries = [entry for part in parts for entry in part.entries]
            message = (
                {"role": "assistant", "content": "".join(part.text for part in parts), "refusal": None}
                if self._plan.reading is None
                else _message(Answer.of(event for part in parts for event in part.events))
            )
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(entries) if self._with_logprobs else None,
                    "finish_reason": parts[-1].finish_reason,
                    "stop_reason": parts[-1].stop_reason,
                }
            )
        return {**self._head("chat.completion"), "choices": choices, "usage": usage.as_dict()}

    def _head(self, kind: str) -> dict[str, Any]:
        plan = self._plan
        return {"id": plan.id, "object": kind, "created": plan.created, "model": plan.model}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk"), "choices": choices}

    def _choice_delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, entries: list[TokenEntry]) -> dict[str, Any]:
        content = []
        for entry in entries:
            logprob = entry.logprob
            top = [self._token(token_id, value) for token_id, value in logprob.top]
            content.append({**self._token(logprob.token_id, logprob.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _event_delta(event: OutputEvent) -> dict[str, Any]:
    """An event as the `delta` of a chunk. Reasoning goes under both names clients look for."""
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text, "reasoning": event.text}
    if isinstance(event, CallStart):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


def _message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning_content"] = message["reasoning"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return message


def _finite(logprob: float) -> float:
    # JSON has no infinity; OpenAI writes -9999 for a probability of zero.
    return max(logprob, -9999.0)
