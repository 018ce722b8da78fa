"""Kimi's prompts written natively: K2-Instruct, K2-Thinking, K2.5, K2.6 and K2.7-Code.

A prompt is a list of pieces: control tokens are pieces of their own, so text that a client sent never becomes one.
Messages come as `normalise_history` leaves them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proa.chat.kimi_tools import declare_tools, sorted_json
from proa.chat.output import kimi_k2 as markers
from proa.chat.output.events import Piece
from proa.core.errors import UserError

__all__ = ["STYLES", "KimiStyle", "PromptOptions", "kimi_style", "prompt_text", "render_prompt"]

_DEFAULT_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."
_ROLE_MARKERS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}
_SYSTEM, _MIDDLE, _END = "<|im_system|>", "<|im_middle|>", "<|im_end|>"
_IMAGE: tuple[Piece, ...] = (
    ("<|media_begin|>", True),
    ("image", False),
    ("<|media_content|>", True),
    ("<|media_pad|>", True),
    ("<|media_end|>", True),
    ("\n", False),
)
# No token: the image processor replaces this text by what it makes of the video.
_VIDEO: tuple[Piece, ...] = (("<|kimi_k25_video_placeholder|>\n", False),)
_MEDIA: dict[str, tuple[Piece, ...]] = {"image": _IMAGE, "image_url": _IMAGE, "video": _VIDEO, "video_url": _VIDEO}


@dataclass(frozen=True, slots=True)
class KimiStyle:
    """How the members of the family differ.

    default_system: a conversation without a system message gets Kimi's own.
    typescript_tools: tools are declared in the TypeScript-like form where they have one.
    thinks: assistant turns hold reasoning. opens_think: the prompt ends with `<think>` or `<think></think>`.
    always_preserves: earlier reasoning stays in the prompt and thinking cannot be turned off.
    """

    default_system: bool
    typescript_tools: bool
    thinks: bool
    opens_think: bool
    always_preserves: bool = False


STYLES = {
    "kimi-k2": KimiStyle(default_system=True, typescript_tools=False, thinks=False, opens_think=False),
    "kimi-k2-thinking": KimiStyle(default_system=True, typescript_tools=False, thinks=True, opens_think=False),
    "kimi-k2.5": KimiStyle(default_system=False, typescript_tools=True, thinks=True, opens_think=True),
    "kimi-k2.6": KimiStyle(default_system=False, typescript_tools=True, thinks=True, opens_think=True),
    "kimi-k2.7-code": KimiStyle(
        default_system=False, typescript_tools=True, thinks=True, opens_think=True, always_preserves=True
    ),
}


def kimi_style(config: Mapping[str, Any], directory: str, template: str) -> KimiStyle:
    """The style of a checkpoint.

    `config`: its config.json; `directory`: the name of its directory, which alone tells K2.6 from K2.7-Code;
    `template`: its chat template, of which only K2-Thinking's and later ones know `<think>`.
    """
    if "kimi-k2.7" in directory.lower().replace("_", "-"):
        return STYLES["kimi-k2.7-code"]
    if config.get("model_type") == "kimi_k25":
        return STYLES["kimi-k2.6"]
    return STYLES["kimi-k2-thinking" if markers.THINK in template else "kimi-k2"]


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What a request may ask of the prompt.

    preserve_thinking: keep the reasoning of answered turns; without it only that of the running tool loop stays.
    continue_final_message: the last message, an assistant's, is the beginning of the answer and stays open.
    """

    thinking: bool = True
    preserve_thinking: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def render_prompt(
    style: KimiStyle,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: PromptOptions | None = None,
) -> list[Piece]:
    """The prompt for normalised messages; neighbouring texts are joined.

    Raises:
        UserError: a content part that is neither text nor an image or video.
    """
    options = options or PromptOptions()
    pieces: list[Piece] = []
    if tools:
        _add_block(pieces, _SYSTEM, "tool_declare", [(_tools_text(style, tools), False)])
    if style.default_system and messages and messages[0].get("role") != "system":
        _add_block(pieces, _SYSTEM, "system", [(_DEFAULT_SYSTEM, False)])
    thinking = options.thinking or style.always_preserves
    answered = _num_answered(messages[:-1] if options.continue_final_message else messages)
    for position, message in enumerate(messages):
        preserve = options.preserve_thinking or style.always_preserves or position >= answered
        role = str(message.get("role"))
        body = _body(style, message, f"messages[{position}]", keeps_thinking=thinking and preserve)
        _add_block(pieces, _ROLE_MARKERS.get(role, _SYSTEM), str(message.get("name") or role), body)
    if options.continue_final_message:
        pieces.pop()
    elif options.add_generation_prompt:
        pieces += [(_ROLE_MARKERS["assistant"], True), ("assistant", False), (_MIDDLE, True)]
        if style.opens_think:
            pieces.append((markers.THINK, True))
            if not thinking:
                pieces.append((markers.THINK_END, True))
    return _joined(pieces)


def prompt_text(pieces: Sequence[Piece]) -> str:
    """The prompt as text, control tokens spelled out."""
    return "".join(text for text, _ in pieces)


def _add_block(pieces: list[Piece], marker: str, label: str, body: Sequence[Piece]) -> None:
    pieces += [(marker, True), (label, False), (_MIDDLE, True), *body, (_END, True)]


def _tools_text(style: KimiStyle, tools: Sequence[Mapping[str, Any]]) -> str:
    declared = declare_tools(tools) if style.typescript_tools else None
    return sorted_json(tools) if declared is None else declared


def _num_answered(messages: Sequence[Mapping[str, Any]]) -> int:
    """Messages up to the last assistant message without tool calls: what follows is the running turn."""
    for position in range(len(messages) - 1, -1, -1):
        if messages[position].get("role") == "assistant" and not messages[position].get("tool_calls"):
            return position + 1
    return 0


def _body(style: KimiStyle, message: Mapping[str, Any], where: str, *, keeps_thinking: bool) -> list[Piece]:
    body = _content(message.get("content"), where)
    role = message.get("role")
    if role == "tool":
        return [(f"## Return of {message.get('tool_call_id') or ''}\n", False), *body]
    if role != "assistant":
        return body
    if style.thinks:
        reasoning = str(message.get("reasoning_content") or "") if keeps_thinking else ""
        body = [(markers.THINK, True), (reasoning, False), (markers.THINK_END, True), *body]
    if calls := message.get("tool_calls"):
        body.append((markers.SECTION_BEGIN, True))
        for call in calls:
            body += [(markers.CALL_BEGIN, True), (call["id"], False), (markers.ARGUMENT_BEGIN, True)]
            body += [(call["function"]["arguments"], False), (markers.CALL_END, True)]
        body.append((markers.SECTION_END, True))
    return body


def _content(content: Any, where: str) -> list[Piece]:
    if content is None or isinstance(content, str):
        return [(content or "", False)]
    pieces: list[Piece] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            pieces.append((str(part.get("text") or ""), False))
        elif isinstance(kind, str) and kind in _MEDIA:
            pieces += _MEDIA[kind]
        else:
            raise UserError(f"{where}.content[{index}]", f"a part of type text, {', '.join(_MEDIA)}", repr(kind))
    return pieces


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Without empty texts, neighbouring texts as one: the tokenizer must see them together."""
    joined: list[Piece] = []
    texts: list[str] = []
    for text, is_marker in pieces:
        if not is_marker:
            texts.append(text)
            continue
        if whole := "".join(texts):
            joined.append((whole, False))
        texts = []
        joined.append((text, True))
    if whole := "".join(texts):
        joined.append((whole, False))
    return joined
