"""Gated linear attention and the delta rule, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from .call import Call


def gated(call: Call) -> Tensor:
    """`longspan.ops.gated_attention` and `longspan.ops.delta_attention`."""
    settings, gate = call.settings, call.settings.get("gate", "head")
    q, (k, v, _) = call.q, call.without_padding()
    given = list(call.parameters)
    decay = None if gate == "none" else given.pop(0).exp()
    beta = given[0] if given else None
    if settings.get("l2_norm"):
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    scale = settings.get("scale")
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    if decay is not None and gate == "head":
        decay = decay[..., None]
    if call.key_padding_mask is not None:
        ignored = call.key_padding_mask[:, None, :]
        decay = None if decay is None else decay.masked_fill(ignored[..., None], 1)
        beta = None if beta is None else beta.masked_fill(ignored, 0)
    state = q.new_zeros((*k.shape[:2], k.shape[3], v.shape[3]))
    outs = []
    for t in range(q.shape[2]):
        if decay is not None:
            state = state * decay[:, :, t, :, None]
        update = v[:, :, t]
        if beta is not None:
            known = torch.einsum("bhij,bhi->bhj", state, k[:, :, t])
            update = beta[:, :, t, None] * (update - known)
        state = state + k[:, :, t, :, None] * update[:, :, None]
        outs.append(torch.einsum("bhij,bhgi->bhgj", state, q[:, :, t].unflatten(1, (k.shape[1], call.group))).flatten(1, 2))
    return torch.stack(outs, dim=2) if outs else q.new_zeros((*q.shape[:3], v.shape[3]))
