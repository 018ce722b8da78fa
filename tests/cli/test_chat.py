from __future__ import annotations

import httpx
import pytest
from typer.testing import CliRunner

from proa.cli import chat as chat_module
from proa.cli.chat import Answer, Conversation
from proa.cli.client import Endpoint, parse_event
from proa.cli.main import app
from proa.core.errors import ProaError

runner = CliRunner()


def test_one_shot_prints_the_answer_and_its_speed(fake_endpoint):
    result = runner.invoke(app, ["chat", fake_endpoint.url, "--prompt", "Capital of France?", "--system", "Be brief"])
    assert result.exit_code == 0, result.output
    assert result.stdout == "Paris\n"
    assert "2 tokens" in result.stderr
    assert "tok/s" in result.stderr
    assert "TTFT" in result.stderr
    assert "prompt 7 (3 cached)" in result.stderr
    request = fake_endpoint.requests[0]
    assert request["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Capital of France?"},
    ]
    assert request["model"] == "fake-model"
    assert "temperature" not in request, "the server's default, unless the user names one"


def test_reasoning_is_dimmed_and_apart_from_the_answer(fake_endpoint, monkeypatch):
    printed = []
    monkeypatch.setattr(chat_module.console.out, "print", lambda *a, **k: printed.append((a, k)))
    fake_endpoint.deltas = [{"reasoning_content": "Hm [x]"}, {"content": "Paris"}]
    endpoint = Endpoint.parse(fake_endpoint.url)
    with httpx.Client(trust_env=False) as client:
        answer = Conversation(endpoint, "m", {}).ask(client, "?")
    assert (answer.reasoning, answer.content) == ("Hm [x]", "Paris")
    assert printed[0][1]["style"] == "dim"
    assert printed[1][0] == ("\n",)


def test_a_server_is_known_by_host_and_port(fake_endpoint, monkeypatch, tmp_path):
    address = fake_endpoint.url.removeprefix("http://")
    assert runner.invoke(app, ["chat", address, "--prompt", "?"]).stdout == "Paris\n"
    monkeypatch.chdir(tmp_path)
    (tmp_path / address).mkdir()
    with chat_module._endpoint_for(fake_endpoint.url, None) as endpoint:
        assert endpoint.root == fake_endpoint.url


@pytest.mark.parametrize(
    ("context", "flags", "longest"),
    [(None, [], 1024), (512, [], 256), (8192, [], 1024), (512, ["--max-tokens", "400"], 400)],
)
def test_answers_leave_room_for_the_prompt(fake_endpoint, context, flags, longest):
    fake_endpoint.max_model_len = context
    assert runner.invoke(app, ["chat", fake_endpoint.url, "--prompt", "?", *flags]).exit_code == 0
    assert fake_endpoint.requests[0]["max_tokens"] == longest


def test_markup_in_an_answer_is_text(fake_endpoint):
    fake_endpoint.deltas = [{"content": "[bold]a[/bold] [/x]"}]
    result = runner.invoke(app, ["chat", fake_endpoint.url, "--prompt", "?"])
    assert result.stdout == "[bold]a[/bold] [/x]\n"


def test_history_is_sent_and_clear_forgets_it(fake_endpoint):
    result = runner.invoke(app, ["chat", fake_endpoint.url], input="one\ntwo\n/retry\n/clear\nthree\n/quit\n")
    assert result.exit_code == 0, result.output
    asked = [[m["content"] for m in r["messages"]] for r in fake_endpoint.requests]
    assert asked == [["one"], ["one", "Paris", "two"], ["one", "Paris", "two"], ["three"]]


def test_a_failed_turn_is_taken_back_and_the_conversation_goes_on(fake_endpoint):
    fake_endpoint.fail_with = (429, {"error": {"message": "queue full"}})
    result = runner.invoke(app, ["chat", fake_endpoint.url], input="one\ntwo\n")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("status 429: queue full") == 2
    assert [len(r["messages"]) for r in fake_endpoint.requests] == [1, 1]


def test_an_error_inside_the_stream_is_an_error(fake_endpoint):
    fake_endpoint.error_event = "engine died"
    result = runner.invoke(app, ["chat", fake_endpoint.url, "--prompt", "?"])
    assert isinstance(result.exception, ProaError)
    assert "engine died" in str(result.exception)


def test_ctrl_c_stops_the_answer_and_keeps_what_came(fake_endpoint, monkeypatch):
    def interrupted(delta, answer):
        answer.content += delta["content"]
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_module, "_print_delta", interrupted)
    conversation = Conversation(Endpoint.parse(fake_endpoint.url), "m", {})
    with httpx.Client(trust_env=False) as client:
        answer = conversation.ask(client, "?")
    assert (answer.finish_reason, answer.completion_tokens) == ("Ctrl-C", 1)
    assert conversation.messages[-1] == {"role": "assistant", "content": "Pa"}


def test_a_temperature_goes_along(fake_endpoint):
    runner.invoke(app, ["chat", fake_endpoint.url, "--prompt", "?", "-t", "0.5"])
    assert fake_endpoint.requests[0]["temperature"] == 0.5


def test_the_key_goes_along(fake_endpoint, monkeypatch):
    monkeypatch.setenv("PROA_API_KEY", "secret")
    runner.invoke(app, ["chat", fake_endpoint.url, "--prompt", "?"])
    assert fake_endpoint.headers[0]["Authorization"] == "Bearer secret"


def test_nobody_there_names_the_address():
    result = runner.invoke(app, ["chat", "http://127.0.0.1:1", "--prompt", "?"])
    assert result.exit_code == 1
    assert "127.0.0.1:1" in str(result.exception)


@pytest.mark.parametrize(
    "text", ["localhost:8000", "http://localhost:8000", "http://localhost:8000/v1", "http://localhost:8000/v1/"]
)
def test_endpoint_spellings(text):
    assert Endpoint.parse(text).url("/v1/models") == "http://localhost:8000/v1/models"


def test_summary_of_an_empty_answer():
    assert Answer(finish_reason="length").summary() == "0 tokens · ended by length"


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ('data: {"a": 1}', {"a": 1}),
        ('data:{"a": 1}', {"a": 1}),
        ("data: [DONE]", None),
        (": comment", None),
        ("", None),
        ("event: x", None),
        ("data: [1]", None),
    ],
)
def test_event_lines(line, event):
    assert parse_event(line) == event


@pytest.mark.parametrize("line", ['data: {"a"', "data: <html>"])
def test_an_event_that_is_no_json_is_an_error_not_a_crash(line):
    with pytest.raises(ProaError, match="JSON in each event"):
        parse_event(line)


@pytest.mark.parametrize("body", ["<html>", "[]", '{"data": []}', '{"data": null}'])
def test_a_server_without_models_is_an_error_not_a_crash(body):
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=body))
    with httpx.Client(transport=transport) as client, pytest.raises(ProaError, match="list of models"):
        Endpoint.parse("host").first_model(client)
