"""Sums of states with gradients: for those of the mechanisms whose states are sums at one exponent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _native
from .._native import State
from ._states import TensorState

_SHIFT, _OLDEST, _TOKENS, _TOKENS_CARRY = 0, 1, 2, 1 << 20


def combine(
    operation: str,
    native: _native.Mechanism,
    earlier: State | TensorState,
    later: State | TensorState,
    decay: Sequence[float] | None,
) -> TensorState:
    """The kernel's own numbers, with the gradients of the formula that it computes, exponents and counts taken as constants."""
    first, second = (TensorState.of(state) if isinstance(state, State) else state for state in (earlier, later))
    if first.mechanism not in ("kernelized", "shaw", "shaw-relative"):
        raise TypeError(f"{operation}: earlier: expected a longspan.State of {first.mechanism}, got a TensorState; give "
                        "state.detach(), or for gradients the earlier state as initial_state")  # fmt: skip
    summed = TensorState.of(native.combine(first.detach(), second.detach(), ()))
    formula = _formula(first, second, decay)
    return TensorState(summed.mechanism, summed.options, summed.parts, summed.numbers + (formula - formula.detach()))


def _formula(first: TensorState, second: TensorState, decay: Sequence[float] | None) -> Tensor:
    """``S = g**n S1 + S2``, each brought to the larger exponent, the keys' sums and the far sums likewise; and the ring of the last
    rows, of which the earlier state's that no longer fit become far. ``n`` counts the later tokens."""
    parts = [state.numbers.split(first.parts, dim=-1) for state in (first, second)]
    marks, later_marks = (part[2].detach() for part in parts)
    shift = torch.maximum(marks[..., _SHIFT], later_marks[..., _SHIFT])
    own_shifts = (marks[..., _SHIFT], later_marks[..., _SHIFT])
    before, since = (torch.where(own.isfinite(), (own - shift).exp(), 0) for own in own_shifts)
    tokens = later_marks[..., _TOKENS] + _TOKENS_CARRY * later_marks[..., _TOKENS + 1]
    gamma = torch.ones(first.kv_heads, dtype=marks.dtype) if decay is None else torch.tensor(decay, dtype=marks.dtype)
    fallen = gamma**tokens
    sums, keys = ((fallen * before)[..., None] * a + since[..., None] * b for a, b in zip(parts[0][:2], parts[1][:2]))
    far = fallen[..., None] * parts[0][3] + parts[1][3]
    ring = parts[0][4]
    if ring.shape[-1]:
        width = first.parts[3]
        rows = ring.shape[-1] // width
        earlier_rows, later_rows = (part[4].unflatten(-1, (rows, width)) for part in parts)

        def row(of: Tensor, oldest: Tensor, back: Tensor) -> Tensor:
            index = ((oldest[..., None] + rows - back) % rows).long()
            return of.gather(2, index[..., None].expand(*index.shape, width))

        back = torch.arange(rows, 0, -1, dtype=marks.dtype)
        since_then = back - tokens[..., None]
        kept = row(earlier_rows, marks[..., _OLDEST], since_then.clamp(min=1))
        own = row(later_rows, later_marks[..., _OLDEST], back.expand_as(since_then))
        ring = torch.where((since_then > 0)[..., None], kept, own).flatten(-2)
        gone = back + tokens[..., None]
        weight = torch.where(gone > rows, gamma[:, None] ** gone, 0)
        leaving = row(earlier_rows, marks[..., _OLDEST], back.expand_as(since_then))
        far = far + (weight[..., None] * leaving).sum(2)
    return torch.cat([sums, keys, torch.zeros_like(marks), far, ring, parts[0][5]], -1)
