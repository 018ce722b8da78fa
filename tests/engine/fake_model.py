"""A model whose next token depends on every token and position of the context, read back through the KV pool.

A wrong slot, block table, position or reused block changes the tokens. Special prompt tokens provoke faults.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Generator, Sequence

import numpy as np
import torch

from proa.attention.batch import ForwardBatch, StillWanted
from proa.kvcache.layout import KVLayout
from proa.kvcache.pool import KVPool
from proa.moe.traffic import ExpertTraffic

VOCAB_SIZE = 512
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, key_dim=2, value_dim=1)
MAX_POSITIONS = 8192

# Prompt tokens with an effect; ordinary prompts stay below.
HANG = 502  # its forward never ends, and holds the interpreter
NO_GPU_MEMORY = 503  # the forward of any batch with it finds no GPU memory
NO_RAM = 504  # the same with RAM, of which it had taken HELD_BYTES
RAISE = 505  # the forward of any batch with it fails
NAN_LOGITS = 506  # its logits are NaN
POINT_MASS = 507  # its logits are -inf but for token 3
SLOW = 508  # its forward takes 50 ms
LONG = 509  # its forward takes 50 ms a layer
FIRST_SPECIAL = 500

NUM_LAYERS = 100
HELD_BYTES = 256 * 2**20

_PRIME = 2_147_483_629
_POWERS = np.array([pow(31, i, _PRIME) for i in range(MAX_POSITIONS)], dtype=np.int64)
_TOKENS = np.arange(VOCAB_SIZE, dtype=np.int64)


class FakeModel:
    vocab_size = VOCAB_SIZE
    weight_bytes = 0
    expert_faults = 0
    hybrid_traffic = None

    def __init__(self) -> None:
        self.layout = LAYOUT
        self._logits = np.zeros((64, VOCAB_SIZE), dtype=np.float32)
        # Token counts of the forwards that succeeded, and of those that found no memory.
        self.forwards: list[int] = []
        self.refused: list[int] = []
        self.recoveries = 0
        self.max_sequences = 1 << 30  # more in a batch than this find no GPU memory

    @property
    def expert_traffic(self) -> ExpertTraffic:
        """1000 bytes and 2 ms a forward."""
        return ExpertTraffic(1000 * len(self.forwards), 0.002 * len(self.forwards))

    def forward(self, batch: ForwardBatch, kv: KVPool, still_wanted: StillWanted | None = None) -> torch.Tensor:
        layers = self.layers(batch, kv, still_wanted)
        while True:
            try:
                next(layers)
            except StopIteration as end:
                return end.value

    def layers(
        self, batch: ForwardBatch, kv: KVPool, still_wanted: StillWanted | None = None
    ) -> Generator[float, None, torch.Tensor]:
        tokens = batch.token_ids.numpy()
        if (tokens == SLOW).any():
            time.sleep(0.05)
        keys, values = kv.key(0).numpy()[:, 0], kv.value(1).numpy()[:, 0]
        slots = batch.slots.numpy()
        keys[slots, 0] = tokens
        keys[slots, 1] = batch.positions.numpy()
        values[slots, 0] = tokens
        self._take_memory(batch)
        if (tokens == RAISE).any():
            raise RuntimeError("the fake model was told to fail")
        for done in range(NUM_LAYERS):
            while done == NUM_LAYERS // 2 and (batch.token_ids == HANG).any():
                ctypes.PyDLL(None).sleep(60)
            if (batch.token_ids == LONG).any():
                time.sleep(0.05)
            yield done / NUM_LAYERS
            wanted = None if still_wanted is None else still_wanted()
            if wanted is not None:
                batch = batch.select(wanted)
        # Always the same memory: a caller who keeps rows across forwards has to notice.
        logits = self._logits[: batch.logit_rows.numel()]
        tables = batch.block_tables.numpy()
        for row, token_row in enumerate(batch.logit_rows.tolist()):
            positions = np.arange(int(batch.positions[token_row]) + 1)
            table = tables[int(batch.sequence_ids[token_row])]
            at = table[positions // batch.block_size] * batch.block_size + positions % batch.block_size
            assert (keys[at, 0] == values[at, 0]).all()
            logits[row] = logits_of(keys[at, 0].astype(np.int64), keys[at, 1].astype(np.int64))
        self.forwards.append(len(tokens))
        return torch.from_numpy(logits)

    def recover(self) -> None:
        self.recoveries += 1

    def _take_memory(self, batch: ForwardBatch) -> None:
        tokens = batch.token_ids.numpy()
        if (tokens == NO_GPU_MEMORY).any() or batch.block_tables.shape[0] > self.max_sequences:
            self.refused.append(len(tokens))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
        if (tokens == NO_RAM).any():
            held = np.ones(HELD_BYTES, dtype=np.uint8)
            self.refused.append(len(tokens))
            raise MemoryError(f"beside {held.nbytes} bytes")


def logits_of(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[vocab] float32, spread over about +-8."""
    terms = (tokens + 1) * (positions + 7) % _PRIME * _POWERS[: len(tokens)] % _PRIME
    state = int(terms.sum() % _PRIME)
    logits = ((state * (_TOKENS * 7919 + 13) % _PRIME * 48_271 % _PRIME) / _PRIME * 16 - 8).astype(np.float32)
    if NAN_LOGITS in tokens:
        logits[5] = np.nan
    if POINT_MASS in tokens:
        logits[:] = -np.inf
        logits[3] = 1.0
    # Ordinary answers hold no token with an effect.
    logits[FIRST_SPECIAL:] = -np.inf
    return logits


def greedy(prompt: Sequence[int], count: int, *, end_ids: Sequence[int] = ()) -> list[int]:
    """The `count` greedy tokens after `prompt`, computed without any cache; fewer when one is in `end_ids`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(logits_of(np.array(tokens), np.arange(len(tokens))))))
        if tokens[-1] in end_ids:
            break
    return tokens[len(prompt) :]
