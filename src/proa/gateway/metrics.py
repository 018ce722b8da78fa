"""What the gateway's /metrics shows, in the Prometheus text format."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from proa.gateway.proxy import Outcome
from proa.gateway.state import State
from proa.gateway.status import GatewayEvent, ModelStatus

__all__ = ["Metrics"]

_OVERHEAD_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.1, 1)
_LOAD_BUCKETS = (1, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)


class Metrics(Collector):
    """All metrics, in a registry of their own. `statuses` is asked at each scrape; `clock`: seconds, growing."""

    def __init__(
        self, statuses: Callable[[], Sequence[ModelStatus]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._statuses = statuses
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        registry = self._registry
        self._requests = Counter(
            "proa:gateway_requests", "Requests that ended, by how.", ["model", "outcome"], registry=registry
        )
        self._overhead = Histogram(
            "proa:gateway_request_overhead_seconds",
            "Time of a request in the gateway until its engine had it, waiting for the engine not counted.",
            registry=registry,
            buckets=_OVERHEAD_BUCKETS,
        )
        self._delay = _ChunkDelays()
        self._starts = Counter("proa:gateway_engine_starts", "Engines started.", ["model"], registry=registry)
        self._failures = Counter("proa:gateway_engine_failures", "Engines that failed.", ["model"], registry=registry)
        self._load = Histogram(
            "proa:gateway_load_seconds",
            "From the start of an engine until it took requests.",
            ["model"],
            registry=registry,
            buckets=_LOAD_BUCKETS,
        )
        self._started_at: dict[str, float] = {}

    def render(self) -> bytes:
        """The text of a scrape."""
        return generate_latest(self._registry)

    def request_ended(self, model: str, outcome: Outcome, overhead: float) -> None:
        """As `proxy.Observer`. `model` is empty for names that no model has: they would be without number."""
        self._requests.labels(model, outcome).inc()
        if outcome == "answered":
            self._overhead.observe(overhead)

    def chunk_sent(self, delay: float) -> None:
        """As `proxy.Observer`."""
        self._delay.observe(delay)

    def observe(self, event: GatewayEvent) -> None:
        """Count what an event says, as soon as it has happened: its own time is a clock's that people set."""
        if event.kind != "state":
            return
        state = event.data["state"]
        if state == State.STARTING:
            self._starts.labels(event.model).inc()
            self._started_at[event.model] = self._clock()
        elif state == State.READY and event.model in self._started_at:
            self._load.labels(event.model).observe(self._clock() - self._started_at.pop(event.model))
        elif state == State.FAILED:
            self._failures.labels(event.model).inc()

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        yield self._delay.family()
        statuses = self._statuses()
        state = GaugeMetricFamily("proa:gateway_model_state", "1 for the state of a model.", labels=["model", "state"])
        for status in statuses:
            for name in State:
                state.add_metric([status.name, name.value], float(status.state is name))
        yield state
        gauges: tuple[tuple[str, str, Callable[[ModelStatus], float]], ...] = (
            ("running_requests", "Requests an engine has.", lambda s: s.running),
            ("waiting_requests", "Requests that wait for an engine.", lambda s: s.waiting),
            ("retry_after_seconds", "Until a failed engine may be started again.", lambda s: s.retry_after),
            ("load_fraction", "Part of the weights that is loaded.", _loaded),
        )
        for gauge, text, value in gauges:
            family = GaugeMetricFamily(f"proa:gateway_{gauge}", text, labels=["model"])
            for status in statuses:
                family.add_metric([status.name], float(value(status)))
            yield family


class _ChunkDelays:
    """A histogram for one thread, without locks: there is an observation per chunk; locks were a tenth of its cost."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_OVERHEAD_BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_OVERHEAD_BUCKETS, seconds)] += 1
        self._sum += seconds

    def family(self) -> Metric:
        bounds = [*map(str, _OVERHEAD_BUCKETS), "+Inf"]
        buckets = list(zip(bounds, accumulate(map(float, self._counts)), strict=True))
        text = "From the arrival of bytes of an answer until they were written to the client."
        family = HistogramMetricFamily("proa:gateway_chunk_delay_seconds", text)
        family.add_metric([], buckets, self._sum)
        return family


def _loaded(status: ModelStatus) -> float:
    if status.state is State.READY:
        return 1.0
    return (status.progress.fraction or 0.0) if status.progress is not None else 0.0
