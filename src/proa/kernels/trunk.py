"""The kernels of the trunk under one name, as `proa.device.gpu` takes them."""

from __future__ import annotations

from proa.kernels.activation import gated_product
from proa.kernels.gemv import is_fast
from proa.kernels.heads import heads_linear
from proa.kernels.linear import linear
from proa.kernels.norm import add_rms_norm, rms_norm
from proa.kernels.rope import rope
from proa.kernels.route import route
from proa.kernels.rows import embedding_rows, kv_store
from proa.kernels.weight_tiles import KINDS

__all__ = [
    "KINDS",
    "add_rms_norm",
    "embedding_rows",
    "gated_product",
    "heads_linear",
    "is_fast",
    "kv_store",
    "linear",
    "rms_norm",
    "rope",
    "route",
]
