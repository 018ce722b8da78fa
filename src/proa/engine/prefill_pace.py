"""When running answers get their next token while prompts are computed."""

from __future__ import annotations

__all__ = ["PrefillPace", "share_tokens"]

# A step to the running answers costs a prompt about a quarter of its time, as far as these allow.
_DECODE_STEPS = 4
_AUTO_GAP_S = (0.2, 0.5)
# What an estimate keeps of a longer one before it: a hiccup is forgotten, the slower of two kinds of layers is not.
_KEPT = 0.7
# A pass that is expected to end in this part of the gap takes the running answers along.
_SHORT = 0.5
_MUCH_SHORTER = 0.5
# A pass overtakes one of which it takes this part of what is left: shortest remaining time first, if that gains enough.
_SOONER = 0.75


class PrefillPace:
    """Decides between layers of a prefill pass whether running answers are due, and which passes take them along.

    Their tokens come at most `max_gap_s` apart, and a layer more where a layer takes longer than those before it;
    between two decode steps at least one layer is computed. None: four decode steps, at least 0.2 and at most 0.5 s.
    Times are measured as steps are computed: they depend on machine, model and context. `now`: seconds of any clock.
    """

    def __init__(self, max_gap_s: float | None = None) -> None:
        self._max_gap_s = max_gap_s
        self._decode_s = 0.0
        self._layer_s = 0.0
        self._layers = 0  # since running answers got a token
        self._last = float("-inf")  # when they did
        # By the number of bits of the token count: tokens and seconds of the latest pass.
        self._passes: dict[int, tuple[int, float]] = {}

    @property
    def gap_s(self) -> float:
        """The bound."""
        if self._max_gap_s is not None:
            return self._max_gap_s
        low, high = _AUTO_GAP_S
        return min(high, max(low, _DECODE_STEPS * self._decode_s))

    @property
    def layer_s(self) -> float:
        """What a layer of a pass has been taking."""
        return self._layer_s

    def is_due(self, now: float) -> bool:
        """Whether running answers come before the next layer."""
        return self._layers > 0 and now - self._last + self._layer_s + self._decode_s > self.gap_s

    def is_short(self, tokens: int) -> bool:
        """Whether a pass of `tokens` tokens is expected to end well within the gap."""
        seconds = self._expected(tokens)
        return seconds is not None and seconds + self._decode_s <= _SHORT * self.gap_s

    def is_much_shorter(self, tokens: int, than: int) -> bool:
        """Whether a pass of `tokens` is expected to take half of the time of one of `than` tokens or less."""
        few, many = self._expected(tokens), self._expected(than)
        return few is not None and many is not None and few <= _MUCH_SHORTER * many

    def whole_s(self, tokens: int, seconds: float, share_done: float) -> float:
        """What a pass of `tokens` takes that has taken `seconds` for that share of its layers: as the last of its size.

        The first layers say less: some have no experts, and those of the first one with them have not run ahead.
        """
        known = self._passes.get(tokens.bit_length())
        if known is not None:
            return known[1]
        return seconds / share_done if share_done else 0.0

    def may_overtake(self, tokens: int, *, whole_s: float, left_s: float, overtaken_s: float) -> bool:
        """Whether a pass of `tokens` goes between two layers of one that takes `whole_s`, of which `left_s` are left.

        If it is expected to end well before that one would, and if all that did so, `overtaken_s` by now, take as long
        as that one alone at most: so a prompt takes at most twice as long for them.
        """
        seconds = self._expected(tokens)
        return seconds is not None and seconds <= _SOONER * left_s and overtaken_s + seconds <= whole_s

    def answered(self, now: float, decode_s: float | None = None) -> None:
        """All running answers have just got a token; `decode_s`: of a step that computed nothing else."""
        self._last, self._layers = now, 0
        if decode_s is not None:
            self._decode_s = max(decode_s, _KEPT * self._decode_s)

    def layer_done(self, seconds: float) -> None:
        """A layer of a pass took so long."""
        self._layers += 1
        self._layer_s = max(seconds, _KEPT * self._layer_s)

    def pass_done(self, tokens: int, seconds: float) -> None:
        """All layers of a pass of `tokens` tokens took so long, decode steps between them not counted."""
        self._passes[tokens.bit_length()] = (tokens, seconds)

    def _expected(self, tokens: int) -> float | None:
        """Seconds of a pass, at most: those of a larger one, or of a smaller one times its tokens."""
        larger = [(known, seconds) for known, seconds in self._passes.values() if known >= tokens]
        if larger:
            return min(larger)[1]
        known, seconds = max(self._passes.values(), default=(0, 0.0))
        return seconds * tokens / known if known else None


def share_tokens(budget: int, wanted: list[int]) -> list[int]:
    """How `budget` prompt tokens of a pass are given to prompts that lack `wanted`, the oldest first.

    Half goes to the oldest, so that it is done after at most twice the passes it would need alone; the rest to those
    that lack least, so that a short prompt is in the next pass whatever the length of the others; what they leave, to
    the oldest again.
    """
    if not wanted:
        return []
    counts = [0] * len(wanted)
    counts[0] = min(wanted[0], -(-budget // 2))
    left = budget - counts[0]
    for index in sorted(range(1, len(wanted)), key=lambda i: wanted[i]):
        counts[index] = min(wanted[index], left)
        left -= counts[index]
    counts[0] += min(wanted[0] - counts[0], left)
    return counts
