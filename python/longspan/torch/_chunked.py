"""The mechanisms in torch's own operations, chunk by chunk: for tensors that are not on the CPU.

Everything runs on the device of ``q`` in O(L) time; torch's autograd differentiates it. Sums are taken in float32 for half
precision. The kernels' tests hold it to the same definition.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: Rows at a time: in-chunk weights are CHUNK x (CHUNK + 2 radius).
CHUNK = 128

_FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu+1": lambda x: torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0))),
    "relu": torch.relu,
    "softplus": F.softplus,
    "exp": torch.exp,
    "identity": lambda x: x,
}


def chunked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Sequence[Tensor] = (),
    *,
    mechanism: str = "kernelized",
    options: str = "{}",
    is_causal: bool = False,
    offset: int = 0,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: tuple[list[int], list[int]] | None = None,
) -> Tensor:
    """``mechanism`` with ``options`` (JSON) on any device: ``[B, H, Lq, dv]``."""
    if mechanism not in _FORMULATIONS:
        raise NotImplementedError(f"{mechanism}: no formulation for {q.device}; move the tensors to the cpu")
    formulation = _FORMULATIONS[mechanism]
    settings = json.loads(options)
    _check_shapes(mechanism, q, k, v, key_padding_mask)
    dtype = q.dtype
    # Without autocast, which would compute sums in half precision.
    with torch.autocast(q.device.type if torch.amp.is_autocast_available(q.device.type) else "cpu", enabled=False):
        wide = torch.promote_types(torch.float32, dtype)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
        parameters = [parameter.to(wide) for parameter in parameters]
        if cu_seqlens is None:
            return formulation(q, k, v, parameters, settings, is_causal, offset, key_padding_mask).to(dtype)
        if q.shape[0] != 1:
            raise ValueError(f"{mechanism}: batch: expected 1 for packed sequences, got {q.shape[0]}")
        queries, keys = cu_seqlens
        if len(queries) != len(keys):
            raise ValueError(f"{mechanism}: cu_seqlens: expected as many boundaries on the key axis as on the query axis, "
                             f"got {len(keys)} and {len(queries)}")  # fmt: skip
        for bounds, tokens in ((queries, q.shape[2]), (keys, k.shape[2])):
            if not bounds or bounds[0] != 0 or bounds[-1] != tokens or bounds != sorted(bounds):
                raise ValueError(f"{mechanism}: cu_seqlens: expected ascending from 0 to {tokens}, got {bounds}")
        pieces = [
            formulation(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], parameters, settings, is_causal, offset, None)
            for a, b, c, d in zip(queries, queries[1:], keys, keys[1:])
        ]
        return torch.cat(pieces or [q.new_zeros((*q.shape[:3], v.shape[3]))], dim=2).to(dtype)


def _check_shapes(mechanism: str, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise ValueError(f"{mechanism}: {name}: expected four axes [batch, head, token, feature], "
                             f"got shape {tuple(tensor.shape)}")  # fmt: skip
    batch, heads, _, head_dim = q.shape
    _, kv_heads, keys, _ = k.shape
    for name, tensor, shape in (("k", k, (batch, kv_heads, keys, head_dim)),
                                ("v", v, (batch, kv_heads, keys, v.shape[3]))):  # fmt: skip
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{mechanism}: {name}: expected shape {shape}, got shape {tuple(tensor.shape)}")
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"{mechanism}: q: expected a number of query heads that is a multiple of the {kv_heads} "
                         f"key/value heads, got {heads} heads")  # fmt: skip
    if key_padding_mask is not None and tuple(key_padding_mask.shape) != (batch, keys):
        raise ValueError(f"{mechanism}: key_padding_mask: expected shape {(batch, keys)}, "
                         f"got shape {tuple(key_padding_mask.shape)}")  # fmt: skip


def _divide(sums: Tensor, normalize: bool) -> Tensor:
    """Numerators over the denominators in the last column; 0 where there is nothing to divide by."""
    if not normalize:
        return sums[..., :-1]
    denominators = sums[..., -1:]
    nothing = denominators.abs() < torch.finfo(sums.dtype).tiny
    return torch.where(nothing, 0, sums[..., :-1] / torch.where(nothing, 1, denominators))


def _kernelized(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Sequence[Tensor],
    settings: dict[str, Any],
    is_causal: bool,
    offset: int,
    key_padding_mask: Tensor | None,
) -> Tensor:
    """Content, relative positions, or both, under one normaliser: the formula of `longspan.ops.shaw_attention`."""
    (_, heads, queries, _), (_, kv_heads, keys, _) = q.shape, k.shape
    content = settings.get("kernelized", True)
    normalize = settings.get("normalize", True)
    name = settings.get("feature_map", "elu+1")
    if name not in _FEATURE_MAPS:
        raise ValueError(f"unknown feature map {name!r}; known on {q.device} are {', '.join(_FEATURE_MAPS)}")
    phi = _FEATURE_MAPS[name]
    table = parameters[0] if parameters else None
    rho = phi if settings.get("rel_feature_map", "same") == "same" else _FEATURE_MAPS["identity"]

    if key_padding_mask is not None:
        # Selected, not multiplied: whatever stands in the padding, 0 times it may be NaN.
        ignored = key_padding_mask[:, None, :, None]
        k, v = k.masked_fill(ignored, 0), v.masked_fill(ignored, 0)
    if name == "exp" and normalize and keys > 0:
        # Cancels in the division; without it the exponentials overflow.
        q = q - q.amax(dim=-1, keepdim=True).detach() if q.shape[-1] else q
        highest = k.amax().detach() if k.numel() else k.new_zeros(())
        if table is not None and rho is phi:
            highest = torch.maximum(highest, table.amax().detach())
        k = k - highest
        table = table - highest if table is not None and rho is phi else table
    group = heads // max(kv_heads, 1)
    features = phi(k)
    ones = v.new_ones((*v.shape[:3], 1))
    if key_padding_mask is not None:
        features, ones = features.masked_fill(ignored, 0), ones.masked_fill(ignored, 0)
    values = torch.cat([v, ones], dim=-1)
    if group != 1:
        features, values = features.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    q = phi(q)
    rows = None
    radius = 0
    if table is not None:
        rows = rho(table) if table.ndim == 3 else rho(table)[None].expand(heads, -1, -1)
        radius = rows.shape[1] // 2
    gamma = settings.get("decay")
    if gamma is not None:
        if not is_causal:
            raise ValueError("decay with a bidirectional mask has no meaning; use a causal mask or leave the decay out")
        gamma = torch.tensor(gamma, dtype=q.dtype, device=q.device).repeat_interleave(group)[:, None, None]

    walk = _Causal if is_causal else _Bidirectional
    sums = walk(features if content else None, values, rows, radius, gamma)
    pieces = []
    # No queries are one empty chunk, so that the result still depends on all tensors.
    for start in range(0, max(queries, 1), CHUNK):
        stop = min(start + CHUNK, queries)
        pieces.append(sums.chunk(q[:, :, start:stop], start + offset, stop + offset))
    return _divide(torch.cat(pieces, dim=2), normalize)


def _clip(token: int, keys: int) -> int:
    return min(max(token, 0), keys)


class _Bidirectional:
    """All keys through one state; relative positions through a band and running sums from both ends."""

    def __init__(self, features, values, rows, radius, _gamma):
        self.values, self.rows, self.radius = values, rows, radius
        self.state = None if features is None else features.transpose(-1, -2) @ values
        if rows is not None:
            nothing = values.new_zeros((*values.shape[:2], 1, values.shape[-1]))
            self.before = torch.cat([nothing, values.cumsum(2)], dim=2)
            # Its own sum, not "total - before", which cancels.
            self.after = torch.cat([values.flip(2).cumsum(2).flip(2), nothing], dim=2)

    def chunk(self, q: Tensor, first: int, last: int) -> Tensor:
        """Sums for the queries ``q`` that stand at keys ``first`` to ``last - 1``."""
        keys = self.values.shape[2]
        out = 0 if self.state is None else q @ self.state
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

    def __init__(self, features, values, rows, radius, gamma):
        self.features, self.values, self.rows, self.radius, self.gamma = features, values, rows, radius, gamma
        # Keys below these are in the state; for relative positions only those at least `radius` before.
        self.taken = 0
        self.far_taken = 0
        self.state = None
        self.far = None
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
        since = None if self.gamma is None else self.gamma ** (token - first)[:, None]
        visible = lambda key: (key[None, :] <= token[:, None])  # noqa: E731
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
            passed = self.gamma ** (token - self.base)
            self.state = None if self.state is None else self.state * passed
            self.far = None if self.far is None else self.far * passed
        self.base = token

    def _enter(self, state, features, taken: int, until: int, token: int):
        """Takes the keys ``taken .. until`` into a state as seen from ``token``."""
        if until <= taken:
            return state
        values = self.values[:, :, taken:until]
        if self.gamma is not None:
            key = torch.arange(taken, until, device=values.device)
            values = values * self.gamma ** (token - key)[:, None]
        if features is None:
            added = values.sum(2, keepdim=True)
        else:
            added = features[:, :, taken:until].transpose(-1, -2) @ values
        return added if state is None else state + added

    @staticmethod
    def _aged(sums: Tensor, since) -> Tensor:
        return sums if since is None else sums * since

    def _decayed(self, scores: Tensor, token: Tensor, key: Tensor) -> Tensor:
        if self.gamma is None:
            return scores
        return scores * self.gamma ** (token[:, None] - key[None, :]).clamp(min=0)


_FORMULATIONS = {"kernelized": _kernelized, "shaw": _kernelized}
