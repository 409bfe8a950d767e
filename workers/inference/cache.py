"""The plain key-value cache: one contiguous buffer a block, allocated once.

Legend: B batch, S new tokens, T tokens held, G KV heads, K head size.
"""

from __future__ import annotations

import torch

from workers.model.config import ModelConfig


class KVCache:
    """Keys and values of one block for up to ``capacity`` tokens of ``batch`` sequences."""

    def __init__(self, config: ModelConfig, capacity: int, batch: int = 1, device="cpu", dtype=torch.float32):
        shape = (batch, capacity, config.kv_heads, config.head_dim)
        self._k, self._v = torch.empty(shape, device=device, dtype=dtype), torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self._k.shape[1]

    def append(self, k_BSGK: torch.Tensor, v_BSGK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep new keys and values; returns all of them [B, T, G, K] as views. Raises ValueError beyond the capacity."""
        stop = self.length + k_BSGK.shape[1]
        if stop > self.capacity:
            raise ValueError(f"{stop} tokens do not fit a cache of {self.capacity}")
        self._k[:, self.length : stop] = k_BSGK
        self._v[:, self.length : stop] = v_BSGK
        self.length = stop
        return self._k[:, :stop], self._v[:, :stop]
