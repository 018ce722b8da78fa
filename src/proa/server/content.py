"""Content parts of all three APIs as text. Nothing is fetched: a part that is no text is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from proa.core.errors import UserError

__all__ = ["part_text", "text_of"]

# The key that holds the text of a part, by its type.
_TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
_MEDIA = {
    "image": "an image",
    "image_url": "an image",
    "input_image": "an image",
    "video": "a video",
    "video_url": "a video",
    "input_video": "a video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "file": "a file",
    "input_file": "a file",
    "document": "a document",
    "container_upload": "a file",
}


def text_of(content: str | Iterable[Mapping[str, Any]] | None, where: str) -> str:
    """The text of a message's content, parts joined; "" for none. `where`: its place, for errors."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part_text(part, f"{where}.{index}") for index, part in enumerate(content))


def part_text(part: Mapping[str, Any], where: str) -> str:
    """The text of one content part.

    Raises:
        UserError: a part that is no text.
    """
    given = part.get("type")
    kind = given if isinstance(given, str) else ""
    if kind in _MEDIA:
        raise UserError(
            where,
            "text: this model has no vision and takes no images, audio, video or files",
            f"{_MEDIA[kind]} (type {kind})",
            "leave the part out",
            code="unsupported_media",
        )
    if (key := _TEXT_KEYS.get(kind)) is None:
        raise UserError(where, f"a part of type {', '.join(_TEXT_KEYS)}", f"type {str(given)[:100]!r}")
    text = part.get(key)
    if not isinstance(text, str):
        raise UserError(f"{where}.{key}", "text", type(text).__name__)
    if "\0" in text:
        raise UserError(f"{where}.{key}", "text without NUL characters", "one with them")
    return text
