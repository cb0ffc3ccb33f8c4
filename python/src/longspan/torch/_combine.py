"""Sums of states with gradients: those of the formulas that the kernels compute, with exponents, places and counts as constants.

What each part of a state means, and how two become one, is in ``state.rs`` of ``kernelized/``, ``toeplitz/``, ``aft/``,
``convolution/`` and ``softmax/`` in ``crates/longspan-kernels/src``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import _calls, _native, _options
from .._native import State
from . import _operators
from ._chunked.rings import OLDEST, SHIFT, rows_at, tokens
from ._states import TensorState

Parts = Sequence[Tensor]


def combine(
    operation: str, native: _native.Mechanism, options: str, earlier: State | TensorState, later: State | TensorState,
    parameters: Sequence[Any],
) -> TensorState:  # fmt: skip
    """The kernel's own numbers, with the gradients of the formula that it computes."""
    chosen = _calls.settings(options)
    if earlier.mechanism == "softmax-window":
        raise ValueError(f"{operation}: earlier: expected a longspan.State, because states of a window have no sum with "
                         "gradients, got a TensorState; give state.detach(), or for gradients the earlier state as "
                         "initial_state")  # fmt: skip
    first, second = (TensorState.of(state) if isinstance(state, State) else state for state in (earlier, later))
    plain = tuple(_operators.as_array(part.detach()) if isinstance(part, Tensor) else part for part in parameters)
    summed = TensorState.of(native.combine(first.detach(), second.detach(), plain))
    a, b, sum_of_both = (list(state.numbers.split(first.parts, dim=-1)) for state in (first, second, summed))
    kind = summed.mechanism
    if kind == "softmax":
        formula = _softmax(a, b, chosen.get("capacity", 4096))
    elif kind == "toeplitz":
        shape = chosen.get("shape") or parameters[0].shape[1:]
        formula = _toeplitz(a, b, sum_of_both, _near(a, shape, None if chosen.get("centred") else chosen.get("first")))
    elif kind in ("short-convolution", "depthwise-convolution"):
        formula = _short_convolution(a, b, sum_of_both, chosen["width"] - 1)
    elif kind == "gated":
        formula = _gated(a, b)
    elif kind.startswith("aft-"):
        formula = _aft(a, b, sum_of_both)
    else:
        if kind == "fourier" and chosen.get("axes") is None:
            b = _turned(b, a[2], torch.as_tensor(parameters[0]), chosen)
        decay = _options.decays(operation, np.empty((1, first.kv_heads)), chosen.get("decay"))
        formula = _kernelized(a, b, sum_of_both, decay, bool(chosen.get("gate")))
    gradients = torch.cat([part if part.dim() == 3 else part.flatten(2) for part in formula], -1)
    # Of what is infinite, the key of an ignored token, there is no gradient.
    gradients = torch.where(gradients.isfinite(), gradients, 0)
    return TensorState(kind, summed.options, summed.parts, summed.numbers + (gradients - gradients.detach()))


def _rows(part: Tensor, places: Tensor, count: int) -> Tensor:
    """Of a part that holds ``count`` rows, those at ``places``, ``[batch, kv_heads, rows]``."""
    return rows_at(part.unflatten(-1, (count, part.shape[-1] // max(count, 1))), places.long())


def _scaled(own: Tensor, to: Tensor, counts: Tensor | None = None) -> Tensor:
    """``exp(own - to)``, or 0 where there is nothing to scale."""
    there = own.isfinite() & to.isfinite()
    there = there if counts is None else there & counts
    return torch.where(there, torch.where(there, own - to, 0).exp(), 0)


def _gated(first: Parts, second: Parts) -> Parts:
    """``S = e^{g of the later} S of the earlier + S of the later``; sums of log decays add up."""
    (before, past, rest), (sums, gates, _) = first[:3], second[:3]
    decay = gates.exp() if gates.shape[-1] else torch.ones_like(before[..., :1])
    decay = decay.repeat_interleave(before.shape[-1] // max(decay.shape[-1], 1), -1)
    return decay * before + sums, past + gates, torch.zeros_like(rest), *(part.detach() for part in first[3:])


def _kernelized(first: Parts, second: Parts, summed: Parts, decay: Sequence[float] | None, gates: bool) -> Parts:
    """``S = g**n S1 + S2``, each brought to the larger exponent, the keys' sums and the far sums likewise; and the ring of the last
    rows, of which the earlier state's that no longer fit become far. ``n`` counts the later tokens, or their gates stand for ``g**n``."""
    marks, later_marks = first[2].detach(), second[2].detach()
    shift = summed[2][..., SHIFT]
    before, since = (_scaled(own[..., SHIFT], shift) for own in (marks, later_marks))
    later = tokens(later_marks)
    gamma = marks.new_ones(marks.shape[1]) if decay is None else marks.new_tensor(decay)
    fallen = second[5][..., 0].exp() if gates else gamma**later
    sums, keys = ((fallen * before)[..., None] * a + since[..., None] * b for a, b in zip(first[:2], second[:2]))
    far, ring = fallen[..., None] * first[3] + second[3], first[4]
    if ring.shape[-1]:
        rows = ring.shape[-1] // first[3].shape[-1]
        back = torch.arange(rows, 0, -1, dtype=marks.dtype, device=marks.device)
        since_then = back - later[..., None]
        oldest, later_oldest = marks[..., OLDEST, None], later_marks[..., OLDEST, None]
        kept = _rows(ring, (oldest - since_then.clamp(min=1)) % rows, rows)
        own = _rows(second[4], ((later_oldest - back) % rows).expand_as(since_then), rows)
        gone = back + later[..., None]
        weight = torch.where(gone > rows, fallen[..., None] if gates else gamma[:, None] ** gone, 0)[..., None]
        past = _rows(ring, ((oldest - back) % rows).expand_as(since_then), rows)
        if gates:
            # A row's last number is what is left of its weight.
            past = torch.cat([past[..., :-1] * past[..., -1:], past[..., -1:]], -1)
            kept = torch.cat([kept[..., :-1], kept[..., -1:] * fallen[..., None, None]], -1)
        far = far + (weight * past).sum(2)
        ring = torch.where((since_then > 0)[..., None], kept, own)
    return sums, keys, torch.zeros_like(marks), far, ring, first[5] + second[5]


def _turned(second: Parts, marks: Tensor, a: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """The later sums of Fourier's features, whose keys counted from 0, turned by the angles of the earlier tokens."""
    angles = a.shape[1]
    turned = 1 if options.get("wave") == "pairs" else 2
    normalizer = options.get("normalizer", "one_plus")
    unturned = normalizer != "literal" and (normalizer == "unrotated" or turned == 2)
    # Denominators of their own are sums of features that do not turn.
    own_keys = normalizer == "unrotated"
    mapped = 2 * angles // turned
    features = mapped * (turned if own_keys else turned + unturned)
    angle = a[..., 0].double() * tokens(marks.detach())[..., None].double()
    cos, sin = (turn.to(marks.dtype)[..., None] for turn in (angle.cos(), angle.sin()))

    def turn(part: Tensor, width: int) -> Tensor:
        x, y, rest = part.split([angles * width, angles * width, part.shape[-1] - 2 * angles * width], -1)
        x, y = (half.unflatten(-1, (angles, width)) for half in (x, y))
        return torch.cat([(x * cos - y * sin).flatten(2), (y * cos + x * sin).flatten(2), rest], -1)

    sums, keys, *others = second
    return [turn(sums, sums.shape[-1] // features), keys if own_keys else turn(keys, 1), *others]


def _toeplitz(first: Parts, second: Parts, summed: Parts, near: int) -> Parts:
    """The later ring after the earlier one; what no longer fits becomes far."""
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


def _aft(first: Parts, second: Parts, summed: Parts) -> Parts:
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


def _short_convolution(first: Parts, second: Parts, both: Parts, before: int) -> Parts:
    if not before:
        return both
    slot = torch.arange(before, device=first[0].device)
    new = second[2].long()
    older = _rows(first[0], (slot + new).clamp(max=before - 1), before)
    newer = second[0].unflatten(-1, (before, -1))
    return [torch.where((slot < before - new)[..., None], older, newer), *both[1:]]


def _softmax(first: Parts, second: Parts, capacity: int) -> Parts:
    """The later keys and values after the earlier ones."""
    place = torch.arange(capacity, device=first[0].device)
    counts, later = (part[2].detach().long() for part in (first, second))
    new = (place >= counts) & (place < counts + later)
    from_later = (place - counts).clamp(min=0)
    rows = [torch.where(new[..., None], _rows(b, from_later, capacity), _rows(a, place.expand_as(new), capacity))
            for a, b in zip(first[:2], second[:2])]  # fmt: skip
    return *rows, torch.zeros_like(first[2]), *first[3:]
