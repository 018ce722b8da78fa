"""What a hop keeps to itself and what it passes on; and the fields of a body."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.core.errors import UserError
from proa.gateway.body import RequestFields, read_fields, rewrite
from proa.gateway.headers import request_headers, response_headers

OWN = {"host": "127.0.0.1:1", "Authorization": "Bearer run-secret", "x-request-id": "id"}
PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def sent(*headers):
    return request_headers([(name.encode(), value) for name, value in headers], own=OWN)


def test_what_belongs_to_the_hop_is_left_out_and_the_rest_goes_along_in_order():
    passed = sent(
        ("connection", b"keep-alive, X-Mine"),
        ("x-mine", b"1"),
        ("keep-alive", b"timeout=5"),
        ("te", b"trailers"),
        ("upgrade", b"h2c"),
        ("transfer-encoding", b"chunked"),
        ("proxy-authorization", b"Basic x"),
        ("expect", b"100-continue"),
        ("content-length", b"7"),
        ("host", b"gateway:8080"),
        ("x-app", b"a"),
        ("content-type", b"application/json"),
        ("x-app", b"b"),
        ("openai-organization", b"org"),
        ("cookie", b"c=1"),
    )
    names = [name for name, _ in passed]
    assert [v for n, v in passed if n == b"host"] == [b"127.0.0.1:1"]
    assert passed[names.index(b"x-app") :][:5] == [
        (b"x-app", b"a"),
        (b"content-type", b"application/json"),
        (b"x-app", b"b"),
        (b"openai-organization", b"org"),
        (b"cookie", b"c=1"),
    ]
    assert not {b"connection", b"x-mine", b"keep-alive", b"te", b"upgrade", b"expect", b"proxy-authorization"} & {
        *names
    }


def test_the_engines_key_replaces_every_copy_of_the_clients():
    passed = sent(("authorization", b"Bearer client"), ("x-api-key", b"client"), ("authorization", b"Bearer other"))
    assert [value for name, value in passed if name == b"authorization"] == [b"Bearer run-secret"]
    assert not any(b"client" in value or b"other" in value for _, value in passed)
    without = request_headers([(b"authorization", b"Bearer client"), (b"x-api-key", b"client")], own={})
    assert not any(b"client" in value for _, value in without)


def test_a_header_named_after_the_engines_secret_cannot_come_from_a_client():
    own = {"x-engine-secret": "s"}
    passed = request_headers([(b"x-engine-secret", b"guess")], own=own)
    assert [value for name, value in passed if name == b"x-engine-secret"] == [b"s"]


def test_trace_context_is_passed_on_or_made():
    assert (b"traceparent", PARENT) in sent(("traceparent", PARENT), ("tracestate", b"a=1"))
    assert (b"tracestate", b"a=1") in sent(("traceparent", PARENT), ("tracestate", b"a=1"))
    made = [dict(sent())[b"traceparent"] for _ in range(2)]
    assert made[0] != made[1] and all(re.fullmatch(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-00", value) for value in made)


@pytest.mark.parametrize(
    "wrong", [b"", b"x", b"ff" + PARENT[2:], PARENT[:3] + b"0" * 32 + PARENT[35:], PARENT.upper(), PARENT + b"0"]
)
def test_what_is_no_trace_context_is_replaced_with_its_state(wrong):
    passed = sent(("traceparent", wrong), ("tracestate", b"a=1"))
    assert [value for name, value in passed if name == b"traceparent"] != [wrong]
    assert b"tracestate" not in dict(passed)


def test_two_trace_contexts_are_none():
    parents = [
        value for name, value in sent(("traceparent", PARENT), ("traceparent", PARENT)) if name == b"traceparent"
    ]
    assert len(parents) == 1 and parents[0] != PARENT


def test_streams_are_not_to_be_buffered_and_say_so_once():
    stream = (b"content-type", b"text/event-stream; charset=utf-8")
    assert response_headers([stream]).count((b"x-accel-buffering", b"no")) == 1
    assert response_headers([stream, (b"x-accel-buffering", b"yes")]) == [stream, (b"x-accel-buffering", b"yes")]
    plain = [(b"content-type", b"application/json"), (b"content-length", b"2")]
    assert response_headers(plain) == plain


def test_a_response_keeps_its_headers_but_for_those_of_the_hop():
    given_headers = [
        (b"date", b"d"), (b"set-cookie", b"a"), (b"connection", b"close, x-hop"), (b"x-hop", b"1"),
        (b"transfer-encoding", b"chunked"), (b"content-length", b"9"), (b"set-cookie", b"b"), (b"x-request-id", b"i"),
    ]  # fmt: skip
    assert response_headers(given_headers) == [(b"date", b"d"), (b"set-cookie", b"a"), (b"set-cookie", b"b")]


def test_model_and_stream_are_read_and_nothing_else_is_looked_at():
    body = b'{"messages": [{"content": {"model": "inner"}}], "stream": true, "model": "m", "n": 1e999}'
    assert read_fields(body) == RequestFields("m", True)
    assert read_fields(b'{"model": "m", "stream": "true"}') == RequestFields("m", False)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"model": 3}', b'{"model": null}', b'{"model": "\xff"}', b'"m"', b"[" * 100_000, b"{}"]
)
def test_a_body_that_names_no_model_is_the_clients_mistake(body):
    with pytest.raises(UserError, match="model"):
        read_fields(body)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), _json, max_size=5), st.dictionaries(st.text(), _json, max_size=3))
def test_changes_replace_fields_and_leave_the_others(fields, changes):
    body = json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace")
    assert json.loads(rewrite(body, changes)) == {**json.loads(body), **json.loads(json.dumps(changes))}


def test_values_that_are_not_changed_keep_their_bytes():
    body = b'{"a": 1.50, "b": [1,  2], "c": "\\u00e9", "big": 123456789012345678901234567890, "model": "x"}'
    assert rewrite(body, {}) is body
    rewritten = rewrite(body, {"model": "y"})
    for value in (b"1.50", b"[1,  2]", b'"\\u00e9"', b"123456789012345678901234567890", b'"y"'):
        assert value in rewritten
