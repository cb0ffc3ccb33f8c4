"""AFT: keys within the reach of biases pair by pair, all others as running sums. O(L) but for biases of all pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import Call, by_rows, lowest, recomputed
from .rings import circled, ordered, present

#: Places of a state's marks: the ring's oldest row, the rows that hold a token, and the tokens before.
_OLDEST, _FILLED, _POSITION = 0, 1, 2


@dataclass(frozen=True)
class _Items:
    """What queries see: keys ``k`` that stand for ``v`` and ``weight`` each, ``[batch, kv_heads, items, width or 1]``."""

    k: Tensor
    v: Tensor
    weight: Tensor

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of all items up to each: of values, of weights, and the exponent that both are relative to, the largest key so far."""
        found: tuple[Tensor, Tensor, Tensor] = recomputed(_running_sums, self.k, self.v, self.weight)
        return found

    def flipped(self) -> _Items:
        return _Items(self.k.flip(2), self.v.flip(2), self.weight.flip(2))


def _running_sums(k: Tensor, v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What reaches over 1, 2, 4, ... items at a time."""
    reaches = [1 << n for n in range((max(k.shape[2], 1) - 1).bit_length())]
    top = k.detach().clamp(min=lowest(k))
    for reach in reaches:
        top = torch.cat([top[:, :, :reach], torch.maximum(top[:, :, reach:], top[:, :, :-reach])], 2)
    own = (k - top).exp()
    sums = torch.cat([own * v, own * weight], -1)
    level = top if top.shape[3] == 1 else torch.cat([top, top], -1)
    for reach in reaches:
        earlier = (level[:, :, :-reach] - level[:, :, reach:]).exp() * sums[:, :, :-reach]
        sums = torch.cat([sums[:, :, :reach], sums[:, :, reach:] + earlier], 2)
    return sums[..., : v.shape[3]], sums[..., v.shape[3] :], top


def _items(call: Call, ring: int) -> tuple[_Items, int]:
    """Keys and values behind those of the state, of which the first stands for all before its ring, and how many are of the state."""
    k, v, there = call.without_padding()
    k = k.masked_fill(there == 0, -torch.inf)
    items, past = _Items(k, v, torch.ones_like(k)), 0
    if call.initial is not None:
        numerator, denominator, exponent, keys, values, marks = (part[:, :, None] for part in call.initial)
        rows = [_Items(exponent.detach().masked_fill(denominator.detach() == 0, -torch.inf), numerator, denominator)]
        if ring:
            slot = marks[..., 0, _OLDEST, None]
            older = [ordered(x[:, :, 0], slot, ring) for x in (keys, values)]
            there = older[0].detach() != -torch.inf
            rows.append(_Items(older[0], present(older[1], there), torch.ones_like(older[0])))
        rows.append(items)
        items = _Items(*(torch.cat(parts, 2) for parts in ([x.k for x in rows], [x.v for x in rows], [x.weight for x in rows])))
        past = 1 + ring
    return items, past


class Aft:
    """AFT with ``biases(call, rows, keys)``, ``[batch or 1, heads or 1, rows, keys]`` or of each row's own keys within a reach; or without.

    ``reach`` gives the keys before and after a row that biases reach, ``None`` for all of them; ``by_position`` says that a state counts
    tokens, because rows of a table are their positions.
    """

    def __init__(
        self, biases: Callable[[Call, slice, slice], Tensor] | None = None,
        reach: Callable[[Call], tuple[int, int] | None] = lambda call: None, by_position: bool = False,
    ) -> None:  # fmt: skip
        self.biases, self.reach, self.by_position = biases, reach, by_position

    def _ring(self, call: Call) -> int:
        """Rows of a state's ring: keys that later rows reach."""
        if self.biases is None:
            return 0
        reach = self.reach(replace(call, is_causal=True))
        return reach[0] if reach else _length(call) - 1

    def __call__(self, call: Call) -> Tensor:
        reach = self.reach(call)
        items, past = _items(call, self._ring(call))
        items = _Items(*(x.repeat_interleave(call.group, 1) for x in (items.k, items.v, items.weight)))
        extended = replace(call, k=items.k, v=items.v, offset=call.offset + past)
        if self.biases is None:
            return self._without(extended, items)
        keys = items.k.shape[2]
        before = after = None
        back, ahead = reach or (None, None)
        if back is not None and keys:
            before = items.sums()
            after = None if call.is_causal else items.flipped().sums()

        def piece(rows: slice, seen: slice) -> Tensor:
            assert self.biases is not None
            at = torch.arange(rows.start, rows.stop, device=items.k.device) + extended.offset
            biases = self.biases(extended, rows, seen)[..., None]
            if back is None or ahead is None:
                scores, v = items.k[:, :, None, seen] + biases, items.v[:, :, None, seen]
                if call.is_causal:
                    scores = scores.masked_fill((extended.distance(rows, seen) > 0)[..., None], -torch.inf)
            else:
                # Of each row the keys that biases reach.
                scores = _windows(items.k, -torch.inf, rows, extended.offset - back, back + ahead + 1) + biases
                v = _windows(items.v, 0.0, rows, extended.offset - back, back + ahead + 1)
            # Of the items that no bias reaches.
            parts = []
            if before is not None and back is not None:
                parts.append(_at(before, at - back - 1))
            if after is not None and ahead is not None:
                parts.append(_at(after, keys - 2 - at - ahead))
            tops = [top for _, _, top in parts] + ([scores.detach().amax(3)] if scores.shape[3] else [])
            highest = torch.stack(tops).amax(0).clamp(min=lowest(scores)) if tops else scores.new_zeros(())
            weights = (scores - highest[:, :, :, None]).exp() if tops else scores
            sums = weights[..., 0] @ v[:, :, 0] if v.shape[2] == weights.shape[4] == 1 else (weights * v).sum(3)
            total = weights.sum(3)
            for own, weight, top in parts:
                factor = (top - highest).exp()
                sums, total = sums + factor * own, total + factor * weight
            out = torch.where(total == 0, 0, sums / torch.where(total == 0, 1, total)) * torch.sigmoid(call.q[:, :, rows])
            if self.by_position and call.initial is not None:
                # Nobody may look at the numbers of a state: rows whose position no table has are no numbers.
                late = _tokens(call) + at - past >= _length(call)
                out = out.masked_fill(late[:, None, :, None], torch.nan)
            return out

        return by_rows(extended.pieces(max(items.k.shape[3], items.v.shape[3]), back, ahead, shared=False), piece)

    @staticmethod
    def _without(call: Call, items: _Items) -> Tensor:
        keys, queries = items.k.shape[2], call.q.shape[2]
        if not keys:
            return torch.zeros_like(call.q) * items.v.sum(2, keepdim=True)
        if call.is_causal:
            sums, total, _ = _at(items.sums(), torch.arange(queries, device=call.q.device) + call.offset)
        else:
            weights = (items.k - items.k.detach().amax(2, keepdim=True).clamp(min=lowest(items.k))).exp()
            sums, total = (weights * items.v).sum(2, keepdim=True), (weights * items.weight).sum(2, keepdim=True)
        return torch.where(total == 0, 0, sums / torch.where(total == 0, 1, total)) * torch.sigmoid(call.q)

    def state_after(self, call: Call) -> list[Tensor]:
        """The parts of the state after the last key."""
        width, ring = call.v.shape[3], self._ring(call)
        items, past = _items(call, ring)
        count = call.lengths[..., None]
        if call.initial is None:
            marks = count.new_zeros((*call.k.shape[:2], 3))
            absent = items.k.new_full((*items.k.shape[:2], ring, items.k.shape[3]), -torch.inf)
            nothing = items.v.new_zeros((*items.v.shape[:2], ring, width))
            items = _Items(*(torch.cat(x, 2) for x in ((absent, items.k), (nothing, items.v), (torch.ones_like(absent), items.weight))))
        else:
            marks = call.initial[5].detach()[..., :3].long()
        whole = 1 if past else 0
        # Those that no window reaches any more.
        far = torch.arange(items.k.shape[2], device=items.k.device) < count + whole
        k = items.k.masked_fill(~far[..., None], -torch.inf)
        top = k.detach().amax(2, keepdim=True).clamp(min=lowest(k)) if k.shape[2] else k.new_full((*k.shape[:2], 1, k.shape[3]), lowest(k))
        weights = (k - top).exp()
        sums, total = (weights * items.v).sum(2), (weights * items.weight).sum(2)
        slot = (marks[..., _OLDEST, None] + count) % max(ring, 1)
        rows = [circled(x[:, :, whole:], count, slot, ring) for x in (items.k, items.v)]
        if not ring:
            rows = [sums[..., :0]] * 2
        held = (marks[..., _FILLED, None] + count).clamp(max=ring)
        place = (marks[..., _POSITION, None] + count).clamp(max=_length(call) if self.by_position else 0)
        return [sums, total, top[:, :, 0], *rows, torch.cat([slot, held, place], -1).to(k.dtype)]


def _windows(x: Tensor, fill: float, rows: slice, begin: int, count: int) -> Tensor:
    """Of each row the items from ``begin`` places after it on, ``[batch, heads, rows, count, width]``; ``fill`` where there are none."""
    many = rows.stop - rows.start
    if not many:
        return x[:, :, :0, None].expand(-1, -1, -1, count, -1)
    first, whole = rows.start + begin, many + count - 1
    inside = x[:, :, max(first, 0) : max(first + whole, 0)]
    left = min(max(-first, 0), whole)
    return F.pad(inside, (0, 0, left, whole - left - inside.shape[2]), value=fill).unfold(2, count, 1).mT


def _at(sums: tuple[Tensor, Tensor, Tensor], last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Running sums up to the items ``last``; nothing before the first."""
    place = last.clamp(0, sums[0].shape[2] - 1)
    nothing = (last < 0)[:, None]
    # Not `index_select`, whose gradient a device sums in another order each time.
    own, weight, top = (x[:, :, place] for x in sums)
    return own.masked_fill(nothing, 0), weight.masked_fill(nothing, 0), top.masked_fill(nothing, lowest(top))


def _length(call: Call) -> int:
    """Positions of a table by position."""
    return call.parameters[0].shape[0]


def _tokens(call: Call) -> Tensor:
    """Tokens before the first, ``[batch, 1]``."""
    if call.initial is None or not call.k.shape[1]:
        return torch.zeros((1, 1), dtype=torch.long, device=call.q.device)
    return call.initial[5].detach()[:, 0, _POSITION, None].long()


def _past(call: Call) -> int:
    return 0 if call.initial is None else 1 + call.initial[3].shape[-1] // max(call.initial[2].shape[-1], 1)


def _positions(table: Tensor, rows: slice, call: Call) -> Tensor:
    """Rows of a table by position for the queries ``rows``, ``[batch or 1, rows, ...]``; an error where the table has none."""
    first, last = rows.start + call.offset - _past(call), rows.stop + call.offset - _past(call)
    if call.initial is None:
        if rows.start < rows.stop and not 0 <= first < last <= table.shape[0]:
            raise ValueError(f"aft: position: expected positions of queries from 0 to {table.shape[0] - 1}, got {first} to {last - 1}")
        return table[None, max(first, 0) : max(last, 0)]
    return table[(_tokens(call) + torch.arange(first, last, device=table.device)).clamp(0, table.shape[0] - 1)]


def full_biases(call: Call, rows: slice, keys: slice) -> Tensor:
    """Those of positions, of a table of pairs or of two factors."""
    *_, z = call.parameters
    of_pairs = len(call.parameters) == 1
    own = _positions(call.parameters[0], rows, call)
    if call.initial is None:
        if keys.stop > z.shape[0]:
            raise ValueError(f"aft-full: keys: expected at most {z.shape[0]} positions, got {keys.stop}")
        return (own[..., keys] if of_pairs else own @ z[keys].T)[:, None]
    # What stands before the first position is not there.
    at = (_tokens(call) + torch.arange(keys.start, keys.stop, device=z.device) - _past(call)).clamp(0, z.shape[0] - 1)
    if of_pairs:
        return own.gather(2, at[:, None].expand(-1, own.shape[1], -1))[:, None]
    return (own @ z[at].mT)[:, None]


def local_biases(call: Call, rows: slice, keys: slice) -> Tensor:
    """Those of positions, or of the rows of a call, for near keys."""
    (w,) = call.parameters
    own = _positions(w, rows, call) if call.settings.get("by_position") else w[None, rows]
    return own[:, None, :, : w.shape[1] // 2 + 1 if call.is_causal else None]


def local_reach(call: Call) -> tuple[int, int]:
    """Keys before and after a row that `local_biases` reach."""
    half = call.parameters[0].shape[1] // 2
    return half, 0 if call.is_causal else half


def conv_reach(call: Call) -> tuple[int, int] | None:
    """The same of `conv_biases`; an image looks at all places."""
    if call.settings.get("image"):
        return None
    taps = call.parameters[0].shape[-1]
    back = taps - 1 if call.is_causal else (taps - 1) // 2
    return back, taps - 1 - back


def conv_biases(call: Call, rows: slice, keys: slice) -> Tensor:
    """Those of a kernel's taps, for near keys."""
    w, *scale = call.parameters
    image = call.settings.get("image")
    taps = w.shape[-1]
    w = w.flatten(1)
    if scale:
        gamma, beta = scale
        # Relative to one of them, so that equal taps are 0, and not what rounding leaves of their mean.
        centred = w - w[:, :1].detach()
        centred = centred - centred.mean(1, keepdim=True)
        variance = centred.square().mean(1, keepdim=True)
        # Where all taps are equal the kernel is beta.
        flat = variance == 0
        w = gamma[:, None] * torch.where(flat, 0, centred) / torch.where(flat, 1, variance).sqrt() + beta[:, None]
    if not image:
        return w[None, :, None]
    token = torch.arange(rows.start, rows.stop, device=w.device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=w.device)[None, :]
    tap_rows = w.shape[1] // taps
    down = key // image[1] - token // image[1] + (tap_rows - 1) // 2
    right = key % image[1] - token % image[1] + (taps - 1) // 2
    inside = (down >= 0) & (down < tap_rows) & (right >= 0) & (right < taps)
    return torch.where(inside, w[:, down.clamp(0, tap_rows - 1) * taps + right.clamp(0, taps - 1)], 0)[None]
