"""The product path with the openai SDK: demo checkpoint, C++ experts, engine, endpoint, stream."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

ROOT = Path(__file__).parents[2]
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
SEA = [{"role": "user", "content": "Tell me about the sea in three sentences."}]


def ask(client, messages=FRANCE, **options):
    return client.chat.completions.create(
        model="demo", messages=messages, **{"temperature": 0, "max_tokens": 24, **options}
    )


def test_the_capital_of_france(server):
    answer = ask(server.client())
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_stream_carries_the_text_of_the_answer(server):
    client = server.client()
    whole = ask(client, SEA, max_tokens=60)
    events = list(ask(client, SEA, max_tokens=60, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for event in events for choice in event.choices)
    assert text == whole.choices[0].message.content
    assert len(events) > 20, "tokens come one by one"
    reasons = [choice.finish_reason for event in events for choice in event.choices if choice.finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_same_text_alone_and_beside_others(server):
    client = server.client()
    alone = ask(client, SEA, max_tokens=48).choices[0].message.content
    questions = [[{"role": "user", "content": f"Count from {i} to {i + 20}."}] for i in range(5)]
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(ask, client, question, max_tokens=48, temperature=1.0) for question in questions]
        batched = [pool.submit(ask, client, SEA, max_tokens=48) for _ in range(3)]
        assert [f.result().choices[0].message.content for f in batched] == [alone] * 3
        assert all(f.result().usage.completion_tokens > 0 for f in others)


def test_n_choices_are_drawn_apart(server):
    answer = ask(server.client(), SEA, n=3, temperature=1.0, seed=7, max_tokens=16)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert answer.usage.completion_tokens <= 48


def test_a_seed_repeats_an_answer(server):
    first, second, other = (
        ask(server.client(), SEA, temperature=1.0, seed=seed, max_tokens=24).choices[0].message.content
        for seed in (5, 5, 6)
    )
    assert first == second != other


def test_logprobs_of_a_greedy_answer(server):
    answer = ask(server.client(), logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries).strip().startswith(answer.choices[0].message.content.strip())
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0] <= 0.0, "greedy takes the likeliest"


def test_stop_strings_end_and_are_cut_off(server):
    whole = ask(server.client()).choices[0].message.content
    answer = ask(server.client(), stop=["Paris"])
    assert answer.choices[0].message.content == whole[: whole.index("Paris")]
    assert answer.choices[0].finish_reason == "stop"


def test_max_tokens_ends_by_length(server):
    answer = ask(server.client(), SEA, max_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5


def test_completions_take_text_and_token_ids(server):
    client = server.client()
    prompt = "The capital of France is"
    tokens = client.post("/../tokenize", body={"model": "demo", "prompt": prompt}, cast_to=object)["tokens"]
    options = {"model": "demo", "temperature": 0, "max_tokens": 8}
    from_text = client.completions.create(prompt=prompt, **options)
    from_ids = client.completions.create(prompt=tokens, **options)
    assert from_text.choices[0].text == from_ids.choices[0].text
    assert "Paris" in from_text.choices[0].text
    assert from_ids.usage.prompt_tokens == len(tokens)
    streamed = client.completions.create(prompt=prompt, stream=True, **options)
    assert "".join(choice.text for event in streamed for choice in event.choices) == from_text.choices[0].text


def test_a_repeated_prompt_comes_from_the_prefix_cache(server):
    long = [{"role": "user", "content": "The sea is wide. " * 60 + "Is it?"}]
    first = ask(server.client(), long, max_tokens=12)
    again = ask(server.client(), long, max_tokens=12)
    assert again.usage.prompt_tokens_details.cached_tokens > 200
    assert again.choices[0].message.content == first.choices[0].message.content


def test_models_name_the_context(server):
    (model,) = server.client().models.list().data
    assert model.id == "demo"
    assert model.max_model_len == 8192


def test_a_prompt_over_the_context_is_refused_with_the_counts(server):
    with pytest.raises(openai.BadRequestError, match="8192") as caught:
        ask(server.client(), [{"role": "user", "content": "sea " * 9000}])
    assert caught.value.code == "context_length_exceeded"


def test_metrics_count_what_was_served(server):
    ask(server.client())
    text = server.get("/metrics").text
    for name in ("sglang:prompt_tokens_total", "sglang:generation_tokens_total", "sglang:time_to_first_token_seconds"):
        assert name in text


def test_the_bench_command_measures_this_server(server):
    command = [sys.executable, "-m", "proa.cli.main", "bench", "serve", "--url", server.url, "--json"]
    load = ["--num-prompts", "4", "--random-input-len", "64", "--random-output-len", "8", "--max-concurrency", "2"]
    done = subprocess.run([*command, *load], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["completed"], report["input_tokens"], report["output_tokens"]) == (4, 256, 32)
    assert 0 < report["ttft_ms"]["median"] <= report["e2e_ms"]["median"]


def test_the_chat_command_starts_a_server_of_its_own():
    command = [sys.executable, "-m", "proa.cli.main", "chat", "demo", "--prompt", "What is the capital of France?"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "TTFT" in done.stderr


def test_a_short_soak_leaks_nothing():
    script = ROOT / "benchmarks" / "serving" / "soak.py"
    done = subprocess.run([sys.executable, str(script), "--minutes", "0.3"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
