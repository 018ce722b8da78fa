"""The part of a layer that is not routed experts, as plain torch products of a model's dimensions on the GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from proa.cli.bench_hybrid_spec import TrunkDims

__all__ = ["TrunkLayer"]


class TrunkLayer:
    """Random bf16 weights, and the products of attention and shared experts. Their results are thrown away."""

    def __init__(self, dims: TrunkDims, hidden: int, device: torch.device) -> None:
        self._dims = dims
        heads, qk = dims.heads, dims.head_dim + dims.rope_dim

        def weight(*shape: int) -> torch.Tensor:
            values: torch.Tensor = torch.randn(*shape, device=device, dtype=torch.bfloat16) * shape[-2] ** -0.5
            return values

        self._q_down, self._q_up = weight(hidden, dims.q_rank), weight(dims.q_rank, heads * qk)
        self._kv_down = weight(hidden, dims.kv_rank + dims.rope_dim)
        self._k_up, self._v_up = weight(heads, dims.head_dim, dims.kv_rank), weight(heads, dims.kv_rank, dims.value_dim)
        # The same, as all heads of many tokens use them.
        self._k_wide = self._k_up.permute(2, 0, 1).reshape(dims.kv_rank, -1).contiguous()
        self._v_wide = self._v_up.permute(1, 0, 2).reshape(dims.kv_rank, -1).contiguous()
        self._out = weight(heads * dims.value_dim, hidden)
        self._shared_up = weight(hidden, 2 * dims.shared_intermediate)
        self._shared_down = weight(dims.shared_intermediate, hidden)

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, torch.Tensor))

    def decode_attention(self, x: torch.Tensor) -> None:
        """x float32 `[T, hidden]`: the projections with k and v absorbed; no cache is read."""
        dims, tokens = self._dims, x.shape[0]
        hidden = x.bfloat16()
        q = (hidden @ self._q_down @ self._q_up).view(tokens, dims.heads, -1)
        hidden @ self._kv_down  # its time is what counts
        latent = torch.bmm(q[..., : dims.head_dim].transpose(0, 1), self._k_up)
        values = torch.bmm(latent, self._v_up).transpose(0, 1).reshape(tokens, -1)
        values @ self._out

    def prefill_attention(self, x: torch.Tensor) -> None:
        """x float32 `[T, hidden]`: the projections with k and v per head, and causal attention of the chunk."""
        dims, tokens = self._dims, x.shape[0]
        hidden = x.bfloat16()
        qk = dims.head_dim + dims.rope_dim
        q = (hidden @ self._q_down @ self._q_up).view(tokens, dims.heads, qk).transpose(0, 1)
        latent = (hidden @ self._kv_down)[:, : dims.kv_rank]
        keys = torch.zeros(dims.heads, tokens, qk, device=x.device, dtype=torch.bfloat16)
        values = torch.zeros_like(keys)  # as wide as keys, which the fused kernels ask for
        keys[..., : dims.head_dim] = (latent @ self._k_wide).view(tokens, dims.heads, -1).transpose(0, 1)
        values[..., : dims.value_dim] = (latent @ self._v_wide).view(tokens, dims.heads, -1).transpose(0, 1)
        attended = F.scaled_dot_product_attention(q[None], keys[None], values[None], is_causal=True)[0]
        attended[..., : dims.value_dim].transpose(0, 1).reshape(tokens, -1) @ self._out

    def shared_experts(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Added to `out` float32 `[T, hidden]`."""
        gate, up = (x.bfloat16() @ self._shared_up).chunk(2, dim=1)
        out.add_((F.silu(gate) * up) @ self._shared_down)
