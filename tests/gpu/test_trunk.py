"""A whole model whose trunk is on the GPU against the same on the CPU and against transformers in float64.

Without a GPU one test runs the kernels in Triton's interpreter.
"""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from tests.gpu.rounded_model import Comparison, Recording, load_plain
from tests.models.conftest import MAX_TOKENS, make_case, one_torch_thread, runtime  # noqa: F401, fixtures
from tests.models.paging import Pager, all_logits
from tests.models.storages import STORAGES
from tests.models.test_oracle import NOISE_FACTOR, reference_logits, rounding_noise, tokens
from tests.models.variants import LAYERS, MLA, VARIANTS, VOCAB, Variant

from proa.device.gpu import FEW_TOKENS, GpuDevice
from proa.device.select import trunk_linears
from proa.models import load_model
from proa.weights.checkpoint import Checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy in the interpreter

GPU = torch.cuda.is_available()
PROMPT, ANSWER = 24, 16
on_gpu_only = pytest.mark.skipif(not GPU, reason="the interpreter is slow and multiplies float32 anyway")


def kind_of(variant):
    """How closely the two devices agree on it.

    Float32 weights are multiplied in float32, bf16 ones of few tokens with 16 bits of the activations. Others are
    rounded to 8 bits in the trunk, or meet rounded activations in the experts: noise flips these roundings.
    """
    storage = STORAGES[variant.storage]
    if storage.int8_activations or storage.int16_activations or not storage.experts_only:
        return "rounded"
    return "float32" if storage.trunk == torch.float32 else "bfloat16"


FLOAT32, BFLOAT16, ROUNDED = (
    [v for v in VARIANTS if kind_of(v) == kind] for kind in ("float32", "bfloat16", "rounded")
)
MIXED = [v for v in FLOAT32 if v.name in ("deepseek_groups_yarn", "mixtral_tied")][: None if GPU else 1]


@pytest.fixture(scope="module")
def trunk(device, runtime):  # noqa: F811
    from proa.kernels import trunk

    return GpuDevice(runtime, device, trunk, linears=trunk_linears())


@pytest.fixture
def load_pair(make_case, runtime, trunk):  # noqa: F811
    """A case, its model on the CPU and on the GPU."""

    def load(variant):
        case = make_case(variant, "trunk")
        options = {"max_tokens": MAX_TOKENS, "max_positions": 256, "expert_activations": "trunk"}
        checkpoint = Checkpoint.open(case.path)
        on_cpu = load_model(checkpoint, runtime, **options)
        on_gpu = load_model(checkpoint, runtime, device=trunk, attention="triton", **options)
        return case, on_cpu, on_gpu

    return load


def greedy(model, ids, count, device, dtype="float32"):
    """The tokens that `model` continues `ids` with; prompts in chunks of few tokens."""
    pages = Pager(model, num_blocks=8, dtype=dtype, device=device)
    sequence = pages.sequence(len(ids) + count)
    for chunk in ids[:-1].split(FEW_TOKENS):
        pages.forward([(sequence, chunk)], last_only=True)
    ids, found = ids[-1:], []
    for _ in range(count):
        ids = pages.forward([(sequence, ids)])[-1:].argmax(-1).int()
        found.append(int(ids))
    return found


@on_gpu_only
@pytest.mark.parametrize("variant", FLOAT32, ids=str)
def test_logits_with_float32_weights(variant, load_pair, device):
    """Prompts of many and of few tokens, within the bound of the native kernels; their greedy tokens."""
    case, on_cpu, on_gpu = load_pair(variant)
    ids = tokens()[:PROMPT]
    exact = reference_logits(copy.deepcopy(case.reference).double(), ids)
    bound = NOISE_FACTOR * rounding_noise(case, ids, exact)
    for size in (PROMPT, FEW_TOKENS):
        pages = Pager(on_gpu, num_blocks=8, device=device)
        sequence = pages.sequence(PROMPT)
        for chunk in ids.split(size):
            pages.forward([(sequence, chunk)])
        assert (all_logits(sequence).double() - exact).abs().max().item() <= bound
    assert greedy(on_gpu, ids, ANSWER, device) == greedy(on_cpu, ids, ANSWER, "cpu")


@on_gpu_only
@pytest.mark.parametrize("variant", BFLOAT16, ids=str)
def test_greedy_tokens_with_bfloat16_weights(variant, load_pair, device):
    _, on_cpu, on_gpu = load_pair(variant)
    ids = tokens()[:PROMPT]
    assert greedy(on_gpu, ids, ANSWER, device) == greedy(on_cpu, ids, ANSWER, "cpu")


@on_gpu_only
@pytest.mark.parametrize("variant", ROUNDED, ids=str)
def test_every_row_where_both_round(variant, make_case, runtime, trunk, device, monkeypatch):  # noqa: F811
    """Chunks on either side of what is few tokens, and single tokens, beside plain torch that rounds alike."""
    case, recording = make_case(variant, "trunk"), Recording()
    options = {"max_tokens": MAX_TOKENS, "max_positions": 256, "expert_activations": "trunk"}
    with monkeypatch.context() as patch:
        recording.watch(patch)
        model = load_model(Checkpoint.open(case.path), runtime, device=trunk, attention="triton", **options)
    plain = [load_plain(case, runtime, device, rounds=rounds, **options) for rounds in (True, False)]
    pages = [Pager(m, num_blocks=16, device=device) for m in (model, *(reference.model for reference in plain))]
    comparison = Comparison(case, tokens(), recording, pages, *plain)
    one = [torch.tensor([token], dtype=torch.int32) for token in (3, 14)]
    for chunks in ([tokens(FEW_TOKENS, 5)], [tokens(40, 6)], one, one):
        comparison.check(chunks)


@pytest.mark.parametrize("variant", MIXED, ids=str)
def test_single_tokens_beside_chunks(variant, load_pair, device):
    """Three answers and two prompts in one forward of many tokens: each as it is alone."""
    case, _, on_gpu = load_pair(variant)
    prompts = [tokens(count, seed) for seed, count in enumerate((5, 9, 1, 20, 17))]
    pages = Pager(on_gpu, num_blocks=16, device=device)
    sequences = [pages.sequence(32) for _ in prompts]
    for sequence, ids in zip(sequences[:3], prompts[:3], strict=True):
        pages.forward([(sequence, ids)])
    more = [torch.tensor([token], dtype=torch.int32) for token in (3, 14, 15)]
    pages.forward(list(zip(sequences, more + prompts[3:], strict=True)))
    whole = [torch.cat(parts) for parts in zip(prompts[:3], more, strict=True)] + prompts[3:]
    for sequence, ids in zip(sequences, whole, strict=True):
        exact = reference_logits(copy.deepcopy(case.reference).double(), ids)
        bound = NOISE_FACTOR * rounding_noise(case, ids, exact)
        assert (all_logits(sequence).double() - exact).abs().max().item() <= bound


@on_gpu_only
@pytest.mark.parametrize("name", ["deepseek_groups_yarn", "qwen3", "glm_norm_bias"])
def test_engine_on_the_gpu(name, make_case):  # noqa: F811
    """Load, plan, schedule, draw: the answers of the engine on the CPU, greedy and sampled."""
    path = make_case(next(v for v in VARIANTS if v.name == name)).path
    on_gpu, info = answers(path, "cuda")
    assert info["device"].startswith("NVIDIA") and "GiB free" in info["gpu_memory"]
    on_cpu, _ = answers(path, "cpu")
    assert on_gpu == on_cpu


def answers(path, device):
    from proa.core.sampling_params import SamplingParams
    from proa.engine.build import build_engine
    from proa.engine.config import EngineConfig
    from proa.engine.load import load_checkpoint
    from proa.ipc.messages import Generate

    config = EngineConfig(
        model_path=str(path),
        to_engine="",
        from_engine="",
        device=device,
        kv_cache_dtype="float32",
        max_total_tokens=4096,
        chunked_prefill_size=FEW_TOKENS,
        max_running_requests=4,
        num_threads=1,
    )
    loaded = load_checkpoint(config, lambda done, total: None)
    engine = build_engine(config, loaded)
    found = {}
    for index in range(6):
        how = {"temperature": 0.8, "top_p": 0.9, "seed": index} if index % 2 else {"temperature": 0.0}
        how |= {"logprobs": 1} if index == 4 else {}
        params = SamplingParams(max_tokens=12, ignore_eos=True, **how)
        prompt = torch.randint(0, VOCAB, (7 + 5 * index,), generator=torch.Generator().manual_seed(index)).tolist()
        engine.submit(Generate(rid=str(index), token_ids=prompt, sampling=params))
        found[str(index)] = []
    while engine.has_work:
        for output in engine.step().outputs:
            assert not output.error, output.error
            found[output.rid] += output.token_ids
    engine.check_integrity()
    return found, loaded.info


DENSE = Variant("deepseek_dense", "deepseek_v3", "bf16", MLA | {"first_k_dense_replace": LAYERS})


@on_gpu_only
def test_captured_decode_steps_have_the_same_bits(make_case, trunk, runtime, device):  # noqa: F811
    """Five sequences of different lengths, alone and in batches of changing size, replayed and launched one by one."""
    from proa.models import DecodeGraphs

    path = make_case(DENSE).path
    options = {"max_tokens": MAX_TOKENS, "max_positions": 256, "device": trunk, "attention": "triton"}
    model = load_model(Checkpoint.open(path), runtime, **options)
    assert model.is_capturable
    pages = [Pager(model, num_blocks=32, dtype="bfloat16", device=device) for _ in range(2)]
    with torch.inference_mode():
        graphs = DecodeGraphs(model, pages[1].kv, max_batch=5, max_blocks=16)
    pages[1].model = Replayed(model, graphs)
    sequences = [[p.sequence(64) for _ in range(5)] for p in pages]
    with torch.inference_mode():
        for size in (5, 1, 3, 5, 2):
            lengths = [1 + 5 * i for i in range(5)] if sequences[0][0].length == 0 else [1] * size
            chunks = [tokens(n, seed) for seed, n in enumerate(lengths)]
            found = [
                p.forward(list(zip(s[: len(chunks)], chunks, strict=True)))
                for p, s in zip(pages, sequences, strict=True)
            ]
            assert torch.equal(*found)
    assert pages[1].model.replayed == 4


class Replayed:
    """A model that replays what was captured."""

    def __init__(self, model, graphs):
        self.layout = model.layout
        self._model, self._graphs, self.replayed = model, graphs, 0

    def forward(self, batch, kv, still_wanted=None):
        if not self._graphs.takes(batch):
            return self._model.forward(batch, kv, still_wanted)
        self.replayed += 1
        return self._graphs.forward(batch)
