"""Short convolution, with gates and without."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import Call
from .rings import rows_at


def _products(call: Call, width: int) -> tuple[Tensor, int]:
    """Products of keys and values behind those of the state, and how many of these there are."""
    products = call.k * call.v if call.settings.get("gated", True) else call.v
    if call.key_padding_mask is not None:
        products = products.masked_fill(call.key_padding_mask[:, None, :, None], 0)
    if call.initial is None or width == 1:
        return products, 0
    past = call.initial[0].unflatten(-1, (width - 1, products.shape[3]))
    return torch.cat([past, products], 2), width - 1


def short_convolution(call: Call) -> Tensor:
    """`longspan.ops.short_convolution` and `depthwise_convolution`."""
    q, (taps, *bias), settings = call.q, call.parameters, call.settings
    products, past = _products(call, taps.shape[1])
    queries, keys, before = q.shape[2], products.shape[2], taps.shape[1] - 1
    # Further away from the keys than this makes no difference.
    first = min(max(call.offset + past, -queries), keys + before) - before
    padded = F.pad(products, (0, 0, max(-first, 0), max(first + before + queries - keys, 0)))
    start = max(first, 0) + before
    terms = (taps[:, t, None] * padded[:, :, start - t : start - t + queries] for t in range(before + 1))
    sums = functools.reduce(torch.add, terms)
    sums = sums + bias[0][:, None] if bias else sums
    out = (F.silu(sums) if settings["silu"] else sums).repeat_interleave(call.group, 1)
    return q * out if settings.get("gated", True) else out


def state_after(call: Call) -> list[Tensor]:
    """The parts of the state after the last key."""
    before, count = call.parameters[0].shape[1] - 1, call.lengths[..., None]
    products, past = _products(call, before + 1)
    products = F.pad(products, (0, 0, before - past, 0))
    last = rows_at(products, count + torch.arange(before, device=products.device)).flatten(2)
    held = torch.zeros((), device=products.device) if call.initial is None else call.initial[2].detach()
    none = last.new_zeros((*last.shape[:2], 0))
    held = (held + count).clamp(max=before).to(last.dtype).expand(*last.shape[:2], 1)
    return [last, none, held, none, none, none]
