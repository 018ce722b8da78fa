"""Faults in a real engine under the endpoint's supervisor: what others notice, how long it takes, what is left.

    python benchmarks/faults/drive.py MODEL cuda|cpu ['{"gpu_experts": 8}']

MODEL has 4096 tokens or more (`benchmarks/memory/sparse_kimi.py` makes one). Prints a JSON object for each event:
requests, an abort, a step without memory, a step that never ends, kill -9 of the engine and of the endpoint's process.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faulty_engine import OOM, STUCK

from proa.core.sampling_params import SamplingParams
from proa.ipc.messages import Abort, FromEngine, Generate, StepOutput
from proa.server.engine_process import EngineProcess, EngineState, RestartPolicy

ENGINE = [sys.executable, str(Path(__file__).with_name("faulty_engine.py"))]
WATCHDOG_S = 6.0
VICTIM = "PROA_FAULTS_VICTIM"  # this process is the one to be killed


class Driver:
    """An engine and what it said."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, tuple[str, str]] = {}
        self.downs: list[str] = []
        self.out_of_memory = 0
        self._changed = asyncio.Event()
        self.process = EngineProcess(
            ENGINE,
            json.dumps(config).encode(),
            policy=RestartPolicy(0.2, 1.0, 3),
            watchdog_timeout=WATCHDOG_S,
            on_message=self._message,
            on_down=self._down,
            on_status=lambda _: self._changed.set(),
        )

    def _message(self, message: FromEngine) -> None:
        if isinstance(message, StepOutput):
            self.out_of_memory = message.stats.out_of_memory
            for output in message.outputs:
                self.tokens.setdefault(output.rid, []).extend(output.token_ids)
                if output.finish_reason:
                    self.ends[output.rid] = (output.finish_reason, output.error)
        self._changed.set()

    def _down(self, reason: str) -> None:
        self.downs.append(reason)
        self._changed.set()

    @property
    def is_ready(self) -> bool:
        return self.process.status.state is EngineState.READY

    async def until(self, condition: Callable[[], bool], seconds: float = 150.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def ask(self, rid: str, prompt: list[int], tokens: int = 8) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self.process.send(Generate(rid=rid, token_ids=prompt, sampling=sampling))

    async def runs(self, rid: str) -> None:
        await self.until(lambda: len(self.tokens.get(rid, [])) > 1)


def say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def gpu_mib() -> int:
    """Used on the first GPU by anyone; -1 without one."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split()[0])
    except (OSError, IndexError, ValueError):
        return -1


def available_mib() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("MemAvailable"))


async def requests(driver: Driver, prompts: dict[str, list[int]]) -> None:
    for rid, prompt in prompts.items():
        driver.ask(rid, prompt)
    await driver.until(lambda: len(driver.ends) == len(prompts))
    driver.ask("long", prompts["r0"], 3000)
    await driver.runs("long")
    started = time.monotonic()
    driver.process.send(Abort("long"))
    await driver.until(lambda: "long" in driver.ends)
    say(event="abort", ms=round((time.monotonic() - started) * 1e3, 1), ended=driver.ends["long"][0])


async def out_of_memory(driver: Driver, prompts: dict[str, list[int]]) -> None:
    for rid, prompt in prompts.items():
        driver.ask(f"beside {rid}", prompt, 40)
    await driver.runs("beside r3")
    before = gpu_mib()
    driver.ask("oom", [20, 21, OOM, 22])
    names = [f"beside {rid}" for rid in prompts]
    await driver.until(lambda: all(name in driver.ends for name in (*names, "oom")))
    same = all(driver.tokens[f"beside {rid}"][:8] == driver.tokens[rid] for rid in prompts)
    others = [driver.ends[name][0] for name in names]
    say(event="out of memory", ended=driver.ends["oom"], others=others, same_tokens=same, gpu_mib=[before, gpu_mib()],
        forwards_refused=driver.out_of_memory, restarts=driver.process.status.restarts)  # fmt: skip


async def stuck(driver: Driver, prompts: dict[str, list[int]]) -> None:
    driver.ask("waits", prompts["r0"], 3000)
    await driver.runs("waits")
    started = time.monotonic()
    driver.ask("stuck", [20, 21, STUCK, 22])
    await driver.until(lambda: len(driver.downs) == 1)
    found = time.monotonic() - started
    await driver.until(lambda: driver.is_ready)
    again = time.monotonic() - started
    driver.ask("after", prompts["r1"])
    await driver.until(lambda: "after" in driver.ends)
    say(event="stuck", found_s=round(found, 1), reason=driver.downs[0], ready_again_s=round(again, 1),
        same_tokens=driver.tokens["after"] == driver.tokens["r1"])  # fmt: skip


async def killed_engine(driver: Driver, prompts: dict[str, list[int]]) -> None:
    driver.ask("killed", prompts["r0"], 3000)
    await driver.runs("killed")
    os.kill(driver.process.status.pid, signal.SIGKILL)
    await driver.until(lambda: len(driver.downs) == 2)
    say(event="kill -9 of the engine", reason=driver.downs[1], gpu_mib=gpu_mib())


def killed_endpoint() -> None:
    before = available_mib()
    victim = subprocess.Popen(
        [sys.executable, *sys.argv], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, VICTIM: "1"}
    )
    assert victim.stdout is not None
    engine = Path("/proc") / victim.stdout.readline().decode().strip()
    time.sleep(0.5)
    during, started = gpu_mib(), time.monotonic()
    victim.kill()
    victim.wait()
    while engine.exists() and time.monotonic() - started < 20:
        time.sleep(0.05)
    gone = round(time.monotonic() - started, 2)
    time.sleep(1.0)
    left = [str(path) for path in (*Path("/tmp").glob(f"proa-{victim.pid}-*"), *Path("/dev/shm").glob("*proa*"))]
    say(event="kill -9 of the endpoint", engine_gone_s=gone, engine_lives=engine.exists(), gpu_mib=[during, gpu_mib()],
        available_mib=[before, available_mib()], files_left=left)  # fmt: skip


async def main() -> None:
    config = {"model_path": sys.argv[1], "device": sys.argv[2], "max_total_tokens": 16384, "max_running_requests": 8}
    driver = Driver({**config, **(json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})})
    task = asyncio.create_task(driver.process.run())
    await driver.until(lambda: driver.is_ready or task.done())
    if VICTIM in os.environ:
        driver.ask("busy", [5] * 20, 4000)
        print(driver.process.status.pid, flush=True)
        await asyncio.sleep(600)
    say(event="ready", gpu_mib=gpu_mib(), message=driver.process.status.message)
    rng = random.Random(1)
    prompts = {f"r{i}": [rng.randrange(10, 60) for _ in range(9 + 7 * i)] for i in range(4)}
    for part in (requests, out_of_memory, stuck, killed_engine):
        await part(driver, prompts)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
    if VICTIM not in os.environ:
        killed_endpoint()
