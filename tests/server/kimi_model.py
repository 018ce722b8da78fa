"""A Kimi checkpoint without weights, and a server whose engine gives scripted answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server_process import ServerProcess
from tests.models.kimi_checkpoint import END, write_tokenizer

from proa.chat.chunkings import pieces_of
from proa.chat.output.kimi_k2 import MARKERS
from proa.chat.tiktoken_tokenizer import TiktokenTokenizer

SB, SE, CB, AB, CE, TH, TE = MARKERS


def write_model(directory: Path) -> Path:
    """A tokenizer of bytes with Kimi's control tokens, and a configuration of its family."""
    directory.mkdir()
    write_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "kimi_k25"}))
    return directory


def answer_ids(tokenizer: TiktokenTokenizer, text: str, ordinary: Sequence[Sequence[int]] = ()) -> list[int]:
    """The token ids of a model's output, markers in it as their tokens."""
    return tokenizer.encode_pieces(pieces_of(text, MARKERS, ordinary))


@contextmanager
def scripted_server(
    directory: Path, texts: Sequence[str], *, max_model_len: int = 65536, **server: Any
) -> Iterator[ServerProcess]:
    """A server that answers a request of seed ANSWER_SEED + i with the i-th of `texts`."""
    model = write_model(directory / "model")
    tokenizer = TiktokenTokenizer.load(model)
    answers = [[*answer_ids(tokenizer, text), END] for text in texts]
    (directory / "answers").write_text(json.dumps(answers))
    engine = {
        "answers": str(directory / "answers"),
        "vocab_size": 512,
        "step_seconds": 0.0,
        "max_model_len": max_model_len,
        "journal_prompts": True,
    }
    process = ServerProcess(directory, model, engine=engine, server=server)
    try:
        yield process.wait_ready()
    finally:
        process.stop()
    assert process.exit_code() == 0, process.log()
    assert "Traceback" not in process.log(), process.log()


def last_prompt(process: ServerProcess) -> list[int]:
    """The token ids of the last prompt that the engine of a scripted server was given."""
    lines = process.journal_file.read_bytes().splitlines()
    return next(json.loads(line)["token_ids"] for line in reversed(lines) if b'"generate"' in line)
