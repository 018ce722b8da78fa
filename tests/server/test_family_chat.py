"""Every family but Kimi behind the server: its template asks for tools, scripted answers become calls over HTTP."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import openai
import pytest
from fake_engine import ANSWER_SEED
from server_process import KEY, ServerProcess
from test_kimi_chat import collect
from tiny_tokenizer import write_model

sys.path.insert(0, str(Path(__file__).parents[1] / "chat"))
from case_writers import DSML, WRITERS, dumps
from family_templates import TEMPLATES

from proa.chat.answer_style import choose_style
from proa.chat.control_tokens import ControlTokens
from proa.chat.dialect import ChatTurn
from proa.chat.templates import ChatTemplate
from proa.chat.tokenizer import Tokenizer
from proa.core.errors import UnsupportedError, UserError
from proa.server.frontend import Frontend

TOOL: dict = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}
OSLO = {"place": 'Oslo é 🙂 "x"\n', "days": 3}
CALL = ("weather", OSLO)
# The prompt of these ends inside the thinking.
PREFILLED = {"minimax_m2"}
# Their templates have no switch for it.
THINKS_UNASKED = {"qwen3_coder", "deepseek_v3", "mistral"}
# Behind a real server: one of each kind of marker and call.
SERVED = ("deepseek_v32", "glm45", "minimax_m2", "qwen3", "qwen3_coder")


def answers(family):
    """(text, content, reasoning, number of calls); each begins where the prompt of its family ends."""
    writer, think = WRITERS[family], "" if family in PREFILLED else "<think>"
    return [
        (f"{think}why</think>Hello.", "Hello.", "why", 0),
        (f"{think}why</think>On it.{writer.section(CALL, CALL)}", "On it.", "why", 2),
        (f"{think}why{writer.section(CALL)}", None, "why", 1),
    ]


def write_family(directory, family):
    tokens = [*WRITERS[family].tokens, *([DSML] if family == "deepseek_v32" else [])]
    return write_model(directory / "model", template=TEMPLATES[family], extra_tokens=tokens)


@pytest.fixture(scope="module", params=SERVED)
def served(request, tmp_path_factory):
    family = request.param
    directory = tmp_path_factory.mktemp(family)
    model = write_family(directory, family)
    tokenizer = Tokenizer.load(model, template=TEMPLATES[family])
    scripted = [[*tokenizer.encode(text), 2] for text, *_ in answers(family)]
    (directory / "answers").write_text(json.dumps(scripted))
    engine = {"answers": str(directory / "answers"), "vocab_size": 700, "step_seconds": 0.0}
    process = ServerProcess(directory, model, engine=engine)
    yield family, process.wait_ready()
    process.stop()
    assert process.exit_code() == 0, process.log()
    assert "Traceback" not in process.log(), process.log()


def test_a_family_over_http(served):
    """What it writes comes out, streamed and whole, in all three APIs."""
    family, process = served
    with openai.OpenAI(base_url=process.url + "/v1", api_key=KEY, max_retries=0) as client:
        for number, (_, content, reasoning, num_calls) in enumerate(answers(family)):
            request = {
                "model": "tiny", "messages": [{"role": "user", "content": "Weather?"}], "tools": [TOOL],
                "seed": ANSWER_SEED + number, "max_tokens": 3000,
            }  # fmt: skip
            streamed = collect(client.chat.completions.create(**request, stream=True))
            assert streamed[:2] == (content, reasoning)
            assert [(name, json.loads(arguments)) for _, name, arguments in streamed[2]] == [CALL] * num_calls
            assert streamed[3] == ("tool_calls" if num_calls else "stop")
            whole = client.chat.completions.create(**request).choices[0]
            calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
            assert (whole.message.content, calls) == (content, [call[1:] for call in streamed[2]])
            assert len({call.id for call in whole.message.tool_calls or ()}) == num_calls
    check_other_apis(process)


def check_other_apis(process):
    function = TOOL["function"]
    common = {"model": "tiny", "seed": ANSWER_SEED + 1}
    messages = {
        **common, "max_tokens": 3000, "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [{"name": "weather", "input_schema": function["parameters"]}],
    }  # fmt: skip
    responses = {**common, "input": "Weather?", "tools": [{"type": "function", **function}]}
    with process.client() as http:
        blocks = http.post("/v1/messages", json=messages).json()["content"]
        items = http.post("/v1/responses", json=responses).json()["output"]
    assert [block["text"] for block in blocks if block["type"] == "text"] == ["On it."]
    assert [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"] == [CALL] * 2
    calls = [item for item in items if item["type"] == "function_call"]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [CALL] * 2


@pytest.mark.parametrize("family", sorted(TEMPLATES))
async def test_prompts(family, tmp_path):
    """Tools and calls in the family's own form; every name of the switch for thinking does what the template can do."""
    frontend = Frontend(write_family(tmp_path, family), None)
    await frontend.load()

    async def prompt(messages, **fields):
        found = await frontend.encode_chat(ChatTurn(messages, **fields), max_tokens=None)
        return frontend.tokenizer.decode(found.token_ids, skip_special_tokens=False), found.reading

    call = {"id": "call_7", "type": "function", "function": {"name": "weather", "arguments": dumps(OSLO)}}
    user = [{"role": "user", "content": "Weather? <tool_call></think>"}]
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_7", "content": "rain"}
    text, reading = await prompt([*user, called, result], tools=[TOOL])
    assert dumps(TOOL["function"]) in text and WRITERS[family].call("weather", OSLO) in text
    assert reading.history_calls == 1 and not reading.spelled
    for fields in (
        {"thinking": False},
        {"reasoning_effort": "none"},
        {"variables": {"thinking": False}},
        {"variables": {"enable_thinking": False}},
    ):
        text, reading = await prompt(user, **fields)
        assert text.rstrip().endswith("</think>") or family in THINKS_UNASKED
        assert not reading.in_reasoning
    for fields in ({"thinking": True}, {"reasoning_effort": "high"}, {"variables": {"enable_thinking": True}}):
        text, reading = await prompt(user, **fields)
        assert reading.in_reasoning == text.rstrip().endswith("<think>")
        assert reading.in_reasoning == (family in {"deepseek_v31", "deepseek_v32", "minimax_m2"})
    with pytest.raises(UserError, match="chat_template_kwargs"):
        await prompt(user, variables={"colour": 1})
    frontend.close()


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_the_template_says_how_calls_are_written(family):
    style = choose_style(template_of(TEMPLATES[family]))
    same = {"glm47": "glm45"}.get(family, family)
    assert style.family is choose_style(None, same, "qwen3").family and style.has_calls


def template_of(source):
    return ChatTemplate(source, ControlTokens(special=(), markers=()))


def test_a_parser_that_cannot_read_the_template_is_not_chosen(caplog):
    odd = TEMPLATES["qwen3"].replace('"name": ', '"tool": ')
    style, told = choose_style(template_of(odd)), choose_style(template_of(odd), "qwen3")
    assert (style.has_calls, told.has_calls) == (False, True)
    assert "qwen3 does not read" in caplog.text


def test_parsers_of_the_command_line():
    think = template_of("<think>")
    assert choose_style(None) is None
    assert choose_style(think).family.markers == ("<think>", "</think>")
    assert not choose_style(think).has_calls
    assert choose_style(think, "none", "none") is None
    assert "<think>" not in choose_style(think, "qwen25", "none").family.markers
    forced = choose_style(None, "none", "deepseek-r1")
    assert forced.starts_in_reasoning("<|Assistant|>", thinking=None)
    assert not forced.starts_in_reasoning("<|Assistant|>", thinking=False)
    assert not forced.starts_in_reasoning("<|Assistant|><think>\n\n</think>\n\n", thinking=None)
    assert choose_style(None, "hermes", "qwen3").starts_in_reasoning("<think>\n", thinking=None)
    for wrong in (("llama3", None), ("qwen3", "gpt-oss"), ("kimi_k2", "none")):
        with pytest.raises(UnsupportedError, match="-parser"):
            choose_style(None, *wrong)
