"""AFT: keys within the reach of biases pair by pair, all others as running sums. O(L) but for biases of all pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import Call, by_rows, lowest, recomputed, shifted
from .rings import circled, ordered, present

#: Places of a state's marks: the ring's oldest row, the rows that hold a token, and the tokens before.
_OLDEST, _FILLED, _POSITION = 0, 1, 2
#: Items of a block of running sums.
_BLOCK = 16


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
    top = k.detach().clamp(min=lowest(k))
    # `cummax` is not on every device, nor in ONNX.
    for reach in (1 << n for n in range((max(k.shape[2], 1) - 1).bit_length())):
        top = torch.cat([top[:, :, :reach], torch.maximum(top[:, :, reach:], top[:, :, :-reach])], 2)
    own = (k - top).exp()
    sums = _joined(torch.cat([own * v, own * weight], -1), top if top.shape[3] == 1 else torch.cat([top, top], -1))
    return sums[..., : v.shape[3]], sums[..., v.shape[3] :], top


def _joined(sums: Tensor, level: Tensor) -> Tensor:
    """Running sums ``[..., items, width]`` of items that are relative to levels, which never fall: over 1, 2, 4, ... items of a block at a time, then
    likewise over the blocks."""
    count = sums.shape[-2]
    if count > _BLOCK:
        extra = -count % _BLOCK
        whole = torch.cat([level, level[..., -1:, :].expand(*level.shape[:-2], extra, -1)], -2).unflatten(-2, (-1, _BLOCK))
        blocks = _joined(F.pad(sums, (0, 0, 0, extra)).unflatten(-2, (-1, _BLOCK)), whole)
        before = F.pad(_joined(blocks[..., -1, :], whole[..., -1, :])[..., :-1, :], (0, 0, 1, 0))
        fallen = F.pad(whole[..., :-1, -1, :], (0, 0, 1, 0), value=lowest(level))
        found: Tensor = blocks + (fallen[..., None, :] - whole).exp() * before[..., None, :]
        return found.flatten(-3, -2)[..., :count, :]
    for reach in (1 << n for n in range((max(count, 1) - 1).bit_length())):
        earlier = (level[..., :-reach, :] - level[..., reach:, :]).exp() * sums[..., :-reach, :]
        sums = torch.cat([sums[..., :reach, :], sums[..., reach:, :] + earlier], -2)
    return sums


def _items(call: Call, ring: int) -> tuple[_Items, int]:
    """Keys and values behind those of the state, of which the first stands for all before its ring, and how many are of the state."""
    k, v, there = call.without_padding()
    k = k.masked_fill(there == 0, -torch.inf)
    items, past = _Items(k, v, torch.ones_like(k)), 0
    if call.initial is not None:
        numerator, denominator, exponent = (part[:, :, None] for part in call.initial[:3])
        rows = [_Items(exponent.detach().masked_fill(denominator.detach() == 0, -torch.inf), numerator, denominator)]
        if ring:
            k, v = older(call, ring)
            rows.append(_Items(k, v, torch.ones_like(k)))
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
        if call.initial is not None:
            return call.initial[4].shape[-1] // max(call.v.shape[3], 1)
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
        if reach is None:
            out = by_rows(extended.pieces(max(items.k.shape[3], items.v.shape[3])), lambda rows, seen: self._piece(extended, items, rows, seen))
        else:
            out = self._near(extended, items, *reach)
        if self.by_position and call.initial is not None:
            out = out.masked_fill(late(call), torch.nan)
        return out

    def _piece(self, call: Call, items: _Items, rows: slice, seen: slice) -> Tensor:
        """Of biases that reach all keys."""
        assert self.biases is not None
        scores = items.k[:, :, None, seen] + self.biases(call, rows, seen)[..., None]
        if call.is_causal:
            scores = scores.masked_fill((call.distance(rows, seen) > 0)[..., None], -torch.inf)
        v = items.v[:, :, seen]
        return _means(call.q[:, :, rows], scores, lambda weights: weights[..., 0] @ v if weights.shape[4] == 1 else (weights * v[:, :, None]).sum(3))

    def _near(self, call: Call, items: _Items, back: int, ahead: int) -> Tensor:
        """Of biases that reach few keys: these pair by pair, a piece of the rows at a time, and all others as running sums. What a piece has is cut
        once for all pieces, so that a backward joins its gradients once instead of adding each to zeros of the whole length."""
        assert self.biases is not None
        queries, keys, count = call.q.shape[2], items.k.shape[2], back + ahead + 1
        # One key a head weighs all of a value, so values of a piece take one product with its weights, along the diagonals of a matrix.
        joint = items.k.shape[3] == 1
        step = max(call.pieces(1 if joint else max(items.k.shape[3], items.v.shape[3]), back, ahead, shared=joint)[0][0].stop, 1)
        at = torch.arange(queries, device=items.k.device) + call.offset
        by_row = [call.q, self.biases(call, slice(0, queries), slice(0, 0)).expand(-1, -1, queries, -1)]
        if keys:
            by_row += _at(items.sums(), at - back - 1)
            if not call.is_causal:
                by_row += _at(items.flipped().sums(), keys - 2 - at - ahead)
        windows = (_windows(x, fill, call.offset - back, queries, step, count) for x, fill in ((items.k, -torch.inf), (items.v, 0.0)))

        def piece(q: Tensor, biases: Tensor, *others: Tensor) -> Tensor:
            *far, k, v = others
            rows = q.shape[2]
            k, of_each = (x.unfold(3, count, 1)[:, :, :, :rows].movedim(2, 4) for x in (k, v))
            of_all = v.mT[:, :, : rows + count - 1]
            return _means(q, k + biases[..., None], lambda weights: shifted(weights[..., 0], 0, of_all.shape[2]) @ of_all if joint else
                          (weights * of_each).sum(3), *far)  # fmt: skip

        return torch.cat([recomputed(piece, *parts) for parts in zip(*(x.split(step, 2) for x in by_row), *windows)], 2)

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
        ring = self._ring(call)
        items, past = _items(call, ring)
        if not past:
            k, v = older(call, ring)
            items = _Items(*(torch.cat(x, 2) for x in ((k, items.k), (v, items.v), (torch.ones_like(k), items.weight))))
        # Those that no window reaches any more.
        far = torch.arange(items.k.shape[2], device=items.k.device) < call.lengths[..., None] + bool(past)
        k = items.k.masked_fill(~far[..., None], -torch.inf)
        top = k.detach().amax(2, keepdim=True).clamp(min=lowest(k)) if k.shape[2] else k.new_full((*k.shape[:2], 1, k.shape[3]), lowest(k))
        weights = (k - top).exp()
        sums, total = (weights * items.v).sum(2), (weights * items.weight).sum(2)
        whole = 1 if past else 0
        rows = rows_after(call, items.k[:, :, whole:], items.v[:, :, whole:], ring, _length(call) if self.by_position else 0)
        return [sums, total, top[:, :, 0], *rows]


def older(call: Call, ring: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the ring before the call, from the oldest on: minus infinity and 0 where there are none."""
    if call.initial is None:
        return call.k.new_full((*call.k.shape[:2], ring, call.k.shape[3]), -torch.inf), call.v.new_zeros((*call.v.shape[:2], ring, call.v.shape[3]))
    k, v = (ordered(x, call.initial[5][..., _OLDEST, None], ring) for x in call.initial[3:5])
    return k, present(v, k.detach() != -torch.inf)


def rows_after(call: Call, k: Tensor, v: Tensor, ring: int, positions: int) -> list[Tensor]:
    """The ring after the last key, of keys and values with the older ones in front, and the marks."""
    count = call.lengths[..., None]
    marks = count.new_zeros((*k.shape[:2], 3)) if call.initial is None else call.initial[5].detach()[..., :3].long()
    slot = (marks[..., _OLDEST, None] + count) % max(ring, 1)
    k, v = (x.to(torch.promote_types(torch.float32, x.dtype)) for x in ((k, v) if ring else (k[:, :, :0], v[:, :, :0])))
    held, place = (marks[..., _FILLED, None] + count).clamp(max=ring), (marks[..., _POSITION, None] + count).clamp(max=positions)
    return [*(circled(x, count, slot, ring) for x in (k, v)), torch.cat([slot, held, place], -1).to(k.dtype)]


def _means(q: Tensor, scores: Tensor, weighed: Callable[[Tensor], Tensor], *far: Tensor) -> Tensor:
    """Of each row the means of values that the exponentials of ``scores``, ``[batch, heads, rows, keys, width or 1]``, have ``weighed``, beside
    running sums of others: of values, of weights, and their exponent, one after the other."""
    tops = [*far[2::3]] + ([scores.detach().amax(3)] if scores.shape[3] else [])
    highest = torch.stack(tops).amax(0).clamp(min=lowest(scores)) if tops else scores.new_zeros(())
    weights = (scores - highest[:, :, :, None]).exp() if tops else scores
    sums, total = weighed(weights), weights.sum(3)
    for own, weight, top in zip(far[::3], far[1::3], far[2::3]):
        factor = (top - highest).exp()
        sums, total = sums + factor * own, total + factor * weight
    return torch.where(total == 0, 0, sums / torch.where(total == 0, 1, total)) * torch.sigmoid(q)


def _windows(x: Tensor, fill: float, begin: int, queries: int, step: int, count: int) -> Sequence[Tensor]:
    """Of each ``step`` rows the items from ``begin`` places after the first row to ``count - 1`` after those of the last, ``[..., width, items]``;
    ``fill`` where there are none."""
    last = begin + -(-max(queries, 1) // step) * step + count - 1
    inside = x[:, :, max(begin, 0) : max(last, 0)]
    left = min(max(-begin, 0), last - begin)
    whole = F.pad(inside, (0, 0, left, last - begin - left - inside.shape[2]), value=fill)
    return whole.unfold(2, step + count - 1, step).unbind(2)


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


def late(call: Call) -> Tensor:
    """Rows whose position no table has, ``[batch or 1, 1, queries, 1]``: as nobody may look at the numbers of a state, they are no numbers."""
    place = _tokens(call) + torch.arange(call.q.shape[2], device=call.q.device) + call.offset
    return (place >= _length(call))[:, None, :, None]


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
