"""Toeplitz positions and softmax attention, a few rows and the keys that they may see at a time: O(L^2) time in bounded memory where
all distances differ, O(L) where far ones share a weight or are out of a window."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import Call, by_rows, divide, exponentials, lowest, shifted
from .features import elementwise
from .rings import circled, ordered, present, rows_at, values_of

#: Places of the marks of a Toeplitz state: where the ring's next row goes, rows that hold a token, and the exponent of the sums.
_SLOT, _TOKENS, _EXPONENT = 0, 1, 2


class _Sums:
    """Sums of keys' features times values, relative to the largest exponent of a key so far where somebody divides them."""

    def __init__(self, keys: _Keys, divided: bool, before: tuple[Tensor, Tensor] | None) -> None:
        self.keys, self.divided = keys, divided
        nothing = keys.features.new_zeros((*keys.features.shape[:2], keys.features.shape[3], keys.values.shape[3]))
        self.now = (nothing, nothing[..., :1, :1].detach() + (lowest(nothing) if divided else 0)) if before is None else before

    def add(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """With the keys ``first .. last``."""
        if last > first:
            sums, level = self.now
            own, features, values = (x[:, :, first:last] for x in (self.keys.exponents, self.keys.features, self.keys.values))
            highest = torch.maximum(level, own.amax(2, keepdim=True)) if self.divided else torch.zeros_like(level)
            self.now = sums * (level - highest).exp() + features.mT @ (values * (own - highest).exp()), highest
        return self.now


@dataclass(frozen=True)
class _Keys:
    """Features, exponents and ``[v, 1]`` of keys, behind those of a state's ring; and the sums of all before with their exponent."""

    features: Tensor
    exponents: Tensor
    values: Tensor
    queries: Tensor
    past: int
    before: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, call: Call, divided: bool) -> _Keys:
        k, v, there = call.without_padding()
        queries, features, exponents = call.features(k, divided)
        values = torch.cat([v, there.expand(-1, k.shape[1], -1, -1)], -1)
        if call.initial is None:
            return cls(features, exponents, values, queries, 0, None)
        sums, weights, marks, ring_k, ring_exponents, ring_v = call.initial
        past, before = near_rows(call.parameters[0], call.settings), None
        if weights.shape[-1]:
            whole = torch.cat([sums.unflatten(-1, (features.shape[3], v.shape[3])), weights[..., None]], -1)
            before = whole, marks[..., _EXPONENT, None, None].detach().clamp(min=lowest(sums))
        if past:
            slot = marks[..., _SLOT, None]
            keys, rows = ordered(ring_k, slot, past), values_of(ring_v, slot, past)
            own = ordered(ring_exponents, slot, past) if ring_exponents.shape[-1] else torch.zeros_like(keys[..., :1])
            there = rows[..., -1:] == 1
            own, keys = own.detach().masked_fill(~there, -torch.inf), present(keys, there)
            features, exponents, values = (torch.cat(x, 2) for x in ((keys, features), (own, exponents), (rows, values)))
        return cls(features, exponents, values, queries, past, before)

    def grouped(self, group: int) -> _Keys:
        """For every query head."""
        features, exponents, values = (x.repeat_interleave(group, 1) for x in (self.features, self.exponents, self.values))
        before = None if self.before is None else (self.before[0].repeat_interleave(group, 1), self.before[1].repeat_interleave(group, 1))
        return _Keys(features, exponents, values, self.queries, self.past, before)


def toeplitz(call: Call) -> Tensor:
    """`longspan.ops.toeplitz_attention`."""
    settings, (table,) = call.settings, call.parameters
    normalize = settings.get("normalize", True)
    keys = _Keys.of(call, normalize).grouped(call.group)
    bias, ends, near, buckets = table.flatten(1), _ends(table, settings), near_rows(table, settings), _buckets(table, settings)
    if not (call.is_causal and settings.get("kind", "table") == "table") and not _covered(table, settings, call):
        raise ValueError(f"toeplitz: bias: expected an entry for every distance of the call, got shape {tuple(table.shape)}")
    passed = None if call.initial is None else call.initial[2][:, :1, _TOKENS].detach().long()
    extended = replace(call, k=keys.features, offset=call.offset + keys.past)
    # Buckets of one side give all later keys the first one.
    after = 0 if settings.get("kind") == "buckets" and not settings.get("bidirectional", True) else near
    pieces = extended.pieces(1) if ends is None else extended.pieces(1, near - 1, after - 1)
    #: Of each piece, by its first row, sums of the keys that all its rows have far behind them, and far ahead.
    far: dict[int, list[tuple[Tensor, Tensor, int]]] = {rows.start: [] for rows, _ in pieces}
    if ends is not None:
        sums, taken = _Sums(keys, normalize, keys.before), 0
        for rows, seen in pieces:
            far[rows.start].append((*sums.add(taken, seen.start), ends[0]))
            taken = max(taken, seen.start)
        if not call.is_causal:
            sums, taken = _Sums(keys, normalize, None), keys.features.shape[2]
            for rows, seen in reversed(pieces):
                far[rows.start].append((*sums.add(seen.stop, taken), ends[1]))
                taken = min(taken, seen.stop)

    def piece(rows: slice, seen: slice) -> Tensor:
        count, of_pairs = rows.stop - rows.start, settings.get("kind", "table") == "grid"
        if of_pairs:
            distance = extended.distance(rows, seen)
        else:
            # One entry a distance, of which each row has another stretch.
            first, distances = seen.start - rows.start - extended.offset + 1 - count, max(count + seen.stop - seen.start - 1, 0)
            distance = torch.arange(first, first + distances, device=bias.device)[None, :]
        entry, reached = _entries(table, settings, rows.start + call.offset, distance, passed, buckets)
        hidden = ~reached | (distance > 0) if call.is_causal else ~reached
        logs = bias[:, entry].transpose(0, 1).masked_fill(hidden[:, None], -torch.inf)
        if not of_pairs:
            logs = shifted(logs.expand(-1, -1, count, -1), count - 1, seen.stop - seen.start)
        logs = logs + keys.exponents[:, :, seen].mT
        beyond = [(matrix, level + bias[:, at, None, None]) for matrix, level, at in far[rows.start]]
        highest = logs.new_zeros(())
        tops = [level.detach() for _, level in beyond] + ([logs.detach().amax(3, keepdim=True)] if logs.shape[3] else [])
        if normalize and tops:
            highest = torch.stack(torch.broadcast_tensors(*tops)).amax(0).clamp(min=lowest(logs))
        q = keys.queries[:, :, rows]
        sums = ((logs - highest).exp() * (q @ keys.features[:, :, seen].mT)) @ keys.values[:, :, seen]
        for matrix, level in beyond:
            sums = sums + (level - highest).exp() * (q @ matrix)
        return sums

    out = divide(by_rows(pieces, piece), normalize)
    if passed is not None and ends is None:
        # Nobody may look at the numbers of a state: beyond the reach of a table there are none.
        token = passed + torch.arange(call.q.shape[2], device=out.device) + call.offset
        out = out.masked_fill((token >= near)[:, None, :, None], torch.nan)
    return out


def toeplitz_state(call: Call) -> list[Tensor]:
    """The parts of the state after the last key."""
    settings, (table,) = call.settings, call.parameters
    keys, near, count = _Keys.of(call, True), near_rows(table, settings), call.lengths[..., None]
    features, exponents, values = keys.features, keys.exponents, keys.values
    marks = features.new_zeros((*features.shape[:2], 3)) if call.initial is None else call.initial[2].detach()
    none = marks[..., :0]
    slot, held = ((marks[..., place, None].long() + count) for place in (_SLOT, _TOKENS))
    slot = slot % max(near, 1)
    if call.initial is None:
        features, exponents, values = (
            F.pad(x, (0, 0, near, 0), value=fill) for x, fill in ((features, 0.0), (exponents, -torch.inf), (values, 0.0))
        )  # fmt: skip
    exponential = elementwise(settings.get("feature_map", "elu+1")) == "exp"
    sums = weights = none
    top = torch.full_like(marks[..., :1], -torch.inf)
    if _ends(table, settings) is not None:
        # Those that left the ring.
        gone = torch.arange(features.shape[2], device=features.device) < count
        own = exponents.masked_fill(~gone[..., None], -torch.inf)
        before = None if call.initial is None else call.initial[2].detach()[..., _EXPONENT, None, None]
        found = own.amax(2, keepdim=True) if own.shape[2] else torch.full_like(top[..., None], -torch.inf)
        found = found if before is None else torch.maximum(found, before)
        finite = found.clamp(min=lowest(features))
        both = features.mT @ (values * (own - finite).exp())
        if keys.before is not None:
            both = both + keys.before[0] * (keys.before[1] - finite).exp()
        sums, weights, top = both[..., :-1].flatten(2), both[..., -1], found[..., 0]
    rows = [circled(x, count, slot, near) if near else none for x in (features, exponents, values)]
    parts = [sums, weights, torch.cat([slot.to(top.dtype), held.clamp(max=near).to(top.dtype), top], -1),
             rows[0], rows[1] if exponential else none, rows[2]]  # fmt: skip
    if _ends(table, settings) is None:
        # As the output: a table reaches no further.
        parts = [part.masked_fill(held > near, torch.nan) for part in parts]
    return parts


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


def near_rows(bias: Tensor, settings: dict[str, Any]) -> int:
    """How many of the latest tokens have weights of their own: rows of a state's ring."""
    kind = settings.get("kind", "table")
    if kind == "grid":
        height, width = bias.shape[1] // 2 + 1, bias.shape[2] // 2 + 1
        return height * width
    if kind == "buckets":
        return int(settings.get("max_distance", 128))
    near: int = max(-_first_distance(bias, settings) + (kind == "table"), 0)
    return near


def _ends(bias: Tensor, settings: dict[str, Any]) -> tuple[int, int] | None:
    """The entries of all keys before the `near_rows` ones, and as far ahead; ``None`` where each distance has one of its own."""
    kind = settings.get("kind", "table")
    if kind == "clipped":
        return 0, bias.shape[1] - 1
    if kind == "buckets":
        return (bias.shape[1] // 2 - 1, bias.shape[1] - 1) if settings.get("bidirectional", True) else (bias.shape[1] - 1, 0)
    return None


def _buckets(bias: Tensor, settings: dict[str, Any]) -> Tensor | None:
    """The bucket of each distance to one side, up to the one from which on all share the last."""
    if settings.get("kind", "table") != "buckets":
        return None
    far, two_sided = int(settings.get("max_distance", 128)), settings.get("bidirectional", True)
    side = bias.shape[1] // (2 if two_sided else 1)
    exact = side // 2
    if not 0 < exact < far or (two_sided and bias.shape[1] % 2):
        raise ValueError(f"toeplitz: bias buckets: expected at least {4 if two_sided else 2} buckets, even in number if bidirectional, "
                         f"and a larger max_distance than the exact ones, half of a side, got {bias.shape[1]} up to distance {far}")  # fmt: skip
    octaves = math.log(far / exact)
    far_ones = [min(exact + int(math.log(n / exact) / octaves * (side - exact)), side - 1) for n in range(exact, far + 1)]
    return torch.tensor([*range(exact), *far_ones], device=bias.device)


def _entries(
    bias: Tensor, settings: dict[str, Any], first: int, distance: Tensor, passed: Tensor | None, buckets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Which entry of a head's table belongs to each pair, and whether there is one, ``[batch or 1, rows, keys]``; the rows stand at
    tokens ``first ..``, after those that have ``passed``, ``[batch, 1]``."""
    kind = settings.get("kind", "table")
    if kind == "grid":
        height, width = bias.shape[1] // 2 + 1, bias.shape[2] // 2 + 1
        token = torch.arange(first, first + distance.shape[0], device=distance.device)[None, :, None]
        token = token if passed is None else token + passed[..., None]
        key = distance + token
        down, right = key // width - token // width, key % width - token % width
        reached = (down.abs() < height) & (key < height * width) & (token < height * width) & (token >= 0)
        entry = (down.clamp(1 - height, height - 1) + height - 1) * bias.shape[2] + right + width - 1
        return entry, reached
    entries = bias.shape[1]
    if buckets is not None:
        two_sided = settings.get("bidirectional", True)
        side = entries // 2 if two_sided else entries
        start = torch.where(distance > 0, side, 0) if two_sided else 0
        back = distance.abs() if two_sided else (-distance).clamp(min=0)
        return (start + buckets[back.clamp(max=len(buckets) - 1)])[None], torch.ones_like(distance, dtype=torch.bool)[None]
    index = distance - _first_distance(bias, settings)
    reached = torch.ones_like(index, dtype=torch.bool) if kind == "clipped" else (index >= 0) & (index < entries)
    return index.clamp(0, entries - 1)[None], reached[None]


def with_cache(call: Call) -> Call:
    """Softmax attention to the keys of a state as well: they stand before those of the call."""
    if call.initial is None:
        return call
    k, v, count, there, *_ = call.initial
    window, count = call.settings.get("window"), count[:, :1].detach()
    rows = int(window or call.settings.get("capacity", 4096))
    if not rows:
        return replace(call, initial=None)
    k, v = k.unflatten(-1, (rows, call.k.shape[3])), v.unflatten(-1, (rows, call.v.shape[3]))
    if window is None:
        absent = torch.arange(rows, device=k.device) >= count[:, 0]
        # Nobody may look at the numbers of a state: one that is full has no numbers.
        over = ~(count[:, 0] + _new(call) <= rows)
        k = k.masked_fill((over & (torch.arange(rows, device=k.device) == 0))[:, None, :, None], torch.nan)
        absent = absent & ~over
    else:
        slot = torch.remainder(count.long(), rows)
        k, v, there = (ordered(x, slot, rows) for x in (k.flatten(2), v.flatten(2), there))
        absent = there[:, 0, :, 0] == 0
    mask = call.key_padding_mask
    mask = torch.zeros((call.k.shape[0], call.k.shape[2]), dtype=torch.bool, device=k.device) if mask is None else mask
    return replace(
        call, k=torch.cat([k, call.k], 2), v=torch.cat([v, call.v], 2), offset=call.offset + rows, initial=None,
        key_padding_mask=torch.cat([absent, mask], 1),
    )  # fmt: skip


def _new(call: Call) -> Tensor:
    """Keys that are not ignored, ``[batch, 1]``."""
    mask = call.key_padding_mask
    if mask is None:
        return torch.full((call.k.shape[0], 1), call.k.shape[2], device=call.k.device)
    return (~mask).sum(1, keepdim=True)


def softmax_state(call: Call) -> list[Tensor]:
    """The parts of the state after the last key."""
    k, v, there = call.without_padding()
    window, kv_heads = call.settings.get("window"), call.k.shape[1]
    rows = int(window or call.settings.get("capacity", 4096))
    there = there.expand(-1, kv_heads, -1, -1)
    if call.initial is None:
        before = [x.new_zeros((*x.shape[:2], rows, x.shape[3])) for x in (k, v, there)]
        count = k.new_zeros((*k.shape[:2], 1), dtype=torch.long)
    else:
        before = [x.unflatten(-1, (rows, x.shape[-1] // max(rows, 1))) for x in (*call.initial[:2], call.initial[3])]
        count = call.initial[2].detach().long()
        if window is None:
            before = [present(x, (torch.arange(rows, device=k.device) < count)[..., None]) for x in before]
    none = k.new_zeros((*k.shape[:2], 0))
    if window is not None:
        new = call.lengths[:, None]
        past = [ordered(x.flatten(2), count % rows, rows) for x in before]
        past = [present(past[0], past[2] == 1), present(past[1], past[2] == 1), past[2].detach()]
        total = count + new
        kept = [circled(torch.cat([a, b], 2), new, total % rows, rows) for a, b in zip(past, (k, v, there))]
        total = torch.where(total < rows, total, rows + total % rows)
        return [kept[0], kept[1], total.to(k.dtype), kept[2], none, none]
    new = _new(call)[:, None]
    place = torch.arange(rows, device=k.device) - count
    if k.shape[2]:
        if call.key_padding_mask is not None:
            # Those that are there to the front.
            order = call.key_padding_mask.to(torch.uint8).argsort(dim=1, stable=True)[:, None]
            k, v = rows_at(k, order), rows_at(v, order)
        at, fresh = place.clamp(0, k.shape[2] - 1), ((place >= 0) & (place < new))[..., None]
        before = [torch.where(fresh, rows_at(b, at), a) for a, b in zip(before, (k, v))]
    parts = [before[0].flatten(2), before[1].flatten(2), (count + new).to(k.dtype)]
    return [*(part.masked_fill(count + new > rows, torch.nan) for part in parts), none, none, none]


def softmax(call: Call) -> Tensor:
    """`longspan.ops.softmax_attention`."""
    k, v, there = call.without_padding()
    k, v = k.repeat_interleave(call.group, 1), v.repeat_interleave(call.group, 1)
    scale, window = call.settings.get("scale"), call.settings.get("window")
    scale = max(k.shape[3], 1) ** -0.5 if scale is None else scale
    reach = () if window is None else (window - 1, window - 1)

    def piece(rows: slice, keys: slice) -> Tensor:
        seen, distance = there[:, :, keys].mT > 0, call.distance(rows, keys)
        if call.is_causal:
            seen = seen & (distance <= 0)
        if window is not None:
            seen = seen & (distance.abs() < window)
        weights = exponentials(scale * call.q[:, :, rows] @ k[:, :, keys].mT, seen)
        return divide(torch.cat([weights @ v[:, :, keys], weights.sum(-1, keepdim=True)], -1))

    return by_rows(call.pieces(1, *reach), piece)
