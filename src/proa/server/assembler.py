"""Token outputs of one choice to text deltas: decoding, stop strings, log-probabilities."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from proa.chat.detokenizer import Detokenizer, StopStrings, TokenBytes
from proa.chat.output.events import ContentDelta, Event
from proa.core.sampling_params import SamplingParams
from proa.ipc.messages import TokenLogprob, TokenOutput

__all__ = ["ChoiceAssembler", "Delta", "TokenEntry"]


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """Log-probability of a token and where its text starts in the choice's text (characters)."""

    logprob: TokenLogprob
    text_offset: int


@dataclass(slots=True)
class Delta:
    """What is new in one choice. `stop_reason`: the stop string or token id that ended it, else None."""

    index: int
    text: str = ""
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str = ""
    # What `text` is for answers that have parts.
    events: list[Event] = field(default_factory=list)

    @property
    def parts(self) -> list[Event]:
        """The events; text of an answer without parts is content."""
        return self.events or ([ContentDelta(self.text)] if self.text else [])

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell the client."""
        return not self.text and not self.events and not self.entries and self.finish_reason is None


class ChoiceAssembler:
    """State of one choice. Entries are held back with the text they belong to, and dropped with a stop string."""

    def __init__(
        self,
        index: int,
        tokenizer: TokenBytes,
        sampling: SamplingParams,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        skip_special_tokens: bool = True,
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
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(sampling.stop)
        self._pending: deque[TokenEntry] = deque()
        self._decoded_length = 0
        self._sent_length = 0

    def push(self, output: TokenOutput) -> Delta:
        """Take an output of the engine; after the end there are no more."""
        delta = Delta(self.index)
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        pieces: list[str] = []
        for position, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if output.matched_stop is not None and position == len(output.token_ids) - 1 and not self._include_stop:
                break
            pieces.append(self._push_token(token_id, output.logprobs[position] if output.logprobs else None))
            if self._stops.found is not None:
                self._finish_with_stop_string(pieces, delta)
                return delta
        if output.finish_reason is not None:
            pieces.append(self._flush())
            self._finish(delta, output)
        delta.text = "".join(pieces)
        self._sent_length += len(delta.text)
        delta.entries = self._release(whole=self.is_finished)
        return delta

    def _push_token(self, token_id: int, logprob: TokenLogprob | None) -> str:
        if logprob is not None:
            self._pending.append(TokenEntry(logprob, self._decoded_length))
        text = self._detokenizer.push(token_id)
        self._decoded_length += len(text)
        return self._stops.push(text, armed=self.num_tokens >= self._sampling.min_tokens)

    def _flush(self) -> str:
        rest = self._detokenizer.finish()
        self._decoded_length += len(rest)
        return self._stops.push(rest) + self._stops.finish()

    def _finish(self, delta: Delta, output: TokenOutput) -> None:
        self.is_finished = True
        delta.finish_reason = output.finish_reason
        delta.error = output.error
        if output.matched_stop is not None and output.matched_stop not in self._eos_token_ids:
            delta.stop_reason = output.matched_stop

    def _finish_with_stop_string(self, pieces: list[str], delta: Delta) -> None:
        stop = self._stops.found
        assert stop is not None
        self.is_finished = True
        if self._include_stop:
            pieces.append(stop)
        delta.text = "".join(pieces)
        delta.finish_reason = "stop"
        delta.stop_reason = stop
        self._sent_length += len(delta.text)
        # A token that starts within the cut-off text was never sent.
        delta.entries = [entry for entry in self._pending if entry.text_offset < self._sent_length]
        self._pending.clear()

    def _release(self, *, whole: bool) -> list[TokenEntry]:
        """Entries whose text has been sent completely; all of them at the end."""
        released: list[TokenEntry] = []
        while self._pending:
            is_last = len(self._pending) == 1
            end = self._decoded_length if is_last else self._pending[1].text_offset
            if not whole and end > self._sent_length:
                break
            released.append(self._pending.popleft())
        return released
