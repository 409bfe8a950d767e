"""Online softmax: partial results of one query over disjoint sets of keys become one.

Legend: B batch, S queries, H query heads, D head size. lse_BSH is log Σ exp(scores), float32 or float64.
"""

from __future__ import annotations

import torch


def merge_(out_BSHD: torch.Tensor, lse_BSH: torch.Tensor, part_BSHD: torch.Tensor, part_lse_BSH: torch.Tensor) -> None:
    """Merge a part into ``out`` and ``lse``, in place.

    ``out ← out + σ(part_lse − lse)(part − out)`` (the form of zhuzilin's ring-flash-attention, which cannot overflow)
    and ``lse ← logaddexp(lse, part_lse)``. A row that has seen no key has out 0 and lse −inf on either side; two such
    rows stay so, where the bare formula gives NaN (−inf − −inf).
    """
    weight_BSH = torch.sigmoid(part_lse_BSH - lse_BSH).nan_to_num_(nan=0.0)
    out_BSHD.lerp_(part_BSHD.to(out_BSHD.dtype), weight_BSH.to(out_BSHD.dtype).unsqueeze(-1))
    lse_BSH.copy_(torch.logaddexp(lse_BSH, part_lse_BSH))
