"""Engines of grammars on JSON schemas: what they accept, whether random answers fit, how long compiling and masks take.

    python benchmarks/grammar/masks.py --tokenizer DIR --schemas 'DIR/*/valid.jsonl'      # the schemas alone
    python benchmarks/grammar/masks.py --tokenizer DIR --schemas ... --calls              # as Kimi's tool calls
    python benchmarks/grammar/masks.py --tokenizer DIR --schemas ... --engine xgrammar    # needs xgrammar and triton

DIR has tiktoken.model and tokenizer_config.json. Tokens are drawn evenly from the mask; after 60 those that close JSON
are preferred. Times are of this thread's CPU: other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import glob
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from proa.chat.dialect import AnswerReading
from proa.chat.grammar.build import AnswerRules, build_constraint
from proa.chat.grammar.matcher import GrammarError, Vocabulary, token_table
from proa.chat.output.parser import output_family
from proa.chat.output.tools import DeclaredTools
from proa.chat.tiktoken_tokenizer import TiktokenTokenizer

RESULTS = Path(__file__).parents[1] / "results/grammar.jsonl"
CLOSING = (b'"', b"}", b"]", b'"}', b'"]', b"}}", b'"}}', b"]}")
MAX_TOKENS = 400
END = 163586


class Ours:
    """llguidance as proa uses it. calls: the schema as the arguments of a required call of Kimi's."""

    def __init__(self, tokenizer: TiktokenTokenizer, *, calls: bool):
        self.vocabulary = Vocabulary(token_table(tokenizer, tokenizer.vocab_size), END)
        self.mask = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.int32)
        family = output_family("kimi_k2")
        self.markers = {tokenizer.token_id(name): name for name in family.markers}
        self.calls = calls
        self.reading = AnswerReading(
            family=family, marker_ids=self.markers, tools=DeclaredTools([]), in_reasoning=False, history_calls=0,
            no_calls=False,
        )  # fmt: skip

    def compile(self, schema: Any) -> None:
        if self.calls:
            tool = {"type": "function", "function": {"name": "kvv_walle_case", "parameters": schema}}
            rules = AnswerRules(tools=[tool], mode="required", parallel_calls=False)
            built = build_constraint(rules, self.reading)
        else:
            built = build_constraint(AnswerRules(json_schema=json.dumps(schema)), None)
        assert built is not None
        self.matcher = self.vocabulary.compile(built.constraint.grammar)

    def fill(self) -> bool:
        """Whether the answer may end."""
        self.matcher.fill(self.mask)
        return self.matcher.may_end

    def take(self, token: int) -> bool:
        """Whether the answer must end."""
        self.matcher.take(token)
        return self.matcher.must_end

    def json_of(self, raw: bytes) -> bytes:
        return raw.split(b"argument_begin|>")[1].split(b"<|tool_call_end")[0] if self.calls else raw


class XGrammar:
    def __init__(self, tokenizer: TiktokenTokenizer):
        import xgrammar

        size, special = tokenizer.vocab_size, tokenizer.special_ids
        tokens = [b"" if token in special else tokenizer.token_bytes(token) for token in range(size)]
        info = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, vocab_size=size, stop_token_ids=[END])
        self.xgrammar = xgrammar
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.tensor = xgrammar.allocate_token_bitmask(1, size)
        self.mask = self.tensor.numpy()[0]

    def compile(self, schema: Any) -> None:
        compiled = self.compiler.compile_json_schema(json.dumps(schema), any_whitespace=True, strict_mode=False)
        self.matcher = self.xgrammar.GrammarMatcher(compiled)

    def fill(self) -> bool:
        self.matcher.fill_next_token_bitmask(self.tensor)
        may_end = bool(self.mask.view(np.uint32)[END // 32] >> np.uint32(END % 32) & 1)
        self.mask.view(np.uint32)[END // 32] &= np.uint32(0xFFFFFFFF ^ (1 << END % 32))
        return may_end

    def take(self, token: int) -> bool:
        assert self.matcher.accept_token(token)
        return bool(self.matcher.is_terminated())

    def json_of(self, raw: bytes) -> bytes:
        return raw


def timed(work: Callable[[], Any], times: list[float]) -> Any:
    started = time.thread_time()
    result = work()
    times.append(time.thread_time() - started)
    return result


def answer(engine: Any, tokenizer: TiktokenTokenizer, closing: Any, schema: Any, rng: Any, times: Any) -> str:
    first: list[float] = []
    try:
        timed(lambda: engine.compile(schema), first)
    except (GrammarError, RuntimeError, ValueError) as error:
        return f"refused: {str(error)[:100]}"
    tokens: list[int] = []
    may_end = timed(engine.fill, first)
    times["compile"].append(first[0])
    times["first"].append(sum(first))
    while len(tokens) < MAX_TOKENS:
        bits = np.unpackbits(engine.mask.view(np.uint8), count=tokenizer.vocab_size, bitorder="little")
        allowed = np.flatnonzero(bits)
        if not allowed.size or (may_end and (len(tokens) > 60 or rng.random() < 0.05)):
            break
        usual = allowed
        if len(tokens) > 60 and rng.random() < 0.7 and (near := closing[bits[closing] > 0]).size:
            usual = near
        tokens.append(int(rng.choice(usual)))
        if timed(lambda: engine.take(tokens[-1]), times["take"]):
            break
        may_end = timed(engine.fill, times["mask"])
    else:
        return "cut"
    raw = engine.json_of(b"".join(map(tokenizer.token_bytes, tokens)))
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(raw))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"wrong: {str(error).splitlines()[0][:100]}"
    return "fits"


def percentiles(values: list[float], scale: float) -> dict[str, float]:
    found = {f"p{p}": round(float(np.percentile(values, p)) * scale, 2) for p in (50, 90, 99, 100)}
    return {**found, "mean": round(float(np.mean(values)) * scale, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--schemas", required=True)
    parser.add_argument("--engine", choices=("llguidance", "xgrammar"), default="llguidance")
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--record", action="store_true", help=f"append the result to {RESULTS.name}")
    options = parser.parse_args()
    tokenizer = TiktokenTokenizer.load(options.tokenizer)
    files = sorted(glob.glob(options.schemas))  # noqa: PTH207 - patterns with a directory
    schemas = [json.loads(line) for file in files for line in Path(file).read_text().splitlines()]
    load: list[float] = []
    make = (
        (lambda: XGrammar(tokenizer))
        if options.engine == "xgrammar"
        else (lambda: Ours(tokenizer, calls=options.calls))
    )
    engine = timed(make, load)
    closing = np.array([t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes(t) in CLOSING])
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {"compile": [], "first": [], "mask": [], "take": []}
    outcomes = [answer(engine, tokenizer, closing, schema, rng, times) for schema in schemas]
    kinds = ("fits", "cut", "wrong", "refused")
    result = {
        "engine": options.engine, "calls": options.calls, "machine": platform.processor() or platform.machine(),
        "schemas": len(schemas), **{kind: sum(o.startswith(kind) for o in outcomes) for kind in kinds},
        "vocabulary_s": round(load[0], 2), "compile_ms": percentiles(times["compile"], 1e3),
        "compile_and_first_mask_ms": percentiles(times["first"], 1e3), "mask_us": percentiles(times["mask"], 1e6),
        "take_us": percentiles(times["take"], 1e6), "tokens": len(times["take"]),
    }  # fmt: skip
    for number, outcome in enumerate(outcomes):
        if outcome.startswith(("wrong", "refused")):
            print(number, outcome, json.dumps(schemas[number])[:200])
    print(json.dumps(result))
    if options.record:
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
