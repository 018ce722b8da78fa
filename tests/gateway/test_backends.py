"""The commands of each kind of engine, what is checked before them, and how one is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from proa.gateway.backends import BACKENDS
from proa.gateway.config import ModelConfig
from proa.gateway.invocation import invoke, used_flags, weight_bytes
from proa.gateway.preparation import PreparationError, prepare

FULL = {"path": "/m", "context_length": 4096, "args": ("--last", "${NAME}:${PORT}")}


def invocation(backend, **fields):
    model = ModelConfig(name="m", backend=backend, **{**FULL, **fields})
    made = invoke(BACKENDS[backend], model, 4321)
    key = made.headers.get("authorization", "").removeprefix("Bearer ")
    assert len(key) > 30 or not key
    return made, key


def test_proa(monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/notify")
    made, key = invocation("proa", kt_weight_path="/w")
    assert made.command == (
        sys.executable, "-P", "-m", "proa.cli.main", "serve", "/m", "--host", "127.0.0.1", "--port", "4321",
        "--served-model-name", "m", "--kt-weight-path", "/w", "--context-length", "4096", "--last", "m:4321",
    )  # fmt: skip
    assert made.env["PROA_API_KEY"] == key
    assert "NOTIFY_SOCKET" not in made.env
    answer = b'{"status": "unavailable", "load": {"bytes_done": 5, "bytes_total": 9}}'
    assert BACKENDS["proa"].reported_bytes(answer) == (5, 9)
    for answer in (b"", b"[]", b'{"status": "ok"}', b'{"load": {"bytes_done": "x"}}'):
        assert BACKENDS["proa"].reported_bytes(answer) is None


def test_kt():
    made, key = invocation("kt", kt_weight_path="/w", venv="/opt/kt", served_name="served")
    assert made.command == (
        "/opt/kt/bin/python", "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", "4321", "--model", "/m",
        "--kt-weight-path", "/w", "--served-model-name", "served", "--context-length", "4096", "--api-key", key,
        "--last", "served:4321",
    )  # fmt: skip
    assert made.env["PYTHONSAFEPATH"] == "1"
    assert BACKENDS["sglang-kt"] is BACKENDS["kt"]
    assert "--kt-weight-path" not in invocation("kt")[0].command
    assert invocation("kt", command=("/usr/bin/engine",))[0].command[0] == "/usr/bin/engine"
    assert invocation("kt")[0].command[0] == sys.executable


def test_llama_server():
    made, key = invocation("llama-server")
    assert made.command[:9] == (
        "llama-server", "--host", "127.0.0.1", "--port", "4321", "-m", "/m", "--alias", "m",
    )  # fmt: skip
    assert made.command[9:] == ("-c", "4096", "--last", "m:4321") and made.env["LLAMA_API_KEY"] == key


def test_vllm():
    made, key = invocation("vllm", venv="/opt/vllm")
    assert made.command == (
        "/opt/vllm/bin/vllm", "serve", "/m", "--host", "127.0.0.1", "--port", "4321", "--served-model-name", "m",
        "--max-model-len", "4096", "--last", "m:4321",
    )  # fmt: skip
    assert made.env["VLLM_API_KEY"] == key
    assert invocation("vllm")[0].command[0] == "vllm"


def test_a_command_gets_what_it_asks_for():
    made, key = invocation("command", command=("serve", "${MODEL}", "${HOST}"))
    assert made.command == ("serve", "/m", "127.0.0.1", "--last", "m:4321") and not key
    made, key = invocation("command", command=("serve",), args=("--key=${API_KEY}",))
    assert made.command == ("serve", f"--key={key}")
    made, key = invocation("command", command=("serve",), env={"KEY": "${API_KEY}"})
    assert made.env["KEY"] == key


def test_every_run_has_a_key_of_its_own():
    assert len({invocation("proa")[1] for _ in range(5)}) == 5


def test_flags_of_a_command():
    assert used_flags(("run", "--a", "1", "--b=--c", "-d", "--", "x")) == ["--a", "--b"]


def test_sizes_of_weights(tmp_path):
    for name, size in (("a.safetensors", 10), ("b.safetensors", 5), ("config.json", 100)):
        (tmp_path / name).write_bytes(bytes(size))
    for part in (1, 2):
        (tmp_path / f"m-0000{part}-of-00002.gguf").write_bytes(bytes(7))
    (tmp_path / "other-00001-of-00003.gguf").write_bytes(bytes(1000))

    def size(path, kt=""):
        return weight_bytes(ModelConfig(name="m", path=str(path), kt_weight_path=str(kt) if kt else ""))

    assert size(tmp_path / "m-00001-of-00002.gguf") == 14
    assert size(tmp_path / "a.safetensors", tmp_path / "b.safetensors") == 15
    assert size(tmp_path / "a.safetensors", tmp_path / "a.safetensors") == 10
    assert size(tmp_path) == 15 + 14 + 1000
    assert size("demo") is None and size(tmp_path / "missing") is None


class Tools:
    """Stands in for programs: answers by what the command contains, and remembers what was run."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.commands = []

    async def __call__(self, command, environment, seconds):
        self.commands.append(tuple(command))
        return self.answers.pop(0)


def kt_model(tmp_path, **fields):
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.symlink_to(sys.executable)
    settings = {"path": str(tmp_path), "kt_weight_path": str(tmp_path), "venv": str(tmp_path / "venv"), **fields}
    return ModelConfig(name="m", backend="kt", **settings)


HELP = ["  --host HOST --port PORT --model MODEL --served-model-name N", "  --api-key K, --kt-weight-path P"]
WITHOUT_KT = [line.replace("--kt-weight-path", "") for line in HELP]


async def prepared(model, tools):
    installs = []
    await prepare(BACKENDS["kt"], model, tools, lambda: installs.append(True))
    return bool(installs)


async def test_an_engine_with_its_flags_is_ready_to_start(tmp_path):
    tools = Tools((0, HELP))
    assert not await prepared(kt_model(tmp_path, auto_build=True), tools)
    assert tools.commands == [(str(tmp_path / "venv/bin/python"), "-m", "sglang.launch_server", "--help")]


@pytest.mark.parametrize("first", [(1, ["No module named sglang"]), (0, WITHOUT_KT)])
async def test_auto_build_installs_the_fork_and_never_sglang(tmp_path, first):
    tools = Tools(first, (0, []), (0, []), (0, HELP))
    assert await prepared(kt_model(tmp_path, auto_build=True), tools)
    _, venv, pip, _ = tools.commands
    assert venv == (sys.executable, "-m", "venv", str(tmp_path / "venv"))
    assert pip[:4] == (str(tmp_path / "venv/bin/python"), "-m", "pip", "install")
    packages = {word.split("==")[0]: word.split("==")[1] for word in pip if "==" in word}
    assert set(packages) == {"ktransformers", "kt-kernel", "sglang-kt"} and len(set(packages.values())) == 1
    assert "sglang" not in pip


async def test_files_are_looked_for_and_names_left_to_the_engine(tmp_path):
    for path in (str(tmp_path / "missing"), "./missing", "../missing"):
        with pytest.raises(PreparationError, match="a file or directory that exists"):
            await prepared(kt_model(tmp_path / path.replace("/", "_"), path=path), Tools())
    assert not await prepared(kt_model(tmp_path / "hub", path="someone/some-model"), Tools((0, HELP)))


async def test_nothing_is_installed_unless_asked_for(tmp_path):
    with pytest.raises(PreparationError, match=r"No module named sglang.*set `auto_build`"):
        await prepared(kt_model(tmp_path), Tools((1, ["No module named sglang"])))


async def test_installations_that_fail_or_do_not_help_are_errors(tmp_path):
    with pytest.raises(PreparationError, match="no space left"):
        await prepared(kt_model(tmp_path, auto_build=True), Tools((1, []), (0, []), (1, ["no space left"])))
    with pytest.raises(PreparationError, match="one without --kt-weight-path"):
        await prepared(
            kt_model(tmp_path / "again", auto_build=True), Tools((0, WITHOUT_KT), (0, []), (0, []), (0, WITHOUT_KT))
        )


async def test_its_own_environment_is_where_a_missing_engine_goes(tmp_path, monkeypatch):
    monkeypatch.setenv("PROA_CACHE_DIR", str(tmp_path))
    model = ModelConfig(name="m", backend="kt", path=str(tmp_path), auto_build=True)
    tools = Tools((0, []), (1, ["no network"]))
    with pytest.raises(PreparationError, match="no network"):
        await prepared(model, tools)
    assert Path(tools.commands[0][-1]).parent == tmp_path / "gateway"
