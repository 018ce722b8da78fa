"""Which engines have to leave so that another fits: a pure decision over what models need and what is in use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from proa.gateway.config import Group

__all__ = ["Limits", "Resident", "Room", "fits", "make_room"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What all loaded models share: resource -> bytes, and groups of models of which few may be loaded at a time."""

    budget: Mapping[str, int]
    groups: Collection[Group] = ()


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that is loaded, or is to be.

    Attributes:
        memory: resource -> bytes; None needs everything.
        last_used: seconds; the one unused for longest leaves first. For those that are busy it should not change with
            every request, or the choice would change too and none of them be given the time to become idle.
        is_pinned: it never leaves. is_busy: it leaves when its requests are done. is_leaving: it is being stopped.
    """

    name: str
    memory: Mapping[str, int] | None
    last_used: float = 0.0
    is_pinned: bool = False
    is_busy: bool = False
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """How a model gets its memory.

    free: it fits. evict: the `idle` have to be stopped. wait: until the `busy` are idle and the `leaving` gone; nothing
    is to be stopped yet, since what is idle may be asked for again before then. never: `reason`.
    """

    kind: Literal["free", "evict", "wait", "never"]
    idle: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    reason: str = ""

    @property
    def going(self) -> tuple[str, ...]:
        """All that have to go."""
        return self.idle + self.busy + self.leaving


def make_room(target: Resident, residents: Sequence[Resident], limits: Limits) -> Room:
    """What has to happen before `target`, which is not among `residents`, may be started.

    The fewest that matter go, in this order: who is leaving anyway, who is idle, who is busy; the longest unused first.
    """
    going: list[Resident] = []
    staying = list(residents)
    for candidate in sorted((r for r in residents if not r.is_pinned), key=_order):
        if fits(target, staying, limits):
            break
        staying.remove(candidate)
        going.append(candidate)
    if not fits(target, staying, limits):
        return Room("never", reason=_why_never(target, staying, limits))
    for candidate in reversed(going.copy()):
        if fits(target, [*staying, candidate], limits):
            staying.append(candidate)
            going.remove(candidate)
    busy = tuple(r.name for r in going if r.is_busy and not r.is_leaving)
    leaving = tuple(r.name for r in going if r.is_leaving)
    idle = tuple(r.name for r in going if not r.is_busy and not r.is_leaving)
    if not going:
        return Room("free")
    return Room("evict" if idle and not busy else "wait", idle, busy, leaving)


def fits(target: Resident, others: Sequence[Resident], limits: Limits) -> bool:
    """Whether `target` may be loaded beside all of `others`."""
    together = [target, *others]
    if len(together) > 1 and any(r.memory is None for r in together):
        return False
    for resource, limit in limits.budget.items():
        if sum((r.memory or {}).get(resource, 0) for r in together) > limit:
            return False
    names = {r.name for r in together}
    return all(len(names.intersection(g.members)) <= g.max_loaded for g in limits.groups if target.name in g.members)


def _order(resident: Resident) -> tuple[bool, bool, float, str]:
    return not resident.is_leaving, resident.is_busy, resident.last_used, resident.name


def _why_never(target: Resident, pinned: Sequence[Resident], limits: Limits) -> str:
    if not fits(target, (), limits):
        over = [r for r, limit in limits.budget.items() if (target.memory or {}).get(r, 0) > limit]
        needs = ", ".join(f"{(target.memory or {})[r]} bytes of {r} (budget {limits.budget[r]})" for r in over)
        return f"it needs {needs}"
    return f"what is pinned leaves no room: {', '.join(r.name for r in pinned)}"
