"""What the routes work with: the parts of one API process, and the way of a request through them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from proa.core.errors import QueueFullError, UnavailableError
from proa.core.sampling_params import SamplingParams
from proa.server.assembler import ChoiceAssembler
from proa.server.body_budget import BodyBudget
from proa.server.config import ServerConfig
from proa.server.engine_client import EngineClient
from proa.server.engine_process import EngineState, EngineStatus
from proa.server.errors import ModelNotFoundError
from proa.server.frontend import Frontend
from proa.server.generation import Assembler, Generation, GenerationPlan
from proa.server.generation_request import GenerationRequest
from proa.server.grammar_checks import GrammarChecks
from proa.server.metrics import Metrics
from proa.server.reading_assembler import ReadingAssembler
from proa.server.sampling import SamplingDefaults, SequenceLimits, build_sampling

__all__ = ["Services"]


class Services:
    """The parts of one API process. `is_draining` is set once, at the first SIGTERM."""

    def __init__(self, config: ServerConfig, client: EngineClient, frontend: Frontend, metrics: Metrics) -> None:
        self.config = config
        self.client = client
        self.frontend = frontend
        self.metrics = metrics
        self.grammars = GrammarChecks()
        self.created = int(time.time())
        self.is_draining = False
        self.status = EngineStatus()
        self.body_budget = BodyBudget(config.max_total_body_bytes)
        self._defaults: SamplingDefaults | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a request would be taken now."""
        return (
            not self.is_draining
            and self.status.state is EngineState.READY
            and self.client.ready is not None
            and self.frontend.is_loaded
        )

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Read once, after the frontend is loaded."""
        if self._defaults is None:
            self._defaults = SamplingDefaults.choose(self.config.sampling_defaults, self.frontend.generation_config)
        return self._defaults

    def check_model(self, name: str | None) -> None:
        """Refuse a model this server does not have; none given means the one it has."""
        if name is not None and not self.config.serves(name):
            raise ModelNotFoundError(name, self.config.model_names)

    def require_ready(self) -> SequenceLimits:
        """The limits of a sequence.

        Raises:
            UnavailableError: draining, or no engine, or the tokenizer is still loading.
        """
        if self.is_draining:
            raise UnavailableError("server", "a running server", "one that is shutting down", "use another one")
        ready = self.client.require_ready()
        _ = self.frontend.tokenizer
        return SequenceLimits(ready.max_model_len, ready.vocab_size, self.frontend.eos_token_ids)

    def sampling(
        self,
        request: GenerationRequest,
        limits: SequenceLimits,
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: int | None,
        num_logprobs: int | None,
    ) -> list[SamplingParams]:
        """Sampling parameters for each prompt."""
        return [
            build_sampling(
                request,
                self.sampling_defaults,
                limits,
                prompt_tokens=len(token_ids),
                max_new_tokens=max_new_tokens,
                num_logprobs=num_logprobs,
            )
            for token_ids in prompts
        ]

    def start(self, plan: GenerationPlan) -> Generation:
        """Hand a planned request to the engine.

        Raises:
            QueueFullError, UnavailableError: not now.
        """
        self.require_ready()
        count = len(plan.prompts) * plan.n
        assemblers = [self._assembler(plan, index, plan.sampling[index // plan.n]) for index in range(count)]
        try:
            return Generation(plan, self.client, assemblers, self.metrics)
        except QueueFullError:
            self.metrics.request_rejected()
            raise

    def _assembler(self, plan: GenerationPlan, index: int, sampling: SamplingParams) -> Assembler:
        tokenizer, eos_token_ids = self.frontend.tokenizer, self.frontend.eos_token_ids
        if plan.reading is not None:
            return ReadingAssembler(
                index,
                tokenizer,
                sampling,
                plan.reading,
                eos_token_ids=eos_token_ids,
                include_stop=plan.include_stop,
            )
        return ChoiceAssembler(
            index,
            tokenizer,
            sampling,
            eos_token_ids=eos_token_ids,
            skip_special_tokens=plan.skip_special_tokens,
            include_stop=plan.include_stop,
        )
