"""Reads single values out of a server's /metrics."""

from __future__ import annotations

import httpx

from proa.cli.client import Endpoint

__all__ = ["metric", "metrics"]


def metrics(client: httpx.Client, endpoint: Endpoint) -> dict[str, float]:
    """Every sample by name without its labels; of several with one name the last."""
    text = client.get(endpoint.url("/metrics")).raise_for_status().text
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name.split("{")[0]: float(value) for name, value in samples}


def metric(endpoint: Endpoint, name: str) -> float:
    """One value. Raises KeyError when the server does not have it."""
    with httpx.Client(trust_env=False) as client:
        return metrics(client, endpoint)[name]
