"""One sequence on its way through the engine."""

from __future__ import annotations

from collections.abc import Iterable

from proa.chat.grammar.matcher import Matcher
from proa.core.sampling_params import SamplingParams
from proa.engine.constraint import SequenceConstraint
from proa.engine.logit_adjust import LogitAdjuster
from proa.ipc.messages import Generate
from proa.kvcache.manager import BlockTable

__all__ = ["Request"]


class Request:
    """State that survives preemption is here; `table` and `num_computed` start over with every admission.

    tokens:  [ prompt ........ | generated ........ ]
             [ computed: in the KV cache | to do    ]
    """

    __slots__ = (
        "adjuster",
        "arrival",
        "cached_tokens",
        "constraint",
        "end_ids",
        "num_computed",
        "params",
        "prompt_len",
        "rid",
        "seed",
        "table",
        "tokens",
    )

    def __init__(
        self,
        message: Generate,
        *,
        arrival: int,
        seed: int,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        matcher: Matcher | None = None,
    ) -> None:
        """`matcher`: at the beginning of the grammar of the message's constraint."""
        params: SamplingParams = message.sampling
        self.rid = message.rid
        self.params = params
        self.tokens = list(message.token_ids)
        self.prompt_len = len(self.tokens)
        self.arrival = arrival
        self.seed = params.seed if params.seed is not None else seed
        self.end_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )
        self.adjuster = LogitAdjuster(params, prompt=self.tokens, end_ids=self.end_ids, vocab_size=vocab_size)
        self.constraint = (
            None
            if message.constraint is None
            else SequenceConstraint(message.constraint, matcher, end_ids=self.end_ids, vocab_size=vocab_size)
        )
        self.table: BlockTable | None = None
        self.num_computed = 0
        # Prompt tokens the prefix cache served at the first admission; None before it.
        self.cached_tokens: int | None = None

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be drawn; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    def append(self, token: int, *, max_model_len: int) -> str | None:
        """Take a generated token; the finish reason when it is the last. GrammarError: a fault of its constraint."""
        self.tokens.append(token)
        self.adjuster.observe(token)
        if token in self.end_ids:  # never one before min_tokens: the adjuster masks them
            return "stop"
        if self.constraint is not None:
            self.constraint.take(token)
            if self.constraint.is_over:
                return "stop"
        if self.num_generated >= self.params.max_tokens or len(self.tokens) >= max_model_len:
            return "length"
        return None
