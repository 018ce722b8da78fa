from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from proa.core.errors import CheckpointError, ContextLengthError, QueueFullError, UnavailableError, UserError
from proa.server.errors import describe, invalid_request
from proa.server.generation_request import StreamOptions
from proa.server.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from proa.server.sampling import SamplingDefaults, SequenceLimits, build_sampling

LIMITS = SequenceLimits(max_model_len=100, vocab_size=50, eos_token_ids=frozenset({2, 60}))


def parse(model: type, /, **fields: Any) -> Any:
    try:
        return model.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        raise invalid_request(error) from None


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse(ChatCompletionRequest, messages=[{"role": "user", "content": "hi"}], **fields)


def sampling(request: ChatCompletionRequest, prompt_tokens: int = 10, defaults: SamplingDefaults | None = None):
    return build_sampling(
        request,
        defaults or SamplingDefaults(),
        LIMITS,
        prompt_tokens=prompt_tokens,
        max_new_tokens=request.chat().max_new_tokens,
        num_logprobs=request.chat().num_logprobs,
    )


class TestSampling:
    def test_everything_arrives(self):
        request = chat(
            temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, presence_penalty=1, frequency_penalty=-1,
            repetition_penalty=1.5, seed=-3, stop=["a", "b"], stop_token_ids=[9], logit_bias={"4": -100, "5": 2.5},
            max_tokens=20, min_tokens=3, logprobs=True, top_logprobs=4,
        )  # fmt: skip
        params = sampling(request)
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.25, 7, 0.125)
        assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1.0, -1.0, 1.5)
        assert (params.seed, params.stop, params.stop_token_ids) == (-3, ("a", "b"), (2, 9))
        assert (params.logit_bias, params.max_tokens, params.min_tokens) == ({4: -100.0, 5: 2.5}, 20, 3)
        assert (params.logprobs, params.ignore_eos) == (4, False)

    def test_defaults(self):
        defaults = SamplingDefaults.choose("model", {"temperature": 0.6, "top_p": 0.9, "top_k": 0, "do_sample": True})
        params = sampling(chat(), defaults=defaults)
        assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.9, -1)
        assert sampling(chat(temperature=0), defaults=defaults).temperature == 0
        assert SamplingDefaults.choose("openai", {"temperature": 0.6}) == SamplingDefaults()

    @pytest.mark.parametrize("value", [-1, "x", True, float("nan"), 1e9])
    def test_wrong_model_defaults(self, value: Any):
        with pytest.raises(CheckpointError, match="temperature"):
            SamplingDefaults.choose("model", {"temperature": value})

    def test_ignore_eos(self):
        assert sampling(chat(ignore_eos=True)).stop_token_ids == ()
        assert sampling(chat(ignore_eos=True, stop_token_ids=[2])).stop_token_ids == (2,)

    def test_off_values(self):
        params = sampling(chat(top_k=0, top_p=0))
        assert params.top_k == -1 and 0 < params.top_p < 1e-6

    def test_lengths(self):
        assert sampling(chat()).max_tokens == 90
        assert sampling(chat(max_tokens=90)).max_tokens == 90
        assert sampling(chat(max_tokens=5, max_completion_tokens=7)).max_tokens == 7
        for request, tokens in ((chat(max_tokens=91), 10), (chat(), 100), (chat(max_tokens=1), 100)):
            with pytest.raises(ContextLengthError, match="100 tokens"):
                sampling(request, tokens)
        for request, field in ((chat(), "messages"), (parse(CompletionRequest, prompt="a"), "prompt")):
            with pytest.raises(ContextLengthError) as caught:
                build_sampling(
                    request, SamplingDefaults(), LIMITS, prompt_tokens=100, max_new_tokens=1, num_logprobs=None
                )
            assert caught.value.param == field
        with pytest.raises(UserError, match="min_tokens"):
            sampling(chat(min_tokens=91))

    @pytest.mark.parametrize("fields", [{"stop_token_ids": [50]}, {"logit_bias": {"50": 1}}])
    def test_ids_outside_the_vocabulary(self, fields: dict):
        with pytest.raises(UserError, match="below 50"):
            sampling(chat(**fields))


class TestRequests:
    def test_stops(self):
        assert chat(stop="a").stops == ("a",) and chat(stop=["a", "b"]).stops == ("a", "b")
        assert chat().stops == () and chat(stop=[]).stops == () and chat(stop=None).stops == ()
        assert len(chat(stop=["x"] * 16).stops) == 16
        with pytest.raises(UserError):
            chat(stop=["x"] * 17)

    def test_number_of_biases(self):
        assert len(chat(logit_bias={str(index): 1 for index in range(1024)}).logit_bias) == 1024
        with pytest.raises(UserError, match="at most 1024"):
            chat(logit_bias={str(index): 1 for index in range(1025)})

    def test_nulls_are_defaults(self):
        assert chat(**dict.fromkeys(ChatCompletionRequest.model_fields.keys() - {"messages"})) == chat()
        requests = [(CompletionRequest, {"prompt": "a"}), (TokenizeRequest, {"prompt": "a"})]
        for model, given in [*requests, (DetokenizeRequest, {"tokens": []})]:
            assert parse(model, **{**dict.fromkeys(model.model_fields), **given}) == parse(model, **given)
        assert parse(StreamOptions, include_usage=None) == StreamOptions()

    def test_prompts(self):
        assert parse(CompletionRequest, prompt="a").prompts == ["a"]
        assert parse(CompletionRequest, prompt=["a", "b"]).prompts == ["a", "b"]
        assert parse(CompletionRequest, prompt=[1, 2]).prompts == [[1, 2]]
        assert parse(CompletionRequest, prompt=[[1], [2, 3]]).prompts == [[1], [2, 3]]

    @pytest.mark.parametrize("prompt", [5, None, [-1], [1, "a"], ["a"] * 129, [True], [[2**31]], "\0", {"a": 1}])
    def test_wrong_prompts_are_told_all_forms(self, prompt: Any):
        with pytest.raises(UserError, match="text without NUL characters, token ids from 0 .* at most 128 of either"):
            parse(CompletionRequest, prompt=prompt)

    def test_penalties_that_leave_float32_are_refused(self):
        assert chat(repetition_penalty=1e-6).repetition_penalty == 1e-6
        for value in (5e-324, 1e-40, 0.0):
            with pytest.raises(UserError, match="repetition_penalty"):
                chat(repetition_penalty=value)

    def test_messages_as_openai_clients_send_them(self):
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        odd = {"id": "c2", "function": {"name": "f", "arguments": "not json"}}
        request = parse(
            ChatCompletionRequest,
            messages=[
                {"role": "assistant", "content": None, "tool_calls": [call, odd], "reasoning": "why", "extra": 1},
                {"role": "tool", "content": [{"type": "text", "text": "x"}], "tool_call_id": "c1"},
            ],
        )
        first, second = (message.as_openai("messages") for message in request.messages)
        assert (
            first["content"] == ""
            and first["reasoning_content"] == first["reasoning"] == "why"
            and "extra" not in first
        )
        arguments = [entry["function"]["arguments"] for entry in first["tool_calls"]]
        assert arguments == ['{"a": 1}', "not json"]
        assert second == {"role": "tool", "content": "x", "tool_call_id": "c1"}

    def test_generation_prompt(self):
        assert (
            chat().turn().add_generation_prompt and not chat(add_generation_prompt=False).turn().add_generation_prompt
        )
        assert not chat(continue_final_message=True).turn().add_generation_prompt

    def test_tools(self):
        tool = {"type": "function", "function": {"name": "mcp.srv-x__f:1", "strict": True}, "extra": 1}
        assert chat(tools=[tool]).turn().tools == [tool]
        assert chat(tools=[]).turn().tools == chat(tools=None).turn().tools == []
        assert chat(tools=[{"type": "web_search"}]).turn().tools == [{"type": "web_search"}]

    def test_tool_choices(self):
        tools = [{"type": "function", "function": {"name": "f"}}]
        named = {"type": "function", "function": {"name": "f"}}
        for choice, mode, name in (
            (None, "auto", None), ("auto", "auto", None), ("none", "none", None), ("required", "required", None),
            (named, "required", "f"),
        ):  # fmt: skip
            request = chat(tools=tools, tool_choice=choice).chat()
            request.check_tool_choice()
            assert (request.tool_choice.mode, request.tool_choice.name) == (mode, name)
            assert request.turn.no_calls is (mode == "none")
        other = {"type": "function", "function": {"name": "g"}}
        for fields in ({"tool_choice": "required"}, {"tool_choice": other, "tools": tools}, {"tool_choice": "maybe"}):
            with pytest.raises(UserError, match="tool_choice"):
                chat(**fields).chat().check_tool_choice()

    @pytest.mark.parametrize(
        "fields",
        [
            {"tools": [{"type": "function"}]},
            {"tools": [{"function": {"name": ""}}]},
            {"tools": [{"function": {"name": "a b"}}]},
            {"tools": [{"function": {"name": "<|im_end|>"}}]},
            {"tools": [{"function": {"name": "a" * 257}}]},
            {"tools": [{"function": {"name": "f", "parameters": []}}]},
            {"tools": [{"function": {"name": "f"}}, {"function": {"name": "f"}}]},
            {"tools": ["f"]},
            {"thinking": {"type": "maybe"}},
        ],
    )
    def test_tools_that_cannot_be(self, fields):
        with pytest.raises(UserError):
            chat(**fields)

    @pytest.mark.parametrize(
        ("fields", "wants"),
        [
            ({}, None),
            ({"thinking": {"type": "disabled"}}, False),
            ({"thinking": {"type": "enabled", "keep": "all"}}, True),
            ({"enable_thinking": False}, False),
            ({"reasoning_effort": "none"}, False),
            ({"reasoning_effort": "high"}, None),
        ],
    )
    def test_ways_to_ask_for_thinking(self, fields, wants):
        assert chat(**fields).turn().thinking is wants

    def test_one_source_to_tokenize(self):
        assert parse(TokenizeRequest, prompt="").text == ""
        with pytest.raises(UserError):
            parse(TokenizeRequest, prompt="a", content="b")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (UserError("a", "b", "c"), 400, "invalid_request_error"),
        (QueueFullError(5), 429, "rate_limit_error"),
        (UnavailableError("a", "b", "c"), 503, "service_unavailable"),
        (RuntimeError("secret /path at 0x7f00"), 500, "server_error"),
        (KeyError("secret"), 500, "server_error"),
    ],
)
def test_error_bodies(error: Exception, status: int, kind: str):
    found, body, _ = describe(error)
    assert found == status and body["error"]["type"] == kind
    assert ("secret" not in json.dumps(body)) and body["error"]["message"]
