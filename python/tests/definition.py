"""The mechanisms as their formulas say, pair by pair, in doubles: what every test compares with."""

import numpy as np

FEATURE_MAPS = {
    "elu+1": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "relu": lambda x: np.maximum(x, 0),
    "softplus": lambda x: np.logaddexp(0, x),
    "exp": np.exp,
    "identity": lambda x: x,
}


def lifted(name, x, matrix=None, rows=None):
    """Maps of whole rows; ``rows`` are the random ones of prf and nprf as they multiply ``x``, ``matrix`` hedgehog's."""
    kind, *options = name.split(":")
    if kind in FEATURE_MAPS:
        return FEATURE_MAPS[kind](x)
    d = x.shape[-1]
    if kind == "prf":
        return np.exp(x @ rows.T - (x**2).sum(-1, keepdims=True) / (2 * d**0.5)) / len(rows) ** 0.5
    if kind == "nprf":
        return np.exp(x / np.linalg.norm(x, axis=-1, keepdims=True) @ rows.T - 0.5) / len(rows) ** 0.5
    if kind == "dpfp":
        r = np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)], -1)
        return np.concatenate([r * np.roll(r, -n, -1) for n in range(1, int(options[0] if options else 1) + 1)], -1)
    if kind == "taylor2":
        x = x / d**0.25
        squares = (x[..., :, None] * x[..., None, :] / 2**0.5).reshape(*x.shape[:-1], d * d)
        return np.concatenate([np.ones_like(x[..., :1]), x, squares], -1)
    exponents = np.concatenate([x @ matrix.swapaxes(-1, -2), -x @ matrix.swapaxes(-1, -2)], -1)
    weights = np.exp(exponents)
    return weights if "exp" in options else weights / weights.sum(-1, keepdims=True)


def weighted(weights, v, normalize=True):
    """``sum_j w_ij v_j / sum_j w_ij``, 0 where no key is seen."""
    numerators = weights @ v
    if not normalize:
        return numerators
    denominators = weights.sum(-1, keepdims=True)
    return np.divide(numerators, denominators, out=np.zeros_like(numerators), where=denominators != 0)


def visible(queries, keys, is_causal, offset, key_padding_mask, batch):
    """``[batch, 1, queries, keys]``."""
    seen = np.ones((batch, 1, queries, keys), bool)
    if is_causal:
        seen &= np.arange(keys)[None, :] <= np.arange(queries)[:, None] + offset
    if key_padding_mask is not None:
        seen &= ~key_padding_mask[:, None, None, :]
    return seen


def shaw(
    q, k, v, rel=None, *, kernelized=True, feature_map="elu+1", rel_feature_map="same", is_causal=False, offset=0,
    key_padding_mask=None, decay=None, normalize=True,
):  # fmt: skip
    """Kernelized attention, with relative positions where ``rel`` is given."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat(group, 1), v.repeat(group, 1)
    phi = FEATURE_MAPS[feature_map]
    queries, keys = q.shape[2], k.shape[2]
    weights = np.zeros((*q.shape[:3], keys))
    if kernelized:
        weights = phi(q) @ phi(k).swapaxes(-1, -2)
    if rel is not None:
        rel = np.asarray(rel, np.float64)
        radius = rel.shape[-2] // 2
        rows = phi(rel) if rel_feature_map == "same" else rel
        distance = np.arange(keys)[None, :] - (np.arange(queries)[:, None] + offset)
        index = np.clip(distance, -radius, radius) + radius
        rows = np.broadcast_to(rows, (q.shape[1], *rows.shape[-2:]))
        weights = weights + np.einsum("bhid,hijd->bhij", phi(q), rows[:, index])
    if decay is not None:
        gamma = np.repeat(np.broadcast_to(decay, k.shape[1] // group), group)[:, None, None]
        age = np.arange(queries)[:, None] + offset - np.arange(keys)[None, :]
        weights = weights * gamma ** np.maximum(age, 0)
    weights = np.where(visible(queries, keys, is_causal, offset, key_padding_mask, q.shape[0]), weights, 0)
    return weighted(weights, v, normalize)


def fourier(
    q, k, v, a, b=None, c=None, beta=None, *, q_positions=None, k_positions=None, normalizer="one_plus", wave="each",
    feature_map="elu+1", is_causal=False, offset=0, key_padding_mask=None,
):  # fmt: skip
    """Fourier positions, or rotary ones."""
    group = q.shape[1] // max(k.shape[1], 1)
    k, v, a = k.repeat(group, 1), v.repeat(group, 1), a.repeat(group, 0)
    phi = FEATURE_MAPS[feature_map]
    queries, keys = q.shape[2], k.shape[2]
    p = (np.arange(queries) + offset)[None, :, None] if q_positions is None else q_positions
    r = np.arange(keys)[None, :, None] if k_positions is None else k_positions
    apart = p[:, :, None] - r[:, None]
    angle = np.einsum("hmn,bijn->bhijm", a, apart)
    fq, fk = phi(q), phi(k)
    plain = np.einsum("bhim,bhjm->bhij", fq, fk)
    if wave == "pairs":
        half = q.shape[-1] // 2
        (x, y), (s, t) = (fq[..., :half], fq[..., half:]), (fk[..., :half], fk[..., half:])
        even = np.einsum("bhim,bhjm,bhijm->bhij", x, s, np.cos(angle)) + np.einsum("bhim,bhjm,bhijm->bhij", y, t, np.cos(angle))
        odd = np.einsum("bhim,bhjm,bhijm->bhij", x, t, np.sin(angle)) - np.einsum("bhim,bhjm,bhijm->bhij", y, s, np.sin(angle))
        weights = even + odd
    else:
        one = np.ones((q.shape[1], q.shape[-1]))
        c = one if c is None else c
        beta = {"one_plus": one, "dominant": np.abs(c) + np.logaddexp(0, 0 if beta is None else beta)}.get(
            normalizer, 0 * one if beta is None else beta
        )
        weights = np.einsum(
            "bhim,bhjm,bhijm->bhij", fq, fk,
            beta[None, :, None, None] + c[None, :, None, None] * np.cos(angle + b[None, :, None, None]),
        )  # fmt: skip
    seen = visible(queries, keys, is_causal, offset, key_padding_mask, q.shape[0])
    weights, plain = np.where(seen, weights, 0), np.where(seen, plain, 0)
    if normalizer == "unrotated":
        numerators, denominators = weights @ v, plain.sum(-1, keepdims=True)
        return np.divide(numerators, denominators, out=np.zeros_like(numerators), where=denominators != 0)
    return weighted(weights, v, normalizer != "none")


def toeplitz(
    q, k, v, bias, *, feature_map="elu+1", is_causal=False, offset=0, key_padding_mask=None, normalize=True
):  # fmt: skip
    """A weight for every distance."""
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat(group, 1), v.repeat(group, 1)
    queries, keys = q.shape[2], k.shape[2]
    phi = FEATURE_MAPS[feature_map]
    index = np.arange(keys)[None, :] - np.arange(queries)[:, None] + queries - 1
    weights = phi(q) @ phi(k).swapaxes(-1, -2) * np.exp(bias)[:, index]
    return weighted(np.where(visible(queries, keys, is_causal, offset, key_padding_mask, q.shape[0]), weights, 0), v, normalize)


def aft(q, k, v, w=None, *, is_causal=False, offset=0, key_padding_mask=None):
    """The attention-free transformer; ``w`` is ``[Lq, 2s - 1]``, or ``[H, Lq, Lk]``."""
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat(group, 1), v.repeat(group, 1)
    queries, keys = q.shape[2], k.shape[2]
    biases = np.zeros((1, queries, keys))
    if w is not None and w.ndim == 3:
        biases = w
    elif w is not None:
        reach = w.shape[1] // 2
        distance = np.arange(keys)[None, :] - (np.arange(queries)[:, None] + offset)
        near = np.abs(distance) <= reach
        biases = np.where(near, np.take_along_axis(w, np.clip(distance + reach, 0, 2 * reach), 1), 0)[None]
    weights = np.exp(k[:, :, None] + biases[None, ..., None])
    weights = np.where(visible(queries, keys, is_causal, offset, key_padding_mask, q.shape[0])[..., None], weights, 0)
    denominators = np.broadcast_to(weights.sum(3), q.shape)
    means = np.divide((weights * v[:, :, None]).sum(3), denominators, out=np.zeros_like(denominators), where=denominators != 0)
    return means / (1 + np.exp(-q))


def short_convolution(q, k, v, taps, *, silu=True, is_causal=False, offset=0, key_padding_mask=None):
    """The sum of the latest products, row after row."""
    u = k * v
    if key_padding_mask is not None:
        u = np.where(key_padding_mask[:, None, :, None], 0, u)
    sums = np.zeros((q.shape[0], k.shape[1], *q.shape[2:]))
    for i in range(q.shape[2]):
        for t in range(taps.shape[1]):
            if 0 <= i + offset - t < k.shape[2]:
                sums[:, :, i] += taps[:, t] * u[:, :, i + offset - t]
    sums = sums / (1 + np.exp(-sums)) if silu else sums
    return q * sums.repeat(q.shape[1] // k.shape[1], 1)


def conv_biases(w, queries, keys, is_causal, offset=0):
    """``[H, Lq, Lk]`` from the taps of `longspan.ops.aft_conv`."""
    taps = w.shape[1]
    back = taps - 1 if is_causal else (taps - 1) // 2
    column = np.arange(keys)[None, :] - (np.arange(queries)[:, None] + offset) + back
    return np.where((column >= 0) & (column < taps), w[:, np.clip(column, 0, taps - 1)], 0)
