"""The launch lines of the seeds as they stand, names of files replaced, on a tiny model of Kimi K2's kind."""

from __future__ import annotations

import re
import shlex

import pytest
import torch
from tests.cli.test_launch_server import CODERAI_LINE, KIMI_K27_LINE, KIMI_THINKING_LINE, seed_lines
from tests.e2e.conftest import start
from tests.models.kimi_checkpoint import write_kimi

TEMPLATE = "{% for m in messages %}<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
OWN_PORT = ("--port", "--host")  # given by the test


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The directories and files that the lines name."""
    root = tmp_path_factory.mktemp("kimi")
    (root / "cpu-weights" / "_layer_0").mkdir(parents=True)  # as kt-kernel's converter leaves them
    (root / "template.jinja").write_text(TEMPLATE)
    return {"model": write_kimi(root / "model"), "cpu": root / "cpu-weights", "template": root / "template.jinja"}


def words_of(line, files):
    """The line's words, but for where things lie and where it listens."""
    places = {"--model": "model", "--model-path": "model", "--kt-weight-path": "model", "--chat-template": "template"}
    words, found = shlex.split(line), []
    for name, value in zip(words, [*words[1:], "--"], strict=True):
        if not name.startswith("--") or name in OWN_PORT:
            continue
        place = "cpu" if "CPU-weight" in value else places.get(name)
        found.append(name)
        if not value.startswith("--"):
            found.append(value if place is None else str(files[place]))
    return found


LINES = [KIMI_K27_LINE, KIMI_THINKING_LINE, CODERAI_LINE.replace("4096", "1024")]


@pytest.mark.parametrize("line", LINES, ids=["K2.7 Code", "K2 Thinking", "CoderAI"])
def test_a_launch_line_starts_and_answers(line, files, tmp_path):
    server = start(["-m", "proa.launch_server", *words_of(line, files)], tmp_path / "log")
    try:
        model = server.client().models.list().data[0].id
        message = {"role": "user", "content": "What is the capital of France?"}
        answer = server.client().chat.completions.create(model=model, messages=[message], max_tokens=8, temperature=0)
        assert answer.choices[0].finish_reason in ("length", "stop") and answer.usage.completion_tokens > 0
        log = server.log.read_text()
    finally:
        server.end()
    given = {word for word in line.split() if word.startswith("--")} - {"--model", "--model-path"}
    rows = dict(re.findall(r"^  (--[\w-]+) +(\S.*)$", log, re.MULTILINE))
    assert rows.keys() | set(OWN_PORT) == given | {*OWN_PORT}
    assert ("kt-kernel's packed bytes" in rows["--kt-weight-path"]) == ("AMXINT4" in line)
    if not torch.cuda.is_available():
        for name in given & {"--kt-num-gpu-experts", "--mem-fraction-static", "--kt-enable-dynamic-expert-update"}:
            assert rows[name].endswith("not used: the trunk runs on the CPU")


def test_the_lines_are_those_of_the_seeds():
    """Where the seeds lie beside the repository: the same flags with the same values."""
    ours = [set(shlex.split(line)) for line in (KIMI_K27_LINE, KIMI_THINKING_LINE, CODERAI_LINE)]
    for line in seed_lines():
        flags = {word for word in line.split() if word.startswith("--")}
        assert any(flags == {word for word in own if word.startswith("--")} for own in ours), line
