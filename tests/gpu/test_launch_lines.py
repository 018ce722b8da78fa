"""The seeds' launch lines on a GPU, without the HTTP side: what their flags become, loads and answers."""

from __future__ import annotations

import pytest
import torch
from tests.cli.test_launch_server import CODERAI_LINE, KIMI_K27_LINE, KIMI_THINKING_LINE
from tests.gpu.test_trunk import on_gpu_only
from tests.models.kimi_checkpoint import SIZES, write_kimi

from proa.cli.flags import by_owner
from proa.cli.sglang_flags import parse
from proa.core.sampling_params import SamplingParams
from proa.engine.build import build_engine
from proa.engine.config import EngineConfig
from proa.engine.load import load_checkpoint
from proa.ipc.messages import Generate

pytestmark = on_gpu_only
MOE_LAYERS, EXPERTS = SIZES["num_hidden_layers"] - 1, SIZES["n_routed_experts"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_kimi(tmp_path_factory.mktemp("kimi") / "model")


def run(config):
    """The start-up table, and how many tokens of short and of long prompts came."""
    loaded = load_checkpoint(config, lambda done, total: None)
    engine = build_engine(config, loaded)
    made = {}
    for index, length in enumerate((3, 700, 40)):
        prompt = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(index)).tolist()
        params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
        engine.submit(Generate(rid=str(index), token_ids=prompt, sampling=params))
        made[str(index)] = 0
    while engine.has_work:
        for output in engine.step().outputs:
            assert not output.error, output.error
            made[output.rid] += len(output.token_ids)
    engine.check_integrity()
    return loaded.info, made


@pytest.mark.parametrize(
    ("line", "experts"),
    [(KIMI_K27_LINE, 8 * MOE_LAYERS), (KIMI_THINKING_LINE, EXPERTS * MOE_LAYERS), (CODERAI_LINE, EXPERTS * MOE_LAYERS)],
    ids=["K2.7 Code", "K2 Thinking", "CoderAI"],
)
def test_a_launch_line_loads_and_answers(line, experts, model):
    values = by_owner(parse(line.split()).values, "engine")
    config = EngineConfig(to_engine="", from_engine="", **{**values, "model_path": str(model), "num_threads": 2})
    info, made = run(config)
    assert made == {"0": 24, "1": 24, "2": 24}
    assert info["gpu_experts"].startswith(f"{experts} of {EXPERTS * MOE_LAYERS}, auto")
    assert ("expert_updates" in info) == ("--kt-enable-dynamic-expert-update" in line)
    assert ("deferred_experts" in info) == ("--kt-max-deferred-experts-per-token 1" in line)
    assert "GiB free" in info["gpu_memory"]


def test_plain_torch_attends_as_the_kernels_do(model):
    """Where steps cannot be captured they are launched."""
    values = {"model_path": str(model), "num_threads": 2, "max_total_tokens": 8192, "gpu_experts": 4}
    runs = {}
    for backend in ("triton", "torch"):
        config = EngineConfig(to_engine="", from_engine="", attention_backend=backend, **values)
        info, runs[backend] = run(config)
        assert backend in info["attention_backend"].lower()
        assert info["cuda_graphs"].startswith("decode steps" if backend == "triton" else "none")
    assert runs["torch"] == runs["triton"]
