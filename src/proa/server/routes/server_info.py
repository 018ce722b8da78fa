"""GET /get_server_info (SGLang's name), /server_info and /version."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request

from proa.server.request_body import services_of

__all__ = ["router"]

router = APIRouter()


@router.get("/get_server_info")
@router.get("/server_info")
async def server_info(request: Request) -> dict[str, Any]:
    """Limits and state, under the names that benchmark clients look for."""
    services = services_of(request)
    ready, stats, status = services.client.ready, services.client.stats, services.status
    return {
        "version": version("proa"),
        "model_path": services.config.model_name,
        "served_model_name": services.config.model_name,
        "status": status.state.value,
        "engine_restarts": status.restarts,
        "context_length": ready.max_model_len if ready else None,
        "max_total_num_tokens": ready.kv_tokens_total if ready else None,
        "max_running_requests": ready.max_running_requests if ready else None,
        "vocab_size": ready.vocab_size if ready else None,
        "weight_bytes": ready.weight_bytes if ready else None,
        "load_seconds": ready.load_seconds if ready else None,
        "max_queued_requests": services.config.max_queued_requests,
        "num_running_reqs": stats.num_running,
        "num_queue_reqs": stats.num_queued,
        "last_gen_throughput": services.metrics.gen_throughput,
        "engine_info": dict(ready.info) if ready else {},
    }


@router.get("/version")
async def server_version() -> dict[str, str]:
    """Version of proa."""
    return {"version": version("proa")}
