"""Sums of states with gradients: by the kernels where they have them, else those of the formulas that they compute, with exponents,
places and counts as constants.

What each part of a state means, and how two become one, is in ``state.rs`` of each mechanism in ``crates/longspan-kernels/src``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _calls, _native
from .._native import State
from . import _operators
from ._chunked.call import Call
from ._chunked.pairs import softmax_state
from ._chunked.rings import rows_at
from ._states import TensorState

Parts = Sequence[Tensor]


class _Combined(torch.autograd.Function):
    """Numbers of the sum of two states whose gradients the kernels have."""

    @staticmethod
    def forward(
        ctx: Any, native: _native.Mechanism, shape: _operators.Shape, first: Tensor, second: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.native, ctx.shape = native, shape
        ctx.save_for_backward(first, second, *parameters)
        earlier, later = (TensorState(*shape, numbers).detach() for numbers in (first, second))
        return TensorState.of(native.combine(earlier, later, _arrays(parameters))).numbers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_combined: Tensor) -> Any:
        first, second, *parameters = ctx.saved_tensors
        shape: _operators.Shape = ctx.shape
        states = [TensorState(*shape, numbers).detach() for numbers in (first, second, d_combined)]
        *d_states, d_arrays = ctx.native.combine_backward(states[0], states[1], _arrays(parameters), states[2])
        # Parameters that have no part in a sum have no gradient.
        of_parameters: list[Any] = [torch.from_numpy(gradient) for gradient in d_arrays] or [None for _ in parameters]
        return None, None, *(TensorState.of(d).numbers for d in d_states), *of_parameters


def _arrays(parameters: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple([_operators.as_array(parameter.detach()) for parameter in parameters])


def combine(
    operation: str, native: _native.Mechanism, options: str, earlier: State | TensorState, later: State | TensorState,
    parameters: Sequence[Any],
) -> TensorState:  # fmt: skip
    """The kernel's own numbers, with the gradients of the formula that it computes."""
    if earlier.mechanism == "softmax-window":
        raise ValueError(f"{operation}: earlier: expected a longspan.State, because states of a window have no sum with "
                         "gradients, got a TensorState; give state.detach(), or for gradients the earlier state as "
                         "initial_state")  # fmt: skip
    first, second = (TensorState.of(state) if isinstance(state, State) else state for state in (earlier, later))
    formula = _formula(earlier.mechanism)
    shape = (first.mechanism, first.options, tuple(first.parts))
    given = [x if isinstance(x, Tensor) else torch.from_numpy(np.ascontiguousarray(x)) for x in parameters]
    if formula is None and shape == (second.mechanism, second.options, tuple(second.parts)):
        return TensorState(*shape, _Combined.apply(native, shape, first.numbers, second.numbers, *given))
    summed = TensorState.of(native.combine(first.detach(), second.detach(), _arrays(given)))
    assert formula is not None, "what does not fit is refused by the kernel"
    chosen = _calls.settings(options)
    if summed.mechanism == "toeplitz":
        chosen = {"shape": tuple(given[0].shape[1:]) if given else None, **chosen}
    a, b, sum_of_both = (list(state.numbers.split(first.parts, dim=-1)) for state in (first, second, summed))
    gradients = torch.cat([part if part.dim() == 3 else part.flatten(2) for part in formula(a, b, sum_of_both, chosen)], -1)
    # Of what is infinite, the key of an ignored token, there is no gradient.
    gradients = torch.where(gradients.isfinite(), gradients, 0)
    return TensorState(summed.mechanism, summed.options, summed.parts, summed.numbers + (gradients - gradients.detach()))


def _formula(mechanism: str) -> Any:
    """Of a mechanism whose kernel has no gradients of sums; ``None`` for the others."""
    return {"softmax": _softmax, "toeplitz": _toeplitz}.get(mechanism, _aft if mechanism.startswith("aft-") else None)


def _rows(part: Tensor, places: Tensor, count: int) -> Tensor:
    """Of a part that holds ``count`` rows, those at ``places``, ``[batch, kv_heads, rows]``."""
    return rows_at(part.unflatten(-1, (count, part.shape[-1] // max(count, 1))), places.long())


def _scaled(own: Tensor, to: Tensor, counts: Tensor | None = None) -> Tensor:
    """``exp(own - to)``, or 0 where there is nothing to scale."""
    there = own.isfinite() & to.isfinite()
    there = there if counts is None else there & counts
    return torch.where(there, torch.where(there, own - to, 0).exp(), 0)


def _toeplitz(first: Parts, second: Parts, summed: Parts, chosen: dict[str, Any]) -> Parts:
    """The later ring after the earlier one; what no longer fits becomes far."""
    near = _near(first, chosen["shape"], None if chosen.get("centred") else chosen.get("first"))
    marks, later_marks, new_marks = (part[2].detach() for part in (first, second, summed))
    exponents = [own[..., 2] for own in (marks, later_marks, new_marks)]
    before, since = (_scaled(own, exponents[2])[..., None] for own in exponents[:2])
    sums, keys = (before * a + since * b for a, b in zip(first[:2], second[:2]))
    if not near:
        return sums, keys, torch.zeros_like(marks), *first[3:]
    back = torch.arange(near, 0, -1, dtype=marks.dtype, device=marks.device)
    held, later_held = marks[..., 1, None], later_marks[..., 1, None]
    slot = [own[..., 0, None] for own in (marks, later_marks, new_marks)]
    if keys.shape[-1]:
        gone = (back <= held) & (back + later_held > near)
        places = ((slot[0] - back) % near).expand_as(gone)
        k, row = _rows(first[3], places, near), _rows(first[5], places, near)
        own = _rows(first[4].detach(), places, near)[..., 0] if first[4].shape[-1] else torch.zeros_like(row[..., 0])
        k = k * _scaled(own, exponents[2][..., None], gone & (row[..., -1].detach() == 1))[..., None]
        keys = keys + k.sum(2)
        sums = sums + (k.mT @ row[..., :-1]).flatten(2)
    # By the place in the new ring: how many tokens ago its row came.
    back = (slot[2] - torch.arange(near, dtype=marks.dtype, device=marks.device) - 1) % near + 1
    kept, own = (slot[0] - (back - later_held)) % near, (slot[1] - back) % near
    k, row = (torch.where((back <= later_held)[..., None], _rows(b, own, near), _rows(a, kept, near))
              for a, b in ((first[3], second[3]), (first[5], second[5])))  # fmt: skip
    return sums, keys, torch.zeros_like(marks), k, torch.zeros_like(first[4]), row


def _near(parts: Parts, shape: Sequence[int], first: int | None) -> int:
    """Rows of a Toeplitz state's ring. Without far sums, whose keys are as wide as the ring's, a table or a grid says it."""
    if parts[1].shape[-1]:
        return parts[3].shape[-1] // parts[1].shape[-1]
    if len(shape) == 1 and first is not None:
        return max(1 - first, 0)
    near = 1
    for entries in shape:
        near *= entries // 2 + 1
    return near


def _aft(first: Parts, second: Parts, summed: Parts, _chosen: dict[str, Any]) -> Parts:
    """Means relative to their exponents; the earlier ring's oldest rows leave, and the later ones take their places."""
    marks, later_marks, new_marks = (part[5].detach() for part in (first, second, summed))
    exponents = [part[2].detach() for part in (first, second, summed)]
    before, since = (_scaled(own, exponents[2]) for own in exponents[:2])
    numerator, denominator = (before * a + since * b for a, b in zip(first[:2], second[:2]))
    width, key_dim = numerator.shape[-1], denominator.shape[-1]
    rows = first[4].shape[-1] // max(width, 1)
    if not rows:
        return numerator, denominator, torch.zeros_like(exponents[0]), first[3], first[4], torch.zeros_like(marks)
    held = later_marks[..., 1, None]
    place = torch.arange(rows, dtype=marks.dtype, device=marks.device)
    gone = ((place - marks[..., 0, None]) % rows < held)[..., None]
    k, v = first[3].unflatten(-1, (rows, key_dim)), first[4].unflatten(-1, (rows, width))
    weight = _scaled(k, exponents[2][..., None, :], gone)
    numerator, denominator = numerator + (weight * v).sum(2), denominator + weight.sum(2)
    back = (new_marks[..., 0, None] - place - 1) % rows + 1
    own = (later_marks[..., 0, None] - back) % rows
    ring = [torch.where((back <= held)[..., None], _rows(b, own, rows), a) for a, b in zip((k, v), second[3:5])]
    return numerator, denominator, torch.zeros_like(exponents[0]), *ring, torch.zeros_like(marks)


def _softmax(first: Parts, second: Parts, _summed: Parts, chosen: dict[str, Any]) -> Parts:
    """The later keys and values after the earlier ones."""
    rows = chosen.get("capacity", 4096)
    k, v = (part.unflatten(-1, (rows, part.shape[-1] // max(rows, 1))) for part in second[:2])
    absent = torch.arange(rows, device=k.device) >= second[2].detach()[:, 0, :1]
    call = Call(k[:, :, :0], k, v, (), (None, None), chosen, True, key_padding_mask=absent, initial=first)
    return *softmax_state(call)[:2], torch.zeros_like(first[2]), *first[3:]
