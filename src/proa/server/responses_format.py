"""Answers as OpenAI responses, whole or as events in the order that Codex and the SDKs rely on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from proa.chat.output.events import CallStart, ContentDelta, ReasoningDelta
from proa.chat.output.events import Event as OutputEvent
from proa.server.assembler import Delta
from proa.server.framing import RESPONSES_EVENTS, Event
from proa.server.generation import GenerationPlan, Usage
from proa.server.responses_output import CustomCall, FunctionCall, OutputItem, OutputMessage, Reasoning
from proa.server.responses_request import ResponsesRequest
from proa.server.responses_tools import ResponseTools

__all__ = ["ResponsesFormat"]


class ResponsesFormat:
    """Serializer of one response. An item is closed by the next one, or by the end."""

    framing = RESPONSES_EVENTS

    def __init__(self, plan: GenerationPlan, body: ResponsesRequest) -> None:
        self._plan = plan
        self._body = body
        self._tools = ResponseTools(body.tools or ())
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._item: OutputItem | None = None
        self._num_items = 0
        self._finish_reason: str | None = None

    def opening(self, usage: Usage) -> Iterator[Event]:  # noqa: ARG002
        """The response without output."""
        for kind in ("created", "in_progress"):
            yield self._numbered({"type": f"response.{kind}", "response": self._response("in_progress")})

    def events(self, delta: Delta, usage: Callable[[], Usage]) -> Iterator[Event]:  # noqa: ARG002
        """What is new; the end closes the open item."""
        for event in delta.parts:
            yield from self._event(event)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            yield from self._close()

    def closing(self, usage: Usage) -> Iterator[Event]:
        """The whole response."""
        response = self._final(usage)
        yield self._numbered({"type": f"response.{response['status']}", "response": response})

    def silence(self) -> Iterator[Event]:
        """Codex counts events, not comments, as signs of life. What a client sent does not come back every time."""
        response = {**self._response("in_progress"), "instructions": None, "tools": [], "metadata": {}}
        response["text"] = {"format": {"type": "text"}}
        yield self._numbered({"type": "response.in_progress", "response": response})

    def failure(self, error: Event) -> Event:
        """The response with what there is of it, and the error."""
        reason = {"code": str(error["error"]["code"]), "message": error["error"]["message"]}
        response = {**self._response("failed"), "error": reason}
        return self._numbered({"type": "response.failed", "response": response})

    def response(self, deltas: Iterable[Delta], usage: Usage) -> dict[str, Any]:
        """The whole response: what the events of a stream add up to."""
        for delta in deltas:
            for _ in self.events(delta, lambda: usage):
                pass
        return self._final(usage)

    def _event(self, event: OutputEvent) -> Iterator[Event]:
        match event:
            case ReasoningDelta():
                if not isinstance(self._item, Reasoning):
                    item_id = self._item_id("rs")
                    yield from self._open(Reasoning(item_id, is_sealed=self._body.wants_sealed_reasoning))
            case ContentDelta():
                if not isinstance(self._item, OutputMessage):
                    yield from self._open(OutputMessage(self._item_id("msg")))
            case CallStart():
                ref = self._tools.ref(event.name)
                kind, prefix = (CustomCall, "ctc") if ref.is_free_text else (FunctionCall, "fc")
                yield from self._open(kind(self._item_id(prefix), event.id, ref))
                return
        assert self._item is not None
        yield from self._placed(self._item.more(event.text))

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._plan.id[-24:]}{self._num_items}"

    def _open(self, item: OutputItem) -> Iterator[Event]:
        yield from self._close()
        self._item = item
        self._num_items += 1
        yield from self._placed(item.opened())

    def _close(self) -> Iterator[Event]:
        if self._item is None:
            return
        for event in self._placed(self._item.closed("incomplete" if self._finish_reason == "length" else "completed")):
            if event["type"] == "response.output_item.done":
                self._output.append(event["item"])
            yield event
        self._item = None

    def _placed(self, events: Iterator[Event]) -> Iterator[Event]:
        for event in events:
            yield self._numbered({**event, "output_index": self._num_items - 1})

    def _numbered(self, event: Event) -> Event:
        event["sequence_number"] = self._sequence
        self._sequence += 1
        return event

    def _final(self, usage: Usage) -> dict[str, Any]:
        is_whole = self._finish_reason in ("stop", "tool_calls")
        response = {**self._response("completed" if is_whole else "incomplete"), "usage": _usage(usage)}
        if is_whole:
            response["completed_at"] = int(time.time())
        elif self._finish_reason == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _response(self, status: str) -> dict[str, Any]:
        plan, body = self._plan, self._body
        text, reasoning = body.text, body.reasoning
        return {
            "id": plan.id,
            "object": "response",
            "created_at": plan.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": plan.model,
            "output": list(self._output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": reasoning.effort if reasoning else None,
                "summary": reasoning.summary if reasoning else None,
            },
            "store": False,
            "temperature": plan.sampling[0].temperature,
            "text": {"format": (text.format if text else None) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": plan.sampling[0].top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
