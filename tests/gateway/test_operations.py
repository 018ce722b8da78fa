"""Running a gateway: health, logs, events, metrics, loading and unloading, systemd, and its end."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
import socket
import threading

import psutil
import pytest
from gateway_process import GatewayProcess
from prometheus_client.parser import text_string_to_metric_families
from raw_http import call, connect, read_answer

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    process = GatewayProcess(
        tmp_path_factory.mktemp("gateway"),
        {"m": [], "loading": ["--start-delay", "0.4", "--load-bytes", "1000", "--load-log"]},
    )
    yield process.wait_ready()
    assert process.stop() == 0, process.log()
    assert "Traceback" not in process.log(), process.log()


def samples(gateway):
    """Name and labels of each sample -> value."""
    families = text_string_to_metric_families(gateway.get("/metrics").text)
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def test_health_says_what_each_model_does(gateway):
    assert gateway.get("/livez").json() == {"status": "ok"}
    for path in ("/readyz", "/health"):
        ready = gateway.get(path)
        assert ready.status_code == 200 and ready.json()["status"] == "ok"
        assert set(ready.json()["models"]) == {"m", "loading"}


def test_models_are_loaded_and_unloaded_on_request(gateway):
    assert gateway.post("/models/load", {"model": "m"}).json() == {"model": "m", "status": "ready"}
    status = gateway.status("m")
    assert status["state"] == "ready" and status["run"] >= 1
    pid = gateway.journal("m", "started")[-1]["pid"]
    assert gateway.post("/models/unload", {"model": "m"}).json() == {"model": "m", "status": "stopped"}
    assert gateway.status("m")["state"] == "stopped" and not psutil.pid_exists(pid)
    for body in ({}, {"model": 1}, {"model": "m", "new": True}, []):
        assert gateway.post("/models/load", body).status_code == 400
    assert gateway.post("/models/unload", {"model": "other"}).status_code == 404
    assert gateway.get("/models/load").status_code == 405


def test_logs_are_there_and_can_be_followed(gateway):
    """G12."""
    gateway.post("/models/unload", {"model": "m"})
    with gateway.client() as client, client.stream("GET", "/logs/m?follow=1&lines=0") as answer:
        assert answer.headers["content-type"].startswith("text/plain")
        gateway.post("/models/load", {"model": "m"})
        lines = (line for line in answer.iter_lines() if not line.startswith("[gateway]"))
        assert "starts" in next(lines) and next(lines) == "ready"
    last = gateway.get("/logs/m?lines=2").text.splitlines()
    assert len(last) == 2 and "ready" in last and any(line.startswith("[gateway] ready after") for line in last)
    assert "starts" in gateway.get("/logs/m").text
    assert gateway.get("/logs/nobody").status_code == 404
    for lines in ("many", "²", "-1", "9" * 10):
        assert gateway.get(f"/logs/m?lines={lines}").status_code == 400


def test_events_tell_what_happens(gateway):
    gateway.post("/models/unload", {"model": "loading"})
    with gateway.client() as client, client.stream("GET", "/events") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: status"
        snapshot = json.loads(next(lines).removeprefix("data: "))
        assert [model["name"] for model in snapshot["models"]] == ["m", "loading"]
        threading.Thread(target=gateway.post, args=("/models/load", {"model": "loading"})).start()
        states = []
        for line in lines:
            event = json.loads(line[6:]) if line.startswith("data: ") else {}
            if (event.get("kind"), event.get("model")) == ("state", "loading"):
                states.append(event["data"]["state"])
                if states[-1] == "ready":
                    break
    assert states == ["starting", "ready"]


def test_the_page_has_nothing_but_itself_and_what_it_asks_for(gateway):
    page = gateway.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    script = page.text.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = page.headers["content-security-policy"]
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert "innerHTML" not in script and "//" not in re.sub(r"// Events[^\n]*", "", script), "no markup, no other site"
    assert set(re.findall(r'checked\("(/[a-z]+)"\)', script)) == {"/models", "/events"}


def test_pages_of_other_sites_cannot_use_a_gateway_without_a_key(gateway):
    for origin in ("https://evil.example", "null", f"http://evil.example:{gateway.port}"):
        answer = call(gateway.port, "/models/load", {"model": "m"}, origin=origin, content_type="text/plain")
        assert answer.status == 403 and json.loads(answer.body)["error"]["code"] == "foreign_page"
    assert call(gateway.port, "/models/load", {"model": "m"}, origin="http://test").status == 200
    # An image or a link says nothing of its origin, and would start an engine; a link to the page is one.
    for site in ("cross-site", "same-site"):
        assert gateway.get("/upstream/m/x", headers={"sec-fetch-site": site}).status_code == 403
        assert gateway.get("/", headers={"sec-fetch-site": site}).status_code == 200
    for site in ("same-origin", "none"):
        assert gateway.get("/models", headers={"sec-fetch-site": site}).status_code == 200
    # A name that was another machine a moment ago.
    for host in ("evil.example", f"evil.example:{gateway.port}", "127.0.0.1.evil.example"):
        assert gateway.get("/models", headers={"host": host}).status_code == 403
    for host in ("localhost:1", "127.0.0.1", "[::1]:8080", "gateway:8080", "proa.localhost"):
        assert gateway.get("/models", headers={"host": host}).status_code == 200


def test_metrics_count_requests_loads_and_what_the_gateway_costs(gateway):
    gateway.post("/models/load", {"model": "m"})
    before = samples(gateway)
    call(gateway.port, CHAT, {"model": "m", "stream": True})
    call(gateway.port, CHAT, {"model": "no-model"})
    after = samples(gateway)

    def grown(name, **labels):
        key = (name, *sorted(labels.items()))
        return after[key] - before.get(key, 0.0)

    assert grown("proa:gateway_requests_total", model="m", outcome="answered") == 1
    assert grown("proa:gateway_requests_total", model="", outcome="refused") == 1
    assert grown("proa:gateway_request_overhead_seconds_count") == 1
    assert grown("proa:gateway_chunk_delay_seconds_count") >= 1
    assert after["proa:gateway_model_state", ("model", "m"), ("state", "ready")] == 1.0
    assert after["proa:gateway_load_seconds_count", ("model", "m")] >= 1
    assert after["proa:gateway_running_requests", ("model", "m")] == 0
    assert not any("no-model" in str(key) for key in after)


def test_it_tells_systemd_that_it_is_ready_alive_and_stopping(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(10)
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        gateway = GatewayProcess(tmp_path, {"m": []}, environment=environment)
        messages = {systemd.recv(1000)}
        while not {b"READY=1", b"WATCHDOG=1"} <= messages:
            messages.add(systemd.recv(1000))
        assert gateway.get("/livez").status_code == 200
        assert gateway.stop() == 0, gateway.log()
        systemd.setblocking(False)
        received = []
        while True:
            try:
                received.append(systemd.recv(1000))
            except BlockingIOError:
                break
        assert b"STOPPING=1" in received


def test_what_outlives_the_drain_is_told_so(tmp_path):
    model = {"m": ["--chunks", "2000", "--chunk-delay", "0.05"]}
    gateway = GatewayProcess(tmp_path, model, http={"drain_timeout": 0.3}).wait_ready()
    with connect(gateway.port, CHAT, {"model": "m", "stream": True}) as running:
        assert running.recv(1, socket.MSG_PEEK)
        gateway.process.send_signal(signal.SIGTERM)
        answer = read_answer(running)
    *_, last, end = answer.body.split(b"\n\n")
    assert end == b"" and json.loads(last.removeprefix(b"data: "))["error"]["type"] == "service_unavailable"
    assert gateway.process.wait(10) == 0, gateway.log()


def test_sigterm_lets_requests_finish_refuses_new_ones_and_leaves_no_engine(tmp_path):
    gateway = GatewayProcess(tmp_path, {"m": ["--chunks", "20", "--chunk-delay", "0.05"]}).wait_ready()
    whole = call(gateway.port, CHAT, {"model": "m", "stream": True}).body
    running = connect(gateway.port, CHAT, {"model": "m", "stream": True})
    assert running.recv(1, socket.MSG_PEEK)
    with gateway.client() as client, client.stream("GET", "/events") as events:
        lines = events.iter_lines()
        next(lines)
        gateway.process.send_signal(signal.SIGTERM)
        gateway.wait(lambda: gateway.get("/readyz").status_code == 503, "draining")
        refused = gateway.post(CHAT, {"model": "m"})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "gateway_stopping"
        assert gateway.post("/models/load", {"model": "m"}).json()["error"]["code"] == "gateway_stopping"
        assert read_answer(running).body == whole
        assert list(lines) is not None, "streams without end are ended"
    running.close()
    pid = gateway.journal("m", "started")[-1]["pid"]
    assert gateway.process.wait(10) == 0, gateway.log()
    assert not psutil.pid_exists(pid)
    assert "Traceback" not in gateway.log(), gateway.log()
