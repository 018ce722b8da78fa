"""Cases of model output through a real server with a scripted engine: three APIs, streamed and whole, cut in every way.

    python tests/server/case_replay.py [--splits all] FILE...

The format of a case is that of `proa.chat.replay --family kimi_k2`. With `--splits all` the ways to cut the tokens into
engine steps take turns among the six combinations of API and mode, so that each sees every kind of cut. Prints what
differs; exit status 1 when something did.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import httpx

# As a script, only the directory of this file is looked into.
sys.path.insert(0, str(Path(__file__).parents[2]))
from api_clients import APIS, Answer
from fake_engine import ANSWER_SEED, ANSWERS_PER_FILE
from kimi_model import END, answer_ids, write_model
from server_process import ServerProcess
from tests.models.kimi_checkpoint import NUM_RANKS

from proa.chat.tiktoken_tokenizer import TiktokenTokenizer

COMBINATIONS = list(product(APIS, (False, True)))
# Longer outputs are not cut in two at every token, but at this many places.
MAX_CUTS = 300
NUM_CONNECTIONS = 4
VERY_LONG = 20_000

Cuts = list[int]


def cuts_of(ids: list[int], *, every: bool) -> Iterator[Cuts]:
    """Ways to cut `ids`: not at all, at markers, at random; with `every` at each place and everywhere too.

    Very long ones without `every` only at the markers.
    """
    markers = [place for place, token in enumerate(ids) if token >= NUM_RANKS]
    edges = sorted({edge for place in markers for edge in (place, place + 1) if 0 < edge < len(ids)})
    if not every and len(ids) > VERY_LONG:
        yield edges
        return
    yield []
    yield edges
    rng = random.Random(len(ids))
    places = range(1, len(ids))
    for _ in range(50 if every else 1):
        yield sorted(rng.sample(places, min(len(places), rng.randint(1, 40))))
    if every:
        if len(ids) < 5000:
            yield list(places)
        yield from ([cut] for cut in (places if len(places) <= MAX_CUTS else sorted(rng.sample(places, MAX_CUTS))))


class Replay:
    """Writes the scripts of all cases and asks a server for them."""

    def __init__(self, directory: Path, cases: list[dict[str, Any]], *, every: bool) -> None:
        self._cases = cases
        model = write_model(directory / "model")
        tokenizer = TiktokenTokenizer.load(model)
        answers = directory / "answers"
        answers.mkdir()
        self._num_scripts = []
        for number, case in enumerate(cases):
            ids = answer_ids(tokenizer, case["text"], case.get("ordinary", ()))
            ids += [END] if case["finish"] == "stop" else []
            scripts = [
                [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
                for cuts in cuts_of(ids, every=every)
            ]
            self._num_scripts.append(len(scripts))
            (answers / str(number)).write_text(json.dumps(scripts))
        engine = {"answers": str(answers), "vocab_size": 512, "step_seconds": 0.0, "max_model_len": 2_000_000}
        self.process = ServerProcess(directory, model, engine=engine, log_level="warning")
        self.num_requests = 0

    def differences(self) -> Iterator[str]:
        """One text for each request whose answer is not what its case expects. Several run at a time."""
        with self.process.wait_ready().client(timeout=300) as http, ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            for number in range(len(self._cases)):
                requests = [
                    (script, *combination)
                    for script in range(self._num_scripts[number])
                    for combination in (COMBINATIONS if script == 0 else [COMBINATIONS[script % len(COMBINATIONS)]])
                ]
                self.num_requests += len(requests)
                yield from filter(None, pool.map(partial(self._check, http, number), requests))

    def _check(self, http: httpx.Client, number: int, request: tuple[int, str, bool]) -> str:
        script, api, stream = request
        case, seed = self._cases[number], ANSWER_SEED + ANSWERS_PER_FILE * number + script
        difference = check(http, case, api, seed=seed, stream=stream)
        return difference and f"{case['id']} script {script} {api} {'stream' if stream else 'whole'}: {difference}"


def check(http: httpx.Client, case: dict[str, Any], api: str, *, seed: int, stream: bool) -> str:
    """What is wrong with the answer to a case; "" when nothing is."""
    ask = APIS[api]
    thinks = case["state"] == "reasoning"
    # Other choices change nothing in how an output is read.
    choice = "none" if case.get("tool_choice") == "none" else "auto"
    answer = ask(http, case.get("tools") or [], history(case), choice=choice, thinks=thinks, seed=seed, stream=stream)
    expected = Answer.expected(case["expect"], api, is_whole=not stream)
    return "" if answer == expected else f"\n  expected {expected}\n  got      {answer}"


def history(case: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation with as many calls as the case wants before its output."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    if count := case.get("history_calls", 0):
        calls = [
            {"id": f"call_{index}", "type": "function", "function": {"name": "earlier", "arguments": "{}"}}
            for index in range(count)
        ]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": f"call_{index}", "content": "ok"} for index in range(count)]
    return messages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--splits", choices=["few", "all"], default="few")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    options = parser.parse_args()
    cases = [json.loads(line) for path in options.files for line in path.read_text().splitlines() if line.strip()]
    with tempfile.TemporaryDirectory() as directory:
        replay = Replay(Path(directory), cases, every=options.splits == "all")
        num_failed = 0
        try:
            for difference in replay.differences():
                num_failed += 1
                print(difference, flush=True)
        finally:
            replay.process.stop()
            print(f"{len(cases)} cases, {replay.num_requests} requests, {num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
