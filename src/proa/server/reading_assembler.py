"""Token outputs of one choice to reasoning, content and tool calls, for models whose answers have these parts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import msgspec

from proa.chat.detokenizer import Detokenizer, StopStrings, TokenBytes
from proa.chat.dialect import AnswerReading
from proa.chat.output.events import ArgumentsDelta, CallStart, ContentDelta, Event, Piece
from proa.core.sampling_params import SamplingParams
from proa.ipc.messages import TokenOutput
from proa.server.assembler import Delta, TokenEntry

__all__ = ["ReadingAssembler"]


class ReadingAssembler:
    """State of one choice. Stop strings count in content only: a call or a thought that quotes one goes on."""

    def __init__(
        self,
        index: int,
        tokenizer: TokenBytes,
        sampling: SamplingParams,
        reading: AnswerReading,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        include_stop: bool = False,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.reasoning_tokens = 0
        self.cached_tokens = 0
        self.is_finished = False
        self._sampling = sampling
        self._eos_token_ids = eos_token_ids
        self._include_stop = include_stop
        self._marker_ids = reading.marker_ids
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
        self._parser = reading.parser()
        self._stops = StopStrings(sampling.stop)
        self._has_calls = False

    def push(self, output: TokenOutput) -> Delta:
        """Take an output of the engine; after the end there are no more."""
        delta = Delta(self.index)
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        for position, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if output.matched_stop is not None and position == len(output.token_ids) - 1 and not self._include_stop:
                break
            if output.logprobs:
                delta.entries.append(TokenEntry(output.logprobs[position], 0))
            self.reasoning_tokens += self._parser.in_reasoning
            self._take(self._parser.push(self._pieces(token_id)), delta)
            if self.is_finished:
                break
        if output.finish_reason is not None and not self.is_finished:
            self._finish(output, delta)
        delta.events = _joined(delta.events)
        return delta

    def _pieces(self, token_id: int) -> Iterable[Piece]:
        name = self._marker_ids.get(token_id)
        if name is None:
            text = self._detokenizer.push(token_id)
            return [(text, False)] if text else []
        # A character that a marker interrupts is not completed any more.
        rest = self._detokenizer.finish()
        return [(rest, False), (name, True)] if rest else [(name, True)]

    def _take(self, events: Iterable[Event], delta: Delta) -> None:
        for event in events:
            if not isinstance(event, ContentDelta):
                self._has_calls |= isinstance(event, CallStart)
                self._add_content(self._stops.finish(), delta)
                delta.events.append(event)
                continue
            self._add_content(self._stops.push(event.text, armed=self.num_tokens >= self._sampling.min_tokens), delta)
            if (stop := self._stops.found) is not None:
                self._add_content(stop if self._include_stop else "", delta)
                self.is_finished = True
                # What comes behind the stop string is dropped, calls too; those before it are to be answered.
                delta.finish_reason = "tool_calls" if self._has_calls else "stop"
                delta.stop_reason = stop
                return

    def _finish(self, output: TokenOutput, delta: Delta) -> None:
        if rest := self._detokenizer.finish():
            self._take(self._parser.push([(rest, False)]), delta)
        if not self.is_finished:
            self._take(self._parser.finish(is_cut=output.finish_reason != "stop"), delta)
        if self.is_finished:
            return
        self._add_content(self._stops.finish(), delta)
        self.is_finished = True
        ends_in_calls = self._has_calls and output.finish_reason == "stop"
        delta.finish_reason = "tool_calls" if ends_in_calls else output.finish_reason
        delta.error = output.error
        if output.matched_stop is not None and output.matched_stop not in self._eos_token_ids:
            delta.stop_reason = output.matched_stop

    def _add_content(self, text: str, delta: Delta) -> None:
        if text:
            delta.events.append(ContentDelta(text))


def _joined(events: list[Event]) -> list[Event]:
    """Texts that go on are one event: a step of many tokens brings few."""
    if len(events) < 2:
        return events
    joined: list[Event] = []
    for _, run in groupby(events, key=_place):
        first, *rest = run
        if not rest or isinstance(first, CallStart):
            joined += [first, *rest]
        else:
            text = "".join(event.text for event in (first, *rest) if not isinstance(event, CallStart))
            joined.append(msgspec.structs.replace(first, text=text))
    return joined


def _place(event: Event) -> tuple[type, int]:
    return type(event), event.index if isinstance(event, ArgumentsDelta | CallStart) else 0
