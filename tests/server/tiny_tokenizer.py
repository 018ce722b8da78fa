"""A byte-level BPE tokenizer and a ChatML template, written as a model directory without weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.",
    "What is the capital of France? The capital of France is Paris, and user and assistant and system talk about it.",
    "0 1 2 3 4 5 6 7 8 9 10 hello world, Grüße aus Köln, 你好世界 🙂",
]


def build(extra_tokens: Sequence[str] = ()) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    names = ("<think>", "</think>", *extra_tokens)
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
    return tokenizer


def write_model(directory: Path, *, template: str | None = CHATML, extra_tokens: Sequence[str] = ()) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    build(extra_tokens).save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2], "temperature": 0.7, "top_p": 0.9, "top_k": 20, "do_sample": True})
    )
    (directory / "config.json").write_text(json.dumps({"model_type": "fake", "vocab_size": 640}))
    return directory
