"""The openai SDK, sync and async, against a running server."""

from __future__ import annotations

import asyncio

import openai
import pytest
from server_process import KEY, ServerProcess
from tiny_tokenizer import build

MESSAGES = [{"role": "user", "content": "Hello fox"}]
TOKENIZER = build()
# The fake engine answers with the prompt's own ids.
PROMPT = "The quick brown fox jumps over the lazy dog. 你好世界 🙂"
PROMPT_IDS = TOKENIZER.encode(PROMPT).ids


@pytest.fixture
def sdk(server: ServerProcess):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def answer_to(prompt: str, count: int) -> str:
    ids = TOKENIZER.encode(prompt).ids
    return TOKENIZER.decode([ids[index % len(ids)] for index in range(count)])


class TestChat:
    def test_whole(self, sdk):
        answer = sdk.chat.completions.create(model="tiny", messages=MESSAGES)
        assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "tiny"
        (choice,) = answer.choices
        assert choice.message.role == "assistant" and choice.message.content == "user\nHello fox"
        assert choice.finish_reason == "stop" and choice.logprobs is None
        usage = answer.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.prompt_tokens_details.cached_tokens == 3
        assert usage.completion_tokens_details.reasoning_tokens == 0

    def test_stream_equals_whole(self, sdk):
        whole = sdk.chat.completions.create(model="tiny", messages=MESSAGES)
        chunks = list(
            sdk.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
        )
        assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
        assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
        assert len({chunk.id for chunk in chunks}) == 1

    def test_usage_is_in_every_chunk_when_asked(self, sdk):
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = list(
            sdk.chat.completions.create(
                model="tiny", messages=MESSAGES, max_tokens=4, stream=True, stream_options=options
            )
        )
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
        assert counts == sorted(counts) and counts[-1] == 4

    def test_no_usage_without_being_asked(self, sdk):
        chunks = list(sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
        assert all(chunk.usage is None and chunk.choices for chunk in chunks)

    def test_choices(self, sdk):
        answer = sdk.chat.completions.create(model="tiny", messages=MESSAGES, n=3, max_tokens=6)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert len({choice.message.content for choice in answer.choices}) == 3
        assert answer.usage.completion_tokens == 18
        streamed = ["", "", ""]
        for chunk in sdk.chat.completions.create(model="tiny", messages=MESSAGES, n=3, max_tokens=6, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert streamed == [choice.message.content for choice in answer.choices]

    def test_logprobs(self, sdk):
        answer = sdk.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            logprobs=True,
            top_logprobs=3,
            max_tokens=5,
            extra_body={"ignore_eos": True},
        )
        choice = answer.choices[0]
        entries = choice.logprobs.content
        assert len(entries) == 5 and all(len(entry.top_logprobs) == 3 for entry in entries)
        assert entries[0].logprob == -0.5 and entries[0].top_logprobs[1].logprob == -1.5
        # The first token is <|im_start|>, which is no text of the answer but a token like any other here.
        assert b"".join(bytes(entry.bytes) for entry in entries[1:]).decode() == choice.message.content
        streamed = [
            entry
            for chunk in sdk.chat.completions.create(
                model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=3, max_tokens=5, stream=True
            )
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content
        ]
        assert streamed == entries

    def test_max_tokens(self, sdk):
        for name in ("max_tokens", "max_completion_tokens"):
            answer = sdk.chat.completions.create(model="tiny", messages=MESSAGES, **{name: 3})
            assert answer.usage.completion_tokens == 3 and answer.choices[0].finish_reason == "length"

    def test_stop_string(self, sdk):
        answer = sdk.chat.completions.create(model="tiny", messages=MESSAGES, stop=["lo f"])
        assert answer.choices[0].message.content == "user\nHel"
        assert answer.choices[0].finish_reason == "stop" and answer.choices[0].stop_reason == "lo f"
        text = "".join(
            chunk.choices[0].delta.content or ""
            for chunk in sdk.chat.completions.create(model="tiny", messages=MESSAGES, stop="lo f", stream=True)
        )
        assert text == "user\nHel"

    def test_stop_string_frees_the_slot(self, sdk, server: ServerProcess):
        answer = sdk.chat.completions.create(
            model="tiny", messages=MESSAGES, stop="Hel", extra_body={"ignore_eos": True}, max_tokens=4000
        )
        server.wait(lambda: any(entry["rid"].startswith(answer.id) for entry in server.journal("abort")), 1.0)

    def test_continue_final_message(self, sdk):
        messages = [*MESSAGES, {"role": "assistant", "content": "I think that"}]
        answer = sdk.chat.completions.create(
            model="tiny", messages=messages, max_tokens=1, extra_body={"continue_final_message": True}
        )
        plain = sdk.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
        text = "<|im_start|>user\nHello fox<|im_end|>\n<|im_start|>assistant\nI think that"
        assert answer.usage.prompt_tokens == len(TOKENIZER.encode(text).ids)
        text += "<|im_end|>\n<|im_start|>assistant\n"
        assert plain.usage.prompt_tokens == len(TOKENIZER.encode(text).ids)

    def test_alias(self, sdk):
        assert sdk.chat.completions.create(model="other-name", messages=MESSAGES, max_tokens=1).model == "other-name"
        with pytest.raises(openai.NotFoundError) as caught:
            sdk.chat.completions.create(model="gpt-4", messages=MESSAGES)
        assert caught.value.code == "model_not_found" and caught.value.param == "model"


class TestCompletions:
    def test_whole_and_stream(self, sdk):
        answer = sdk.completions.create(model="tiny", prompt=PROMPT, max_tokens=len(PROMPT_IDS))
        assert answer.object == "text_completion" and answer.choices[0].text == PROMPT
        assert answer.choices[0].finish_reason == "length"
        chunks = list(sdk.completions.create(model="tiny", prompt=PROMPT, max_tokens=len(PROMPT_IDS), stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT
        assert all("�" not in chunk.choices[0].text for chunk in chunks)

    def test_default_length(self, sdk):
        assert sdk.completions.create(model="tiny", prompt=PROMPT).usage.completion_tokens == 16

    @pytest.mark.parametrize("stream", [False, True])
    def test_prompt_kinds(self, sdk, stream):
        other = TOKENIZER.encode("Grüße aus Köln").ids
        for prompt, texts in (
            (PROMPT_IDS, [answer_to(PROMPT, 6)]),
            ([PROMPT, "Grüße aus Köln"], [answer_to(PROMPT, 6), answer_to("Grüße aus Köln", 6)]),
            ([PROMPT_IDS, other], [answer_to(PROMPT, 6), answer_to("Grüße aus Köln", 6)]),
        ):
            found = [""] * len(texts)
            answer = sdk.completions.create(model="tiny", prompt=prompt, max_tokens=6, stream=stream)
            for part in answer if stream else [answer]:
                for choice in part.choices:
                    found[choice.index] += choice.text
            assert found == texts

    @pytest.mark.parametrize("stream", [False, True])
    def test_echo_and_choices(self, sdk, stream):
        answer = sdk.completions.create(
            model="tiny", prompt=["hello world", PROMPT], n=2, max_tokens=2, echo=True, stream=stream
        )
        found = [""] * 4
        for part in answer if stream else [answer]:
            for choice in part.choices:
                found[choice.index] += choice.text
        assert all(text.startswith("hello world") for text in found[:2])
        assert all(text.startswith(PROMPT) for text in found[2:])

    def test_logprobs(self, sdk):
        answer = sdk.completions.create(model="tiny", prompt="hello world", max_tokens=4, logprobs=2)
        logprobs = answer.choices[0].logprobs
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 4
        assert "".join(logprobs.tokens) == answer.choices[0].text
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert answer.choices[0].text[offset:].startswith(token)
        assert all(len(top) == 2 for top in logprobs.top_logprobs)

    def test_stop_token_id(self, sdk):
        stop = PROMPT_IDS[4]
        answer = sdk.completions.create(
            model="tiny", prompt=PROMPT_IDS, max_tokens=20, extra_body={"stop_token_ids": [stop]}
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "stop" and choice.stop_reason == stop
        assert choice.text == TOKENIZER.decode(PROMPT_IDS[:4])

    def test_min_tokens_holds_off_stop_strings(self, sdk):
        text = "0 1 2 3 4 5 6 7 8 9 10"
        ids = TOKENIZER.encode(text).ids
        early = sdk.completions.create(model="tiny", prompt=text, max_tokens=2 * len(ids), stop="3")
        late = sdk.completions.create(
            model="tiny", prompt=text, max_tokens=2 * len(ids), stop="3", extra_body={"min_tokens": len(ids)}
        )
        assert early.choices[0].text == "0 1 2 "
        assert late.choices[0].text == text + "0 1 2 " and late.usage.completion_tokens > len(ids)


class TestOthers:
    def test_models(self, sdk):
        models = list(sdk.models.list())
        assert [model.id for model in models] == ["tiny", "other-name"]
        assert all(model.max_model_len == 4096 and model.owned_by == "proa" and model.created > 0 for model in models)
        assert sdk.models.retrieve("tiny").max_model_len == 4096
        with pytest.raises(openai.NotFoundError):
            sdk.models.retrieve("nothing")

    def test_typed_errors(self, sdk, server: ServerProcess):
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.chat.completions.create(model="tiny", messages=[])
        assert caught.value.param == "messages" and caught.value.type == "invalid_request_error"
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger,
            pytest.raises(openai.AuthenticationError),
        ):
            stranger.models.list()


async def test_async_client(server: ServerProcess):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as sdk:
        whole = await sdk.chat.completions.create(model="tiny", messages=MESSAGES)

        async def stream() -> str:
            chunks = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        texts = await asyncio.gather(*(stream() for _ in range(12)))
        assert set(texts) == {whole.choices[0].message.content}
        completion = await sdk.completions.create(model="tiny", prompt=PROMPT, max_tokens=5)
        assert completion.choices[0].text == answer_to(PROMPT, 5)
        assert [model.id async for model in sdk.models.list()] == ["tiny", "other-name"]
