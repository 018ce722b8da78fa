"""How many prompt tokens a step computes, so that answers beside a long prompt keep flowing."""

from __future__ import annotations

__all__ = ["PrefillPace"]

# A step beside decoding sequences should end by then: it is the pause between two of their tokens.
_STEP_S = 0.5
# Chunks below this are all overhead.
_MIN_TOKENS = 16
# A smaller chunk is not worth it below this share of the full chunk's tokens per second.
_MIN_RATE = 0.5


class PrefillPace:
    """The full chunk for prompts alone; beside decoding sequences the largest half, quarter, .. done in half a second.

    How long a chunk takes depends on machine, model and context, so it is measured as chunks are computed. Small chunks
    are not always the answer: a step of a large model reads nearly all experts for few tokens as for many, and halving
    the chunk would halve the prompt's speed and shorten no pause. Sizes found to be like that are left out.
    """

    def __init__(self, max_tokens: int) -> None:
        self._sizes = [max_tokens]
        while self._sizes[-1] // 2 >= _MIN_TOKENS:
            self._sizes.append(self._sizes[-1] // 2)
        # Tokens per second by size, as far as tried.
        self._rates: dict[int, float] = {}
        self._size = max_tokens

    def tokens(self, *, beside_decoding: bool) -> int:
        """Prompt tokens of the next step."""
        return self._size if beside_decoding else self._sizes[0]

    def observe(self, tokens: int, seconds: float) -> None:
        """A step computed `tokens` of prompts in `seconds`; counts when that was a full chunk of some size."""
        if tokens not in self._sizes:
            return
        rate = tokens / max(seconds, 1e-6)
        # Longer context or a busier machine slows down all sizes alike, and no size is slower than a smaller one.
        change = rate / self._rates.get(tokens, rate)
        self._rates = {size: max(known * change, rate if size > tokens else 0.0) for size, known in self._rates.items()}
        self._rates[tokens] = rate
        self._size = self._best()

    def _best(self) -> int:
        full = self._rates.get(self._sizes[0])
        if full is None:
            return self._sizes[0]
        best, rate = self._sizes[0], full
        for size in self._sizes:
            rate = self._rates.get(size, rate)  # not tried yet: as fast as the next larger one
            if rate < full * _MIN_RATE:
                break
            best = size
            if size <= rate * _STEP_S:
                break
        return best
