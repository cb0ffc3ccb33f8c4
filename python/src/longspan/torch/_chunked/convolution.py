"""Short convolution, with gates and without."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import Call


def short_convolution(call: Call) -> Tensor:
    """`longspan.ops.short_convolution` and `depthwise_convolution`."""
    q, (taps, *bias), settings = call.q, call.parameters, call.settings
    queries, keys, before, gated = q.shape[2], call.k.shape[2], taps.shape[1] - 1, settings.get("gated", True)
    products = call.k * call.v if gated else call.v
    if call.key_padding_mask is not None:
        products = products.masked_fill(call.key_padding_mask[:, None, :, None], 0)
    # Further away from the keys than this makes no difference.
    first = min(max(call.offset, -queries), keys + before) - before
    padded = F.pad(products, (0, 0, max(-first, 0), max(first + before + queries - keys, 0)))
    start = max(first, 0) + before
    terms = (taps[:, t, None] * padded[:, :, start - t : start - t + queries] for t in range(before + 1))
    sums = functools.reduce(torch.add, terms)
    sums = sums + bias[0][:, None] if bias else sums
    out = (F.silu(sums) if settings["silu"] else sums).repeat_interleave(call.group, 1)
    return q * out if gated else out
