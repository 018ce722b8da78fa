"""How one checkpoint is talked to: the prompt of a conversation, and how the answer to it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from proa.chat.answer_style import AnswerStyle
from proa.chat.history import normalise_history
from proa.chat.kimi_prompt import KimiStyle, PromptOptions, render_prompt
from proa.chat.output.parser import OutputFamily, OutputParser, output_family
from proa.chat.output.tools import DeclaredTools, parse_object
from proa.chat.template_switches import TemplateSwitches, flag_of
from proa.chat.templates import ChatTemplate
from proa.chat.tiktoken_tokenizer import TiktokenTokenizer
from proa.core.errors import UserError

__all__ = ["AnswerReading", "ChatPrompt", "ChatTurn", "Dialect", "KimiDialect", "TemplateDialect"]

# Called with the number of characters of a rendered prompt; raises when it cannot fit.
SizeCheck = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """What a request asks for, whatever API it came through.

    messages: OpenAI messages. tools: OpenAI's; empty without. no_calls: `tool_choice` none.
    thinking: whether to think before the answer; None: as the model does by default. reasoning_effort: how much.
    keeps_thinking: the reasoning of answered turns stays in the prompt, where the model can have it there.
    continue_final_message: the last message is to be continued. variables: further variables of the chat template.
    """

    messages: list[dict[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    no_calls: bool = False
    thinking: bool | None = None
    reasoning_effort: str | None = None
    keeps_thinking: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """How the answer to a prompt is read.

    marker_ids: token id -> name of the family's markers. spelled: the markers that come as text, having no token.
    """

    family: OutputFamily
    marker_ids: Mapping[int, str]
    tools: DeclaredTools
    in_reasoning: bool
    history_calls: int
    no_calls: bool
    spelled: frozenset[str] = frozenset()

    def parser(self) -> OutputParser:
        """The parser of one answer."""
        return self.family.parser(
            self.tools,
            in_reasoning=self.in_reasoning,
            history_calls=self.history_calls,
            no_calls=self.no_calls,
            spelled=self.spelled,
        )


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Token ids of a prompt; `reading` is None where the answer is text and nothing else."""

    token_ids: list[int]
    reading: AnswerReading | None = None


class TemplateTokenizer(Protocol):
    """What a template's prompt is tokenized with."""

    def encode_rendered(self, text: str) -> list[int]: ...
    def token_id(self, name: str) -> int | None: ...


class Dialect(Protocol):
    """The way one checkpoint is talked to. Thread-safe."""

    def prompt(self, turn: ChatTurn, check_size: SizeCheck) -> ChatPrompt:
        """The prompt of a conversation.

        Raises:
            UserError: a conversation this model cannot take.
        """
        ...


class TemplateDialect:
    """A checkpoint with a jinja template.

    Args:
        style: how answers are read; None: they are text and nothing else.
    """

    def __init__(
        self, tokenizer: TemplateTokenizer, template: ChatTemplate | None, style: AnswerStyle | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._style = style
        ids = {name: tokenizer.token_id(name) for name in style.family.markers} if style is not None else {}
        self._marker_ids = {token_id: name for name, token_id in ids.items() if token_id is not None}
        self._spelled = frozenset(name for name, token_id in ids.items() if token_id is None)

    def prompt(self, turn: ChatTurn, check_size: SizeCheck) -> ChatPrompt:
        """The prompt as the template writes it."""
        template = self._template
        if template is None:
            fix = "use /v1/completions, or start the server with --chat-template"
            raise UserError("messages", "a model with a chat template", "one without", fix)
        has_tools = self._style is not None and self._style.has_calls and template.shows_tools
        if turn.tools and not turn.no_calls and not has_tools:
            fix = 'remove it, set tool_choice: "none", or start the server with a --chat-template that shows tools'
            raise UserError("tools", "a field this model has", "one it does not", fix, code="unsupported_parameter")
        switches = TemplateSwitches.of(turn, template.variables)
        messages, history_calls = self._history(turn, template)
        text = template.render(
            messages,
            add_generation_prompt=turn.add_generation_prompt,
            continue_final_message=turn.continue_final_message,
            tools=turn.tools if has_tools else (),
            variables=switches.variables,
        )
        if turn.add_generation_prompt:
            text += switches.end_of_thinking(text)
        check_size(len(text))
        reading = None
        if self._style is not None:
            reading = AnswerReading(
                family=self._style.family,
                marker_ids=self._marker_ids,
                tools=DeclaredTools(turn.tools),
                in_reasoning=self._style.starts_in_reasoning(text, thinking=switches.thinking),
                history_calls=history_calls,
                no_calls=turn.no_calls,
                spelled=self._spelled,
            )
        return ChatPrompt(self._tokenizer.encode_rendered(text), reading)

    def _history(self, turn: ChatTurn, template: ChatTemplate) -> tuple[list[dict[str, Any]], int]:
        """Messages for the template: results in the order of their calls, arguments as it wants them."""
        if not any(message.get("tool_calls") or message["role"] == "tool" for message in turn.messages):
            return turn.messages, 0
        new_id = {} if self._style is None else {"new_id": self._style.family.history_id}
        history = normalise_history(turn.messages, **new_id)
        messages = []
        for message in history.messages:
            if not message.get("reasoning_content", "x"):
                # Where there is no such field, templates look for think tags in the content.
                message = {key: value for key, value in message.items() if key != "reasoning_content"}  # noqa: PLW2901
            messages.append(message if template.takes_text_arguments else _with_parsed_arguments(message))
        return messages, history.next_index


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Templates iterate over the arguments of a call; what is no JSON object stays text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments", "")
        parsed = parse_object(arguments) if isinstance(arguments, str) else arguments
        function = {**call["function"], "arguments": arguments if parsed is None else parsed}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


class KimiDialect:
    """A Kimi checkpoint: prompts written natively, answers with reasoning and tool calls."""

    _VARIABLES = frozenset({"thinking", "enable_thinking", "preserve_thinking"})

    def __init__(self, tokenizer: TiktokenTokenizer, style: KimiStyle) -> None:
        self._tokenizer = tokenizer
        self._style = style
        self._family = output_family("kimi_k2")
        ids = {name: tokenizer.token_id(name) for name in self._family.markers}
        self._marker_ids = {token_id: name for name, token_id in ids.items() if token_id is not None}

    def prompt(self, turn: ChatTurn, check_size: SizeCheck) -> ChatPrompt:
        """The prompt in Kimi's own form; earlier calls get Kimi's ids."""
        if turn.continue_final_message and not _is_begun(turn.messages[-1]):
            raise UserError("continue_final_message", "a last message of the assistant's with text", "another one")
        history = normalise_history(turn.messages)
        asked = TemplateSwitches.of(turn, self._VARIABLES).thinking
        thinking = asked is not False or self._style.always_preserves
        options = PromptOptions(
            thinking=thinking,
            preserve_thinking=flag_of(turn.variables, "preserve_thinking") or turn.keeps_thinking,
            add_generation_prompt=turn.add_generation_prompt,
            continue_final_message=turn.continue_final_message,
        )
        pieces = render_prompt(self._style, history.messages, turn.tools, options)
        check_size(sum(len(text) for text, _ in pieces))
        reading = AnswerReading(
            family=self._family,
            marker_ids=self._marker_ids,
            tools=DeclaredTools(turn.tools),
            in_reasoning=self._style.thinks and thinking and not turn.continue_final_message,
            history_calls=history.next_index,
            no_calls=turn.no_calls,
        )
        return ChatPrompt(self._tokenizer.encode_pieces(pieces), reading)


def _is_begun(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant" and bool(message.get("content")) and not message.get("tool_calls")
