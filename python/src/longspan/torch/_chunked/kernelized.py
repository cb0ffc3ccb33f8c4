"""Kernelized attention with Shaw's or Fourier positions, in O(L) time."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import Call, divide
from .features import MAPS, elementwise, lift

#: Rows at a time: in-chunk weights are CHUNK x (CHUNK + 2 radius).
CHUNK = 128

#: What takes the place of the causal recurrence while `longspan.torch.onnx.export` runs: of queries' and keys' features, values and
#: the decay of each head.
RECURRENCE: ContextVar[Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None] = ContextVar("recurrence", default=None)


def kernelized(call: Call) -> Tensor:
    """Content, relative positions, or both, under one normaliser: the formula of `longspan.ops.shaw_attention`."""
    settings, parameters, (of_queries, of_keys) = call.settings, call.parameters, call.maps
    (_, heads, queries, _), (_, kv_heads, keys, _) = call.q.shape, call.k.shape
    content = settings.get("kernelized", True)
    normalize = settings.get("normalize", True)
    whole = settings.get("feature_map", "elu+1")
    name = elementwise(whole)
    phi = MAPS[name]
    table = parameters[0] if parameters else None
    same = settings.get("rel_feature_map", "same") == "same"
    if table is not None and same:
        # A row of the table goes through the map of the keys that its head reads.
        matrix = None if of_keys is None else of_keys.repeat_interleave(call.group, 0)
        table = lift(whole, table if table.ndim == 3 else table[None], matrix)
    rho = phi if same else MAPS["identity"]

    k, v, there = call.without_padding()
    q, k = lift(whole, call.q, of_queries), lift(whole, k, of_keys)
    if name == "exp" and normalize and keys > 0:
        # Cancels in the division; without it the exponentials overflow.
        q = q - q.amax(dim=-1, keepdim=True).detach() if q.shape[-1] else q
        highest = k.new_zeros(())
        if k.numel():
            # One for each sequence and head; a table's rows, which all share, have one in common with them.
            highest = (k.amax((2, 3), keepdim=True) if table is None else k.amax()).detach()
        if table is not None and same:
            highest = torch.maximum(highest, table.amax().detach())
        k = k - highest
        if table is not None:
            # A raw table is a factor of the weights as it is.
            table = table - highest if same else table * torch.exp(-highest)
    features = phi(k)
    if call.key_padding_mask is not None:
        features = features.masked_fill(there == 0, 0)
    values = torch.cat([v, there.expand(-1, kv_heads, -1, -1)], dim=-1)
    if call.group != 1:
        features, values = features.repeat_interleave(call.group, 1), values.repeat_interleave(call.group, 1)
    q = phi(q)
    rows = None
    radius = 0
    if table is not None:
        rows = rho(table if table.ndim == 3 else table[None]).expand(heads, -1, -1)
        radius = rows.shape[1] // 2
    gamma = settings.get("decay")
    if gamma is not None:
        if not call.is_causal:
            raise ValueError("decay with a bidirectional mask has no meaning; use a causal mask or leave the decay out")
        gamma = torch.tensor(gamma, dtype=q.dtype, device=q.device).repeat_interleave(call.group)[:, None, None]

    recurrence = RECURRENCE.get()
    if recurrence is not None and call.is_causal and rows is None and call.offset == 0 and queries == keys:
        return divide(recurrence(q, features, values, gamma), normalize)
    walk = _Causal if call.is_causal else _Bidirectional
    sums = walk(features if content else None, values, rows, radius, gamma)
    if not call.is_causal and rows is None:
        # All rows read the same state.
        return divide(sums.chunk(q, 0, queries), normalize)
    pieces = []
    # Without queries one empty chunk runs, so that autograd still reaches all tensors.
    for start in range(0, max(queries, 1), CHUNK):
        stop = min(start + CHUNK, queries)
        pieces.append(sums.chunk(q[:, :, start:stop], start + call.offset, stop + call.offset))
    return divide(torch.cat(pieces, dim=2), normalize)


def _power(gamma: Tensor, exponent: Any) -> Tensor:
    return torch.pow(gamma, exponent)


def _clip(token: int, keys: int) -> int:
    return min(max(token, 0), keys)


class _Bidirectional:
    """All keys through one state; relative positions through a band and running sums from both ends."""

    def __init__(
        self, features: Tensor | None, values: Tensor, rows: Tensor | None, radius: int, gamma: Tensor | None
    ) -> None:
        self.values, self.rows, self.radius = values, rows, radius
        self.state = None if features is None else features.transpose(-1, -2) @ values
        if rows is not None:
            nothing = values.new_zeros((*values.shape[:2], 1, values.shape[-1]))
            self.before = torch.cat([nothing, values.cumsum(2)], dim=2)
            # Summed from the end, because "total - before" would cancel digits.
            self.after = torch.cat([values.flip(2).cumsum(2).flip(2), nothing], dim=2)

    def chunk(self, q: Tensor, first: int, last: int) -> Tensor:
        """Sums for the queries ``q`` that stand at keys ``first`` to ``last - 1``."""
        keys = self.values.shape[2]
        out = q.new_zeros(()) if self.state is None else q @ self.state
        if self.rows is None:
            return out
        weights = q @ self.rows.transpose(-1, -2)
        near = _clip(first - self.radius + 1, keys)
        far = max(_clip(last - 1 + self.radius, keys), near)
        out = out + weights[..., :1] * self.before[:, :, near : near + 1]
        out = out + weights[..., -1:] * self.after[:, :, far : far + 1]
        band = _band(weights, first, last, near, far, self.radius)
        return out + band @ self.values[:, :, near:far]


def _band(weights: Tensor, first: int, last: int, near: int, far: int, radius: int) -> Tensor:
    """Weights of relative positions between the queries at ``first ..`` and the keys ``near .. far``."""
    token = torch.arange(first, last, device=weights.device)
    key = torch.arange(near, far, device=weights.device)
    # Under a causal mask the weights end at "here"; what comes later is masked by the caller.
    distance = (key[None, :] - token[:, None] + radius).clamp(0, weights.shape[-1] - 1)
    return weights.gather(-1, distance.expand(*weights.shape[:2], -1, -1))


class _Causal:
    """A state of all keys that every row of a chunk sees, and dense weights for those that only some rows see."""

    def __init__(
        self, features: Tensor | None, values: Tensor, rows: Tensor | None, radius: int, gamma: Tensor | None
    ) -> None:
        self.features, self.values, self.rows, self.radius, self.gamma = features, values, rows, radius, gamma
        # Keys below these are in the state; for relative positions only those at least `radius` before.
        self.taken = 0
        self.far_taken = 0
        self.state: Tensor | None = None
        self.far: Tensor | None = None
        # The token that decays are counted from.
        self.base = 0

    def chunk(self, q: Tensor, first: int, last: int) -> Tensor:
        """Sums for the queries ``q`` that stand at keys ``first`` to ``last - 1``; chunks come in order."""
        values, keys = self.values, self.values.shape[2]
        token = torch.arange(first, last, device=q.device)
        self._age(first)
        start = _clip(first + 1, keys)
        stop = max(_clip(last, keys), start)
        out = q.new_zeros((*q.shape[:3], values.shape[-1]))
        since = None if self.gamma is None else _power(self.gamma, (token - first)[:, None])

        def visible(key: Tensor) -> Tensor:
            return key[None, :] <= token[:, None]

        if self.features is not None:
            self.state = self._enter(self.state, self.features, self.taken, start, first)
            self.taken = max(self.taken, start)
            if self.state is not None:
                out = out + self._aged(q @ self.state, since)
            key = torch.arange(start, stop, device=q.device)
            scores = (q @ self.features[:, :, start:stop].transpose(-1, -2)).masked_fill(~visible(key), 0)
            out = out + self._decayed(scores, token, key) @ values[:, :, start:stop]
        if self.rows is not None:
            weights = q @ self.rows[:, : self.radius + 1].transpose(-1, -2)
            near = _clip(first - self.radius + 1, keys)
            stop = max(stop, near)
            self.far = self._enter(self.far, None, self.far_taken, near, first)
            self.far_taken = max(self.far_taken, near)
            if self.far is not None:
                out = out + self._aged(weights[..., :1] * self.far, since)
            key = torch.arange(near, stop, device=q.device)
            band = _band(weights, first, last, near, stop, self.radius)
            band = band.masked_fill(~visible(key), 0)
            out = out + self._decayed(band, token, key) @ values[:, :, near:stop]
        return out

    def _age(self, token: int) -> None:
        """Lets the states grow older until ``token``."""
        if self.gamma is not None:
            passed = _power(self.gamma, token - self.base)
            self.state = None if self.state is None else self.state * passed
            self.far = None if self.far is None else self.far * passed
        self.base = token

    def _enter(
        self, state: Tensor | None, features: Tensor | None, taken: int, until: int, token: int
    ) -> Tensor | None:
        """Takes the keys ``taken .. until`` into a state as seen from ``token``."""
        if until <= taken:
            return state
        values = self.values[:, :, taken:until]
        if self.gamma is not None:
            key = torch.arange(taken, until, device=values.device)
            values = values * _power(self.gamma, (token - key)[:, None])
        if features is None:
            added = values.sum(2, keepdim=True)
        else:
            added = features[:, :, taken:until].transpose(-1, -2) @ values
        return added if state is None else state + added

    @staticmethod
    def _aged(sums: Tensor, since: Tensor | None) -> Tensor:
        return sums if since is None else sums * since

    def _decayed(self, scores: Tensor, token: Tensor, key: Tensor) -> Tensor:
        if self.gamma is None:
            return scores
        return scores * _power(self.gamma, (token[:, None] - key[None, :]).clamp(min=0))


def _near(at_query: Tensor, at_key: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Positions counted from the one nearest to zero, those of ignored keys 0. Only differences matter to outputs, but gradients of
    frequencies are sums of products with positions, and lose the digits that all of them share."""
    at_key = at_key.masked_fill(~there, 0)
    if at_query.shape[1] == 0:
        return at_query, at_key
    least = torch.cat([at_query, at_key.masked_fill(~there, torch.inf)], 1).amin(1, keepdim=True)
    greatest = torch.cat([at_query, at_key.masked_fill(~there, -torch.inf)], 1).amax(1, keepdim=True)
    origin = (least.clamp(min=0) + greatest.clamp(max=0)).detach()
    return at_query - origin, at_key - origin


def fourier(call: Call) -> Tensor:
    """`longspan.ops.fourier_attention`: kernelized attention over turned features."""
    settings = call.settings
    k, v, there = call.without_padding()
    normalizer = settings.get("normalizer", "one_plus")
    pairs = settings.get("wave", "each") == "pairs"
    queries, keys = call.features(k, normalizer != "none")
    keys = keys * there
    a, *rest = call.parameters
    if settings.get("axes"):
        *rest, at_query, at_key = rest
        at_query, at_key = _near(at_query, at_key, there[:, 0] > 0)
    else:
        at_query = torch.arange(call.q.shape[2], dtype=k.dtype, device=k.device)[None, :, None] + call.offset
        at_key = torch.arange(k.shape[2], dtype=k.dtype, device=k.device)[None, :, None]
    turn_query = torch.einsum("hmn,bin->bhim", a.repeat_interleave(call.group, 0), at_query)
    turn_key = torch.einsum("hmn,bjn->bhjm", a, at_key)
    if pairs:
        half = queries.shape[-1] // 2

        def turned(x: Tensor, angle: Tensor) -> Tensor:
            first, second = x[..., :half], x[..., half:]
            cos, sin = angle.cos(), angle.sin()
            return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

        left, right = turned(queries, turn_query), turned(keys, turn_key)
    else:
        turn_query = turn_query + rest[0][None, :, None]
        scaled = queries if len(rest) < 2 else queries * rest[1][None, :, None]
        lefts = [scaled * turn_query.cos(), scaled * turn_query.sin()]
        rights = [keys * turn_key.cos(), keys * turn_key.sin()]
        if normalizer == "one_plus" or len(rest) > 2:
            beta = rest[2] if len(rest) > 2 else queries.new_ones(())
            if normalizer == "dominant":
                beta = rest[1].abs() + F.softplus(beta)
            lefts.append(queries * (beta[None, :, None] if beta.ndim else beta))
            rights.append(keys)
        left, right = torch.cat(lefts, -1), torch.cat(rights, -1)
    ones = there.expand(-1, k.shape[1], -1, -1)
    plain = {"feature_map": "identity", "normalize": False, "decay": settings.get("decay")}

    def summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernelized(replace(call, q=q, k=k, v=v, parameters=(), maps=(None, None), settings=plain, key_padding_mask=None))

    if normalizer == "none":
        return summed(left, right, v)
    if normalizer == "unrotated":
        return divide(torch.cat([summed(left, right, v), summed(queries, keys, ones)], -1))
    sums = summed(left, right, torch.cat([v, ones], -1))
    if normalizer == "literal":
        negative = sums[..., -1:] < 0
        # The kernels refuse such a call; here nobody may look at the numbers.
        sums = torch.cat([sums[..., :-1].masked_fill(negative, torch.nan), sums[..., -1:]], -1)
    return divide(sums)
