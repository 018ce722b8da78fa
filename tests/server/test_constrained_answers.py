"""Constrained answers of a model that writes noise: a real engine behind a real server, Kimi's tokenizer."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from family_templates import TEMPLATES
from server_process import ServerProcess

from proa.chat.output.parser import output_family

SHARED = Path(__file__).parents[2].parent / "shared"
# PROA_ALL_SCHEMAS=1 runs all 212; else every this many.
STEP = 1 if os.environ.get("PROA_ALL_SCHEMAS") else 16
# No answer is 10^12 characters long.
UNREACHABLE = {"type": "string", "minLength": 999_999_999_999}
OTHER = {"type": "function", "function": {"name": "other_tool", "parameters": {"type": "object", "maxProperties": 0}}}


def walle_schemas() -> list[Any]:
    files = sorted((SHARED / "data/walle/validator_cases").glob("*/valid.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@contextmanager
def noisy_server(directory: Path, config: dict[str, Any], **server: Any) -> Iterator[ServerProcess]:
    """A server with Kimi's vocabulary and this tokenizer_config.json."""
    model = directory / "model"
    model.mkdir()
    (model / "tiktoken.model").symlink_to(SHARED / "data/kimi-tokenizer/tiktoken.model")
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "config.json").write_text(json.dumps({"model_type": "kimi_k25"}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 163586}))
    engine = {"model_path": str(model), "max_total_tokens": 65536, "chunked_prefill_size": 4096}
    process = ServerProcess(directory, model, engine=engine, engine_script="random_engine.py", server=server)
    process.wait(lambda: process.status() == 200, seconds=120, what="ready")
    yield process
    process.process.terminate()
    assert process.exit_code(60) == 0, process.log()
    assert "Traceback" not in process.log(), process.log()


def tokenizer_config() -> dict[str, Any]:
    path = SHARED / "data/kimi-tokenizer/tokenizer_config.json"
    if not path.exists():
        pytest.skip("the shared data is not there")
    config: dict[str, Any] = json.loads(path.read_bytes())
    return config


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    with noisy_server(tmp_path_factory.mktemp("kimi"), tokenizer_config()) as process:
        yield process


@pytest.fixture
def glm(tmp_path):
    """The same vocabulary, with GLM's markers in the places of reserved tokens and a template that writes them."""
    config = tokenizer_config()
    decoder = config["added_tokens_decoder"]
    taken = {entry["content"] for entry in decoder.values()}
    for number, marker in enumerate(output_family("glm45").markers):
        if marker not in taken:
            decoder[str(163700 + number)] = {"content": marker, "special": False}
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATES["glm45"])
    with noisy_server(tmp_path, config, chat_template=str(template)) as process:
        yield process


def ask(http, stream: bool, path: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
    """The answer: content, calls as (id, name, arguments), the reason, the completion tokens."""
    body = {
        "messages": [{"role": "user", "content": "Go."}], "temperature": 0, "max_tokens": 1500, "stream": stream,
        "thinking": {"type": "disabled"}, **fields,
    }  # fmt: skip
    if not stream:
        response = http.post(path, json=body)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        calls = choice["message"].get("tool_calls") or []
        calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
        return {"content": choice["message"]["content"], "calls": calls, "reason": choice["finish_reason"]}
    content, calls, reason = None, [], None
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                delta = choice["delta"]
                reason = choice["finish_reason"] or reason
                if delta.get("content"):
                    content = (content or "") + delta["content"]
                for call in delta.get("tool_calls") or ():
                    if call.get("id"):
                        calls.append((call["id"], call["function"]["name"], ""))
                    calls[-1] = (*calls[-1][:2], calls[-1][2] + call["function"].get("arguments", ""))
    return {"content": content, "calls": calls, "reason": reason}


def function(schema: Any, name: str = "kvv_walle_case", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


def refused(http, **fields: Any) -> dict[str, Any]:
    started = time.monotonic()
    response = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], **fields})
    assert response.status_code == 400, response.text[:500]
    assert time.monotonic() - started < 25
    return response.json()["error"]


def test_every_required_call_fits_its_schema(kimi):
    """Draft 2020-12, judged by jsonschema; the first number continues the conversation's."""
    schemas = walle_schemas()
    assert len(schemas) == 212
    history = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "other_tool", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "x", "content": "done"},
    ]

    def run(number: int) -> tuple[int, int]:
        schema, is_cut, num_calls = schemas[number], 0, 0
        parameters = {"tools": [function(schema), OTHER], "tool_choice": "required", "messages": history}
        whole, streamed = ask(http, False, **parameters), ask(http, True, **parameters)
        assert whole == streamed
        assert whole["content"] is None
        if whole["reason"] == "length":
            return 1, 0
        assert whole["reason"] == "tool_calls" and whole["calls"], whole
        for position, (call_id, name, arguments) in enumerate(whole["calls"]):
            assert call_id == f"functions.{name}:{position + 1}"
            assert name in {"kvv_walle_case", "other_tool"}
            used = schema if name == "kvv_walle_case" else OTHER["function"]["parameters"]
            jsonschema.Draft202012Validator(used).validate(json.loads(arguments))
            num_calls += 1
        return is_cut, num_calls

    numbers = [number for number in range(0, 212, STEP) if schemas[number] != UNREACHABLE]
    with kimi.client(timeout=300) as http, ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, numbers))
    assert sum(cut for cut, _ in results) <= 0.1 * len(numbers), "too many answers without an end say nothing"
    assert sum(calls for _, calls in results) >= len(numbers)


def test_every_required_call_of_parameters_fits_its_schema(glm):
    """The same of a family that writes parameters one by one: strings as text, other values as JSON."""
    schemas = [schema for schema in walle_schemas() if "properties" in schema and schema.get("type") == "object"]

    def run(schema: Any) -> int | None:
        parameters = {"tools": [function(schema), OTHER], "tool_choice": "required"}
        whole, streamed = ask(http, False, **parameters), ask(http, True, **parameters)
        if whole["reason"] == "length":
            return None
        for answer in (whole, streamed):
            assert answer["content"] is None and answer["reason"] == "tool_calls" and answer["calls"], answer
            for _, name, arguments in answer["calls"]:
                used = {"kvv_walle_case": schema, "other_tool": OTHER["function"]["parameters"]}[name]
                jsonschema.Draft202012Validator(used).validate(json.loads(arguments))
        assert [call[1:] for call in whole["calls"]] == [call[1:] for call in streamed["calls"]]
        return len(whole["calls"])

    with glm.client(timeout=300) as http, ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, schemas[::STEP]))
    assert results.count(None) <= 0.1 * len(results)


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_function_is_called_once(kimi, stream):
    tools = [function({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}, "first"), OTHER]
    with kimi.client() as http:
        answer = ask(http, stream, tools=tools, tool_choice={"type": "function", "function": {"name": "first"}})
    ((call_id, name, arguments),) = answer["calls"]
    assert (call_id, name, answer["reason"]) == ("functions.first:0", "first", "tool_calls")
    assert json.loads(arguments)["a"] in (1, 2)


def test_only_allowed_tools_are_called(kimi):
    """The prompt is that of all tools, so that its prefix is found again."""
    tools = [function({"type": "object", "maxProperties": 0}, name) for name in ("first", "second", "third")]
    allowed = [{"type": "function", "function": {"name": name}} for name in ("second", "third")]
    lengths = set()
    with kimi.client() as http:
        for seed in range(4):
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": allowed}}
            fields = {
                "tools": tools,
                "tool_choice": choice,
                "temperature": 1,
                "seed": seed,
                "parallel_tool_calls": False,
            }
            ((_, name, _),) = ask(http, False, **fields)["calls"]
            assert name in {"second", "third"}
        for choice in ("auto", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": allowed}}):
            body = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 1, "tools": tools}
            response = http.post("/v1/chat/completions", json={**body, "tool_choice": choice})
            lengths.add(response.json()["usage"]["prompt_tokens"])
    assert len(lengths) == 1


def test_one_call_without_parallel_calls(kimi):
    with kimi.client() as http:
        for seed in range(5):
            fields = {"tools": [OTHER], "tool_choice": "required", "temperature": 1, "seed": seed}
            assert len(ask(http, False, **fields, parallel_tool_calls=False)["calls"]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_formats_of_content(kimi, stream):
    properties = {"n": {"type": "integer"}, "s": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["n", "s"], "additionalProperties": False}
    named = {"name": "it", "schema": schema, "strict": True}
    with kimi.client() as http:
        for fields, check in (
            ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
            ({"response_format": {"type": "json_schema", "json_schema": named}}, lambda text: fits(schema, text)),
            ({"json_schema": json.dumps(schema)}, lambda text: fits(schema, text)),
            ({"regex": "[a-c]{3}/[0-9]{2}"}, lambda text: len(text) == 6 and text[3] == "/"),
            ({"ebnf": 'root ::= "yes" | "no" [0-9]'}, lambda text: text == "yes" or text[:2] == "no"),
            ({"ebnf": 'start: "yes" | "no" /[0-9]/'}, lambda text: text == "yes" or text[:2] == "no"),
        ):
            answer = ask(http, stream, **fields)
            assert answer["reason"] == "stop" and not answer["calls"], (fields, answer)
            assert check(answer["content"]), (fields, answer)


def fits(schema: Any, text: str) -> bool:
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    return True


def test_completions_take_the_same_formats(kimi):
    body = {"prompt": "Go.", "max_tokens": 50, "temperature": 0, "regex": "(ab)+c"}
    with kimi.client() as http:
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] in {"stop", "length"} and set(choice["text"]) <= set("abc")


def test_the_other_chat_apis_ask_the_same(kimi):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    text = {"format": {"type": "json_schema", "name": "it", "schema": schema, "strict": True}}
    one = {"parallel_tool_calls": False}  # noise opens call after call, and the answer would be cut now and then
    with kimi.client() as http:
        body = {"model": "tiny", "max_tokens": 1500, "messages": [{"role": "user", "content": "Go."}]}
        tools = [{"name": "held", "input_schema": schema}]
        fields = {
            "tools": tools,
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "disabled"},
        }
        answer = http.post("/v1/messages", json={**body, **fields}).json()
        assert answer["stop_reason"] == "tool_use", answer
        assert all(block["type"] == "tool_use" and block["input"]["a"] in (1, 2) for block in answer["content"])
        body = {"model": "tiny", "max_output_tokens": 1500, "input": "Go.", "reasoning": {"effort": "none"}}
        tools = [{"type": "function", "name": "held", "parameters": schema, "strict": True}]
        answer = http.post("/v1/responses", json={**body, "tools": tools, "tool_choice": "required", **one}).json()
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        assert calls and all(fits(schema, call["arguments"]) for call in calls), answer
        answer = http.post("/v1/responses", json={**body, "text": text}).json()
        (message,) = [item for item in answer["output"] if item["type"] == "message"]
        assert fits(schema, message["content"][0]["text"])


def test_a_cut_answer_says_length(kimi):
    with kimi.client() as http:
        schema = {"type": "string", "minLength": 1000}
        answer = ask(http, False, tools=[function(schema)], tool_choice="required", max_tokens=30)
        assert answer["reason"] == "length"
        assert ask(http, False, json_schema=json.dumps(schema), max_tokens=5)["reason"] == "length"


def test_thinking_comes_before_the_grammar(kimi):
    """Noise never closes its thoughts: the answer must neither end in them nor hold anything else."""
    with kimi.client() as http:
        body = {"tools": [OTHER], "tool_choice": "required", "thinking": {"type": "enabled"}, "max_tokens": 40}
        response = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], **body})
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "length" and choice["message"]["reasoning_content"]
        forced = {**body, "logit_bias": {"163607": 100}, "max_tokens": 500}
        response = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], **forced})
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["tool_calls"], choice


def test_auto_holds_calls_to_what_is_declared(kimi):
    """A section is forced by a bias that the grammar overrules once it holds."""
    strict = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tools = [function(strict, "held", strict=True), function(None, "free")]
    del tools[1]["function"]["parameters"]
    with kimi.client() as http:
        for seed in range(4):
            fields = {"tools": tools, "logit_bias": {"163595": 100}, "seed": seed, "temperature": 1, "max_tokens": 300}
            answer = ask(http, False, **fields)
            assert answer["calls"]
            whole = answer["calls"][:-1] if answer["reason"] == "length" else answer["calls"]
            for position, (call_id, name, arguments) in enumerate(whole):
                assert call_id == f"functions.{name}:{position}" and name in {"held", "free"}
                fits(strict if name == "held" else {"type": "object"}, arguments)


def test_none_never_opens_a_call(kimi):
    with kimi.client() as http:
        fields = {"tools": [OTHER], "tool_choice": "none", "logit_bias": {"163595": 100, "163597": 100}}
        answer = ask(http, False, max_tokens=20, **fields)
    assert not answer["calls"] and answer["content"] and answer["reason"] == "length"


DEEP: Any = {"type": "string"}
for _ in range(60):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
CHAIN = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
         for i in range(3000)}  # fmt: skip
HOSTILE = {
    "loop": {"$ref": "#"},
    "loop of two": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "stack": {"$defs": {**CHAIN, "d3000": {"type": "string"}}, "$ref": "#/$defs/d0"},
    "no end": {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}$"} for i in range(10, 40)]},
    "deep": DEEP,
    "large": {"enum": ["x" * 1000 + str(i) for i in range(1000)]},
    "lookahead": {"type": "string", "pattern": "(?=a)b"},
    "unknown type": {"type": "varchar"},
    "impossible": {"type": "integer", "minimum": 5, "maximum": 4},
    "remote": {"$ref": "http://127.0.0.1/schema"},
}


def test_hostile_schemas_get_400_and_disturb_nobody(kimi):
    pid = kimi.engine_pid()
    with kimi.client(timeout=60) as http, ThreadPoolExecutor(len(HOSTILE) + 1) as pool:
        running = pool.submit(ask, http, True, tools=[OTHER], max_tokens=400, ignore_eos=True)
        errors = dict(
            zip(
                HOSTILE,
                pool.map(
                    lambda schema: refused(http, tools=[function(schema)], tool_choice="required"), HOSTILE.values()
                ),
                strict=True,
            )
        )
        assert running.result()["reason"] == "length"
        assert ask(http, False, tools=[OTHER], tool_choice="required")["calls"]
    assert all(error["type"] == "invalid_request_error" for error in errors.values())
    # The prompt of the large one and of the long chain does not fit the context either.
    assert all(error["param"].startswith(("tools", "messages")) for error in errors.values()), errors
    assert sum(error["param"].startswith("tools") for error in errors.values()) >= len(errors) - 2, errors
    assert kimi.engine_pid() == pid


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "absent"}}, "tools": [OTHER]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [OTHER]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [5]}}, "tools": [OTHER]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"name": "absent"}]}, "tools": [OTHER]}, "tool_choice"),
        ({"tools": [OTHER, OTHER], "tool_choice": "required"}, "tools"),
        ({"tools": [function({}, "a b")], "tool_choice": "required"}, "tools.0.function.name"),
        ({"tools": [function({}, "a" * 300)], "tool_choice": "required"}, "tools.0.function.name"),
        ({"tools": [function({}, "<|tool_call_end|>")], "tool_choice": "required"}, "tools.0.function.name"),
        ({"tools": [function({}, f"f{i}") for i in range(10_001)], "tool_choice": "required"}, "tools"),
        ({"tools": [function({"not": {}}, strict=True)]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"regex": "(a+"}, "regex"),
        ({"regex": "(?<=a)b"}, "regex"),
        ({"regex": "(" * 5000 + ")" * 5000}, "regex"),
        ({"ebnf": "root ::= ("}, "ebnf"),
        ({"ebnf": "root ::= " + "(" * 50_000}, "ebnf"),
        ({"ebnf": "start: undefined"}, "ebnf"),
        ({"ebnf": 'start: "a"', "tools": [OTHER]}, "ebnf"),
        ({"regex": "a" * 300_000}, "regex"),
        ({"json_schema": "{"}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": HOSTILE["large"]}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": HOSTILE["stack"]}}}, "response_format"),
    ],
)
def test_what_cannot_be_asked_is_named(kimi, fields, param):
    with kimi.client(timeout=60) as http:
        error = refused(http, **fields)
    assert error["param"].startswith(param), error


def test_clients_that_leave_while_a_schema_is_compiled(kimi):
    slow = {"type": "object", "properties": {f"p{i}": {"type": ["string", "integer"]} for i in range(2000)}}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    left = 0
    for index in range(3):
        with kimi.client(timeout=0.1) as http:
            try:
                schema = json.dumps({**slow, "title": str(index)})
                http.post("/v1/chat/completions", json={**body, "json_schema": schema})
            except httpx.TimeoutException:
                left += 1
    assert left, "compiled too fast for this test"
    with kimi.client() as http:
        assert ask(http, False, tools=[OTHER], tool_choice="required")["calls"]


def test_a_restarted_engine_takes_grammars(kimi):
    os.kill(kimi.engine_pid(), signal.SIGKILL)
    kimi.wait(lambda: len(kimi.journal("started")) >= 2 and kimi.status() == 200, seconds=120, what="a new engine")
    with kimi.client() as http:
        assert ask(http, False, tools=[OTHER], tool_choice="required")["calls"]
