"""Output items of the Responses API, each with the events that tell of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from proa.server.framing import Event
from proa.server.responses_items import sealed
from proa.server.responses_tools import ToolRef, free_text_of

__all__ = ["CustomCall", "FunctionCall", "OutputItem", "OutputMessage", "Reasoning"]


class OutputItem(Protocol):
    """An item that is being written. Events have no sequence number and no output index yet."""

    def opened(self) -> Iterator[Event]:
        """The events that announce it."""
        ...

    def more(self, text: str) -> Iterator[Event]:
        """More of its text."""
        ...

    def closed(self, status: str) -> Iterator[Event]:
        """The events that end it, `response.output_item.done` with the whole item the last."""
        ...


class _Text:
    """What messages and reasoning have in common: one content part of text."""

    def __init__(self, item: dict[str, Any], part: dict[str, Any], event: str) -> None:
        self._item = item
        self._part = part
        self._event = event
        self._texts: list[str] = []
        self._place = {"item_id": item["id"], "content_index": 0}

    def opened(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "item": dict(self._item)}
        yield {"type": "response.content_part.added", **self._place, "part": dict(self._part)}

    def more(self, text: str, **extra: Any) -> Iterator[Event]:
        if text:
            self._texts.append(text)
            yield {"type": f"response.{self._event}.delta", **self._place, "delta": text, **extra}

    def closed(self, status: str, **extra: Any) -> Iterator[Event]:
        text = "".join(self._texts)
        part = {**self._part, "text": text}
        yield {"type": f"response.{self._event}.done", **self._place, "text": text, **extra}
        yield {"type": "response.content_part.done", **self._place, "part": part}
        yield {"type": "response.output_item.done", "item": {**self._item, "content": [part], "status": status}}


class OutputMessage(_Text):
    """Content."""

    def __init__(self, item_id: str) -> None:
        item = {"id": item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        super().__init__(item, part, "output_text")

    def more(self, text: str, **extra: Any) -> Iterator[Event]:
        return super().more(text, logprobs=[], **extra)

    def closed(self, status: str, **extra: Any) -> Iterator[Event]:
        return super().closed(status, logprobs=[], **extra)


class Reasoning(_Text):
    """Reasoning; `is_sealed`: also as encrypted_content, which clients without a store hand back."""

    def __init__(self, item_id: str, *, is_sealed: bool) -> None:
        item = {"id": item_id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        super().__init__(item, {"type": "reasoning_text", "text": ""}, "reasoning_text")
        self._is_sealed = is_sealed

    def closed(self, status: str, **extra: Any) -> Iterator[Event]:
        self._item["encrypted_content"] = sealed("".join(self._texts)) if self._is_sealed else None
        return super().closed(status, **extra)


def _begun_call(kind: str, item_id: str, call_id: str, ref: ToolRef, field: str) -> Event:
    """The item of a call of `ref` whose text, in `field`, is to come."""
    item = {"id": item_id, "type": kind, "status": "in_progress", "call_id": call_id, "name": ref.name, field: ""}
    return item if ref.namespace is None else {**item, "namespace": ref.namespace}


class FunctionCall:
    """A call of a function."""

    def __init__(self, item_id: str, call_id: str, ref: ToolRef) -> None:
        self._item = _begun_call("function_call", item_id, call_id, ref, "arguments")
        self._texts: list[str] = []

    def opened(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "item": dict(self._item)}

    def more(self, text: str) -> Iterator[Event]:
        if text:
            self._texts.append(text)
            delta = {"item_id": self._item["id"], "delta": text}
            yield {"type": "response.function_call_arguments.delta", **delta}

    def closed(self, status: str) -> Iterator[Event]:
        arguments = "".join(self._texts)
        done = {"item_id": self._item["id"], "name": self._item["name"], "arguments": arguments}
        yield {"type": "response.function_call_arguments.done", **done}
        yield {"type": "response.output_item.done", "item": {**self._item, "arguments": arguments, "status": status}}


class CustomCall:
    """A call of a free-text tool. Its text is known at the end, when the JSON around it is."""

    def __init__(self, item_id: str, call_id: str, ref: ToolRef) -> None:
        self._item = _begun_call("custom_tool_call", item_id, call_id, ref, "input")
        self._texts: list[str] = []

    def opened(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "item": dict(self._item)}

    def more(self, text: str) -> Iterator[Event]:
        self._texts.append(text)
        return iter(())

    def closed(self, status: str) -> Iterator[Event]:
        text = free_text_of("".join(self._texts))
        place = {"item_id": self._item["id"]}
        if text:
            yield {"type": "response.custom_tool_call_input.delta", **place, "delta": text}
        yield {"type": "response.custom_tool_call_input.done", **place, "input": text}
        yield {"type": "response.output_item.done", "item": {**self._item, "input": text, "status": status}}
