"""Constrained sequences in the engine: what they may write, when they end, and that they hurt nobody else."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from fake_model import VOCAB_SIZE, greedy
from harness import EOS, fake_engine

from proa.chat.grammar.matcher import TokenTable, Vocabulary
from proa.core.constraint import MAX_GRAMMAR_CHARACTERS, Constraint
from proa.core.sampling_params import SamplingParams
from proa.engine.constraint import SequenceConstraint, mask_words
from proa.engine.logit_adjust import LogitAdjuster
from proa.engine.sampler import LogitsError, draw

PROMPT = [10, 20, 30, 40, 50]
# Ids 3 .. 258 are the bytes, as in byte-fallback vocabularies; 2 ends an answer, 300 .. 302 are markers.
FIRST_BYTE, OPEN, CLOSE, THINK_END = 3, 300, 301, 302
TABLE = TokenTable(
    [b"", b"", b"<eos>", *(bytes([value]) for value in range(256)), *(b"<%d>" % i for i in range(259, VOCAB_SIZE))],
    [0, 1, EOS, *range(259, VOCAB_SIZE)],
)


def load_vocabulary() -> Vocabulary:
    return Vocabulary(TABLE, EOS)


@pytest.fixture
def engine():
    return fake_engine(load_vocabulary=load_vocabulary)


def run(engine, *, max_seconds: float = 30.0):
    """Until all is done, also what waits for a grammar."""
    deadline = time.monotonic() + max_seconds
    while engine.engine.is_compiling:
        assert time.monotonic() < deadline
        engine.step()
        time.sleep(0.001)
    engine.run()


def text_of(tokens):
    return bytes(token - FIRST_BYTE for token in tokens).decode()


def test_an_answer_fits_its_grammar_and_ends_with_it(engine):
    engine.submit("a", PROMPT, Constraint(grammar='start: "yes " /[0-9]{3}/ ("!" | "?")'), max_tokens=50)
    engine.submit("free", PROMPT, max_tokens=30)
    run(engine)
    result = engine.results["a"]
    text = text_of(result.tokens)
    assert text.startswith("yes ") and text[4:7].isdigit() and text[7] in "!?" and len(text) == 8
    # Nothing more fits: no token is spent on ending, whatever ignore_eos says.
    assert (result.finish_reason, result.matched_stop) == ("stop", None)
    assert engine.results["free"].tokens == greedy(PROMPT, 30)


def test_the_same_tokens_alone_and_beside_others(engine):
    constraint = Constraint(grammar="start: /[a-z]{5,40}/ /[0-9]/")
    alone = fake_engine(load_vocabulary=load_vocabulary)
    alone.submit("x", PROMPT, constraint, max_tokens=60)
    run(alone)
    for number in range(6):
        engine.submit(str(number), PROMPT, constraint, max_tokens=60)
        engine.submit(f"free {number}", [number + 3, 7, 9], max_tokens=40)
    run(engine)
    assert {tuple(engine.results[str(number)].tokens) for number in range(6)} == {tuple(alone.results["x"].tokens)}


def test_a_preempted_answer_goes_on():
    engine = fake_engine(load_vocabulary=load_vocabulary, num_blocks=24, max_model_len=96)
    for number in range(4):
        engine.submit(str(number), PROMPT, Constraint(grammar="start: /[a-z]{60}/"), max_tokens=80)
    run(engine)
    assert {text_of(result.tokens).isalpha() and len(result.tokens) for result in engine.results.values()} == {60}


def test_length_cuts_it(engine):
    engine.submit("a", PROMPT, Constraint(grammar="start: /[a-z]{60}/"), max_tokens=7)
    run(engine)
    assert engine.results["a"].finish_reason == "length" and len(engine.results["a"].tokens) == 7


def test_a_token_that_ends_the_answer_is_allowed_where_it_may_end(engine):
    """Greedy tokens of the fake model never repeat: with two letters to choose from, it must come to EOS or length."""
    engine.submit("a", PROMPT, Constraint(grammar="start: /[ab]*/"), ignore_eos=False, max_tokens=400)
    run(engine)
    result = engine.results["a"]
    assert (result.finish_reason, result.matched_stop) == ("stop", EOS)
    assert set(text_of(result.tokens[:-1])) <= set("ab")


def test_a_fault_ends_its_sequence_only(engine):
    engine.submit("broken", PROMPT, Constraint(grammar="start: undefined"))
    # Its text has no end and its end has no text: found when the mask is computed.
    engine.submit("dead", PROMPT, Constraint(grammar='start: "a" %json {"$ref": "#"}'), max_tokens=20)
    engine.submit("good", PROMPT, Constraint(grammar='start: "ok"'))
    engine.submit("free", PROMPT, max_tokens=20)
    run(engine)
    assert engine.results["broken"].finish_reason == "error" and "undefined" in engine.results["broken"].error
    assert engine.results["dead"].finish_reason == "error"
    assert text_of(engine.results["good"].tokens) == "ok"
    assert engine.results["free"].tokens == greedy(PROMPT, 20)


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(grammar="x" * (MAX_GRAMMAR_CHARACTERS + 1)),
        Constraint(banned=(VOCAB_SIZE,)),
        Constraint(grammar='start: "a"', starts={5: (VOCAB_SIZE,)}),
        Constraint(grammar='start: "a"', starts={-1: ()}),
        Constraint(grammar='start: "a"', pauses=(VOCAB_SIZE,)),
    ],
)
def test_what_the_api_should_not_have_sent_is_refused(engine, constraint):
    engine.submit("a", PROMPT, constraint)
    engine.run()
    assert engine.results["a"].finish_reason == "error"


def test_without_a_vocabulary_grammars_are_refused():
    engine = fake_engine()
    engine.submit("a", PROMPT, Constraint(grammar='start: "a"'))
    engine.run()
    assert engine.results["a"].finish_reason == "error" and "grammar" in engine.results["a"].error


def test_sequences_run_while_a_grammar_is_compiled_and_it_can_be_aborted():
    release = threading.Event()

    def load() -> Vocabulary:
        assert release.wait(30)
        return load_vocabulary()

    engine = fake_engine(load_vocabulary=load)
    for rid in ("waits", "leaves", "all"):
        engine.submit(rid, PROMPT, Constraint(grammar='start: "ok"'))
    engine.submit("free", PROMPT, max_tokens=20)
    while engine.engine.has_work:
        engine.step()
    assert engine.results["free"].tokens == greedy(PROMPT, 20)
    assert engine.engine.is_compiling and not engine.engine.flush()
    assert engine.engine.stats().num_queued == 3
    engine.engine.abort("leaves")
    engine.step()
    assert engine.results["leaves"].finish_reason == "abort" and engine.results["waits"].finish_reason is None
    release.set()
    run(engine)
    assert text_of(engine.results["waits"].tokens) == "ok"
    engine.submit("again", PROMPT, Constraint(grammar='start: "ok" "!"'))
    engine.engine.abort("")
    engine.run()
    assert engine.results["again"].finish_reason == "abort"
    assert engine.engine.flush()


def follow(constraint, tokens, *, end_ids=(EOS,)):
    """The allowed tokens before each of `tokens` and after the last; None where all are."""
    matcher = load_vocabulary().compile(constraint.grammar) if constraint.grammar else None
    sequence = SequenceConstraint(constraint, matcher, end_ids=end_ids, vocab_size=VOCAB_SIZE)
    seen = []
    for token in [*tokens, None]:
        mask = np.zeros(mask_words(VOCAB_SIZE), dtype=np.int32)
        if sequence.is_over:
            seen.append("over")
        elif sequence.fill(mask):
            assert not sequence.is_free
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
            seen.append(set(np.flatnonzero(bits).tolist()))
        else:
            assert sequence.is_free
            seen.append(None)
        if token is not None:
            sequence.take(token)
    return seen


def letter(character):
    return FIRST_BYTE + ord(character)


def test_a_grammar_waits_for_its_start_and_pauses():
    calls = Constraint(grammar=f"start: (<[{OPEN}]> /[ab]/ <[{CLOSE}]>)+", starts={OPEN: (OPEN,)}, pauses=(CLOSE,))
    ab = {letter("a"), letter("b")}
    tokens = [letter("x"), OPEN, letter("a"), CLOSE, letter("y"), OPEN, letter("b"), CLOSE]
    assert follow(calls, tokens) == [None, None, ab, {CLOSE}, None, None, ab, {CLOSE}, None]


def test_before_the_start_nothing_ends_the_answer_that_must_have_one():
    constraint = Constraint(
        grammar='start: "a" "b"?', starts={THINK_END: (), OPEN: (letter("a"),)}, banned=(CLOSE,), must_start=True
    )
    everything = set(range(VOCAB_SIZE))
    waiting = everything - {CLOSE, EOS}
    assert follow(constraint, [letter("x"), THINK_END, letter("a"), letter("b")]) == [
        waiting, waiting, {letter("a")}, {letter("b"), EOS}, "over",
    ]  # fmt: skip
    assert follow(constraint, [OPEN]) == [waiting, {letter("b"), EOS}]
    assert follow(constraint, [THINK_END, letter("a")], end_ids=())[-1] == {letter("b")}
    assert follow(Constraint(banned=(OPEN,)), [5, 6]) == [everything - {OPEN}] * 3


def test_the_sampler_takes_allowed_tokens_only():
    rng = np.random.default_rng(3)
    for vocab in (31, 32, 33, 512, 1000):
        logits = rng.standard_normal(vocab).astype(np.float32)
        before = logits.copy()
        allowed = rng.choice(vocab, 5, replace=False)
        bits = np.zeros(mask_words(vocab) * 32, dtype=np.uint8)
        bits[allowed] = 1
        bits[vocab:] = 1  # beyond the vocabulary: no token
        mask = np.packbits(bits, bitorder="little").view(np.int32)
        for temperature, seed in ((0.0, 0), *((1.0, seed) for seed in range(20))):
            params = SamplingParams(temperature=temperature, logprobs=1)
            adjuster = LogitAdjuster(params, prompt=[1], end_ids=(), vocab_size=vocab)
            drawn = draw(logits, params, adjuster, seed=seed, position=1, index=0, mask=mask)
            assert drawn.token in allowed
            if temperature == 0.0:
                assert drawn.token == max(allowed, key=lambda token: logits[token])
                # Log-probabilities are of the logits as the model gave them.
                assert drawn.logprob.top[0][0] == int(np.argmax(logits))
        assert (logits == before).all()
        with pytest.raises(LogitsError):
            draw(logits, params, adjuster, seed=0, position=1, index=0, mask=np.zeros_like(mask))
