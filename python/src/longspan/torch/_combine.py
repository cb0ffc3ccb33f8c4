"""Sums of states with gradients: by the kernels where they have them, else those of the formulas that they compute, with exponents,
places and counts as constants.

What each part of a state means, and how two become one, is in ``state.rs`` of each mechanism in ``crates/longspan-kernels/src``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _calls, _native
from .._native import State
from . import _operators
from ._chunked.aft import Aft
from ._chunked.call import Call
from ._chunked.pairs import near_rows, softmax_state, toeplitz_state
from ._chunked.rings import ordered
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
    # Of a mechanism whose kernel has no gradients of sums.
    formula: Any = {"softmax": _softmax, "toeplitz": _toeplitz}.get(earlier.mechanism, _aft if earlier.mechanism.startswith("aft-") else None)
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


def _scaled(own: Tensor, to: Tensor) -> Tensor:
    """``exp(own - to)``, or 0 where there is nothing to scale. The exponent of a sum is no smaller than those of its parts, but for the
    rounding of what stands for none."""
    own, to = own.detach(), to.detach()
    there = own.isfinite() & to.isfinite()
    return torch.where(there, torch.where(there, own - to, 0).clamp(max=0).exp(), 0)


def _toeplitz(first: Parts, second: Parts, summed: Parts, chosen: dict[str, Any]) -> Parts:
    """The later ring's rows after the earlier state, and what the later one holds no longer as rows."""
    table = torch.empty((1, *chosen["shape"]), device="meta")
    settings = {**chosen, "feature_map": "identity", "centred": chosen.get("centred") or chosen.get("first") is None}
    count, after, ring = near_rows(table, settings), first, first[3:]
    if count:
        oldest = second[2][..., :1] - second[2][..., 1:2]
        k, v = (ordered(second[part], oldest, count) for part in (3, 5))
        exponents = ordered(second[4], oldest, count).detach() if second[4].shape[-1] else torch.zeros_like(k[..., :1])
        after = toeplitz_state(Call(
            k[:, :, :0], k, v[..., :-1], [table], (None, None), settings, True, key_padding_mask=v.detach()[:, 0, :, -1] != 1,
            initial=first, exponents=exponents,
        ))  # fmt: skip
        turn = after[2][..., :1] - summed[2][..., :1]
        ring = [ordered(after[3], turn, count).flatten(2), torch.zeros_like(first[4]), ordered(after[5], turn, count).flatten(2)]
    before, since = (_scaled(own[2][..., 2:3], summed[2][..., 2:3]) for own in (after, second))
    sums, keys = (before * a + since * b for a, b in zip(after[:2], second[:2]))
    return sums, keys, torch.zeros_like(summed[2]), *ring


def _aft(first: Parts, second: Parts, summed: Parts, _chosen: dict[str, Any]) -> Parts:
    """The same of AFT, whose sums and their exponents have a number for each channel."""
    count, after, ring = second[4].shape[-1] // max(second[0].shape[-1], 1), first, first[3:5]
    if count:
        held = second[5].detach()[..., 1:2]
        k, v = (ordered(part, second[5][..., :1] - held, count) for part in second[3:5])
        absent = torch.arange(count, device=k.device) >= held[:, 0]
        after = Aft().state_after(Call(k[:, :, :0], k, v, (), (None, None), {}, True, key_padding_mask=absent, initial=first))
        ring = [ordered(part, after[5][..., :1] - summed[5][..., :1], count).flatten(2) for part in after[3:5]]
    before, since = (_scaled(own[2], summed[2]) for own in (after, second))
    sums, weights = (before * a + since * b for a, b in zip(after[:2], second[:2]))
    return sums, weights, torch.zeros_like(summed[2]), *ring, torch.zeros_like(summed[5])


def _softmax(first: Parts, second: Parts, _summed: Parts, chosen: dict[str, Any]) -> Parts:
    """The later keys and values after the earlier ones."""
    rows = chosen.get("capacity", 4096)
    k, v = (part.unflatten(-1, (rows, part.shape[-1] // max(rows, 1))) for part in second[:2])
    absent = torch.arange(rows, device=k.device) >= second[2].detach()[:, 0, :1]
    call = Call(k[:, :, :0], k, v, (), (None, None), chosen, True, key_padding_mask=absent, initial=first)
    return *softmax_state(call)[:2], torch.zeros_like(first[2]), *first[3:]
