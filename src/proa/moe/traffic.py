"""How much the routed experts read from memory, and how long they took."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ExpertTraffic", "HybridTraffic"]


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


@dataclass(frozen=True, slots=True)
class HybridTraffic:
    """Totals since loading, of experts that the CPU and a GPU share.

    slots: of each MoE layer, the tokens' slots in decode steps and short forwards, and those whose expert was on the
    GPU. streamed_bytes: of experts that crossed the bus for prompts; streamed_seconds: from the first to the last copy
    of these prompts' passes.
    """

    slots: tuple[tuple[int, int], ...]
    streamed_bytes: int = 0
    streamed_seconds: float = 0.0
