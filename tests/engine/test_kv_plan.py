from __future__ import annotations

from typing import Any

import numpy as np
import psutil
import pytest

from proa.core.errors import ConfigError
from proa.engine.config import EngineConfig
from proa.engine.kv_plan import KVPlan, plan_kv
from proa.kvcache.layout import KVLayout
from proa.kvcache.pool import KVPool, kv_bytes_per_token

GIB = 2**30
# 4 layers x (8 heads x (128 + 128)) floats: 32 KiB per token.
LAYOUT = KVLayout(num_layers=4, num_kv_heads=8, key_dim=128, value_dim=128)


def plan(available_gib: float, *, weights_gib: float = 2.0, model_context: int = 32768, **config: Any) -> KVPlan:
    settings = EngineConfig(model_path="", to_engine="", from_engine="", **config)
    return plan_kv(
        settings,
        LAYOUT,
        model_context=model_context,
        weight_bytes=int(weights_gib * GIB),
        available_bytes=int(available_gib * GIB),
    )


def test_takes_its_share_of_what_is_left() -> None:
    result = plan(8, memory_fraction=0.5)
    # (8 - 2 weights - 1 reserve) * 0.5 = 2.5 GiB of 32 KiB.
    assert result.num_tokens == 81920
    assert result.max_model_len == 32768 and result.notes["context_length"] == "32768"
    assert plan(8, memory_fraction=0.5, kv_cache_dtype="bfloat16").num_tokens == 163840


def test_takes_no_more_than_running_requests_can_fill() -> None:
    assert plan(64, max_running_requests=2, context_length=1000).num_tokens == 2 * 1008


def test_lowers_the_models_context_but_not_the_users() -> None:
    result = plan(3.5, memory_fraction=1.0)
    assert result.max_model_len == result.num_tokens == 16384
    assert "from the model's 32768 to 16384" in result.notes["context_length"]
    with pytest.raises(ConfigError, match=r"\[context_length\] expected at most 16384"):
        plan(3.5, memory_fraction=1.0, context_length=20000)
    with pytest.raises(ConfigError, match=r"\[context_length\] expected at most 32768, the model's"):
        plan(64, context_length=40000)


def test_refuses_what_does_not_fit_with_the_numbers() -> None:
    numbers = r"2\.50 GiB available, 2\.00 GiB weights and scratch, 1\.00 GiB reserve, 32\.0 KiB"
    with pytest.raises(ConfigError, match=numbers):
        plan(2.5)
    with pytest.raises(ConfigError, match=r"\[max_total_tokens\] expected 16 to 32768 tokens"):
        plan(4, max_total_tokens=40000)
    with pytest.raises(ConfigError, match="max_total_tokens"):
        plan(64, max_total_tokens=15)
    assert plan(4, max_total_tokens=1007).num_tokens == 992


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("latent", [True, False])
def test_pool_has_the_planned_size_and_is_lazy(dtype: Any, latent: bool) -> None:
    layout = KVLayout(num_layers=3, num_kv_heads=1, key_dim=576, value_dim=512, latent=latent)
    before = psutil.Process().memory_info().rss
    pool = KVPool(layout, num_blocks=10_000, block_size=16, dtype=dtype)
    assert psutil.Process().memory_info().rss - before < pool.nbytes / 20
    tensors = [pool.key(i) for i in range(3)] + ([] if latent else [pool.value(i) for i in range(3)])
    assert pool.nbytes == sum(t.numel() * t.element_size() for t in tensors)
    assert pool.nbytes == kv_bytes_per_token(layout, dtype) * 160_000
    assert pool.key(0).shape == (160_000, 1, 576) and pool.value(2).shape == (160_000, 1, 512)
    pool.key(1)[7, 0, 3] = 2.5
    assert float(pool.value(1)[7, 0, 3]) == (2.5 if latent else 0.0)
    assert not np.any(pool.key(2)[:100].float().numpy())
