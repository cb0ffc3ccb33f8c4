"""The mechanisms in torch's own operations, chunk by chunk: for tensors that are not on the CPU.

Everything runs on the device of ``q``, content, Shaw and Fourier positions in O(L) time, Toeplitz positions and AFT in O(L^2)
time and bounded memory; torch's autograd differentiates it. Sums are taken in float32 for half
precision. The kernels' tests hold it to the same definition.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _calls

#: Rows at a time: in-chunk weights are CHUNK x (CHUNK + 2 radius).
CHUNK = 128

_FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu+1": lambda x: torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0))),
    "relu": torch.relu,
    "softplus": F.softplus,
    "exp": torch.exp,
    "identity": lambda x: x,
}


#: What takes the place of the causal recurrence while `longspan.torch.onnx.export` runs: of queries' and keys' features, values and
#: the decay of each head.
RECURRENCE: ContextVar[Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None] = ContextVar("recurrence", default=None)


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
    """A mechanism in torch's own operations, for any device: what `longspan.ops` computes for tensors that are not on the CPU,
    and where derivatives are wanted that the kernels do not give.

    Parameters
    ----------
    q : Tensor ``[B, H, Lq, d]``
        Queries.
    k, v : Tensor ``[B, Hkv, Lk, d]``, ``[B, Hkv, Lk, dv]``
        Keys and values.
    parameters : sequence of Tensor
        What the mechanism learns, in the order of the arguments of its function.
    mechanism : str
        A name of `longspan.mechanisms`.
    options : str
        Its options as JSON, as the functions of `longspan.ops` write them.
    is_causal, offset : bool, int
        Query ``i`` sees the keys ``j <= i + offset``; without a mask, all.
    key_padding_mask : bool Tensor ``[B, Lk]``, optional
        True is ignored.
    cu_seqlens : pair of lists of int, optional
        Boundaries of packed sequences on the query and the key axis; ``B = 1``.

    Returns
    -------
    Tensor ``[B, H, Lq, dv]``
        In the type of ``q``; half precision is computed in float32.

    Raises
    ------
    NotImplementedError
        For a mechanism without such a formulation.
    ValueError
        For shapes that do not fit.

    Notes
    -----
    O(L) time but for Toeplitz positions and AFT, which take O(L**2) here.

    Examples
    --------
    >>> import torch
    >>> from longspan import ops
    >>> from longspan.torch import chunked_attention
    >>> q, k, v = torch.randn(3, 1, 2, 100, 8)
    >>> out = chunked_attention(q, k, v, is_causal=True)
    >>> torch.testing.assert_close(out, ops.kernelized_attention(q, k, v, is_causal=True), rtol=1e-4, atol=1e-4)
    """
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
        _check_parameters(mechanism, q, k, parameters, settings, is_causal, offset)
        if mechanism == "toeplitz":
            # Of the whole call, because packed sequences share its table.
            settings["first"] = 1 - q.shape[2] - offset
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
            formulation(
                q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], _slices(mechanism, parameters, settings, a, b, c, d),
                settings, is_causal, offset, None,
            )  # fmt: skip
            for a, b, c, d in zip(queries, queries[1:], keys, keys[1:])
        ]
        return torch.cat(pieces or [q.new_zeros((*q.shape[:3], v.shape[3]))], dim=2).to(dtype)


def _elementwise(name: str) -> str:
    """The elementwise map to apply after `_lift`."""
    kind, *options = name.split(":")
    if kind in _FEATURE_MAPS:
        return kind
    return "exp" if kind == "prf" or (kind == "hedgehog" and "exp" in options) else "identity"


@functools.lru_cache(maxsize=64)
def _random_rows(name: str, head_dim: int) -> Any:
    from .._native import random_rows

    return random_rows(name, head_dim)


def _lift(name: str, x: Tensor, matrix: Tensor | None) -> Tensor:
    """``[batch, heads, tokens, d]`` to the exponents or features of a map of whole rows; ``x`` itself for others.

    ``matrix`` is what "hedgehog" learns, ``[heads, width, d]``.
    """
    kind, *options = name.split(":")
    width = x.shape[-1]
    scale = max(width, 1) ** -0.25
    if kind in ("prf", "nprf"):
        rows = torch.as_tensor(_random_rows(name, width), dtype=x.dtype, device=x.device)
        features = max(rows.shape[0], 1)
        if kind == "prf":
            exponents: Tensor = x @ rows.T - 0.5 * (x * scale).square().sum(-1, keepdim=True) - 0.5 * math.log(features)
            return exponents
        square = x.square().sum(-1, keepdim=True)
        # A row of zeros has no direction: it stays zero, with gradient 0.
        none = square == 0
        direction = (x / torch.where(none, 1, square).sqrt()).masked_fill(none, 0)
        bounded: Tensor = (direction @ rows.T - 0.5).exp() * features**-0.5
        return bounded
    if kind == "dpfp":
        parts = torch.cat([torch.relu(x), torch.relu(-x)], -1)
        order = int(options[0]) if options else 1
        return torch.cat([parts * parts.roll(-n, -1) for n in range(1, order + 1)], -1)
    if kind == "taylor2":
        x = x * scale
        first, second = torch.triu_indices(width, width, device=x.device)
        products = x[..., first] * x[..., second] * torch.where(first == second, x.new_tensor(0.5**0.5), x.new_ones(()))
        return torch.cat([torch.ones_like(x[..., :1]), x, products], -1)
    if kind == "hedgehog" and matrix is not None:
        exponents = x @ matrix.transpose(-1, -2)
        exponents = torch.cat([exponents, -exponents], -1)
        return exponents if "exp" in options else exponents.softmax(-1)
    if kind in _FEATURE_MAPS:
        return x
    raise ValueError(f"unknown feature map {name!r}; known on {x.device} are {', '.join(_FEATURE_MAPS)}, prf, nprf, dpfp, "
                     "taylor2, hedgehog")  # fmt: skip


def _without_maps(
    settings: dict[str, Any], parameters: Sequence[Tensor]
) -> tuple[Sequence[Tensor], tuple[Tensor | None, Tensor | None]]:
    """The parameters of positions, and what the feature map of queries and of keys learns."""
    if settings.get("feature_map", "").startswith("hedgehog"):
        return parameters[:-2], (parameters[-2], parameters[-1])
    return parameters, (None, None)


def _check_shapes(mechanism: str, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise ValueError(f"{mechanism}: {name}: expected four axes [batch, head, token, feature], "
                             f"got shape {tuple(tensor.shape)}")  # fmt: skip
    batch, heads, _, head_dim = q.shape
    _, kv_heads, keys, _ = k.shape
    key_dim = 1 if mechanism == "aft-conv" else head_dim
    for name, tensor, shape in (("k", k, (batch, kv_heads, keys, key_dim)),
                                ("v", v, (batch, kv_heads, keys, v.shape[3]))):  # fmt: skip
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{mechanism}: {name}: expected shape {shape}, got shape {tuple(tensor.shape)}")
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"{mechanism}: q: expected a number of query heads that is a multiple of the {kv_heads} "
                         f"key/value heads, got {heads} heads")  # fmt: skip
    if key_padding_mask is not None and tuple(key_padding_mask.shape) != (batch, keys):
        raise ValueError(f"{mechanism}: key_padding_mask: expected shape {(batch, keys)}, "
                         f"got shape {tuple(key_padding_mask.shape)}")  # fmt: skip


def _check_parameters(
    mechanism: str,
    q: Tensor,
    k: Tensor,
    parameters: Sequence[Tensor],
    settings: dict[str, Any],
    is_causal: bool,
    offset: int,
) -> None:
    """Checks shapes that broadcasting would accept silently."""
    _, heads, queries, head_dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    wanted: list[tuple[int, ...]]
    parameters, maps = _without_maps(settings, parameters)
    for matrix, of in zip(maps, (heads, kv_heads)):
        if matrix is not None and (matrix.shape[0], matrix.shape[-1]) != (of, head_dim):
            raise ValueError(f"{mechanism}: maps: expected shape ({of}, width, {head_dim}), got shape {tuple(matrix.shape)}")
    features = _calls.features(settings.get("feature_map", "elu+1"), head_dim)
    if mechanism == "shaw":
        rows = parameters[0].shape[-2]
        width = head_dim if settings.get("rel_feature_map", "same") == "same" else features
        wanted = [(heads, rows, width) if parameters[0].ndim == 3 else (rows, width)]
    elif mechanism == "toeplitz":
        table = settings.get("kind", "table") == "table" and not settings.get("centred")
        wanted = [(heads, queries + keys - 1) if table else (heads, *parameters[0].shape[1:])]
    elif mechanism == "aft-full":
        length = parameters[0].shape[0]
        wanted = [(length, length)] if len(parameters) == 1 else [(length, parameters[0].shape[1])] * 2
    elif mechanism == "aft-local":
        wanted = [(parameters[0].shape[0] if settings.get("by_position") else queries, parameters[0].shape[1])]
    elif mechanism == "aft-conv":
        wanted = [(heads, *parameters[0].shape[1:]), (heads,), (heads,)]
        if settings.get("image") and (is_causal or offset or queries != keys or queries != math.prod(settings["image"])):
            raise ValueError(f"{mechanism}: image: expected as many queries and keys as the image has places, "
                             f"{math.prod(settings['image'])}, no mask of order and no offset")  # fmt: skip
    elif mechanism == "fourier":
        axes = settings.get("axes") or 1
        angles = features // 2 if settings.get("wave") == "pairs" else features
        wanted = [(kv_heads, angles, axes), *[(heads, features)] * len(parameters)]
        if settings.get("axes"):
            wanted[len(parameters) - 2 :] = [(q.shape[0], queries, axes), (q.shape[0], keys, axes)]
    else:
        wanted = []
    for parameter, shape in zip(parameters, wanted):
        if tuple(parameter.shape) != shape:
            raise ValueError(f"{mechanism}: parameters: expected shape {shape}, got shape {tuple(parameter.shape)}")


def _slices(
    mechanism: str, parameters: Sequence[Tensor], settings: dict[str, Any], a: int, b: int, c: int, d: int
) -> Sequence[Tensor]:
    """The parameters of one packed sequence, queries ``a .. b`` and keys ``c .. d``."""
    if mechanism == "fourier" and settings.get("axes"):
        positions, maps = _without_maps(settings, parameters)
        *others, queries, keys = positions
        return [*others, queries[:, a:b], keys[:, c:d], *(matrix for matrix in maps if matrix is not None)]
    if mechanism == "aft-local" and not settings.get("by_position"):
        return [parameters[0][: b - a]]
    return parameters


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
    whole = settings.get("feature_map", "elu+1")
    parameters, (of_queries, of_keys) = _without_maps(settings, parameters)
    name = _elementwise(whole)
    phi = _FEATURE_MAPS[name]
    table = parameters[0] if parameters else None
    same = settings.get("rel_feature_map", "same") == "same"
    if table is not None and same:
        # A row of the table goes through the map of the keys that its head reads.
        matrix = None if of_keys is None else of_keys.repeat_interleave(heads // max(kv_heads, 1), 0)
        table = _lift(whole, table if table.ndim == 3 else table[None], matrix)
    rho = phi if same else _FEATURE_MAPS["identity"]

    if key_padding_mask is not None:
        # Selected, not multiplied: 0 times a NaN in the padding would be NaN.
        ignored = key_padding_mask[:, None, :, None]
        k, v = k.masked_fill(ignored, 0), v.masked_fill(ignored, 0)
    q, k = _lift(whole, q, of_queries), _lift(whole, k, of_keys)
    if name == "exp" and normalize and keys > 0:
        # Cancels in the division; without it the exponentials overflow.
        q = q - q.amax(dim=-1, keepdim=True).detach() if q.shape[-1] else q
        highest = k.flatten().amax(0).detach() if k.numel() else k.new_zeros(())
        if table is not None and same:
            highest = torch.maximum(highest, table.amax().detach())
        k = k - highest
        if table is not None:
            # A raw table is a factor of the weights as it is.
            table = table - highest if same else table * torch.exp(-highest)
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
        rows = rho(table if table.ndim == 3 else table[None]).expand(heads, -1, -1)
        radius = rows.shape[1] // 2
    gamma = settings.get("decay")
    if gamma is not None:
        if not is_causal:
            raise ValueError("decay with a bidirectional mask has no meaning; use a causal mask or leave the decay out")
        gamma = torch.tensor(gamma, dtype=q.dtype, device=q.device).repeat_interleave(group)[:, None, None]

    recurrence = RECURRENCE.get()
    if recurrence is not None and is_causal and rows is None and offset == 0 and queries == keys:
        return _divide(recurrence(q, features, values, gamma), normalize)
    walk = _Causal if is_causal else _Bidirectional
    sums = walk(features if content else None, values, rows, radius, gamma)
    if not is_causal and rows is None:
        # All rows read the same state.
        return _divide(sums.chunk(q, 0, queries), normalize)
    pieces = []
    # Without queries one empty chunk runs, so that autograd still reaches all tensors.
    for start in range(0, max(queries, 1), CHUNK):
        stop = min(start + CHUNK, queries)
        pieces.append(sums.chunk(q[:, :, start:stop], start + offset, stop + offset))
    return _divide(torch.cat(pieces, dim=2), normalize)


def _power(gamma: Tensor, exponent: Any) -> Tensor:
    return torch.pow(gamma, exponent)


def _clip(token: int, keys: int) -> int:
    return min(max(token, 0), keys)


class _Bidirectional:
    """All keys through one state; relative positions through a band and running sums from both ends."""

    def __init__(
        self,
        features: Tensor | None,
        values: Tensor,
        rows: Tensor | None,
        radius: int,
        gamma: Tensor | None,
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
        self,
        features: Tensor | None,
        values: Tensor,
        rows: Tensor | None,
        radius: int,
        gamma: Tensor | None,
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


def _without_padding(k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values with zeros where a key is ignored, and 1 for each key that is there, ``[batch, 1, keys, 1]``."""
    if key_padding_mask is None:
        return k, v, k.new_ones((k.shape[0], 1, k.shape[2], 1))
    ignored = key_padding_mask[:, None, :, None]
    return k.masked_fill(ignored, 0), v.masked_fill(ignored, 0), (~ignored).to(k.dtype)


def _features(
    settings: dict[str, Any], q: Tensor, k: Tensor, normalize: bool, maps: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor, Tensor]:
    whole = settings.get("feature_map", "elu+1")
    name = _elementwise(whole)
    q, k = _lift(whole, q, maps[0]), _lift(whole, k, maps[1])
    if name == "exp" and normalize:
        # Cancels in the division; without it the exponentials overflow.
        q = q - q.amax(dim=-1, keepdim=True).detach() if q.shape[-1] else q
        k = k - k.amax().detach() if k.numel() else k
    return _FEATURE_MAPS[name](q), _FEATURE_MAPS[name](k)


def _fourier(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Sequence[Tensor],
    settings: dict[str, Any],
    is_causal: bool,
    offset: int,
    key_padding_mask: Tensor | None,
) -> Tensor:
    """`longspan.ops.fourier_attention`: kernelized attention over turned features."""
    k, v, there = _without_padding(k, v, key_padding_mask)
    normalizer = settings.get("normalizer", "one_plus")
    pairs = settings.get("wave", "each") == "pairs"
    parameters, maps = _without_maps(settings, parameters)
    queries, keys = _features(settings, q, k, normalizer != "none", maps)
    keys = keys * there
    group = q.shape[1] // max(k.shape[1], 1)
    a, *rest = parameters
    if settings.get("axes"):
        *rest, at_query, at_key = rest
    else:
        at_query = torch.arange(q.shape[2], dtype=q.dtype, device=q.device)[None, :, None] + offset
        at_key = torch.arange(k.shape[2], dtype=q.dtype, device=q.device)[None, :, None]
    turn_query = torch.einsum("hmn,bin->bhim", a.repeat_interleave(group, 0), at_query)
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
    settings = {"feature_map": "identity", "normalize": False, "decay": settings.get("decay")}
    ones = there.expand(-1, k.shape[1], -1, -1)
    if normalizer == "none":
        return _kernelized(left, right, v, (), settings, is_causal, offset, None)
    if normalizer == "unrotated":
        sums = _kernelized(left, right, v, (), settings, is_causal, offset, None)
        total = _kernelized(queries, keys, ones, (), settings, is_causal, offset, None)
        return _divide(torch.cat([sums, total], -1), True)
    sums = _kernelized(left, right, torch.cat([v, ones], -1), (), settings, is_causal, offset, None)
    if normalizer == "literal":
        negative = sums[..., -1:] < 0
        sums = torch.cat([sums[..., :-1].masked_fill(negative, 0), sums[..., -1:]], -1)
    return _divide(sums, True)


#: Numbers that a chunk of pairs may take.
_PAIRS = 1 << 24


def _rows(q: Tensor, numbers_per_row: int) -> int:
    return max(1, _PAIRS // max(1, q.shape[0] * q.shape[1] * numbers_per_row))


def _distances(first: int, last: int, keys: int, offset: int, device: torch.device) -> Tensor:
    """``j - (i + offset)``, ``[queries, keys]``."""
    token = torch.arange(first, last, device=device) + offset
    return torch.arange(keys, device=device)[None, :] - token[:, None]


def _toeplitz(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Sequence[Tensor],
    settings: dict[str, Any],
    is_causal: bool,
    offset: int,
    key_padding_mask: Tensor | None,
) -> Tensor:
    """`longspan.ops.toeplitz_attention`, a few rows of all pairs at a time."""
    (bias,), maps = _without_maps(settings, parameters)
    normalize = settings.get("normalize", True)
    k, v, there = _without_padding(k, v, key_padding_mask)
    left, right = _features(settings, q, k, normalize, maps)
    group = q.shape[1] // max(k.shape[1], 1)
    right, values = (right * there).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    ones = there.expand(-1, q.shape[1], -1, -1)
    values = torch.cat([values, ones], -1)
    bias = bias.flatten(1)
    if normalize and bias.numel():
        bias = bias - bias.amax(1, keepdim=True).detach()
    pieces = []
    step = _rows(q, k.shape[2])
    for start in range(0, max(q.shape[2], 1), step):
        stop = min(start + step, q.shape[2])
        distance = _distances(start, stop, k.shape[2], offset, q.device)
        entry, reached = _entries(parameters[0], settings, start + offset, distance)
        hidden = ~reached
        if is_causal:
            hidden = hidden | (distance > 0)
        elif distance.device.type != "meta" and bool(hidden.any()):
            raise ValueError(f"toeplitz: bias: expected an entry for every distance of the call, got shape "
                             f"{tuple(parameters[0].shape)}")  # fmt: skip
        weights = bias[:, entry].exp() * (left[:, :, start:stop] @ right.transpose(-1, -2))
        pieces.append(weights.masked_fill(hidden, 0) @ values)
    return _divide(torch.cat(pieces, 2), normalize)


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
    first_distance = -(entries // 2) if kind == "clipped" or settings.get("centred") else settings["first"]
    index = distance - first_distance
    reached = torch.ones_like(index, dtype=torch.bool) if kind == "clipped" else (index >= 0) & (index < entries)
    return index.clamp(0, entries - 1), reached


def _aft(biases: Callable[..., Tensor | None]) -> Callable[..., Tensor]:
    """AFT with ``biases(parameters, settings, is_causal, distance, rows, offset)``, ``[heads or 1, queries, keys]``, a few
    rows at a time."""

    def formulation(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        parameters: Sequence[Tensor],
        settings: dict[str, Any],
        is_causal: bool,
        offset: int,
        key_padding_mask: Tensor | None,
    ) -> Tensor:
        k, v, there = _without_padding(k, v, key_padding_mask)
        group = q.shape[1] // max(k.shape[1], 1)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        pieces = []
        step = _rows(q, k.shape[2] * q.shape[3])
        for start in range(0, max(q.shape[2], 1), step):
            stop = min(start + step, q.shape[2])
            distance = _distances(start, stop, k.shape[2], offset, q.device)
            seen = there[:, :, None, :, 0] > 0
            if is_causal:
                seen = seen & (distance <= 0)
            scores = k[:, :, None].expand(-1, -1, stop - start, -1, -1)
            bias = biases(parameters, settings, is_causal, distance, slice(start, stop), offset)
            if bias is not None:
                scores = scores + bias[None, ..., None]
            scores = scores.masked_fill(~seen[..., None], -torch.inf)
            # The largest of a row cancels; a row that sees nothing has none.
            highest = scores.detach().amax(3, keepdim=True) if k.shape[2] else scores.new_zeros(())
            weights = (scores - highest.nan_to_num(neginf=0.0)).exp()
            total = weights.sum(3)
            means = torch.where(total == 0, 0, (weights * v[:, :, None]).sum(3) / torch.where(total == 0, 1, total))
            pieces.append(means * torch.sigmoid(q[:, :, start:stop]))
        return torch.cat(pieces, 2)

    return formulation


def _positions(table: Tensor, rows: slice, offset: int) -> Tensor:
    """Rows of a table by position for the queries ``rows``; an error where the table has none."""
    position = torch.arange(rows.start, rows.stop, device=table.device) + offset
    outside = (position < 0) | (position >= table.shape[0])
    if table.device.type != "meta" and bool(outside.any()):
        raise ValueError(f"aft: position: expected positions of queries from 0 to {table.shape[0] - 1}, got others")
    return table[position]


def _full_biases(
    parameters: Sequence[Tensor], settings: dict[str, Any], is_causal: bool, distance: Tensor, rows: slice, offset: int
) -> Tensor:
    keys = distance.shape[1]
    *_, z = parameters
    columns = z[:, :keys] if len(parameters) == 1 else z[:keys]
    if columns.shape[1 if len(parameters) == 1 else 0] != keys:
        raise ValueError(f"aft-full: keys: expected at most {z.shape[0]} positions, got {keys}")
    if len(parameters) == 1:
        return _positions(columns, rows, offset)[None]
    return (_positions(parameters[0], rows, offset) @ columns.T)[None]


def _local_biases(
    parameters: Sequence[Tensor], settings: dict[str, Any], is_causal: bool, distance: Tensor, rows: slice, offset: int
) -> Tensor:
    (w,) = parameters
    column = distance + w.shape[1] // 2
    inside = (column >= 0) & (column < w.shape[1])
    own = _positions(w, rows, offset) if settings.get("by_position") else w[rows]
    near = own.gather(1, column.clamp(0, w.shape[1] - 1))
    return torch.where(inside, near, 0)[None]


def _conv_biases(
    parameters: Sequence[Tensor], settings: dict[str, Any], is_causal: bool, distance: Tensor, rows: slice, offset: int
) -> Tensor:
    w, *scale = parameters
    image = settings.get("image")
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
        column = distance + (taps - 1 if is_causal else (taps - 1) // 2)
        inside = (column >= 0) & (column < taps)
        column = column.clamp(0, taps - 1)
    return torch.where(inside, w[:, column], 0)


def _softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Sequence[Tensor],
    settings: dict[str, Any],
    is_causal: bool,
    offset: int,
    key_padding_mask: Tensor | None,
) -> Tensor:
    """`longspan.ops.softmax_attention`, a few rows of all pairs at a time."""
    k, v, there = _without_padding(k, v, key_padding_mask)
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = settings.get("scale")
    scale = max(q.shape[3], 1) ** -0.5 if scale is None else scale
    pieces = []
    step = _rows(q, k.shape[2])
    for start in range(0, max(q.shape[2], 1), step):
        stop = min(start + step, q.shape[2])
        seen = there.transpose(-1, -2) > 0
        distances = _distances(start, stop, k.shape[2], offset, q.device)
        if is_causal:
            seen = seen & (distances <= 0)
        if settings.get("window") is not None:
            seen = seen & (distances.abs() < settings["window"])
        scores = (scale * q[:, :, start:stop] @ k.transpose(-1, -2)).masked_fill(~seen, -torch.inf)
        highest = scores.detach().amax(-1, keepdim=True) if k.shape[2] else scores.new_zeros(())
        weights = (scores - highest.nan_to_num(neginf=0.0)).exp()
        pieces.append(_divide(torch.cat([weights @ v, weights.sum(-1, keepdim=True)], -1), True))
    return torch.cat(pieces, 2)


def _short_convolution(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Sequence[Tensor],
    settings: dict[str, Any],
    is_causal: bool,
    offset: int,
    key_padding_mask: Tensor | None,
) -> Tensor:
    """`longspan.ops.short_convolution`."""
    (taps,) = parameters
    queries, keys, before = q.shape[2], k.shape[2], taps.shape[1] - 1
    products = k * v
    if key_padding_mask is not None:
        products = products.masked_fill(key_padding_mask[:, None, :, None], 0)
    # Further away from the keys than this makes no difference.
    first = min(max(offset, -queries), keys + before) - before
    padded = F.pad(products, (0, 0, max(-first, 0), max(first + before + queries - keys, 0)))
    start = max(first, 0) + before
    terms = (taps[:, t, None] * padded[:, :, start - t : start - t + queries] for t in range(before + 1))
    sums = functools.reduce(torch.add, terms)
    out = F.silu(sums) if settings["silu"] else sums
    return q * out.repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1)


_FORMULATIONS = {
    "softmax": _softmax,
    "kernelized": _kernelized,
    "shaw": _kernelized,
    "fourier": _fourier,
    "toeplitz": _toeplitz,
    "short-convolution": _short_convolution,
    "aft-full": _aft(_full_biases),
    "aft-local": _aft(_local_biases),
    "aft-simple": _aft(lambda *_: None),
    "aft-conv": _aft(_conv_biases),
}
