"""Prometheus metrics: SGLang's names, so that its dashboards work, and proa's own for what only a hybrid has."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proa.ipc.messages import EngineStats, Ready
from proa.server.engine_process import EngineState, EngineStatus
from proa.server.rates import Rate

__all__ = ["Metrics"]

_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10)
# Totals of EngineStats that start at zero again with every engine process.
_TOTALS = (
    "prefix_hit_tokens", "prompt_tokens", "generation_tokens", "aborted", "out_of_memory", "expert_bytes_read",
    "expert_ms", "moved_experts", "deferred_experts",
    "streamed_bytes", "streamed_ms",
)  # fmt: skip


class Metrics(Collector):
    """Everything `/metrics` shows, in its own registry."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._labels = {"model_name": model_name}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._ttft = self._histogram(
            "sglang:time_to_first_token_seconds", "Submission to first token.", _LATENCY_BUCKETS
        )
        self._itl = self._histogram(
            "sglang:inter_token_latency_seconds", "Between two tokens of a choice.", _TOKEN_BUCKETS
        )
        self._e2e = self._histogram("sglang:e2e_request_latency_seconds", "Submission to last token.", _LATENCY_BUCKETS)
        self._requests = self._counter("sglang:num_requests", "Requests accepted.")
        self._rejected = self._counter("proa:num_rejected_requests", "Requests refused with 429.")
        self._stats = EngineStats()
        self._base = dict.fromkeys(_TOTALS, 0.0)
        self._status = EngineStatus()
        self._ready: Ready | None = None
        self._generated, self._expert_rate, self._stream_rate = Rate(), Rate(), Rate()
        # Of each MoE layer: the share of slots whose expert was on the GPU.
        self._gpu_hits: list[Rate] = []

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)

    def request_started(self) -> None:
        self._requests.inc()

    def request_rejected(self) -> None:
        self._rejected.inc()

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` tokens arrived together, `seconds` after the ones before."""
        for _ in range(num_tokens):
            self._itl.observe(seconds / num_tokens)

    def request_finished(self, seconds: float) -> None:
        self._e2e.observe(seconds)

    def engine_ready(self, ready: Ready) -> None:
        self._ready = ready

    def engine_status(self, status: EngineStatus) -> None:
        self._status = status

    def engine_stats(self, stats: EngineStats) -> None:
        """Take the engine's snapshot."""
        self._stats = stats
        self._generated.update(self.total("generation_tokens"))
        self._expert_rate.update(self.total("expert_bytes_read"), self.total("expert_ms"))
        self._stream_rate.update(self.total("streamed_bytes"), self.total("streamed_ms"))
        while len(self._gpu_hits) < len(stats.expert_slots):
            self._gpu_hits.append(Rate())
        for rate, (slots, on_gpu) in zip(self._gpu_hits, stats.expert_slots, strict=False):
            rate.update(on_gpu, slots)

    @property
    def gen_throughput(self) -> float:
        """Generated tokens per second."""
        return self._generated.value

    def engine_down(self) -> None:
        """Keep the totals of the engine that is gone."""
        for name in _TOTALS:
            self._base[name] = self.total(name)
        self._stats = EngineStats()

    def total(self, name: str) -> float:
        """A total of EngineStats over all engine processes."""
        return self._base[name] + float(getattr(self._stats, name))

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        stats, status, ready = self._stats, self._status, self._ready
        used, capacity = stats.kv_tokens_used, stats.kv_tokens_total or (ready.kv_tokens_total if ready else 0)
        prompt_tokens = self.total("prompt_tokens")
        yield self._gauge("sglang:num_running_reqs", "Sequences being generated.", stats.num_running)
        yield self._gauge("sglang:num_queue_reqs", "Sequences waiting for a slot.", stats.num_queued)
        yield self._gauge("sglang:num_used_tokens", "Tokens in the KV cache.", used)
        yield self._gauge("sglang:token_usage", "Share of the KV cache in use.", used / capacity if capacity else 0.0)
        yield self._gauge(
            "sglang:cache_hit_rate",
            "Share of prompt tokens found in the prefix cache.",
            self.total("prefix_hit_tokens") / prompt_tokens if prompt_tokens else 0.0,
        )
        yield self._gauge("sglang:gen_throughput", "Generated tokens per second.", self.gen_throughput)
        yield self._total("sglang:prompt_tokens", "Prompt tokens.", prompt_tokens)
        yield self._total("sglang:generation_tokens", "Generated tokens.", self.total("generation_tokens"))
        yield self._total(
            "sglang:cached_tokens", "Prompt tokens from the prefix cache.", self.total("prefix_hit_tokens")
        )
        yield self._total("sglang:num_aborted_requests", "Sequences aborted.", self.total("aborted"))
        load_seconds = ready.load_seconds if ready else 0.0
        yield self._gauge("sglang:engine_load_weights_time", "Seconds the weights took to load.", load_seconds)
        yield self._gauge("proa:kv_tokens_used", "Tokens in the KV cache.", used)
        yield self._gauge("proa:kv_tokens_capacity", "Tokens the KV cache can hold.", capacity)
        yield self._gauge("proa:weight_bytes", "Bytes of weights in memory.", ready.weight_bytes if ready else 0)
        yield self._gauge("proa:load_bytes_done", "Bytes of weights read so far.", status.bytes_done)
        yield self._gauge("proa:load_bytes_expected", "Bytes of weights to read.", status.bytes_total)
        yield self._total("proa:expert_bytes_read", "Bytes of expert weights read.", self.total("expert_bytes_read"))
        yield self._total("proa:expert_seconds", "Seconds spent in expert layers.", self.total("expert_ms") / 1e3)
        yield from self._hybrid()
        yield self._total("proa:experts_moved", "Experts that came to the GPU.", self.total("moved_experts"))
        yield self._total("proa:experts_deferred", "Slots that came a layer late.", self.total("deferred_experts"))
        yield self._total("proa:out_of_memory", "Forwards that found no memory.", self.total("out_of_memory"))
        yield self._gauge("proa:step_seconds", "Last engine step.", stats.step_ms / 1e3)
        yield self._gauge("proa:schedule_seconds", "Scheduling in the last step.", stats.schedule_ms / 1e3)
        yield self._gauge("proa:sample_seconds", "Sampling in the last step.", stats.sample_ms / 1e3)
        yield self._gauge("proa:engine_ready", "1 while the engine takes requests.", status.state is EngineState.READY)
        yield self._total("proa:engine_restarts", "Engine processes started again.", status.restarts)

    def _hybrid(self) -> Iterable[Metric]:
        """What only an engine with experts on CPU and GPU has, and how a long prompt gets on."""
        stats, measured = self._stats, self._ready.read_gb_s if self._ready else 0.0
        # Bytes per millisecond / 1e6 = GB/s.
        rate, streamed = self._expert_rate.value / 1e6, self._stream_rate.value / 1e6
        share = rate / measured if measured else 0.0
        yield self._gauge("proa:expert_read_gbps", "GB/s at which expert weights were read.", rate)
        yield self._gauge(
            "proa:ram_read_gbps", "Read bandwidth of the RAM in GB/s, measured at start; 0: not.", measured
        )
        yield self._gauge("proa:expert_bandwidth_share", "Their rate in terms of that bandwidth.", share)
        yield self._total("proa:streamed_bytes", "Bytes of experts copied for prompts.", self.total("streamed_bytes"))
        yield self._total("proa:streamed_seconds", "Seconds they took.", self.total("streamed_ms") / 1e3)
        yield self._gauge("proa:stream_gbps", "GB/s at which experts were copied for prompts.", streamed)
        yield self._gauge("proa:prefill_tokens", "Prompt tokens on their way through the layers.", stats.prefill_tokens)
        yield self._gauge("proa:prefill_share", "Share of the layers they have been through.", stats.prefill_share)
        hits = GaugeMetricFamily(
            "proa:gpu_expert_hit_ratio",
            "Share of decoded slots whose expert was on the GPU, by MoE layer.",
            labels=[*self._labels, "layer"],
        )
        for layer, hit in enumerate(self._gpu_hits):
            hits.add_metric([*self._labels.values(), str(layer)], hit.value)
        yield hits

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), float(value))
        return family

    def _total(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), float(value))
        return family

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, list(self._labels), buckets=buckets, registry=self._registry)
        return histogram.labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self._labels), registry=self._registry).labels(**self._labels)
