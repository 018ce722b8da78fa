"""Which parsers a checkpoint's answers need: what the command line says, else what its chat template writes."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from proa.chat.output.events import Answer
from proa.chat.output.output_format import THINK, THINK_END
from proa.chat.output.parser import ALIASES, OutputFamily, output_family
from proa.chat.output.tools import DeclaredTools, parse_object
from proa.chat.templates import ChatTemplate
from proa.core.errors import UnsupportedError

__all__ = ["REASONING_PARSERS", "AnswerStyle", "check_parsers", "choose_style", "refuse_other_than_kimi"]

logger = logging.getLogger("proa.chat")

# SGLang's names -> whether the model thinks even when neither prompt nor answer begin with the tag. Where the prompt
# says so, it decides.
REASONING_PARSERS: dict[str, bool] = {
    "deepseek-r1": True,
    "deepseek-v3": False,
    "deepseek-v4": False,
    "glm45": False,
    "kimi_k2": False,
    "minimax": True,
    "minimax-append-think": True,
    "qwen3": False,
    "qwen3-thinking": True,
}

# What a template writes -> the parser; the first that is found counts.
_MARKS = (
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("｜DSML｜", "deepseek_v32"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "qwen3"),
    ("[TOOL_CALLS]", "mistral"),
)
_DEEPSEEK = "<｜tool▁calls▁begin｜>"


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """How answers are read. has_calls: tool calls are among them. always_thinks: see REASONING_PARSERS."""

    family: OutputFamily
    has_calls: bool
    always_thinks: bool

    def starts_in_reasoning(self, prompt: str, *, thinking: bool | None) -> bool:
        """Whether the answer to `prompt` begins inside `<think>`; `thinking`: what the request asks for."""
        if THINK not in self.family.markers:
            return False
        end = prompt[-100:].rstrip()
        if end.endswith((THINK, THINK_END)):
            return end.endswith(THINK)
        return self.always_thinks and thinking is not False


def choose_style(
    template: ChatTemplate | None, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> AnswerStyle | None:
    """The style of a checkpoint with this chat template; None where answers are text and nothing else.

    Args:
        tool_parser: `--tool-call-parser`, a name of `output_family` or `none`; None: by the template.
        reasoning_parser: `--reasoning-parser`, a name of REASONING_PARSERS or `none`; None: by the template.

    Raises:
        UnsupportedError: a name that is not among them.
    """
    source = template.source if template is not None else ""
    tools = tool_parser if tool_parser is not None else _detect(source)
    if tool_parser is None and template is not None and not _is_read_back(template, tools):
        logger.warning("the chat template writes calls in a way that %s does not read: no tools", tools)
        tools = "none"
    check_parsers(tools, reasoning_parser)
    has_reasoning = THINK in source or THINK_END in source
    always_thinks = False
    if reasoning_parser is not None:
        has_reasoning = reasoning_parser != "none"
        always_thinks = REASONING_PARSERS.get(reasoning_parser, False)
    has_reasoning = has_reasoning or (tools == "kimi_k2" and reasoning_parser is None)
    logger.info("tool calls are read as %s, reasoning %s", tools, "apart" if has_reasoning else "as content")
    family = output_family(tools, has_reasoning=has_reasoning)
    if not family.markers:
        return None
    return AnswerStyle(family, has_calls=ALIASES.get(tools, tools) != "none", always_thinks=always_thinks)


def check_parsers(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise UnsupportedError for names there are not."""
    if tool_parser is not None:
        output_family(tool_parser)
    if reasoning_parser not in {None, "none", *REASONING_PARSERS}:
        names = ", ".join(sorted(REASONING_PARSERS))
        raise UnsupportedError("--reasoning-parser", f"one of {names}, none", repr(reasoning_parser))


def refuse_other_than_kimi(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise UnsupportedError for parsers that cannot read what a Kimi checkpoint's own prompts ask for."""
    if tool_parser not in (None, "kimi_k2"):
        raise UnsupportedError("--tool-call-parser", "kimi_k2 for a Kimi checkpoint", repr(tool_parser), "leave it out")
    if reasoning_parser is not None and reasoning_parser not in REASONING_PARSERS:
        raise UnsupportedError(
            "--reasoning-parser", "kimi_k2 for a Kimi checkpoint", repr(reasoning_parser), "leave it out"
        )


def _detect(source: str) -> str:
    if _DEEPSEEK in source:
        return "deepseek_v3" if "```json" in source else "deepseek_v31"
    return next((name for mark, name in _MARKS if mark in source), "none")


def _is_read_back(template: ChatTemplate, tool_parser: str) -> bool:
    """Whether the parser finds the call that the template writes; True where there is nothing to find or to lose."""
    if tool_parser == "none":
        return True
    family = output_family(tool_parser)
    name, arguments = "probe_tool", {"text": "probe"}
    text = template.text_of_call(family.history_id(name, 0), name, arguments)
    if name not in text:
        return True
    schema = {"properties": {"text": {"type": "string"}}}
    # Two that take the same, lest the name is inferred.
    tools = [{"type": "function", "function": {"name": known, "parameters": schema}} for known in (name, "other_tool")]
    parser = family.parser(DeclaredTools(tools), in_reasoning=False)
    calls = Answer.of(parser.push_text(text) + parser.finish()).calls
    return [(call.name, parse_object(call.arguments)) for call in calls] == [(name, arguments)]
