"""What the client commands share: finding the endpoint, reading its event stream, saying what went wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proa.core.errors import ProaError, UnavailableError

if TYPE_CHECKING:
    import httpx

__all__ = ["Endpoint", "parse_event", "request_error"]

_DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server. `root` has no trailing slash and no `/v1`."""

    root: str
    api_key: str | None = None

    @classmethod
    def parse(cls, text: str, api_key: str | None = None) -> Endpoint:
        """From what a person types: `localhost:8000`, `http://host:8000/v1/` and so on."""
        url = text if "://" in text else f"http://{text}"
        return cls(url.rstrip("/").removesuffix("/v1"), api_key)

    def url(self, path: str) -> str:
        return f"{self.root}{path}"

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def first_model(self, client: httpx.Client) -> str:
        """Name of the first model the server lists.

        Raises:
            ProaError: the server cannot be reached, refuses, or lists none.
        """
        import httpx  # here: it is slow to import, and `proa serve` does without

        try:
            response = client.get(self.url("/v1/models"), headers=self.headers())
        except httpx.HTTPError as error:
            raise UnavailableError(self.root, "a server", f"{type(error).__name__}: {error}", "start one") from error
        if response.status_code != 200:
            raise request_error(self.root, response.status_code, response.text)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ProaError(self.root, "a list of models at /v1/models", response.text[:300]) from error

    def context_length(self, client: httpx.Client, model: str) -> int | None:
        """Most tokens of prompt and answer together, where the server tells (`max_model_len`)."""
        import httpx  # here: it is slow to import, and `proa serve` does without

        try:
            answer = client.get(self.url(f"/v1/models/{model}"), headers=self.headers()).json()
            return int(answer["max_model_len"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None


def parse_event(line: str) -> dict[str, Any] | None:
    """The JSON object of one line of an event stream; None for comments, blank lines, other fields and `[DONE]`.

    Raises:
        ProaError: the event carries an error, which is how a server ends a stream that it cannot finish, or no JSON.
    """
    if not line.startswith("data:"):
        return None
    data = line[5:].strip()
    if data == _DONE:
        return None
    try:
        event = json.loads(data)
    except ValueError as error:
        raise ProaError("stream", "JSON in each event", data[:300]) from error
    if isinstance(event, dict) and event.get("error"):
        raise request_error("stream", 200, data)
    return event if isinstance(event, dict) else None


def request_error(where: str, status: int, body: str) -> ProaError:
    """An exception that carries the message of an OpenAI error body, or the start of any other body."""
    try:
        detail = json.loads(body)["error"]
        message = detail["message"] if isinstance(detail, dict) else str(detail)
    except (ValueError, KeyError, TypeError):
        message = body[:300] or "an empty body"
    return ProaError(where, "an answer", f"status {status}: {message}")
