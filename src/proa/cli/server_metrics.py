"""What a running server says of itself in `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proa.cli.client import Endpoint, request_error
from proa.core.errors import ProaError, UnavailableError

if TYPE_CHECKING:
    import httpx

__all__ = ["ServerMetrics", "fetch_metrics", "parse_metrics"]


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """One scrape. Counts are of now or since the server started; rates are over its last second with work.

    kv_used, kv_capacity: tokens. expert_gb_s: at which the CPU read experts, ram_gb_s: of the RAM, 0 where it was not
    measured; stream_gb_s: at which experts crossed the bus for prompts. prefill_tokens: on their way through the
    layers, prefill_share: how far. gpu_hits: by MoE layer, the share of slots whose expert was on the GPU.
    """

    model: str
    is_ready: bool
    restarts: int
    running: int
    waiting: int
    rejected: int
    aborted: int
    out_of_memory: int
    tokens_per_s: float
    step_s: float
    kv_used: int
    kv_capacity: int
    prefix_hit_rate: float
    expert_gb_s: float
    ram_gb_s: float
    bandwidth_share: float
    stream_gb_s: float
    moved_experts: int
    deferred_experts: int
    prefill_tokens: int
    prefill_share: float
    gpu_hits: tuple[float, ...]


def fetch_metrics(client: httpx.Client, endpoint: Endpoint) -> ServerMetrics:
    """One scrape of `endpoint`.

    Raises:
        UnavailableError: it cannot be reached. ProaError: it refuses, or is no proa server.
    """
    import httpx  # here: it is slow to import, and `proa serve` does without

    try:
        response = client.get(endpoint.url("/metrics"), headers=endpoint.headers())
    except httpx.HTTPError as error:
        raise UnavailableError(endpoint.root, "a server", f"{type(error).__name__}: {error}", "start one") from error
    if response.status_code != 200:
        raise request_error(endpoint.root, response.status_code, response.text)
    return parse_metrics(response.text, endpoint.root)


def parse_metrics(text: str, where: str) -> ServerMetrics:
    """The Prometheus text format. ProaError, naming `where`: it is not of a proa server."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, float] = {}
    layers: dict[int, float] = {}
    model = ""
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                model = sample.labels.get("model_name", model)
                if "layer" in sample.labels:
                    layers[int(sample.labels["layer"])] = sample.value
                else:
                    values[sample.name] = sample.value
        return _metrics(model, values, tuple(layers[layer] for layer in sorted(layers)))
    except (ValueError, KeyError) as error:
        raise ProaError(where, "the metrics of a proa server", f"others ({type(error).__name__}: {error})") from error


def _metrics(model: str, values: dict[str, float], gpu_hits: tuple[float, ...]) -> ServerMetrics:
    def count(name: str) -> int:
        return int(values[name])

    return ServerMetrics(
        model=model,
        is_ready=values["proa:engine_ready"] == 1.0,
        restarts=count("proa:engine_restarts_total"),
        running=count("sglang:num_running_reqs"),
        waiting=count("sglang:num_queue_reqs"),
        rejected=count("proa:num_rejected_requests_total"),
        aborted=count("sglang:num_aborted_requests_total"),
        out_of_memory=count("proa:out_of_memory_total"),
        tokens_per_s=values["sglang:gen_throughput"],
        step_s=values["proa:step_seconds"],
        kv_used=count("proa:kv_tokens_used"),
        kv_capacity=count("proa:kv_tokens_capacity"),
        prefix_hit_rate=values["sglang:cache_hit_rate"],
        expert_gb_s=values["proa:expert_read_gbps"],
        ram_gb_s=values["proa:ram_read_gbps"],
        bandwidth_share=values["proa:expert_bandwidth_share"],
        stream_gb_s=values["proa:stream_gbps"],
        moved_experts=count("proa:experts_moved_total"),
        deferred_experts=count("proa:experts_deferred_total"),
        prefill_tokens=count("proa:prefill_tokens"),
        prefill_share=values["proa:prefill_share"],
        gpu_hits=gpu_hits,
    )
