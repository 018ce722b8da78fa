"""The tokens of a pass on a GPU: as many as its memory allows, and all that belongs to them fits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.core.errors import ConfigError
from proa.device.select import Gpu
from proa.engine.config import EngineConfig
from proa.engine.expert_placement import with_experts
from proa.engine.solve import EnginePlan, NoRoomError
from proa.engine.solve import solve as solve_engine
from proa.kvcache.layout import KVLayout
from proa.models import ExpertInfo, GpuBytes, ModelInfo

GIB = 2**30
# Kimi K2: 61 layers of latents, 60 with 384 experts of 23.6 MiB, a trunk of 11 GiB; 100 KiB of scratch a token.
MODEL = ModelInfo(
    family="test",
    layout=KVLayout(num_layers=61, num_kv_heads=1, key_dim=576, value_dim=512, latent=True),
    vocab_size=163840,
    max_position_embeddings=262144,
    eos_token_ids=(2,),
    has_float32_trunk=False,
    experts=ExpertInfo(layers=60, experts=384, top_k=8, hidden=7168, intermediate=2048),
)
EXPERT_BYTES = 60 * 384 * 24_772_608


class Needs:
    """As `ModelNeeds`, without a checkpoint."""

    info = MODEL

    def __init__(self, expert_bytes: int) -> None:
        self.expert_bytes = expert_bytes

    def gpu_trunk(self, max_tokens: int, context: int | None = None) -> GpuBytes:
        return trunk(max_tokens)


def trunk(max_tokens: int) -> GpuBytes:
    return GpuBytes(11 * GIB, GIB + max_tokens * 102_400)


def solve(vram_gib: float, *, expert_bytes: int = EXPERT_BYTES, **config: Any) -> EnginePlan:
    configured = EngineConfig(model_path="", to_engine="", from_engine="", **{"max_running_requests": 4, **config})
    gpu = Gpu(0, "GPU", int((vram_gib - 0.5) * GIB), int(vram_gib * GIB))
    return solve_engine(configured, Needs(expert_bytes), gpu, 800 * GIB)


@pytest.mark.parametrize(("vram_gib", "tokens"), [(24, 8192), (32, 16384), (48, 32768), (141, 32768)])
def test_a_pass_is_as_large_as_memory_allows(vram_gib: float, tokens: int) -> None:
    plan = solve(vram_gib, context_length=32768)
    assert plan.config.chunked_prefill_size == tokens
    assert plan.placed.stream_from == 49 and not plan.placed.stream_all
    assert plan.kv.max_model_len == 32768
    needed = with_experts(trunk(tokens + 4), plan.placed, MODEL.experts, all_bytes=EXPERT_BYTES, max_tokens=tokens + 4)
    cache = plan.kv.num_tokens * MODEL.layout.elements_per_token() * 2
    assert needed.weights + needed.scratch + cache + GIB <= (vram_gib - 0.5) * GIB
    assert plan.notes["prompts"].startswith(f"up to {tokens} tokens in a pass; experts stream where that is faster")


def test_no_larger_than_the_context_can_fill() -> None:
    assert solve(141, context_length=5000).config.chunked_prefill_size == 8192
    assert solve(141, context_length=1000).config.chunked_prefill_size == 2048


def test_a_long_context_comes_before_a_large_pass() -> None:
    # 160k tokens of 70 KB take 11 GiB of the 20 beside the trunk.
    plan = solve(32, context_length=163840)
    assert plan.kv.max_model_len == 163840
    assert 2048 <= plan.config.chunked_prefill_size < solve(32, context_length=32768).config.chunked_prefill_size * 2


def test_what_is_asked_for_is_kept_or_refused() -> None:
    plan = solve(141, chunked_prefill_size=16384, gpu_prefill_threshold=400, gpu_experts=8)
    assert (plan.config.chunked_prefill_size, plan.placed.stream_from, plan.placed.stream_all) == (16384, 400, True)
    assert plan.notes["prompts"] == "up to 16384 tokens in a pass; all experts stream, from 400 tokens on"
    with pytest.raises(ConfigError, match="GPU memory"):
        solve(22, chunked_prefill_size=32768, gpu_prefill_threshold=400)


def test_without_room_or_need_for_a_ring_experts_stay() -> None:
    small = solve(14.5, context_length=2048, max_running_requests=1)
    assert small.placed.stream_from is None and small.config.chunked_prefill_size <= 1024
    everything = solve(141, expert_bytes=60 * GIB, context_length=32768)
    assert everything.placed.on_gpu.all() and everything.config.chunked_prefill_size == 4096
    off = solve(141, gpu_prefill_threshold=0)
    assert off.placed.stream_from is None and off.config.chunked_prefill_size == 4096
    with pytest.raises(ConfigError, match="GPU memory"):
        solve(12)


def test_a_small_ring_comes_before_a_few_experts() -> None:
    """Half of what the trunk leaves is not enough for ring and scratch, yet the bus is faster than the CPU."""
    plan = solve(15.5, context_length=2048)
    assert plan.config.chunked_prefill_size == 2048 and plan.placed is not None and plan.placed.stream_from == 49
    assert plan.placed.ring_bytes >= 4 * 24_772_608 and plan.kv.num_tokens >= 2048


def test_open_requests_are_those_that_decode_steps_are_captured_for_and_the_cache_has_room_for() -> None:
    def requests(vram_gib: float, **config: Any) -> int:
        plan = solve(vram_gib, max_running_requests=None, **config)
        share = plan.kv.num_tokens // plan.config.requests
        assert (
            plan.notes["max_running_requests"]
            == f"{plan.config.requests}, with {share} tokens of the KV cache for each"
        )
        assert plan.config.requests == 1 or share >= min(4096, plan.kv.max_model_len)
        return plan.config.requests

    assert requests(141) == 16 and requests(141, cuda_graph_max_bs=32) == 32
    assert requests(141, max_total_tokens=5 * 4096) == 5
    assert requests(141, max_total_tokens=5 * 4096, context_length=1024) == 16
    assert requests(141, max_total_tokens=1024) == 1
    few = requests(14.5)
    assert 1 <= few < 16
    with pytest.raises(ConfigError, match="GPU memory"):
        requests(12)
    assert solve(141).notes["max_running_requests"].startswith("4, with ")  # as asked for


def test_experts_that_all_fit_without_a_ring_need_none() -> None:
    """17.3 GiB of experts: with a ring a few would stay in RAM, and cross the bus for every prompt."""
    plan = solve(36, expert_bytes=2 * 384 * 24_772_608, context_length=32768)
    assert plan.placed is not None and plan.placed.on_gpu.all() and plan.placed.ring_bytes == 0
    assert plan.config.chunked_prefill_size == 4096 and plan.kv.max_model_len == 32768
    # Where some have to stay the bus carries them.
    some = solve(28, expert_bytes=2 * 384 * 24_772_608, context_length=32768)
    assert some.placed is not None and not some.placed.on_gpu.all() and some.placed.stream_from is not None


_OPEN = st.none()


@settings(max_examples=150, deadline=None)
@given(
    vram_gib=st.floats(11, 60),
    ram_gib=st.floats(1, 900),
    expert_gib=st.floats(0.1, 600),
    config=st.fixed_dictionaries(
        {
            "max_running_requests": _OPEN | st.integers(1, 64),
            "max_total_tokens": _OPEN | st.integers(1, 2**20),
            "context_length": _OPEN | st.integers(1, 262144),
            "chunked_prefill_size": _OPEN | st.integers(1, 65536),
            "gpu_prefill_threshold": _OPEN | st.integers(0, 5000),
            "mem_fraction_static": _OPEN | st.floats(0.01, 1.0),
            "gpu_experts": _OPEN | st.integers(0, 500),
            "kv_cache_dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
            "expert_updates": st.booleans(),
        }
    ),
)
def test_any_settings_fit_or_are_refused(
    vram_gib: float, ram_gib: float, expert_gib: float, config: dict[str, Any]
) -> None:
    """What is told is kept, what is planned is there, and what cannot be is an error of the user."""
    config_given = EngineConfig(model_path="", to_engine="", from_engine="", **config)
    gpu = Gpu(0, "GPU", int(vram_gib * GIB), int(vram_gib * GIB) + GIB)
    ram = int(ram_gib * GIB)
    refusal: NoRoomError | None = None
    try:
        plan = solve_engine(config_given, Needs(int(expert_gib * GIB)), gpu, ram)
    except NoRoomError as error:
        refusal = error
    if refusal is not None:
        assert refusal.vram and refusal.ram and str(refusal)
        return
    assert sum(plan.vram.values()) <= gpu.free_bytes
    loading = plan.ram["loading"]
    assert sum(plan.ram.values()) - loading <= ram
    told = {name: value for name, value in config.items() if value is not None}
    kept = ("max_running_requests", "chunked_prefill_size", "kv_cache_dtype", "context_length", "max_total_tokens")
    assert all(getattr(plan.config, name) == told[name] for name in kept if name in told)
    assert plan.kv.num_tokens <= told.get("max_total_tokens", 2**40)
    assert plan.kv.max_model_len == told.get("context_length", plan.kv.max_model_len)
    assert plan.kv.num_tokens >= plan.kv.max_model_len
    assert plan.config.max_running_requests is not None and plan.config.chunked_prefill_size is not None
