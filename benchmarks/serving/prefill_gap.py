"""How long running answers and short prompts wait while a long prompt is computed, and what they cost the prompt.

    python benchmarks/serving/prefill_gap.py MODEL [--prompt 32768] [--short 512] [--answers 1] [--config JSON]
        [--jsonl FILE]

An engine in this process, no HTTP. First the prompt alone, then as many other tokens beside `--answers` sequences that
decode, then again while a prompt of `--short` tokens comes when a fifth of its layers are done. `--config`: fields of
EngineConfig, for example {"max_decode_gap_ms": 200}.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from proa.core.sampling_params import SamplingParams
from proa.engine.build import build_engine
from proa.engine.config import EngineConfig
from proa.engine.engine import Engine
from proa.engine.load import load_checkpoint
from proa.ipc.messages import Generate

LAYERS_DONE = 0.2


class Run:
    """Requests of one engine, and when each of their tokens came."""

    def __init__(self, engine: Engine, vocab_size: int, seed: int) -> None:
        self.engine = engine
        self._vocab_size = vocab_size
        self._random = random.Random(seed)  # another one each time: the prefix cache remembers
        self.times: dict[str, list[float]] = {}

    def submit(self, rid: str, prompt: int, new: int) -> None:
        tokens = [self._random.randrange(self._vocab_size) for _ in range(prompt)]
        params = SamplingParams(max_tokens=new, ignore_eos=True, temperature=0.0)
        self.times[rid] = []
        self.engine.submit(Generate(rid=rid, token_ids=tokens, sampling=params))

    def step(self, poll: Callable[[], None] | None = None) -> None:
        for output in self.engine.step(poll).outputs:
            if output.error:
                sys.exit(output.error)
            if output.token_ids:
                self.times[output.rid].append(perf_counter())

    def first_token(self, rid: str) -> float:
        """Seconds until `rid` has its first token."""
        started = perf_counter()
        while not self.times[rid]:
            self.step()
        return perf_counter() - started


def overtaking(run: Run, prompt: int, short: int) -> dict[str, float]:
    """Seconds of both until their first tokens, with no answer running."""
    run.submit("warm short", short, 1)
    run.first_token("warm short")
    run.submit("short alone", short, 1)
    alone_s = run.first_token("short alone")
    came = 0.0

    def poll() -> None:
        nonlocal came
        running = run.engine.running_pass
        if not came and running is not None and running.share_done >= LAYERS_DONE:
            came = perf_counter()
            run.submit("short", short, 1)

    started = perf_counter()
    run.submit("overtaken", prompt, 1)
    while not run.times["overtaken"] or not run.times.get("short"):
        run.step(poll)
    return {
        "short": short,
        "short_alone_s": alone_s,
        "short_s": run.times["short"][0] - came,
        "overtaken_s": run.times["overtaken"][0] - started,
    }


def measure(engine: Engine, vocab_size: int, prompt: int, short: int, answers: int) -> dict[str, Any]:
    run = Run(engine, vocab_size, prompt)
    run.submit("warm", min(prompt, 2048), 4)
    run.first_token("warm")
    run.submit("alone", prompt, 1)
    alone_s = run.first_token("alone")
    names = [f"answer{i}" for i in range(answers)]
    for name in names:
        run.submit(name, 16, 100_000)
    while min(len(run.times[name]) for name in names) < 32:
        run.step()
    steps = [b - a for a, b in zip(run.times[names[0]], run.times[names[0]][1:], strict=False)][8:]
    begin = perf_counter()
    run.submit("beside", prompt, 1)
    beside_s = run.first_token("beside")
    gaps = []
    for name in names:
        seen = [time for time in run.times[name] if time >= begin]
        gaps += [b - a for a, b in zip([begin, *seen], [*seen, perf_counter()], strict=True)]
    engine.abort("")
    run.step()
    return {
        "prompt": prompt,
        "answers": answers,
        "gap_bound_ms": engine.pace.gap_s * 1e3,
        "decode_ms": statistics.median(steps) * 1e3,
        "longest_gap_ms": max(gaps) * 1e3,
        "median_gap_ms": statistics.median(gaps) * 1e3,
        "tokens_beside": len(gaps) - answers,
        "alone_s": alone_s,
        "beside_s": beside_s,
        "alone_tok_s": prompt / alone_s,
        "beside_tok_s": prompt / beside_s,
        "longest_layer_ms": engine.pace.layer_s * 1e3,
        **(overtaking(run, prompt, short) if short < prompt else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt", default="32768", help="tokens, several after commas")
    parser.add_argument("--short", type=int, default=512)
    parser.add_argument("--answers", type=int, default=1)
    parser.add_argument("--config", default="{}")
    parser.add_argument("--jsonl", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = EngineConfig(
        model_path=given.model, to_engine="", from_engine="", random_seed=0, **json.loads(given.config)
    )
    started = perf_counter()
    loaded = load_checkpoint(config, lambda *_: None)
    engine = build_engine(config, loaded)
    head = {"config": json.loads(given.config), "start_s": perf_counter() - started, "info": loaded.info}
    for prompt in given.prompt.split(","):
        result = measure(engine, min(loaded.model.vocab_size, 4096), int(prompt), given.short, given.answers)
        rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in result.items()}
        line = json.dumps({**head, **rounded})
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        if given.jsonl is not None:
            with given.jsonl.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
