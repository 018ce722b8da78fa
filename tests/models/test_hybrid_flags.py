"""What the flags of a launch line make an engine do whose experts are on CPU and GPU."""

from __future__ import annotations

import itertools

import pytest
from tests.kernels.fake_cuda import build_fake_driver
from tests.models.hybrid_models import load_hybrid
from tests.models.test_gpu_trunk import greedy
from tests.models.test_oracle import tokens
from tests.models.variants import VARIANTS

from proa.cli.flags import FLAGS
from proa.cli.sglang_flags import parse
from proa.core.sampling_params import SamplingParams
from proa.engine.build import LoadedModel, build_engine
from proa.engine.config import EngineConfig
from proa.engine.expert_placement import place_experts
from proa.engine.kv_plan import KVPlan
from proa.engine.runner import Runner
from proa.ipc.messages import Generate
from proa.models import inspect
from proa.moe.stream import WeightStream
from proa.weights.checkpoint import Checkpoint

LINE = """--model m --kt-weight-path m --kt-num-gpu-experts 2 --kt-gpu-prefill-token-threshold 20
--chunked-prefill-size 48 --prefill-max-requests {prompts} --kt-max-deferred-experts-per-token {late}
--max-running-requests 4 --enable-mixed-chunk"""


def config_of(line: str) -> EngineConfig:
    values = parse(line.split()).values
    fields = {flag.field: values[flag.name] for flag in FLAGS if flag.owner == "engine" and flag.name in values}
    return EngineConfig(**({"model_path": "m", "to_engine": "", "from_engine": "", "block_size": 16} | fields))


@pytest.mark.parametrize(("prompts", "late"), [(1, 0), (2, 1)])
def test_passes_and_steps_are_what_a_launch_line_says(prompts, late, make_case, device, tmp_path, monkeypatch):
    case = make_case(next(v for v in VARIANTS if v.name == "glm_norm_bias"), "trunk")
    config = config_of(LINE.format(prompts=prompts, late=late))
    info = inspect(Checkpoint.open(case.path)).experts
    plan = place_experts(config, info, 2 * info.layers, all_bytes=1 << 20, left_bytes=1 << 24)
    model = load_hybrid(monkeypatch, case.path, device, build_fake_driver(tmp_path), plan, expert_activations="trunk")
    kv = KVPlan(num_blocks=64, block_size=16, dtype="float32", max_model_len=128, notes={})
    loaded = LoadedModel(model, model.layout, kv, (), usage=model.expert_usage)
    ticks = itertools.count()
    engine = build_engine(config, loaded, clock=lambda: 1e-4 * next(ticks))

    streamed, forwards = [], []
    start, build = WeightStream.start, Runner._build
    monkeypatch.setattr(WeightStream, "start", lambda *args: (streamed.append(args[1]), start(*args)))
    monkeypatch.setattr(
        Runner, "_build", lambda self, chunks, *rest: (forwards.append(chunks), build(self, chunks, *rest))[1]
    )
    lengths = (60, 10, 30, 20, 5)
    done = {}
    for index, length in enumerate(lengths):
        params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
        engine.submit(Generate(rid=str(index), token_ids=tokens(length, index).tolist(), sampling=params))
        done[str(index)] = []
    while engine.has_work:
        for output in engine.step().outputs:
            assert not output.error, output.error
            done[output.rid] += output.token_ids
    assert all(len(answer) == 12 for answer in done.values())

    passes = [[chunk.count for chunk in chunks if chunk.count > 1] for chunks in forwards]
    assert max(sum(counts) for counts in passes) == 48, "--chunked-prefill-size"
    assert max(len(counts) for counts in passes) == prompts, "--prefill-max-requests"
    mixed = [len(chunks) > len(counts) > 0 for chunks, counts in zip(forwards, passes, strict=True)]
    assert any(mixed), "--enable-mixed-chunk"
    tokens_of = [sum(chunk.count for chunk in chunks) for chunks in forwards]
    assert {count >= 20 for count in tokens_of} == {True, False}
    assert len(streamed) == sum(count >= 20 for count in tokens_of), "--kt-gpu-prefill-token-threshold"
    away = (info.layers - 1) * (info.experts - 2)  # the last layer has one token of a prompt
    assert all(sum(len(group.experts) for group in groups) == away for groups in streamed)
    assert (model.expert_usage.num_deferred > 0) == (late > 0), "--kt-max-deferred-experts-per-token"
    if not late:
        assert [int(token) for token in done["1"]] == greedy(case.model, tokens(10, 1), 12)
