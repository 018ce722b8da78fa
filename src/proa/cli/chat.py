"""`proa chat`: talk to a model in the terminal."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from proa.cli import console
from proa.cli.client import Endpoint, parse_event, request_error
from proa.cli.flags import DEMO
from proa.cli.local_server import local_server
from proa.core import env
from proa.core.errors import ProaError

if TYPE_CHECKING:
    import httpx

__all__ = ["Answer", "Conversation", "register"]

_HELP = "/clear forgets the conversation, /retry asks again, /quit leaves; Ctrl-C stops an answer, Ctrl-D leaves"
_CONNECT_S = 10.0
_ANSWER_TOKENS = 1024
_ADDRESS = re.compile(r"[\w.-]+:\d+(/v1)?/?")


def register(app: typer.Typer) -> None:
    """Add `chat` to the commands."""
    app.command(help=console.help_text(inspect.getdoc(chat) or ""))(chat)


@dataclass(slots=True)
class Answer:
    """One streamed answer: what came and how fast. Times in seconds."""

    content: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: float | None = None
    total_s: float = 0.0

    def summary(self) -> str:
        """One line: tokens, rate after the first token, time to the first."""
        parts = [f"{self.completion_tokens} tokens"]
        if self.first_token_s is not None:
            rest_s = self.total_s - self.first_token_s
            if self.completion_tokens > 1 and rest_s > 0:
                parts.append(f"{(self.completion_tokens - 1) / rest_s:.1f} tok/s")
            parts.append(f"TTFT {self.first_token_s * 1e3:.0f} ms")
        if self.prompt_tokens:
            cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
            parts.append(f"prompt {self.prompt_tokens}{cached}")
        if self.finish_reason not in {None, "stop"}:
            parts.append(f"ended by {self.finish_reason}")
        return " · ".join(parts)


@dataclass(slots=True)
class Conversation:
    """The turns so far and how the next one is asked for."""

    endpoint: Endpoint
    model: str
    sampling: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, client: httpx.Client, prompt: str) -> Answer:
        """Send a user turn and print the answer as it comes. Ctrl-C ends the answer; what came stays in the history.

        Raises:
            ProaError: the server refused or broke off; the turn is then taken back.
        """
        import httpx  # here: it is slow to import, and `proa serve` does without

        self.messages.append({"role": "user", "content": prompt})
        answer = Answer()
        start = time.perf_counter()
        try:
            for delta in self._stream(client, answer):
                if answer.first_token_s is None:
                    answer.first_token_s = time.perf_counter() - start
                _print_delta(delta, answer)
        except KeyboardInterrupt:
            answer.finish_reason = "Ctrl-C"
        except (ProaError, httpx.HTTPError) as error:
            self.messages.pop()
            console.out.print()
            if isinstance(error, httpx.HTTPError):
                raise ProaError(self.endpoint.root, "an answer", f"{type(error).__name__}: {error}") from error
            raise
        answer.total_s = time.perf_counter() - start
        console.out.print()
        self.messages.append({"role": "assistant", "content": answer.content})
        return answer

    def _stream(self, client: httpx.Client, answer: Answer) -> Iterator[dict[str, Any]]:
        """Deltas that carry text; usage and finish reason go into `answer`."""
        payload = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.sampling,
        }
        url = self.endpoint.url("/v1/chat/completions")
        with client.stream("POST", url, json=payload, headers=self.endpoint.headers()) as response:
            if response.status_code != 200:
                raise request_error(url, response.status_code, response.read().decode(errors="replace"))
            for line in response.iter_lines():
                event = parse_event(line)
                if event is None:
                    continue
                if usage := event.get("usage"):
                    answer.completion_tokens = usage.get("completion_tokens", 0)
                    answer.prompt_tokens = usage.get("prompt_tokens", 0)
                    answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                for choice in event.get("choices", []):
                    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                    delta = choice.get("delta") or {}
                    if delta.get("content") or delta.get("reasoning_content"):
                        answer.completion_tokens += (
                            1  # about right until usage comes, which an interrupted answer lacks
                        )
                        yield delta


def _print_delta(delta: dict[str, Any], answer: Answer) -> None:
    if reasoning := delta.get("reasoning_content"):
        answer.reasoning += reasoning
        console.out.print(escape(reasoning), style="dim", end="", soft_wrap=True)
    if content := delta.get("content"):
        if answer.reasoning and not answer.content:
            console.out.print("\n")
        answer.content += content
        console.out.print(escape(content), end="", soft_wrap=True)
    console.out.file.flush()


@contextmanager
def _endpoint_for(target: str, api_key: str | None) -> Iterator[Endpoint]:
    """The endpoint at a URL or HOST:PORT, or that of a server started for a model directory."""
    is_address = _ADDRESS.fullmatch(target) is not None and not Path(target).exists()
    if is_address or target.startswith(("http://", "https://")):
        yield Endpoint.parse(target, api_key)
        return
    with local_server(target, api_key) as server:
        yield server.endpoint


def chat(
    target: Annotated[
        str | None, typer.Argument(metavar="MODEL|URL|demo", help="Model directory, server URL, or demo (default).")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Ask this one question and leave.")] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="System prompt.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name to ask for; default the server's first.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", "-t", min=0.0, help="0 is greedy; default what the server takes, 0 for demo."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer in tokens; default 1024, at most half of the context.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key of the server; better in PROA_API_KEY.")] = None,
) -> None:
    """Talk to a model in the terminal.

    Given a model directory or `demo`, a server is started for the conversation and stopped at its end; given a URL, the
    server there is used. Reasoning is dimmed; each answer ends with its speed.

    Examples:

        proa chat                          # the demo model

        proa chat /models/Qwen3-30B-A3B

        proa chat http://127.0.0.1:8000 --system "Be brief"

        proa chat demo --prompt "What is the capital of France?"
    """
    import httpx  # here: it is slow to import, and `proa serve` does without

    target = target or env.base_url() or DEMO
    if temperature is None and target == DEMO:
        temperature = 0.0  # a model this small wanders when it is sampled
    sampling: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
    with _endpoint_for(target, api_key or env.api_key()) as endpoint:
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        # The server is named by the user: a proxy from the environment must not come between.
        with httpx.Client(timeout=timeout, trust_env=False) as client:
            name = model or endpoint.first_model(client)
            context = endpoint.context_length(client, name) or 2 * _ANSWER_TOKENS
            sampling["max_tokens"] = max_tokens or max(1, min(_ANSWER_TOKENS, context // 2))
            turns = [{"role": "system", "content": system}] if system else []
            conversation = Conversation(endpoint, name, sampling, turns)
            if prompt is None:
                _converse(conversation, client)
                return
            answer = conversation.ask(client, prompt)
            console.err.print(f"[dim]{escape(answer.summary())}[/]")
            if answer.finish_reason == "Ctrl-C":
                raise typer.Exit(130)


def _converse(conversation: Conversation, client: httpx.Client) -> None:
    """Read, ask, print, until the user leaves."""
    console.err.print(f"[bold]{escape(conversation.model)}[/] at {escape(conversation.endpoint.root)}. [dim]{_HELP}[/]")
    kept = len(conversation.messages)  # the system prompt survives /clear
    last, before_last = "", kept
    while True:
        try:
            line = console.out.input("[bold cyan]> [/]").strip()
        except EOFError:
            console.out.print()
            return
        except KeyboardInterrupt:
            console.out.print()
            continue
        if line in {"/quit", "/exit"}:
            return
        if line == "/clear":
            del conversation.messages[kept:]
            before_last = kept
            continue
        if line == "/retry" and last:
            line = last
            del conversation.messages[before_last:]
        elif line.startswith("/"):
            console.err.print(f"[dim]{_HELP}[/]")
            continue
        if not line:
            continue
        last, before_last = line, len(conversation.messages)
        try:
            answer = conversation.ask(client, line)
            console.err.print(f"[dim]{escape(answer.summary())}[/]")
        except ProaError as error:
            console.error(str(error))
