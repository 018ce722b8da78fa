"""The table that formats with `<invoke name="...">` and `<parameter name="...">` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proa.chat.output.machine import CallMachine
from proa.chat.output.output_format import Action, State

__all__ = ["invoke_table"]


def invoke_table(
    begins: Sequence[str], ends: Sequence[str], *, prefixes: Sequence[str]
) -> dict[State, Mapping[str, Action]]:
    """Sections from one of `begins` to one of `ends`; `prefixes`: what may stand behind a tag's `<` or `</`.

    Inside a call a missing end is made up for by what follows: the next call, or the end of the section.
    """

    def tags(tag: str, action: Action) -> dict[str, Action]:
        bracket, name = ("</", tag[2:]) if tag.startswith("</") else ("<", tag[1:])
        return {f"{bracket}{prefix}{name}": action for prefix in prefixes}

    opening = dict.fromkeys(begins, CallMachine.open_section)
    in_call: dict[str, Action] = {
        **dict.fromkeys(begins, CallMachine.close_call),
        **dict.fromkeys(ends, CallMachine.close_call_and_section),
    }
    return {
        State.REASONING: opening,
        State.CONTENT: opening,
        State.SECTION: {
            **tags("<invoke", CallMachine.open_call),
            **dict.fromkeys(ends, CallMachine.close_section),
        },
        State.NAME: {
            ">": CallMachine.close_name,
            **dict.fromkeys(begins, CallMachine.open_section),
            **dict.fromkeys(ends, CallMachine.close_section),
        },
        State.BODY: {
            "{": CallMachine.open_json,
            **tags("<parameter", CallMachine.open_key),
            **tags("<invoke", CallMachine.close_and_open_call),
            **tags("</invoke>", CallMachine.close_call),
            **in_call,
        },
        State.KEY: {">": CallMachine.open_value, **in_call},
        State.VALUE: {**tags("</parameter>", CallMachine.close_value), **in_call},
        State.ARGUMENTS: {**tags("</invoke>", CallMachine.close_call), **in_call},
    }
