"""Requests through a gateway process: what an engine says arrives as it was said."""

from __future__ import annotations

import concurrent.futures
import json
import random
import socket
import time

import psutil
import pytest
import raw_http
from gateway_process import GatewayProcess
from raw_http import call, connect, read_answer

CHAT = "/v1/chat/completions"
KEY = "the-gateways-key"
# path, body: whatever names a model goes to its engine, on any path.
REQUESTS = {
    "chat stream": (CHAT, {"stream": True, "stream_options": {"include_usage": True}}),
    "chat": (CHAT, {"tools": [{"type": "function"}], "logprobs": True, "temperature": 0.1}),
    "responses": ("/v1/responses", {"stream": True, "input": "Zwei\u2028Orte"}),
    "messages": ("/v1/messages?beta=true", {"stream": True, "max_tokens": 5}),
    "completions": ("/v1/completions", {"stream": True, "prompt": [1, 2]}),
    "embeddings": ("/v1/embeddings", {"input": ["a", "b"]}),
    "tokenize": ("/tokenize", {"prompt": "x"}),
    "unheard of": ("/engine/specific%20path", {"x": None}),
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    process = GatewayProcess(
        tmp_path_factory.mktemp("gateway"),
        {
            "m": ["--chunks", "5"],
            "slow": ["--chunks", "400", "--chunk-delay", "0.02", "--first-delay", "0.05"],
            "crash": ["--crash-after", "1"],
            "late": ["--start-delay", "1.0"],
        },
        fields={"m": {"aliases": {"cold": {"temperature": 0.0, "chat_template_kwargs": {"thinking": False}}}}},
        http={"progress_interval": 0.2, "max_body_bytes": 100_000},
    )
    yield process.wait_ready()
    assert process.stop() == 0, process.log()
    assert "Traceback" not in process.log(), process.log()


@pytest.mark.parametrize("path, body", REQUESTS.values(), ids=REQUESTS)
def test_bytes_are_those_of_the_engine(gateway, path, body):
    """K2, G3: reasoning, tool calls, log probabilities, comments, usage after the finish, and headers."""
    engine = gateway.engine_port("m")
    body = {"model": "m", **body}
    direct, through = call(engine, path, body), call(gateway.port, path, body)
    assert through.body == direct.body and len(direct.body) > 100
    assert through.status == direct.status == 200
    assert through.end_to_end() == direct.end_to_end()
    *_, first, second = gateway.journal("m", "request")
    assert (first["path"], first["body"]) == (second["path"], second["body"]) == (path, body)


def test_an_error_of_the_engine_is_passed_on_as_it_is(gateway):
    engine = gateway.engine_port("m")
    direct = call(engine, "/nothing", b"", method="GET")
    through = call(gateway.port, "/upstream/m/nothing", b"", method="GET")
    assert (through.status, through.body) == (direct.status, direct.body)
    assert through.status == 404 and through.end_to_end() == direct.end_to_end()


def test_streams_ask_proxies_not_to_buffer(gateway):
    assert call(gateway.port, CHAT, {"model": "m", "stream": True}).header("x-accel-buffering") == "no"
    assert call(gateway.port, CHAT, {"model": "m"}).header("x-accel-buffering") is None


def test_request_id_and_trace_context_reach_the_engine_and_hop_by_hop_headers_do_not(gateway):
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"x_request_id": "abc", "traceparent": parent, "te": "trailers", "x_app": "yes"}
    answer = call(gateway.port, CHAT, {"model": "m"}, **headers)
    assert answer.header("x-request-id") == "abc"
    seen = gateway.journal("m", "request")[-1]["headers"]
    assert (seen["x-request-id"], seen["traceparent"], seen["x-app"]) == ("abc", parent, "yes")
    assert "te" not in seen
    answer = call(gateway.port, CHAT, {"model": "m"})
    seen = gateway.journal("m", "request")[-1]["headers"]
    assert answer.header("x-request-id") == seen["x-request-id"] and len(seen["traceparent"]) == 55


def test_an_alias_sets_its_fields_and_nothing_else(gateway):
    """G10."""
    call(gateway.port, CHAT, {"model": "cold", "temperature": 1.0, "top_p": 0.5})
    kept = {"model": "m", "top_p": 0.5}
    set_by_alias = {"temperature": 0.0, "chat_template_kwargs": {"thinking": False}}
    assert gateway.journal("m", "request")[-1]["body"] == {**kept, **set_by_alias}


def test_the_gateway_lists_models_and_aliases_itself(gateway):
    data = gateway.get("/v1/models").json()["data"]
    assert [entry["id"] for entry in data] == ["m", "cold", "slow", "crash", "late"]
    assert gateway.get("/v1/models/cold").json()["id"] == "cold"
    missing = gateway.get("/v1/models/m2")
    assert missing.status_code == 404 and "late" in missing.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/upstream%2Fm/x", "/upstream%2Fm%2Fx", "/upstream%2Fm/x/y"])
def test_a_written_slash_is_none_of_a_route(gateway, path):
    answer = call(gateway.port, path, b"", method="GET")
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (404, "not_found")


def test_trailers_of_a_request_are_no_headers(gateway):
    body = b'{"model": "m"}'
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as client:
        client.sendall(
            b"POST %b HTTP/1.1\r\nhost: test\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT.encode()
            + b"%x\r\n%b\r\n0\r\nx-late: yes\r\n\r\n" % (len(body), body)
        )
        assert read_answer(client).status == 200
    assert "x-late" not in gateway.journal("m", "request")[-1]["headers"]


@pytest.mark.parametrize(
    "body, status, code",
    [
        ({"model": "M"}, 404, "model_not_found"),
        (b'{"model": "cold", "\xff": 1}', 400, "invalid_json"),
        ({"model": "m-instruct"}, 404, "model_not_found"),
        ({"messages": []}, 400, "missing_required_parameter"),
        (b"{", 400, "invalid_json"),
        (b'{"model": "m", "pad": "' + b"x" * 100_000 + b'"}', 413, "request_too_large"),
    ],
)
def test_what_has_no_engine_is_refused_with_a_reason(gateway, body, status, code):
    answer = call(gateway.port, CHAT, body)
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["code"]) == (status, code)
    anthropic = json.loads(call(gateway.port, "/v1/messages", body).body)
    assert anthropic["type"] == "error" and set(anthropic["error"]) == {"type", "message"}


def test_a_body_without_a_length_is_taken_up_to_the_limit(gateway):
    def send(pieces):
        head = f"POST {CHAT} HTTP/1.1\r\nhost: test\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n"
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as connection:
            connection.sendall(head.encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
            for piece in pieces:
                connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
            connection.sendall(b"0\r\n\r\n")
            return read_answer(connection)

    assert send([b'{"model": ', b'"m", "tag": 1}']).status == 200
    assert gateway.journal("m", "request")[-1]["body"] == {"model": "m", "tag": 1}
    assert send([b'{"model": "m", "pad": "', b"x" * 60_000, b"x" * 60_000, b'"}']).status == 413


def test_a_path_names_a_model_for_what_has_no_body(gateway):
    assert gateway.get("/upstream/m/v1/models?x=1").json()["object"] == "list"
    assert gateway.get("/upstream/nobody/v1/models").status_code == 404
    assert gateway.get("/v1/files").status_code == 405  # a POST would be for an engine


def test_a_client_that_leaves_frees_the_engine_within_a_second(gateway):
    """K3, G4: streaming, and while the answer is computed."""
    gateway.engine_port("slow")
    for body in ({"model": "slow", "stream": True}, {"model": "slow", "stream": True, "n": 2}):
        aborted = len(gateway.journal("slow", "aborted"))
        connection = connect(gateway.port, CHAT, body)
        assert connection.recv(100)
        connection.close()
        left = time.monotonic()
        gateway.wait(lambda seen=aborted: len(gateway.journal("slow", "aborted")) > seen, "abort")
        assert time.monotonic() - left < 1.0
    assert gateway.engine_state("slow")["running"] == 0
    gateway.wait(lambda: gateway.status("slow")["running"] == 0, "lease given back")


def test_a_client_that_leaves_before_the_head_is_noticed_too(gateway):
    gateway.engine_port("slow")
    started = gateway.engine_state("slow")["requests"]
    connection = connect(gateway.port, CHAT, {"model": "slow", "stream": True})
    gateway.wait(lambda: gateway.engine_state("slow")["requests"] > started, "request")
    connection.close()
    gateway.wait(lambda: gateway.engine_state("slow")["running"] == 0, "abort", 1.0)


def test_a_held_stream_is_told_how_far_it_is_and_then_gets_the_engines_bytes(gateway):
    answer = call(gateway.port, CHAT, {"model": "late", "stream": True})
    comments = [line for line in answer.body.split(b"\n\n") if line.startswith(b": late: loading")]
    assert len(comments) >= 2 and answer.status == 200
    assert answer.header("content-type") == "text/event-stream; charset=utf-8"
    direct = call(gateway.engine_port("late"), CHAT, {"model": "late", "stream": True})
    assert answer.body == b"".join(comment + b"\n\n" for comment in comments) + direct.body


def test_an_engine_that_dies_ends_its_streams_with_an_error_event(gateway):
    answer = call(gateway.port, CHAT, {"model": "crash", "stream": True})
    *_, last, end = answer.body.split(b"\n\n")
    assert end == b"" and b"[DONE]" not in answer.body
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["type"] == "service_unavailable" and "model crash" in error["message"]


def test_a_thousand_requests_of_which_a_fifth_leave_cost_nothing_that_stays(gateway):
    gateway.engine_port("m")
    before = gateway.num_descriptors()
    counted = gateway.engine_state("m")
    rng = random.Random(7)
    plan = [(rng.random() < 0.2, rng.random() < 0.5, rng.choice([0.0, 0.0, 0.002])) for _ in range(1000)]
    expected = {stream: call(gateway.port, CHAT, {"model": "m", "stream": stream}).body for stream in (True, False)}

    def one(leaves: bool, stream: bool, pause: float) -> bool:
        connection = connect(gateway.port, CHAT, {"model": "m", "stream": stream})
        with connection:
            if leaves:
                time.sleep(pause)
                return True
            return read_answer(connection).body == expected[stream]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda entry: one(*entry), plan))
    gateway.wait(lambda: gateway.status("m")["running"] == gateway.status("m")["waiting"] == 0, "leases given back")
    gateway.wait(lambda: gateway.engine_state("m")["running"] == 0, "no upstream request left")
    ended = gateway.engine_state("m")
    gone = sum(leaves for leaves, _, _ in plan)
    finished, aborted = (ended[name] - counted[name] for name in ("finished", "aborted"))
    assert finished >= 1002 - gone and finished + aborted <= 1002
    gateway.wait(lambda: gateway.num_descriptors() <= before, "descriptors closed")
    children = psutil.Process(gateway.process.pid).children(recursive=True)
    running = sum(status["state"] == "ready" for status in gateway.get("/models").json()["models"])
    # An engine and its keeper each.
    assert len(children) == 2 * running, [child.cmdline() for child in children]


def test_a_bounded_queue_and_engines_that_are_not_there_say_when_to_come_back(start_gateway):
    """K9, G6, G9."""
    gateway = start_gateway(
        {
            "busy": ["--chunks", "200", "--chunk-delay", "0.05"],
            "refusing": ["--start-delay", "0.5"],
            "broken": ["--crash-at-start", "3"],
        },
        fields={
            "busy": {"max_running": 1, "max_waiting": 1, "memory": {}},
            "refusing": {"while_starting": "refuse", "memory": {}},
            "broken": {"memory": {}},
        },
    )
    gateway.engine_port("busy")
    with connect(gateway.port, CHAT, {"model": "busy", "stream": True}) as running:
        assert running.recv(1)
        with connect(gateway.port, CHAT, {"model": "busy", "stream": True}):
            gateway.wait(lambda: gateway.status("busy")["waiting"] == 1, "one that waits")
            refusals = {
                "queue_full": (429, gateway.post(CHAT, {"model": "busy"})),
                "engine_starting": (503, gateway.post(CHAT, {"model": "refusing", "stream": True})),
                "engine_failed": (503, gateway.post(CHAT, {"model": "broken"})),
                "engine_cooling_down": (503, gateway.post(CHAT, {"model": "broken"})),
            }
    for code, (status, answer) in refusals.items():
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
        assert int(answer.headers["retry-after"]) >= 1
    gateway.wait(lambda: gateway.status("refusing")["state"] == "ready", "the load that a refusal began")
    assert gateway.post(CHAT, {"model": "refusing"}).status_code == 200
    assert "out of memory: this is why" in gateway.get("/logs/broken").text


def test_models_that_take_turns_lose_no_request(start_gateway):
    """Two models of which one fits: requests for both come all the time, each is answered whole."""
    options = ["--chunks", "10", "--chunk-delay", "0.005"]
    gateway = start_gateway({"a": options, "b": options}, patience=0.1)
    bodies = {name: {"model": name, "stream": True, "messages": [name]} for name in "ab"}
    whole = call(gateway.port, CHAT, bodies["a"]).body
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda n: call(gateway.port, CHAT, bodies["ab"[n // 12 % 2]]), range(96)))
    assert all(answer.status == 200 and answer.body.endswith(whole) for answer in answers)
    assert not gateway.journal("a", "aborted") and not gateway.journal("b", "aborted")
    starts = [len(gateway.journal(name, "started")) for name in "ab"]
    assert sum(starts) > 2, "they did take turns"


def test_every_route_but_livez_asks_for_the_key(start_gateway):
    gateway = start_gateway({"m": []}, http={"api_key": KEY})
    for method, path in (
        ("GET", "/readyz"), ("GET", "/health"), ("GET", "/metrics"), ("GET", "/v1/models"), ("GET", "/models"),
        ("GET", "/logs/m"), ("GET", "/events"), ("POST", "/models/load"), ("POST", "/models/unload"),
        ("POST", CHAT), ("GET", "/upstream/m/health"), ("GET", "/nothing"), ("POST", "/livez"), ("POST", "/"),
    ):  # fmt: skip
        for headers in ({}, {"authorization": f"Bearer {KEY}x"}, {"x_api_key": "wrong"}):
            answer = call(gateway.port, path, b'{"model": "m"}', method=method, **headers)
            assert answer.status == 401, path
    assert not gateway.journal("m", "started")
    assert gateway.get("/livez").status_code == 200
    for headers in ({"authorization": f"Bearer {KEY}"}, {"x_api_key": KEY}):
        assert call(gateway.port, CHAT, {"model": "m"}, **headers).status == 200
        assert KEY not in str(gateway.journal("m", "request")[-1]["headers"])


def test_a_client_that_does_not_read_is_cut_off(start_gateway):
    gateway = start_gateway({"m": ["--chunks", "60000"]}, http={"write_timeout": 0.3})
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", gateway.port))
        connection.sendall(raw_http.request("POST", CHAT, b'{"model": "m", "stream": true}', {}))
        gateway.wait(lambda: gateway.journal("m", "aborted"), "abort")
    assert gateway.status("m")["running"] == 0


def test_a_body_counts_until_its_answer_begins(start_gateway):
    """Answers take long: those of a few large prompts must not keep all others out."""
    gateway = start_gateway(
        {"m": ["--chunks", "500", "--chunk-delay", "0.02"]},
        http={"max_total_body_bytes": 100_000, "progress_interval": 60},
    )
    body = {"model": "m", "stream": True, "prompt": "x" * 60_000}
    with connect(gateway.port, CHAT, body) as first, connect_when_answered(first, gateway.port, body) as second:
        assert second.recv(15) == b"HTTP/1.1 200 OK"


def connect_when_answered(first, port, body):
    assert first.recv(15) == b"HTTP/1.1 200 OK"
    return connect(port, CHAT, body)
