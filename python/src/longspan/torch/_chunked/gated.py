"""Gated linear attention and the delta rule, chunk after chunk."""

from dataclasses import replace

import torch
from torch import Tensor

from .call import Call

#: Tokens of a chunk, and of one whose pairs have a decay for each channel.
_CHUNK, _BY_CHANNEL = 64, 16


def whole(call: Call) -> Call:
    """The same call, where a token whose gates are no numbers has a key that is none."""
    gates = list(call.parameters)
    lost = [gate.isnan() if gate.ndim == 3 else gate.isnan().any(-1) for gate in gates]
    if not gates:
        return call
    bad = lost[0] if len(lost) == 1 else lost[0] | lost[1]
    k = call.k.masked_fill(bad[..., None], torch.nan)
    return replace(call, k=k, parameters=[gate.masked_fill(gate.isnan(), 0) for gate in gates])


def gated(call: Call) -> tuple[Tensor, list[Tensor]]:
    """`longspan.ops.gated_attention` and `longspan.ops.delta_attention`, and the parts of the state after the last key."""
    settings, gate = call.settings, call.settings.get("gate", "head")
    q, (k, v, _) = call.q, call.without_padding()
    given = list(call.parameters)
    g = None if gate == "none" else given.pop(0)
    beta = given[0] if given else None
    if settings.get("l2_norm"):
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    scale = settings.get("scale")
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    g = k.new_zeros((*k.shape[:3], 1)) if g is None else g if g.ndim == 4 else g[..., None]
    if call.key_padding_mask is not None:
        ignored = call.key_padding_mask[:, None, :]
        g = g.masked_fill(ignored[..., None], 0)
        beta = None if beta is None else beta.masked_fill(ignored, 0)
    passed = g.sum(2)
    state = q.new_zeros((*k.shape[:2], k.shape[3], v.shape[3]))
    if call.initial is not None:
        state = call.initial[0].unflatten(-1, state.shape[2:])
        passed = passed + call.initial[1] if gate != "none" else passed
    q = q.unflatten(1, (k.shape[1], call.group))
    step, outs = _CHUNK if g.shape[3] == 1 else _BY_CHANNEL, []
    for start in range(0, k.shape[2], step):
        part = slice(start, start + step)
        beta_of = None if beta is None else beta[:, :, part]
        out, state = _chunk(q[:, :, :, part], k[:, :, part], v[:, :, part], g[:, :, part], beta_of, state)
        outs.append(out.flatten(1, 2))
    if not outs:
        # Sums of no tokens, so that autograd still reaches all tensors.
        outs = [call.q @ state.repeat_interleave(call.group, 1) + sum(x.sum() for x in (k, v, g, beta) if x is not None)]
    out = torch.cat(outs, 2)
    none = passed.new_zeros((*passed.shape[:2], 0))
    return out, [state.flatten(2), none if gate == "none" else passed, none, none, none, none]


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of a chunk after ``state``, and the state after it. What decays between two tokens is a sum of its own, for a difference of
    running sums would lose digits where they are large, and all where a decay is 0."""
    count = k.shape[2]
    since = g.cumsum(2).exp()
    row = torch.arange(count, device=g.device)[:, None]
    later = (row > row.T)[..., None]
    # From key j to row i: of g from j + 1 to i.
    between = torch.where(later, g[:, :, :, None], 0).cumsum(2).masked_fill((row < row.T)[..., None], -torch.inf).exp()
    if g.shape[3] == 1:
        between = between[..., 0]
        seen = (q @ k[:, :, None].mT) * between[:, :, None]
    else:
        seen = torch.einsum("bhgid,bhjd,bhijd->bhgij", q, k, between)
    if beta is not None:
        known = k @ k.mT * between if g.shape[3] == 1 else torch.einsum("bhid,bhjd,bhijd->bhij", k, k, between)
        system = torch.eye(count, dtype=k.dtype, device=k.device) + beta[..., None] * known.tril(-1)
        v = torch.linalg.solve_triangular(system, beta[..., None] * (v - (since * k) @ state), upper=False, unitriangular=True)
    out = (since[:, :, None] * q) @ state[:, :, None] + seen @ v[:, :, None]
    # What is left of each key at the end.
    left = between[:, :, -1, :, None] if g.shape[3] == 1 else between[:, :, -1]
    last = since[:, :, -1].unsqueeze(-1)
    return out, last * state + (left * k).mT @ v
