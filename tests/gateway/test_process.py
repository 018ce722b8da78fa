"""Processes under a keeper: output, exit status, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from engines import FAKE, PYTHON, is_alive, until, wait_until

from proa.core import env
from proa.gateway import keeper
from proa.gateway.process import KeptProcess

HERE = Path(__file__).parent


async def start(code: str, lines: list | None = None) -> KeptProcess:
    kept = [] if lines is None else lines
    command = [*PYTHON, "-c", code]
    return await KeptProcess.start(command, env.child_environment(), lambda line, keep: kept.append((line, keep)))


async def test_output_comes_in_lines_and_progress_bars_are_not_kept():
    lines = []
    code = (
        "import sys; w = sys.stdout.buffer.write\n"
        "w(b'one\\r\\n'); sys.stdout.flush(); print('two', file=sys.stderr, flush=True)\n"
        "w('\\xe9\\n'.encode('latin-1')); w(b'x' * 20000 + b'\\n'); w(b' 10 %\\r 20 %\\r'); sys.stdout.flush()\n"
        "import time; time.sleep(0.05); w(b' 30 %\\rdone\\n\\n'); w(b'no end')"
    )
    process = await start(code, lines)
    assert await process.wait() == 0
    kept = [line for line, keep in lines if keep]
    assert kept[:3] == ["one", "two", "\ufffd"]
    assert "".join(kept[3:-2]) == "x" * 20000
    assert kept[-2:] == ["done", "no end"]
    assert [line for line, keep in lines if not keep] in ([" 20 %"], [" 10 %", " 20 %"])


async def test_the_exit_status_is_that_of_the_command():
    assert await (await start("raise SystemExit(7)")).wait() == 7
    assert await (await start("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")).wait() == -signal.SIGSEGV


async def test_a_program_that_is_not_there_ends_with_a_message():
    lines = []
    process = await KeptProcess.start(["/no/such/program"], env.child_environment(), lambda line, _: lines.append(line))
    assert await process.wait() == 127
    assert "/no/such/program" in lines[0]


async def test_the_command_has_its_own_session_and_an_empty_input():
    lines = []
    process = await start("import os, sys; print(os.getpid(), os.getsid(0), len(sys.stdin.read()))", lines)
    await process.wait()
    assert lines == [(f"{process.pid} {process.pid} 0", True)]


CHILDREN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(2):
    if (pid := os.fork()) == 0:
        os.setsid()
        if (grandchild := os.fork()) == 0:
            time.sleep(3600)
        print("pid", grandchild, flush=True)
        time.sleep(3600)
    print("pid", pid, flush=True)
"""


def pids_in(lines: list) -> list[int]:
    return [int(line.split()[1]) for line, _ in lines if line.startswith("pid ")]


async def test_children_that_left_the_group_end_with_the_command():
    lines = []
    process = await start(CHILDREN + "while not os.path.exists(sys.argv[0] + 'x'): time.sleep(0.1); break", lines)
    await process.wait()
    await asyncio.sleep(0)
    assert len(pids_in(lines)) >= 2
    assert not any(map(is_alive, pids_in(lines)))


async def test_stop_kills_what_ignores_the_request():
    lines = []
    process = await start(CHILDREN + "time.sleep(3600)", lines)
    await until(lambda: len(pids_in(lines)) == 4)
    started = time.monotonic()
    await process.stop(0.2)
    assert time.monotonic() - started >= 0.2
    assert await process.wait() == -signal.SIGKILL
    assert not any(map(is_alive, [process.pid, *pids_in(lines)]))


async def test_stop_is_polite_first():
    lines = []
    code = "import os, time, signal; signal.signal(15, lambda *_: os._exit(5)); print('up', flush=True); time.sleep(99)"
    process = await start(code, lines)
    await until(lambda: lines)
    await process.stop(30)
    assert await process.wait() == 5


async def test_a_killed_keeper_takes_the_command_and_its_group_along():
    lines = []
    process = await start("import os, time; print('pid', os.fork(), flush=True); time.sleep(3600)", lines)
    await until(lambda: lines)
    members = process.members()
    assert len(members) == 2
    os.kill(process._keeper.pid, signal.SIGKILL)
    await process.wait()
    await until(lambda: not any(map(is_alive, members)), 5)


async def test_a_killed_keeper_leaves_nothing_that_left_the_group():
    lines = []
    code = "import os, time; c = os.fork(); c or os.setsid(); print('pid', os.getpid(), flush=True); time.sleep(3600)"
    process = await start(code, lines)
    await until(lambda: len(lines) == 2)
    members = process.members()
    assert len(members) == 2
    os.kill(process._keeper.pid, signal.SIGKILL)
    await process.wait()
    await until(lambda: not any(map(is_alive, members)), 5)


def test_the_command_dies_with_its_keeper_even_when_nobody_looks():
    ours, theirs = socket.socketpair()
    code = "import time; print('up', flush=True); time.sleep(3600)"
    command = [sys.executable, "-I", "-S", keeper.__file__, *PYTHON, "-c", code]
    with ours, theirs, subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        pid = int(ours.recv(32))
        process.kill()
        wait_until(lambda: not is_alive(pid), 5.0)


async def test_a_start_that_is_given_up_leaves_nothing(monkeypatch):
    """The keeper is there, but its word does not come in time."""
    monkeypatch.setattr("proa.gateway.process._KEEPER_SECONDS", 0.0)
    before = psutil.Process().children(recursive=True)
    with pytest.raises(TimeoutError):
        await start("import time; time.sleep(3600)")
    assert set(psutil.Process().children(recursive=True)) <= set(before)


async def test_a_descriptor_that_got_away_holds_nobody_up(monkeypatch):
    monkeypatch.setattr("proa.gateway.process._OUTPUT_SECONDS", 0.1)
    lines = []
    process = await start("print('x', flush=True); import time; time.sleep(3600)", lines)
    await until(lambda: lines)
    copy = os.open(f"/proc/{process.pid}/fd/1", os.O_WRONLY)
    try:
        await process.stop(1)
    finally:
        os.close(copy)


def test_nothing_outlives_a_killed_gateway(tmp_path):
    journal = tmp_path / "journal"
    options = ["--fork", "2", "--fork-escape", "--ignore-sigterm", "--journal", str(journal), "--port", "${PORT}"]
    gateway = subprocess.Popen(
        [sys.executable, str(HERE / "run_supervisor.py"), *PYTHON, str(FAKE), *options], stdout=subprocess.PIPE
    )
    try:
        assert gateway.stdout.readline() == b"loaded\n"
        entries = [json.loads(line) for line in journal.read_text().splitlines()]
        pids = [e["pid"] for e in entries if e["event"] == "started"]
        pids += [e["child"] for e in entries if e["event"] == "forked"]
        assert len(pids) == 3 and all(map(is_alive, pids))
    finally:
        gateway.kill()
        gateway.wait()
        gateway.stdout.close()
    wait_until(lambda: not any(map(is_alive, pids)), 5.0, "no engine left")
