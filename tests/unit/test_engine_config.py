from __future__ import annotations

import json
from typing import Any

import pytest

from proa.core.errors import ConfigError
from proa.engine.config import EngineConfig

BASE = {"model_path": "m", "to_engine": "ipc:///a", "from_engine": "ipc:///b"}


def test_round_trip() -> None:
    config = EngineConfig(**BASE, context_length=100, kv_cache_dtype="bfloat16", random_seed=-4)
    assert EngineConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_running_requests": 0}, "max_running_requests"),
        ({"max_total_tokens": 0}, "max_total_tokens"),
        ({"context_length": -1}, "context_length"),
        ({"chunked_prefill_size": 10**9}, "chunked_prefill_size"),
        ({"block_size": 1.5}, "block_size"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        ({"memory_fraction": 0.0}, "memory_fraction"),
        ({"num_threads": "all"}, "num_threads"),
        ({"log_level": "loud"}, "log_level"),
        ({"model_path": None}, "model_path"),
        ({"max_running": 3}, "max_running"),
    ],
)
def test_wrong_values_name_the_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig.from_json(json.dumps({**BASE, **change}).encode())


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[]", b'{"model_path": "m"}', b"{" * 5000])
def test_what_is_no_config_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError):
        EngineConfig.from_json(data)
