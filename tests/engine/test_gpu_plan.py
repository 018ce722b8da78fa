"""What goes where with a trunk on a GPU, and what is refused before anything is loaded."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.kernels.fake_cuda import build_fake_driver

from proa.core.errors import ConfigError, MemoryShortageError
from proa.device.select import Gpu, choose_gpu
from proa.engine.config import EngineConfig
from proa.engine.expert_placement import with_experts
from proa.engine.gpu_plan import check_expert_memory, fit_experts, plan_gpu, with_ram
from proa.engine.kv_plan import KVPlan
from proa.engine.pinning import check_pinning
from proa.kvcache.layout import KVLayout
from proa.models import ExpertInfo, GpuBytes, ModelInfo
from proa.native._C import CudaError

GIB = 2**30
# 4 layers x (8 heads x (128 + 128)) of bf16: 16 KiB per token.
MODEL = ModelInfo(
    family="test",
    layout=KVLayout(num_layers=4, num_kv_heads=8, key_dim=128, value_dim=128),
    vocab_size=2**16,
    max_position_embeddings=32768,
    eos_token_ids=(2,),
    has_float32_trunk=False,
    experts=ExpertInfo(layers=3, experts=8, top_k=2, hidden=256, intermediate=128),
)


def plan(free_gib: float, *, weights_gib: float = 10.0, **config: Any) -> tuple[KVPlan, dict[str, str]]:
    settings = EngineConfig(model_path="", to_engine="", from_engine="", **{"block_size": 16, **config})
    gpu = Gpu(0, "GPU", int(free_gib * GIB), 24 * GIB)
    return plan_gpu(settings, gpu, MODEL, GpuBytes(int(weights_gib * GIB), GIB // 2))


def test_a_cache_of_what_is_left_in_bfloat16() -> None:
    result, notes = plan(14, max_running_requests=64)
    # 14 - 10 weights - 0.5 scratch - 1 reserve - 64 rows of logits, 32 drawn from - 288 MiB of libraries - 16 graphs of
    # 4 MiB and twice the logits of the largest; 95 % of it.
    room = 2.5 * GIB - (64 * 4 + 32 * 60) * 2**16 - (288 + 16 * 4) * 2**20 - 2 * 16 * 2**16 * 4
    assert result.num_tokens == int(room * 0.95) // (16384 * 16) * 16
    assert result.dtype == "bfloat16"
    assert notes["device"] == "GPU (cuda:0)"


def test_blocks_are_as_the_attention_of_the_model_reads_them() -> None:
    latent = dataclasses.replace(MODEL, layout=KVLayout(2, 1, 576, 512, latent=True))
    settings = EngineConfig(model_path="", to_engine="", from_engine="")
    for model, block in ((MODEL, 128), (latent, 64)):
        assert plan_gpu(settings, Gpu(0, "GPU", 20 * GIB, 24 * GIB), model, GpuBytes(0, 0))[0].block_size == block
    assert plan(20, block_size=48)[0].block_size == 48


def test_float32_weights_get_a_float32_cache() -> None:
    settings = EngineConfig(model_path="", to_engine="", from_engine="")
    model = dataclasses.replace(MODEL, has_float32_trunk=True)
    assert plan_gpu(settings, Gpu(0, "GPU", 20 * GIB, 24 * GIB), model, GpuBytes(0, 0))[0].dtype == "float32"
    assert plan(20, kv_cache_dtype="float32")[0].dtype == "float32"


def test_mem_fraction_static_bounds_weights_and_cache_together() -> None:
    result, _ = plan(23, max_running_requests=64, mem_fraction_static=0.5)
    assert result.num_tokens == int((12 - 10) * GIB * 0.95) // (16384 * 16) * 16


def test_flags_that_contradict_each_other_are_refused_with_numbers() -> None:
    fraction = r"--mem-fraction-static 0\.45 of 24\.00 GiB, beside scratch and reserve; 23\.00 GiB are free"
    # 10.8 GiB for weights of 10 and the cache: 0.8 GiB are 52428 tokens of 16 KiB.
    with pytest.raises(ConfigError, match=rf"\[max_total_tokens\] expected 16 to 52428 tokens .*{fraction}.*got 65536"):
        plan(23, mem_fraction_static=0.45, max_total_tokens=65536)
    assert plan(23, mem_fraction_static=0.45, max_total_tokens=52416)[0].num_tokens == 52416
    with pytest.raises(ConfigError, match=r"\[GPU memory\] .*--mem-fraction-static 0\.4 of 24\.00 GiB"):
        plan(23, mem_fraction_static=0.4)
    with pytest.raises(
        ConfigError, match=r"\[context_length\] expected at most 4096, what the KV cache holds, got 8192"
    ):
        plan(23, max_total_tokens=4096, context_length=8192)
    with pytest.raises(ConfigError, match=r"\[context_length\] expected at most 32768, the model's limit, got 65536"):
        plan(23, context_length=65536)
    with pytest.raises(ConfigError, match=r"\[context_length\] expected at most \d+, what the KV cache holds"):
        plan(11.9, context_length=32768, max_running_requests=1)


def test_what_is_left_open_follows_from_what_is_not() -> None:
    """Each of the four alone, and none."""
    free, _ = plan(23)
    assert (free.max_model_len, free.num_tokens) == (32768, 16 * 32768)
    assert plan(23, context_length=4096)[0].num_tokens == 16 * 4096
    assert plan(23, max_running_requests=2)[0].num_tokens == 2 * 32768
    few, _ = plan(23, max_total_tokens=8192)
    assert (few.num_tokens, few.max_model_len) == (8192, 8192) and "lowered" in few.notes["context_length"]
    tight, _ = plan(23, mem_fraction_static=0.45)
    assert tight.num_tokens == int(0.8 * GIB * 0.95) // (16384 * 16) * 16


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"\[GPU memory\] expected room .*8\.00 GiB available, 10\.91 GiB weights"):
        plan(8)
    with pytest.raises(ConfigError, match=r"\[max_total_tokens\] expected 16 to \d+ tokens"):
        plan(14, max_total_tokens=10**6)
    text = r"9\.25 GiB of RAM \(the routed experts 8\.00, process 0\.25, reserve 1\.00\), got 9\.20 GiB"
    with pytest.raises(ConfigError, match=text):
        check_expert_memory(8 * GIB, int(9.2 * GIB), {"process": GIB // 4})
    check_expert_memory(8 * GIB, 9 * GIB)


# 24 experts of 1 GiB.
EXPERT_BYTES = 24 * GIB


def fit(free_gib: float, **config: Any) -> tuple[int, KVPlan, dict[str, str]]:
    """How many experts go to a GPU with that much free beside a trunk of 10 GiB, and the cache beside them."""
    fixed = {"gpu_prefill_threshold": 0, "block_size": 16}
    settings = EngineConfig(model_path="", to_engine="", from_engine="", **{**fixed, **config})
    gpu, trunk = Gpu(0, "GPU", int(free_gib * GIB), 96 * GIB), GpuBytes(10 * GIB, GIB // 2)
    placed = fit_experts(settings, gpu, MODEL, trunk, expert_bytes=EXPERT_BYTES, max_tokens=64)
    needed = with_experts(trunk, placed, MODEL.experts, all_bytes=EXPERT_BYTES, max_tokens=64)
    kv, notes = plan_gpu(settings, gpu, MODEL, needed, placed)
    return int(placed.on_gpu.sum()), kv, notes


def test_what_the_cache_does_not_need_is_for_experts() -> None:
    # 4 x 32768 tokens of 16 KiB are 2 GiB; 30 - 10 - 0.5 - 1 reserve - 0.4 graphs, logits, libraries; 95 % of it: 17.2.
    count, kv, notes = fit(30)
    assert count == 15
    assert kv.num_tokens >= 4 * 32768
    assert notes["gpu_experts"] == "15 of 24, auto, as many as fit"
    assert fit(30, max_total_tokens=32768)[0] == 16
    assert fit(30.2, context_length=4096)[0] == 17
    assert fit(30, mem_fraction_static=0.25)[0] == 11  # 24 of 96 GiB for weights and cache: 14 x 0.95 - 2


def test_with_all_experts_there_the_cache_takes_the_rest() -> None:
    count, kv, _ = fit(60)
    assert count == 24
    assert kv.num_tokens == 16 * 32768
    # 26 GiB of room: all experts and the context of one request, though not of four.
    assert fit(38.3)[0] == 24
    # A number of tokens is kept: 2 GiB of them and 23 experts.
    count, kv, _ = fit(38.3, max_total_tokens=4 * 32768)
    assert count == 23 and kv.num_tokens == 4 * 32768


def test_a_long_context_takes_half_of_the_room_unless_it_was_asked_for() -> None:
    few = dataclasses.replace(MODEL, max_position_embeddings=2**20)  # 16 GiB a request
    settings = EngineConfig(model_path="", to_engine="", from_engine="", gpu_prefill_threshold=0)
    gpu, trunk = Gpu(0, "GPU", 30 * GIB, 96 * GIB), GpuBytes(10 * GIB, GIB // 2)
    placed = fit_experts(settings, gpu, few, trunk, expert_bytes=EXPERT_BYTES, max_tokens=64)
    assert placed.on_gpu.sum() == 8
    asked = msgspec.structs.replace(settings, context_length=2**20)
    placed = fit_experts(asked, gpu, few, trunk, expert_bytes=EXPERT_BYTES, max_tokens=64)
    assert placed.on_gpu.sum() == 1


def test_a_few_experts_are_not_worth_a_shorter_context() -> None:
    many = dataclasses.replace(
        MODEL, experts=dataclasses.replace(MODEL.experts, layers=100), max_position_embeddings=2**18
    )
    settings = EngineConfig(model_path="", to_engine="", from_engine="", gpu_prefill_threshold=0, block_size=16)
    trunk = GpuBytes(10 * GIB, GIB // 2)
    counts = []
    for free in (17.3, 50):  # 5 and 36 GiB of room: 2 of 800 experts in half of it, 20 beside four requests of 4 GiB
        gpu = Gpu(0, "GPU", int(free * GIB), 96 * GIB)
        placed = fit_experts(settings, gpu, many, trunk, expert_bytes=800 * GIB, max_tokens=64)
        counts.append(int(placed.on_gpu.sum()))
    assert counts == [1, 20]


def test_a_number_of_experts_is_kept_as_far_as_it_fits() -> None:
    assert fit(30, gpu_experts=2)[0] == 6
    assert fit(30, gpu_experts=0)[0] == 0
    count, kv, notes = fit(30, gpu_experts=200)
    assert count == 17 and kv.num_tokens >= 1024
    assert notes["gpu_experts"] == "17 of 24, auto; 600 asked for, more do not fit or are not there"
    assert fit(12, gpu_experts=2, max_total_tokens=64)[0] == 0
    with pytest.raises(ConfigError, match="deferred-experts-per-token"):
        fit(30, max_deferred_experts=2)


def test_experts_that_move_take_slots_on_both_sides() -> None:
    settings = EngineConfig(model_path="", to_engine="", from_engine="", expert_updates=True)
    gpu, trunk = Gpu(0, "GPU", 40 * GIB, 96 * GIB), GpuBytes(10 * GIB, GIB // 2)
    model = dataclasses.replace(MODEL, experts=ExpertInfo(layers=48, experts=8, top_k=2, hidden=256, intermediate=128))
    placed = fit_experts(settings, gpu, model, trunk, expert_bytes=16 * EXPERT_BYTES, max_tokens=64)
    needed = with_experts(trunk, placed, model.experts, all_bytes=16 * EXPERT_BYTES, max_tokens=64)
    plan_gpu(settings, gpu, model, needed, placed)  # fits
    assert placed.on_gpu.sum() == placed.moves == 10 and placed.ram_slots == 8  # of 20 that fit
    in_ram = 16 * EXPERT_BYTES - int(placed.on_gpu.sum()) * GIB
    in_ram += int(placed.on_gpu.sum(axis=1).max()) * GIB  # on their way to the GPU
    in_ram += GIB // 2  # read ahead
    stay = with_ram(placed, 16 * EXPERT_BYTES, in_ram + 1 * GIB)
    notes = [plan_gpu(settings, gpu, model, needed, p)[1] for p in (placed, stay)]
    assert notes[0]["expert_updates"] == "up to 10 at a time follow the routing" and stay.moves == 0
    assert notes[1]["expert_updates"] == "none move: RAM has no room for another expert of each layer"
    assert with_ram(placed, 16 * EXPERT_BYTES, in_ram + (1 + 2 * 3 * 48) * GIB).ram_slots == 3
    with pytest.raises(ConfigError, match="the routed experts"):
        with_ram(placed, 16 * EXPERT_BYTES, in_ram)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_gpu("cpu") is None
    with caplog.at_level(logging.INFO, logger="proa.device"):
        assert choose_gpu("auto") is None
    assert [record.message.partition(":")[0] for record in caplog.records] == ["the trunk runs on the CPU"]
    with pytest.raises(ConfigError, match=r"\[device\] expected a CUDA GPU .*Fix: use --device cpu"):
        choose_gpu("cuda")


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", False),
        ("No CUDA GPUs are available", False),
        ("The NVIDIA driver on your system is too old (found version 11040).\nPlease update your GPU driver", True),
        ("CUDA unknown error - this may be due to an incorrectly set up environment", True),
        ("CUDA error: out of memory", True),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", True),
    ],
)
def test_a_driver_that_does_not_start(monkeypatch: pytest.MonkeyPatch, text: str, refused: bool) -> None:
    """A machine without a GPU computes on its CPU; one whose driver is at fault says so."""

    def fail() -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", fail)
    assert choose_gpu("cpu") is None
    if not refused:
        assert choose_gpu("auto") is None
    for device in ("auto", "cuda") if refused else ("cuda",):
        with pytest.raises(ConfigError, match=re.escape(text.partition("\n")[0])) as caught:
            choose_gpu(device)  # type: ignore[arg-type]
        is_taken = "out of memory" in text or "busy" in text
        assert ("knows CUDA 13.0" in str(caught.value)) == (refused and not is_taken)
        assert ("end what else uses it" in str(caught.value)) == is_taken
        assert str(caught.value).endswith("use --device cpu")


def test_pinning_is_tried_before_anything_is_loaded(tmp_path: Path) -> None:
    driver = build_fake_driver(tmp_path)
    for _ in range(2):  # what was pinned is let go
        check_pinning(driver, 8 * GIB)

    class Refusing:
        def pin(self, ranges: list[tuple[int, int]]) -> None:
            raise CudaError("[cuMemHostRegister] expected success, got CUDA_ERROR_OUT_OF_MEMORY (2)")

    with pytest.raises(MemoryShortageError, match=r"\[pinned memory\] expected 8\.00 GiB .* got .*OUT_OF_MEMORY"):
        check_pinning(Refusing(), 8 * GIB)  # type: ignore[arg-type]
