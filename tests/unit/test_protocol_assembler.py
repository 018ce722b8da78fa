"""Token outputs to deltas: the same text, entries and end however the outputs are cut."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
import tiny_tokenizer

from proa.chat.tokenizer import Tokenizer
from proa.core.sampling_params import SamplingParams
from proa.ipc.messages import TokenLogprob, TokenOutput
from proa.server.assembler import ChoiceAssembler, Delta

BACKEND = tiny_tokenizer.build()
TOKENIZER = Tokenizer.from_definition(msgspec.json.decode(BACKEND.to_str()))
TEXT = "The quick brown fox. 你好世界 🙂 dog"
IDS = BACKEND.encode(TEXT).ids
END = 2


def outputs(ids: list[int], size: int, *, logprobs: bool = True, **last) -> list[TokenOutput]:
    parts = [ids[start : start + size] for start in range(0, len(ids), size)]
    return [
        TokenOutput(
            rid="r",
            token_ids=part,
            logprobs=[TokenLogprob(token, -1.0, []) for token in part] if logprobs else None,
            **(last if index == len(parts) - 1 else {}),
        )
        for index, part in enumerate(parts)
    ]


def run(parts: list[TokenOutput], **options) -> tuple[str, list[int], Delta, ChoiceAssembler]:
    sampling = SamplingParams(**{name: options.pop(name) for name in ("stop", "min_tokens") if name in options})
    assembler = ChoiceAssembler(0, TOKENIZER, sampling, eos_token_ids=frozenset({END}), **options)
    text, entries, delta = "", [], Delta(0)
    for part in parts:
        delta = assembler.push(part)
        text += delta.text
        entries += [entry.logprob.token_id for entry in delta.entries]
        if assembler.is_finished:
            break
    return text, entries, delta, assembler


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
class TestAnyCut:
    def test_length(self, size: int):
        text, entries, last, assembler = run(outputs(IDS, size, finish_reason="length"))
        assert (text, entries, last.finish_reason, last.stop_reason) == (TEXT, IDS, "length", None)
        assert assembler.num_tokens == len(IDS)

    def test_end_of_text(self, size: int):
        parts = outputs([*IDS, END], size, finish_reason="stop", matched_stop=END)
        text, entries, last, assembler = run(parts)
        assert (text, entries, last.finish_reason, last.stop_reason) == (TEXT, IDS, "stop", None)
        assert assembler.num_tokens == len(IDS) + 1

    def test_stop_token(self, size: int):
        parts = outputs(IDS, size, finish_reason="stop", matched_stop=IDS[-1])
        text, entries, last, _ = run(parts)
        assert (text, entries, last.stop_reason) == (BACKEND.decode(IDS[:-1]), IDS[:-1], IDS[-1])
        assert run(parts, include_stop=True)[0] == TEXT

    def test_stop_string(self, size: int):
        parts = outputs(IDS, size, finish_reason="length")
        text, entries, last, assembler = run(parts, stop=("n fox. 你",))
        assert (text, last.finish_reason, last.stop_reason) == ("The quick brow", "stop", "n fox. 你")
        assert BACKEND.decode(entries).startswith(text) and "fox" not in BACKEND.decode(entries)
        assert "你" in BACKEND.decode(IDS[: assembler.num_tokens])
        assert "你" not in BACKEND.decode(IDS[: assembler.num_tokens - 1])
        assert run(parts, stop=("n fox. 你",), include_stop=True)[0] == "The quick brown fox. 你"

    def test_held_back_text_comes_in_the_end(self, size: int):
        text, entries, last, _ = run(outputs(IDS, size, finish_reason="length"), stop=("dogma",))
        assert (text, entries, last.finish_reason) == (TEXT, IDS, "length")

    def test_min_tokens(self, size: int):
        parts = outputs(IDS, size, finish_reason="length")
        assert run(parts, stop=("quick",), min_tokens=len(IDS))[0] == TEXT
        assert run(parts, stop=("quick",), min_tokens=2)[0] == "The "


def test_incomplete_character_at_the_end():
    ids = BACKEND.encode("🙂").ids[:-1]
    assert run(outputs(ids, 1, finish_reason="length"))[0] == "�"


def test_offsets_and_order_of_entries():
    assembler = ChoiceAssembler(0, TOKENIZER, SamplingParams(stop=("zzz",)))
    offsets = [
        entry.text_offset for part in outputs(IDS, 1, finish_reason="length") for entry in assembler.push(part).entries
    ]
    assert offsets == [len(BACKEND.decode(IDS[:index]).rstrip("�")) for index in range(len(IDS))]


def test_special_tokens_can_be_shown():
    ids = [1, *IDS]
    assert run(outputs(ids, 1, finish_reason="length"))[0] == TEXT
    assert run(outputs(ids, 1, finish_reason="length"), skip_special_tokens=False)[0] == "<|im_start|>" + TEXT
