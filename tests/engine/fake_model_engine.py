"""`python fake_model_engine.py`: the real engine process around the fake model. `model_path` picks how loading goes."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from pathlib import Path

from fake_model import LAYOUT, MAX_POSITIONS, FakeModel

from proa.core.errors import CheckpointError
from proa.engine.build import LoadedModel, Report
from proa.engine.config import EngineConfig
from proa.engine.kv_plan import plan_kv
from proa.engine.loop import run_engine


def load(config: EngineConfig, report: Report) -> LoadedModel:
    if config.model_path == "damaged":
        raise CheckpointError("model.safetensors", "8 bytes of header", "3", "download it again")
    if config.model_path == "bug":
        raise RuntimeError("loading hit a bug")
    if config.model_path == "nomem":
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    steps = 40 if config.model_path == "slow" else 2
    for step in range(1, steps + 1):
        time.sleep(0.06 if config.model_path == "slow" else 0.0)
        report(step, steps)
    plan = plan_kv(config, LAYOUT, model_context=MAX_POSITIONS, weight_bytes=0, available_bytes=2**34)
    return LoadedModel(FakeModel(), LAYOUT, plan, (2,), plan.notes)


if __name__ == "__main__":
    settings = json.loads(sys.stdin.buffer.read())
    if journal := settings.pop("journal", None):
        with Path(journal).open("a") as file:
            file.write(json.dumps({"event": "started", "pid": os.getpid()}) + "\n")
    sys.exit(run_engine(EngineConfig.from_json(json.dumps(settings).encode()), load))
