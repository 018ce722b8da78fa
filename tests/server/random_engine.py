"""The real engine around a model whose logits are noise, for constrained answers: `random_engine.py < config`.

The vocabulary is that of `model_path`; now and then what closes JSON is likelier than all else, so that answers end.
The noise depends on the position and on the token there, so an answer depends on the prompt.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from proa.attention.batch import ForwardBatch, StillWanted
from proa.chat.grammar.vocabulary import load_vocabulary
from proa.chat.tiktoken_tokenizer import TiktokenTokenizer
from proa.chat.tokenizer_files import TokenizerFiles
from proa.engine.build import LoadedModel, Report
from proa.engine.config import EngineConfig
from proa.engine.kv_plan import plan_kv
from proa.engine.loop import run_engine
from proa.kvcache.layout import KVLayout
from proa.kvcache.pool import KVPool
from proa.moe.traffic import ExpertTraffic

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, key_dim=1, value_dim=1)
# Tokens of other families that end a value or a call.
CLOSING_MARKERS = ("</arg_value>", "</tool_call>")
CLOSING = (b'"', b"}", b"]", b'"}', b'"]', b"}}", b'"}}', b"]}", b'"]}')
# One position in this many closes.
CLOSING_PERIOD = 3


class RandomModel:
    weight_bytes = 0
    expert_faults = 0
    hybrid_traffic = None
    expert_traffic = ExpertTraffic()

    def __init__(self, tokenizer: TiktokenTokenizer) -> None:
        self.vocab_size = tokenizer.vocab_size
        self._noise = np.random.default_rng(0).standard_normal(4 * self.vocab_size).astype(np.float32)
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(self.vocab_size)]
        markers = [tokenizer.token_id(name) for name in CLOSING_MARKERS]
        closing = [token_id for token_id, token in enumerate(tokens) if token in CLOSING or token_id in markers]
        self._closing = np.array(closing)

    def layers(
        self, batch: ForwardBatch, kv: KVPool, still_wanted: StillWanted | None = None
    ) -> Generator[float, None, torch.Tensor]:
        yield 0.5
        return self.forward(batch, kv, still_wanted)

    def recover(self) -> None:
        """Nothing is left behind."""

    def forward(self, batch: ForwardBatch, kv: KVPool, still_wanted: StillWanted | None = None) -> torch.Tensor:
        if still_wanted is not None and (wanted := still_wanted()) is not None:
            batch = batch.select(wanted)
        rows = batch.logit_rows.tolist()
        logits = np.empty((len(rows), self.vocab_size), dtype=np.float32)
        for out, row in zip(logits, rows, strict=True):
            state = (int(batch.positions[row]) + 1) * 2_654_435_761 + int(batch.token_ids[row]) * 40_503
            begin = state % (3 * self.vocab_size)
            out[:] = self._noise[begin : begin + self.vocab_size]
            if state // 7 % CLOSING_PERIOD == 0:
                out[self._closing] += 20.0
        return torch.from_numpy(logits)


def load(config: EngineConfig, report: Report) -> LoadedModel:
    report(1, 1)
    tokenizer = TiktokenTokenizer.load(Path(config.model_path))
    plan = plan_kv(config, LAYOUT, model_context=8192, weight_bytes=0, available_bytes=2**32)
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    vocabulary = partial(load_vocabulary, TokenizerFiles(Path(config.model_path)), tokenizer.vocab_size, (end,))
    return LoadedModel(RandomModel(tokenizer), LAYOUT, plan, (end,), plan.notes, load_vocabulary=vocabulary)


if __name__ == "__main__":
    settings = json.loads(sys.stdin.buffer.read())
    if journal := settings.pop("journal", None):
        with Path(journal).open("a") as file:
            file.write(json.dumps({"event": "started", "pid": os.getpid()}) + "\n")
    sys.exit(run_engine(EngineConfig.from_json(json.dumps(settings).encode()), load))
