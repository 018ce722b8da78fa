"""An engine process without a model: the real messages over the real sockets, deterministic tokens, faults on demand.

Reads its JSON configuration on stdin like `python -m proa.engine`. The tokens of an answer are the prompt's own ids in
turn, so that a test can say what will be generated; choice i starts at the i-th. Events that tests ask about are
appended to the file `journal`, one JSON object a line. A request with seed FAILING_SEED fails at its third token,
one with seed SLOW_SEED gets its first token late.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from proa.ipc.messages import (
    Abort,
    EngineStats,
    ExpertsRecorded,
    Fatal,
    FlushCache,
    Flushed,
    Generate,
    Loading,
    PrefillProgress,
    Ready,
    RecordExperts,
    Shutdown,
    StepOutput,
    TokenLogprob,
    TokenOutput,
)
from proa.ipc.transport import EngineAddresses, EngineEndpoint

FAILING_SEED = 13
SLOW_SEED = 14
SLOW_SECONDS = 1.0
# Seed ANSWER_SEED + i is answered with the i-th list of token ids in the file `answers` of the configuration. A list of
# lists is given out one list a step, and ends for its length when it is out of lists. Where `answers` is a directory,
# seed ANSWER_SEED + ANSWERS_PER_FILE * k + i means the i-th list in its file k.
ANSWER_SEED = 1000
ANSWERS_PER_FILE = 100_000


class FakeEngine:
    def __init__(self, config: dict) -> None:
        self.config = config
        self.endpoint = EngineEndpoint(EngineAddresses(config["to_engine"], config["from_engine"]))
        self.step_seconds = config.get("step_seconds", 0.002)
        self.max_running = config.get("max_running_requests", 8)
        self.running: dict[str, dict] = {}
        self.waiting: list[Generate] = []
        self.totals = {"prompt_tokens": 0, "generation_tokens": 0, "prefix_hit_tokens": 0, "aborted": 0}
        self.done = False
        self.progress: list[PrefillProgress] = []
        self.answers: list | None = None
        self.answers_path: Path | None = None
        self.recorded: list[int] = []  # generated tokens at start and stop

    def journal(self, **event) -> None:
        if path := self.config.get("journal"):
            with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123
                file.write(json.dumps({"time": time.time(), "pid": os.getpid(), **event}) + "\n")

    def start(self) -> bool:
        self.journal(event="started")
        fault = self.config.get("start_fault")
        if fault == "user":
            self.endpoint.send(Fatal("[config] expected a good model, got a bad one.", user=True))
            return False
        if fault == "silence":
            time.sleep(60)
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        total = 1000
        for done in (0, total // 2, total):
            self.endpoint.send(Loading(done, total))
            time.sleep(self.config.get("load_seconds", 0.0) / 3)
        self.endpoint.send(
            Ready(
                max_model_len=self.config.get("max_model_len", 4096),
                kv_tokens_total=65536,
                max_running_requests=self.max_running,
                vocab_size=self.config.get("vocab_size", 640),
                load_seconds=0.01,
                weight_bytes=total,
                read_gb_s=100.0,
                info={"engine": "fake"},
            )
        )
        return True

    def take(self, message) -> None:
        match message:
            case Generate():
                ids = {"token_ids": message.token_ids} if self.config.get("journal_prompts") else {}
                sampling = repr(message.sampling)
                self.journal(
                    event="generate",
                    rid=message.rid,
                    sampling=sampling,
                    n=len(message.token_ids),
                    is_constrained=message.constraint is not None,
                    **ids,
                )
                self.waiting.append(message)
            case Abort():
                self.journal(event="abort", rid=message.rid, known=message.rid in self.running)
                self.totals["aborted"] += 1
                self.running.pop(message.rid, None)
                self.waiting = [request for request in self.waiting if request.rid != message.rid]
            case FlushCache():
                self.endpoint.send(Flushed(message.id, ok=not self.running))
            case RecordExperts():
                self.endpoint.send(ExpertsRecorded(message.id, self.record(message.action)))
            case Shutdown():
                self.done = True

    def record(self, action: str) -> list[list[int]] | None:
        """Every token of an answer goes to expert 1 of the only layer."""
        if action == "start":
            self.recorded = [self.totals["generation_tokens"]]
        if action == "stop":
            self.recorded = [*self.recorded[:1], self.totals["generation_tokens"]]
        if action != "dump" or not self.recorded:
            return None
        first, last = self.recorded[0], [*self.recorded, self.totals["generation_tokens"]][1]
        self.recorded = []
        return [[0, last - first]]

    def step(self) -> list[TokenOutput]:
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting.pop(0)
            self.running[request.rid] = {
                "request": request,
                "count": 0,
                "steps": 0,
                "told": 0,
                "started": time.monotonic(),
            }
            self.totals["prompt_tokens"] += len(request.token_ids)
        outputs = []
        for rid, state in list(self.running.items()):
            slow = state["request"].sampling.seed == SLOW_SEED
            waited = time.monotonic() - state["started"]
            if slow and waited < SLOW_SECONDS:
                if waited > (state["told"] + 1) * SLOW_SECONDS / 10:
                    state["told"] += 1
                    self.progress.append(PrefillProgress(rid, len(state["request"].token_ids) * state["told"] // 10))
                continue
            outputs.append(self.advance(rid, state))
        return outputs

    def answer(self, seed: int | None) -> list[int] | list[list[int]] | None:
        """The scripted answer that seed ANSWER_SEED + i asks for."""
        if seed is None or seed < ANSWER_SEED or "answers" not in self.config:
            return None
        path = Path(self.config["answers"])
        number, index = divmod(seed - ANSWER_SEED, ANSWERS_PER_FILE)
        if path.is_dir():
            path = path / str(number)
        if self.answers is None or self.answers_path != path:
            self.answers, self.answers_path = json.loads(path.read_text()), path
        return self.answers[index]

    def advance(self, rid: str, state: dict) -> TokenOutput:
        request, count = state["request"], state["count"]
        sampling = request.sampling
        choice = int(rid.rsplit(".", 1)[-1]) if "." in rid else 0
        answer = self.answer(sampling.seed) or request.token_ids
        if answer and isinstance(answer[0], list):
            return self.advance_by_chunk(rid, state, answer)
        token = answer[(count + choice) % len(answer)]
        state["count"] = count + 1
        self.totals["generation_tokens"] += 1
        finish, matched = None, None
        if token in sampling.stop_token_ids and count + 1 > sampling.min_tokens:
            finish, matched = "stop", token
        elif count + 1 >= sampling.max_tokens:
            finish = "length"
        error = ""
        if sampling.seed == FAILING_SEED and count == 2:
            finish, error = "error", "injected failure"
        logprobs = None
        if sampling.logprobs is not None:
            top = [((token + offset) % 600, -0.5 - offset) for offset in range(sampling.logprobs)]
            logprobs = [TokenLogprob(token, -0.5, top)]
        if finish is not None:
            del self.running[rid]
        cached = min(len(request.token_ids) - 1, 3)
        return TokenOutput(
            rid=rid, token_ids=[token], logprobs=logprobs, finish_reason=finish, matched_stop=matched, error=error,
            cached_tokens=cached if count == 0 else 0,
        )  # fmt: skip

    def advance_by_chunk(self, rid: str, state: dict, chunks: list[list[int]]) -> TokenOutput:
        sampling, chunk = state["request"].sampling, chunks[state["steps"]]
        token_ids, finish, matched = chunk, None, None
        ends = [place for place, token in enumerate(chunk) if token in sampling.stop_token_ids]
        if ends:
            token_ids, finish = chunk[: ends[0] + 1], "stop"
            matched = token_ids[-1]
        elif state["count"] + len(chunk) >= sampling.max_tokens:
            token_ids, finish = chunk[: sampling.max_tokens - state["count"]], "length"
        elif state["steps"] == len(chunks) - 1:
            finish = "length"
        state["count"] += len(token_ids)
        state["steps"] += 1
        self.totals["generation_tokens"] += len(token_ids)
        if finish is not None:
            del self.running[rid]
        return TokenOutput(rid=rid, token_ids=token_ids, finish_reason=finish, matched_stop=matched)

    def stats(self) -> EngineStats:
        made = self.totals["generation_tokens"]
        used = sum(len(state["request"].token_ids) + state["count"] for state in self.running.values())
        return EngineStats(
            num_running=len(self.running), num_queued=len(self.waiting), kv_tokens_used=used, kv_tokens_total=65536,
            expert_bytes_read=self.totals["generation_tokens"] * 1000, expert_ms=self.totals["generation_tokens"] * 0.1,
            step_ms=1.0, expert_slots=((8 * made, 2 * made), (8 * made, 6 * made)), streamed_bytes=made * 50_000_000,
            streamed_ms=made * 1.0, moved_experts=3, **self.totals,
        )  # fmt: skip

    def loop(self) -> None:
        heartbeat = time.monotonic()
        while not self.done:
            busy = bool(self.running or self.waiting)
            self.endpoint.poll(0.0 if busy else 0.05)
            for message in self.endpoint.receive():
                self.take(message)
            outputs = self.step()
            if outputs or self.progress or time.monotonic() - heartbeat > 0.2:
                heartbeat = time.monotonic()
                self.endpoint.send(StepOutput(outputs, self.stats(), self.progress))
                self.progress = []
            if self.running:
                time.sleep(self.step_seconds)


def main() -> None:
    engine = FakeEngine(json.loads(sys.stdin.buffer.read()))
    if engine.start():
        engine.loop()
    engine.endpoint.close()


if __name__ == "__main__":
    main()
