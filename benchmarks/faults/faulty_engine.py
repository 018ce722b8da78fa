"""The engine process around a real model, with faults on demand: prompt tokens OOM and STUCK provoke them.

On a GPU both are genuine: memory is taken until CUDA has none, in the middle of a forward and with a job handed to the
CPU that nobody waits for; the stream waits for a job that is never handed over.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from proa.attention.batch import ForwardBatch
from proa.engine.build import LoadedModel, Report
from proa.engine.config import EngineConfig
from proa.engine.load import load_checkpoint
from proa.engine.loop import run_engine

OOM, STUCK = 4000, 4001
BLOCK_BYTES = 1 << 33


class FaultyModel:
    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: ForwardBatch, kv: Any, still_wanted: Any = None) -> torch.Tensor:
        return self._model.forward(batch, kv, self._with_fault(batch, still_wanted))

    def layers(self, batch: ForwardBatch, kv: Any, still_wanted: Any = None) -> Any:
        return self._model.layers(batch, kv, self._with_fault(batch, still_wanted))

    def _with_fault(self, batch: ForwardBatch, still_wanted: Any) -> Callable[[], Any] | None:
        ids = batch.token_ids
        if not batch.spans:  # steps of answers, which may have any token
            return still_wanted
        if (ids == OOM).any():
            fault = self._take_all_memory
        elif (ids == STUCK).any():
            fault = self._wait_for_ever
        else:
            return still_wanted

        def after_layer() -> Any:
            fault(ids.device)
            return None if still_wanted is None else still_wanted()

        return after_layer

    def _take_all_memory(self, device: torch.device) -> None:
        if device.type == "cpu":
            raise MemoryError
        self._worker.submit(torch.cuda.current_stream(device).cuda_stream, 0)
        held = []
        while True:
            held.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=device))

    def _wait_for_ever(self, device: torch.device) -> None:
        if device.type == "cpu":
            time.sleep(3600)
        self._worker.wait(torch.cuda.current_stream(device).cuda_stream, 0)
        torch.cuda.synchronize(device)

    @property
    def _worker(self) -> Any:
        return self._model._hybrid._worker  # noqa: SLF001  # no flag of the engine provokes faults


def load(config: EngineConfig, report: Report) -> LoadedModel:
    loaded = load_checkpoint(config, report)
    return replace(loaded, model=FaultyModel(loaded.model))


if __name__ == "__main__":
    sys.exit(run_engine(EngineConfig.from_json(sys.stdin.buffer.read()), load))
