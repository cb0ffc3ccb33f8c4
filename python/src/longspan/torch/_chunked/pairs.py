"""Toeplitz positions and softmax attention, a few rows of all pairs at a time: O(L^2) time in bounded memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .call import Call, divide, exponentials


def toeplitz(call: Call) -> Tensor:
    """`longspan.ops.toeplitz_attention`."""
    settings, (table,) = call.settings, call.parameters
    normalize = settings.get("normalize", True)
    k, v, there = call.without_padding()
    left, *of_keys = call.features(k, normalize)
    right, exponents, values = (x.repeat_interleave(call.group, 1) for x in (*of_keys, v))
    values = torch.cat([values, there.expand(-1, left.shape[1], -1, -1)], -1)
    bias = table.flatten(1)
    if not call.is_causal and not _covered(table, settings, call):
        raise ValueError(f"toeplitz: bias: expected an entry for every distance of the call, got shape {tuple(table.shape)}")

    def piece(rows: slice, distance: Tensor) -> Tensor:
        entry, reached = _entries(table, settings, rows.start + call.offset, distance)
        hidden = ~reached | (distance > 0) if call.is_causal else ~reached
        logs = bias[:, entry] + exponents.transpose(-1, -2)
        weights = exponentials(logs, ~hidden) if normalize else logs.exp().masked_fill(hidden, 0)
        return (weights * (left[:, :, rows] @ right.transpose(-1, -2))) @ values

    return divide(call.by_rows(k.shape[2], piece), normalize)


def _covered(bias: Tensor, settings: dict[str, Any], call: Call) -> bool:
    """Whether the table has an entry for every pair of the call."""
    kind, queries, keys = settings.get("kind", "table"), call.q.shape[2], call.k.shape[2]
    if kind in ("clipped", "buckets") or queries == 0 or keys == 0:
        return True
    if kind == "grid":
        places = (bias.shape[1] // 2 + 1) * (bias.shape[2] // 2 + 1)
        return call.offset >= 0 and max(queries + call.offset, keys) <= places
    first = _first_distance(bias, settings)
    return first <= 1 - queries - call.offset and keys - call.offset <= first + bias.shape[1]


def _first_distance(bias: Tensor, settings: dict[str, Any]) -> int:
    """The distance of a head's first entry."""
    if settings.get("kind", "table") == "clipped" or settings.get("centred"):
        return -(bias.shape[1] // 2)
    first: int = settings["first"]
    return first


def _entries(bias: Tensor, settings: dict[str, Any], first: int, distance: Tensor) -> tuple[Tensor, Tensor]:
    """Which entry of a head's table belongs to each pair, and whether there is one; the rows stand at keys ``first ..``."""
    kind = settings.get("kind", "table")
    if kind == "grid":
        height, width = bias.shape[1] // 2 + 1, bias.shape[2] // 2 + 1
        token = torch.arange(first, first + distance.shape[0], device=distance.device)[:, None]
        key = distance + token
        down, right = key // width - token // width, key % width - token % width
        reached = (down.abs() < height) & (key < height * width) & (token < height * width) & (token >= 0)
        entry = (down.clamp(1 - height, height - 1) + height - 1) * bias.shape[2] + right + width - 1
        return entry, reached
    entries = bias.shape[1]
    if kind == "buckets":
        two_sided = settings.get("bidirectional", True)
        side = entries // 2 if two_sided else entries
        start = torch.where(distance > 0, side, 0) if two_sided else 0
        back = distance.abs() if two_sided else (-distance).clamp(min=0)
        exact = side // 2
        octaves = (back.clamp(min=max(exact, 1)).double() / max(exact, 1)).log()
        octaves = octaves / math.log(settings.get("max_distance", 128) / max(exact, 1))
        far = (exact + (octaves * (side - exact)).long()).clamp(max=side - 1)
        return start + torch.where(back < exact, back, far), torch.ones_like(distance, dtype=torch.bool)
    index = distance - _first_distance(bias, settings)
    reached = torch.ones_like(index, dtype=torch.bool) if kind == "clipped" else (index >= 0) & (index < entries)
    return index.clamp(0, entries - 1), reached


def softmax(call: Call) -> Tensor:
    """`longspan.ops.softmax_attention`."""
    k, v, there = call.without_padding()
    k, v = k.repeat_interleave(call.group, 1), v.repeat_interleave(call.group, 1)
    scale, window = call.settings.get("scale"), call.settings.get("window")
    scale = max(k.shape[3], 1) ** -0.5 if scale is None else scale

    def piece(rows: slice, distance: Tensor) -> Tensor:
        seen = there.transpose(-1, -2) > 0
        if call.is_causal:
            seen = seen & (distance <= 0)
        if window is not None:
            seen = seen & (distance.abs() < window)
        weights = exponentials(scale * call.q[:, :, rows] @ k.transpose(-1, -2), seen)
        return divide(torch.cat([weights @ v, weights.sum(-1, keepdim=True)], -1))

    return call.by_rows(k.shape[2], piece)
