"""What an engine step costs outside the model: schedule, sample, encode the output. Milliseconds per step of a batch.

    python benchmarks/serving/engine_overhead.py [--batch 8] [--jsonl FILE]

Logits are random and given, so no model runs. "peaked" is like real text (most of the mass on some hundred tokens),
"flat" is the worst case for top_p.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Generator
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np
import torch

from proa.attention.batch import ForwardBatch, StillWanted
from proa.core.sampling_params import SamplingParams
from proa.engine.build import LoadedModel, build_engine
from proa.engine.config import EngineConfig
from proa.engine.kv_plan import KVPlan
from proa.ipc.messages import Generate
from proa.kvcache.layout import KVLayout
from proa.kvcache.pool import KVPool
from proa.moe.traffic import ExpertTraffic

VOCAB_SIZES = {"smollm2": 49152, "kimi-k2": 163840}
SPREADS = {"peaked": 4.0, "flat": 1.0}
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 0.7, "top_p": 0.95},
    "everything": {
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 50,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
    },
    "top_p, 5 logprobs": {"temperature": 0.7, "top_p": 0.95, "logprobs": 5},
}
STEPS = 64
PROMPT_TOKENS = 512


class GivenLogits:
    """Answers every forward with the same logits."""

    weight_bytes = 0
    expert_traffic = ExpertTraffic()

    def __init__(self, vocab_size: int, batch: int, spread: float) -> None:
        self.vocab_size = vocab_size
        self._logits = torch.from_numpy(
            (np.random.default_rng(0).normal(size=(batch, vocab_size)) * spread).astype(np.float32)
        )

    def layers(
        self, batch: ForwardBatch, kv: KVPool, still_wanted: StillWanted | None = None
    ) -> Generator[float, None, torch.Tensor]:
        yield 0.5
        return self.forward(batch, kv, still_wanted)

    def forward(self, batch: ForwardBatch, kv: KVPool, still_wanted: StillWanted | None = None) -> torch.Tensor:  # noqa: ARG002
        return self._logits[: batch.logit_rows.numel()]


def measure(vocab_size: int, batch: int, spread: float, sampling: dict[str, float]) -> dict[str, float]:
    """Medians over the decode steps of a full batch."""
    plan = KVPlan(num_blocks=batch * 64, block_size=16, dtype="float32", max_model_len=1024, notes={})
    config = EngineConfig(
        model_path="",
        to_engine="",
        from_engine="",
        max_running_requests=batch,
        chunked_prefill_size=batch * PROMPT_TOKENS,
    )
    layout = KVLayout(num_layers=1, num_kv_heads=1, key_dim=1, value_dim=1)
    engine = build_engine(config, LoadedModel(GivenLogits(vocab_size, batch, spread), layout, plan, (2,)))
    for i in range(batch):
        params = SamplingParams(max_tokens=STEPS + 2, ignore_eos=True, **sampling)
        engine.submit(Generate(rid=f"{i:032}", token_ids=[100 + i] * PROMPT_TOKENS, sampling=params))
    engine.step()
    schedule, sample, encode = [], [], []
    encoder = msgspec.msgpack.Encoder()
    for _ in range(STEPS):
        output = engine.step()
        started = perf_counter()
        encoder.encode(output)
        encode.append((perf_counter() - started) * 1e3)
        schedule.append(output.stats.schedule_ms)
        sample.append(output.stats.sample_ms)
    medians = {
        "schedule_ms": statistics.median(schedule),
        "sample_ms": statistics.median(sample),
        "encode_ms": statistics.median(encode),
    }
    return {**medians, "total_ms": sum(medians.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--jsonl", help="append results to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for vocab, vocab_size in VOCAB_SIZES.items():
        for shape, spread in SPREADS.items():
            for name, sampling in SAMPLINGS.items():
                times = measure(vocab_size, arguments.batch, spread, sampling)
                parts = "  ".join(f"{key} {value:6.3f}" for key, value in times.items())
                print(f"{vocab:8} {vocab_size:6}  {shape:6} {name:18} {parts}")
                if arguments.jsonl:
                    record = {"vocab_size": vocab_size, "batch": arguments.batch, "logits": shape, "sampling": name}
                    with Path(arguments.jsonl).open("a") as file:
                        file.write(json.dumps({**record, **{k: round(v, 4) for k, v in times.items()}}) + "\n")


if __name__ == "__main__":
    main()
