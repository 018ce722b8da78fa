"""Where the demo model lies. Apart from its builder, which needs numpy: serving a model that is there does without."""

from __future__ import annotations

from pathlib import Path

from proa.core.env import cache_dir as default_cache_dir

__all__ = ["demo_model_path"]

MODEL_NAME = "smollm2-135m-moe"


def demo_model_path(cache_dir: Path | None = None, *, format: str = "bf16", all_linears: bool = False) -> Path:  # noqa: A002
    """Where `ensure_demo_model` puts the checkpoint; it may not exist yet."""
    suffix = "" if format == "bf16" else f"-{format}"
    base = default_cache_dir() if cache_dir is None else cache_dir
    return base / "models" / f"{MODEL_NAME}{suffix}{'-all' if all_linears else ''}"
