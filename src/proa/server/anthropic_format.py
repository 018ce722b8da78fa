"""Answers as Anthropic messages, whole or as events: message_start, blocks one after another, message_delta, stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from proa.chat.output.events import ArgumentsDelta, CallStart, ContentDelta, ReasoningDelta
from proa.chat.output.events import Event as OutputEvent
from proa.chat.output.tools import parse_object
from proa.server.anthropic_request import INVALID_JSON
from proa.server.assembler import Delta
from proa.server.framing import ANTHROPIC_EVENTS, Event
from proa.server.generation import GenerationPlan, Usage

__all__ = ["MessagesFormat"]

# Clients drop thinking without a signature; nobody checks what it says.
_SIGNATURE = "proa"
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormat:
    """Serializer of one message. A block is closed by the next one, or by the end."""

    framing = ANTHROPIC_EVENTS

    def __init__(self, plan: GenerationPlan) -> None:
        self._plan = plan
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the open block
        self._is_open = False
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def opening(self, usage: Usage) -> Iterator[Event]:
        """The message without content. What the prefix cache had is known with the first token."""
        yield {"type": "message_start", "message": self._message([], usage)}
        yield {"type": "ping"}

    def events(self, delta: Delta, usage: Callable[[], Usage]) -> Iterator[Event]:
        """What is new, and with the end its reason and the usage."""
        for event in delta.parts:
            yield from self._event(event)
        if delta.finish_reason is None:
            return
        yield from self._close()
        if delta.finish_reason == "stop" and isinstance(delta.stop_reason, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", delta.stop_reason
        else:
            self._stop_reason = _STOP_REASONS.get(delta.finish_reason, "end_turn")
        reason = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        yield {"type": "message_delta", "delta": reason, "usage": _usage(usage())}

    def closing(self, usage: Usage) -> Iterator[Event]:  # noqa: ARG002
        """The last event."""
        yield {"type": "message_stop"}

    def silence(self) -> Iterator[Event]:
        """Anthropic's own sign of life."""
        yield {"type": "ping"}

    def failure(self, error: Event) -> Event:
        """The error itself."""
        return error

    def response(self, deltas: Iterable[Delta], usage: Usage) -> dict[str, Any]:
        """The whole message: what the events of a stream add up to."""
        for delta in deltas:
            for _ in self.events(delta, lambda: usage):
                pass
        return self._message(self._blocks, usage)

    def _event(self, event: OutputEvent) -> Iterator[Event]:
        match event:
            case ReasoningDelta():
                yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
                yield from self._add("thinking_delta", "thinking", event.text)
            case ContentDelta():
                yield from self._open({"type": "text", "text": ""})
                yield from self._add("text_delta", "text", event.text)
            case CallStart():
                yield from self._close()
                # Anthropic's ids have no dots or colons. They are bound again when they come back.
                call_id = f"toolu_{self._plan.id[-24:]}_{event.index}"
                yield from self._open({"type": "tool_use", "id": call_id, "name": event.name, "input": {}})
            case ArgumentsDelta():
                yield from self._add("input_json_delta", "partial_json", event.text)

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        if self._is_open and self._blocks[-1]["type"] == block["type"]:
            return
        yield from self._close()
        self._is_open = True
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _add(self, kind: str, key: str, text: str) -> Iterator[Event]:
        if text:
            self._texts.append(text)
            yield {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": {"type": kind, key: text}}

    def _close(self) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        index, block, text = len(self._blocks) - 1, self._blocks[-1], "".join(self._texts)
        self._texts = []
        if block["type"] == "tool_use":
            arguments = parse_object(text)
            block["input"] = {INVALID_JSON: text} if arguments is None else arguments
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = _SIGNATURE
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self._plan.id,
            "type": "message",
            "role": "assistant",
            "model": self._plan.model,
            "content": content,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": _usage(usage),
        }


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts what came from the cache apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
