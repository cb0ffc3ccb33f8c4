"""The mechanisms as their formulas say, pair by pair, in doubles: what every test compares with."""

import numpy as np

FEATURE_MAPS = {
    "elu+1": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "relu": lambda x: np.maximum(x, 0),
    "softplus": lambda x: np.logaddexp(0, x),
    "exp": np.exp,
    "identity": lambda x: x,
}


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
