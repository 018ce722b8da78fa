"""The same GGUF experts in llama.cpp and in proa, in turn: prefill of 512 tokens and decode, whole server, two threads.

    python -m proa.convert.random_model --like qwen3-30b --layers 6 --format int8_g128 --no-experts TRUNK
    python benchmarks/peers/same_gguf.py --llama-bench PATH/llama-bench --trunk TRUNK MODEL.gguf [--rounds 2]

MODEL.gguf is a whole model for llama.cpp (a random one: the vocabulary of TRUNK's tokenizer and the same dimensions);
proa takes its routed experts from it and the rest from TRUNK, a checkpoint directory. Lines are appended to
benchmarks/results/speed.jsonl; llama-bench's as it prints them, with a label.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))

from speed import RESULTS, fingerprint, measure

LOADS = ("prefill 512", "decode 1")


def llama(binary: Path, model: Path, threads: int) -> list[dict[str, Any]]:
    """llama-bench's records of prefill 512 and decode 128, three runs each."""
    command = [binary, "-m", model, "-t", str(threads), "-p", "512", "-n", "128", "-r", "3", "-o", "jsonl"]
    output = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def main() -> int:
    """Measure both in turn, print, append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--trunk", type=Path, required=True)
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    flags = ["--kt-weight-path", str(arguments.model), "--threads", str(arguments.threads)]
    machine = fingerprint()
    for _ in range(arguments.rounds):
        peer = llama(arguments.llama_bench, arguments.model, arguments.threads)
        ours = measure(str(arguments.trunk), ["--max-running-requests", "1", *flags], LOADS)
        label = f"same GGUF: {arguments.model.stem}"
        records = [{"label": f"{label}, llama.cpp", "machine": machine} | record for record in peer]
        records.append({"label": f"{label}, proa with {arguments.trunk.name}", "machine": machine} | ours)
        with arguments.output.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        theirs = " / ".join(f"{record['avg_ts']:.1f}" for record in peer)
        speeds = f"{ours['prefill 512']['prefill_tok_s']} / {ours['decode 1']['decode_tok_s']}"
        print(f"{label}: llama.cpp {theirs}, proa {speeds} tok/s (prefill 512 / decode)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
