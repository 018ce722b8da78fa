"""What one token occupies in the KV cache of a model."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KVLayout"]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Per-layer KV shape, the same for all layers.

    MHA/GQA: keys `[slots, num_kv_heads, key_dim]`, values `[slots, num_kv_heads, value_dim]` in pools of their own.
    MLA (`latent=True`): one pool `[slots, 1, kv_lora_rank + rope_dim]`; the values are its first `value_dim` columns.
    """

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False

    def elements_per_token(self) -> int:
        """Number of cache elements one token takes over all layers."""
        width = self.key_dim if self.latent else self.key_dim + self.value_dim
        return self.num_layers * self.num_kv_heads * width
