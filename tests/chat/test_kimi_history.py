"""Any client's conversation in the form of Kimi's prompts."""

import copy

import pytest

from proa.chat.history import normalise_history
from proa.chat.kimi_prompt import STYLES, render_prompt
from proa.core.errors import UserError


def call(call_id, name="weather", arguments="{}"):
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "function": function} | ({} if call_id is None else {"id": call_id})


def assistant(*calls, **more):
    return {"role": "assistant", "content": "", "tool_calls": list(calls)} | more


def result(content, call_id=None, **more):
    return {"role": "tool", "content": content} | ({} if call_id is None else {"tool_call_id": call_id}) | more


def results_of(messages):
    normal = normalise_history(messages).messages
    return [(m["content"], m.get("tool_call_id")) for m in normal if m["role"] == "tool"]


def test_calls_are_numbered_through_the_conversation():
    history = normalise_history(
        [
            assistant(call("call_a"), call("functions.read:7", "read")),
            result("1", "call_a"),
            result("2", "functions.read:7"),
            {"role": "user", "content": "on"},
            assistant(call("toolu_b")),
            result("3", "toolu_b"),
        ]
    )
    ids = [c["id"] for m in history.messages for c in m.get("tool_calls", ())]
    assert ids == ["functions.weather:0", "functions.read:1", "functions.weather:2"]
    assert [m["tool_call_id"] for m in history.messages if m["role"] == "tool"] == ids
    assert history.next_index == 3


def test_results_come_in_the_order_of_their_calls():
    messages = [assistant(call("a"), call("b"), call("c")), result("C", "c"), result("A", "a"), result("B", "b")]
    assert [content for content, _ in results_of(messages)] == ["A", "B", "C"]


def test_an_id_used_in_every_turn_means_the_latest_call_without_result():
    turn = [assistant(call("x:0"))]
    messages = [*turn, result("one", "x:0"), *turn, result("two", "x:0")]
    assert results_of(messages) == [("one", "functions.weather:0"), ("two", "functions.weather:1")]
    # The first turn's result is missing: the one there is belongs to the second.
    assert results_of([*turn, *turn, result("two", "x:0")]) == [("two", "functions.weather:1")]


def test_the_same_id_twice_in_a_message_binds_in_order():
    messages = [assistant(call("x", "a"), call("x", "b")), result("1", "x"), result("2", "x"), result("3", "x")]
    assert results_of(messages) == [("1", "functions.a:0"), ("2", "functions.b:1"), ("3", "functions.b:1")]


def test_results_without_a_known_id_bind_by_name_then_in_order():
    calls = assistant(call("a", "first"), call("b", "second"), call("c", "third"))
    messages = [calls, result("?"), result("2", "lost", name="second"), result("3", "c"), result("more", "gone")]
    assert results_of(messages) == [
        ("?", "functions.first:0"),
        ("2", "functions.second:1"),
        ("3", "functions.third:2"),
        ("more", "gone"),
    ]


def test_a_result_is_not_bound_to_a_later_call():
    assert results_of([result("early", "a"), assistant(call("a")), result("late", "a")]) == [
        ("early", "a"),
        ("late", "functions.weather:0"),
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ('{"a"', '{"a"'),
        (" \n", "{}"),
        (None, "{}"),
        ({"b": "é", "a": [1, None]}, '{"b":"é","a":[1,null]}'),
        ([], "[]"),
    ],
)
def test_arguments(arguments, text):
    (message,) = normalise_history([assistant(call("a", arguments=arguments))]).messages
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": text}


@pytest.mark.parametrize(
    ("message", "reasoning"),
    [
        ({"content": "c"}, ""),
        ({"content": "c", "reasoning_content": " r\n"}, " r\n"),
        ({"content": "c", "reasoning": "r"}, "r"),
        ({"content": "c", "reasoning_content": "", "reasoning": "r"}, "r"),
        ({"content": "c", "reasoning_content": "x", "reasoning": "y"}, "x"),
        ({"content": [{"type": "thinking", "thinking": "a"}, {"type": "text", "text": "c"}]}, "a"),
    ],
)
def test_reasoning(message, reasoning):
    normal = normalise_history([{"role": "assistant"} | message]).messages
    assert normal == [{"role": "assistant", "content": "c", "reasoning_content": reasoning}]


def test_content_and_unknown_keys():
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "cache": 1},
        {"role": "user", "content": None, "name": "ada"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, image]},
        {"role": "assistant", "tool_calls": None, "refusal": None},
    ]
    assert normalise_history(messages).messages == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "", "name": "ada"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, image]},
        {"role": "assistant", "content": "", "reasoning_content": ""},
    ]


def test_the_input_stays_as_it_is():
    messages = [assistant(call("a", arguments={"x": 1})), result("1", "a")]
    before = copy.deepcopy(messages)
    normalise_history(messages)
    assert messages == before


@pytest.mark.parametrize("broken", [{"id": "a"}, {"id": "a", "function": {"arguments": "{}"}}, "text", None])
def test_a_call_that_is_no_function_call_is_named(broken):
    with pytest.raises(UserError, match=r"\[messages\[1\]\.tool_calls\[0\]\]"):
        normalise_history([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [broken]}])


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_parts_that_are_no_objects_stay_for_the_prompt_to_refuse(role):
    parts = [{"type": "text", "text": "a"}, "b", None]
    (message,) = normalise_history([{"role": role, "content": parts}]).messages
    assert message["content"] == parts
    with pytest.raises(UserError, match=r"messages\[0\]\.content\[1\]"):
        render_prompt(STYLES["kimi-k2.6"], [message])


def test_ten_thousand_calls_of_one_id_take_linear_time():
    n = 10_000
    same = [assistant(*[call("x")] * n), *[result("r", "x")] * n]
    lost = [assistant(*[call(str(i)) for i in range(n)]), *[result("r", "gone")] * n]
    turns = [message for _ in range(n) for message in (assistant(call("x")), result("r", "x"))]
    for messages in (same, lost, turns):
        assert normalise_history(messages).next_index == n


def test_handed_cases(shared):
    from proa.chat.replay import main

    assert main(["--history", str(shared / "cases/kimi_history.jsonl")]) == 0
