"""How much the routed experts read from memory, and how long they took."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ExpertTraffic"]


@dataclass(frozen=True, slots=True)
class ExpertTraffic:
    """Totals over all forwards since loading.

    `bytes_read`: packed weights of the distinct experts that each forward of a layer used. `seconds`: inside those
    forwards; the quotient is the rate at which weights came from memory as long as that is what limits them (few
    tokens), less where arithmetic does (prefill).
    """

    bytes_read: int = 0
    seconds: float = 0.0

    def __add__(self, other: ExpertTraffic) -> ExpertTraffic:
        return ExpertTraffic(self.bytes_read + other.bytes_read, self.seconds + other.seconds)
