"""AFT, a few rows of all pairs at a time: O(L^2) time in bounded memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .call import Call, exponentials


def aft(biases: Callable[[Call, slice, Tensor], Tensor] | None) -> Callable[[Call], Tensor]:
    """AFT with ``biases(call, rows, distance)``, ``[heads or 1, rows, keys]``, or without."""

    def formulation(call: Call) -> Tensor:
        k, v, there = call.without_padding()
        k, v = k.repeat_interleave(call.group, 1), v.repeat_interleave(call.group, 1)

        def piece(rows: slice, distance: Tensor) -> Tensor:
            seen = there[:, :, None, :, 0] > 0
            if call.is_causal:
                seen = seen & (distance <= 0)
            scores = k[:, :, None].expand(-1, -1, len(distance), -1, -1)
            if biases is not None:
                scores = scores + biases(call, rows, distance)[None, ..., None]
            weights = exponentials(scores, seen[..., None])
            total = weights.sum(3)
            means = torch.where(total == 0, 0, (weights * v[:, :, None]).sum(3) / torch.where(total == 0, 1, total))
            return means * torch.sigmoid(call.q[:, :, rows])

        return call.by_rows(k.shape[2] * call.q.shape[3], piece)

    return formulation


def _positions(table: Tensor, rows: slice, offset: int) -> Tensor:
    """Rows of a table by position for the queries ``rows``; an error where the table has none."""
    first, last = rows.start + offset, rows.stop + offset
    if rows.start < rows.stop and not 0 <= first < last <= table.shape[0]:
        raise ValueError(f"aft: position: expected positions of queries from 0 to {table.shape[0] - 1}, got {first} to {last - 1}")
    return table[max(first, 0) : max(last, 0)]


def full_biases(call: Call, rows: slice, distance: Tensor) -> Tensor:
    parameters, keys = call.parameters, distance.shape[1]
    *_, z = parameters
    columns = z[:, :keys] if len(parameters) == 1 else z[:keys]
    if columns.shape[1 if len(parameters) == 1 else 0] != keys:
        raise ValueError(f"aft-full: keys: expected at most {z.shape[0]} positions, got {keys}")
    if len(parameters) == 1:
        return _positions(columns, rows, call.offset)[None]
    return (_positions(parameters[0], rows, call.offset) @ columns.T)[None]


def local_biases(call: Call, rows: slice, distance: Tensor) -> Tensor:
    (w,) = call.parameters
    column = distance + w.shape[1] // 2
    inside = (column >= 0) & (column < w.shape[1])
    own = _positions(w, rows, call.offset) if call.settings.get("by_position") else w[rows]
    near = own.gather(1, column.clamp(0, w.shape[1] - 1))
    return torch.where(inside, near, 0)[None]


def conv_biases(call: Call, rows: slice, distance: Tensor) -> Tensor:
    w, *scale = call.parameters
    image = call.settings.get("image")
    taps = w.shape[-1]
    w = w.flatten(1)
    if scale:
        gamma, beta = scale
        centred = w - w.mean(1, keepdim=True)
        deviation = centred.square().mean(1, keepdim=True).sqrt()
        # Where all taps are equal the kernel is beta.
        flat = deviation == 0
        w = gamma[:, None] * torch.where(flat, 0, centred / torch.where(flat, 1, deviation)) + beta[:, None]
    if image:
        token = torch.arange(rows.start, rows.stop, device=w.device)[:, None]
        key = torch.arange(distance.shape[1], device=w.device)[None, :]
        tap_rows = w.shape[1] // taps
        down = key // image[1] - token // image[1] + (tap_rows - 1) // 2
        right = key % image[1] - token % image[1] + (taps - 1) // 2
        inside = (down >= 0) & (down < tap_rows) & (right >= 0) & (right < taps)
        column = down.clamp(0, tap_rows - 1) * taps + right.clamp(0, taps - 1)
    else:
        column = distance + (taps - 1 if call.is_causal else (taps - 1) // 2)
        inside = (column >= 0) & (column < taps)
        column = column.clamp(0, taps - 1)
    return torch.where(inside, w[:, column], 0)
