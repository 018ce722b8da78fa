"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from proa.server.request_body import services_of
from proa.server.services import Services

__all__ = ["router"]

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The served model under each of its names."""
    services = services_of(request)
    return {"object": "list", "data": [_describe(services, name) for name in services.config.model_names]}


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(request: Request, model_id: str) -> dict[str, Any]:
    """One model."""
    services = services_of(request)
    services.check_model(model_id)
    return _describe(services, model_id)


def _describe(services: Services, name: str) -> dict[str, Any]:
    ready = services.client.ready
    return {
        "id": name,
        "object": "model",
        "created": services.created,
        "owned_by": "proa",
        "root": services.config.model_name,
        "parent": None,
        # Known once the engine has sized its KV cache.
        "max_model_len": ready.max_model_len if ready is not None else None,
    }
