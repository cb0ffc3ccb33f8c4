"""A weight for every distance."""

import operator
from typing import Any

from .. import _calls, _options
from .._route import attend, step


_KINDS = ("table", "clipped", "buckets", "grid")


def toeplitz_options(
    operation: str, bias: Any, kind: str, max_distance: int, bidirectional: bool, feature_map: str, normalize: bool,
    algorithm: str, centred: bool,
) -> str:  # fmt: skip
    if kind not in _KINDS:
        raise ValueError(f"{operation}: kind: expected one of {', '.join(_KINDS)}, got {kind!r}")
    if kind == "grid":
        _options.expect_axes(operation, "bias", bias, 3, "(heads, 2 * height - 1, 2 * width - 1)")
    else:
        _options.expect_axes(operation, "bias", bias, 2, "(heads, distances)")
    centred = centred and kind == "table"
    if (centred or kind in ("clipped", "grid")) and any(n % 2 != 1 for n in bias.shape[1:]):
        expected = {"table": "(heads, 2n - 1) with a state", "clipped": "(heads, 2R + 1)",
                    "grid": "(heads, 2 * height - 1, 2 * width - 1)"}[kind]  # fmt: skip
        raise ValueError(f"{operation}: bias: expected shape {expected}, got shape {tuple(bias.shape)}")
    _options.expect_integer(operation, "max_distance", max_distance, 1, (1 << 40) - 1)
    _options.expect_type(operation, "bidirectional", bidirectional, bool)
    _options.expect_type(operation, "feature_map", feature_map, str)
    _options.expect_type(operation, "algorithm", algorithm, str)
    _options.expect_type(operation, "normalize", normalize, bool)
    return _options.as_object(
        kind=kind, centred=centred, max_distance=max_distance, bidirectional=bidirectional, feature_map=feature_map,
        normalize=normalize, algorithm=algorithm,
    )  # fmt: skip


def toeplitz_attention(
    q, k, v, bias, *, kind="table", max_distance=128, bidirectional=True, feature_map="elu+1", maps=None, is_causal=False,
    offset=0, key_padding_mask=None, cu_seqlens=None, normalize=True, initial_state=None, output_final_state=False,
    algorithm="auto",
):  # fmt: skip
    """Kernelized attention with a learned weight for every distance.

    ``out_i = sum_j w_ij v_j / sum_j w_ij`` with ``w_ij = phi(q_i) . phi(k_j) exp(bias[j - i - offset])``.

    Parameters
    ----------
    q, k, v : array ``[B, H, Lq, d]``, ``[B, Hkv, Lk, d]``, ``[B, Hkv, Lk, dv]``
        Queries, keys and values.
    bias : array ``[H, entries]``
        What ``kind`` says.
    kind : str
        Which distances have an entry of their own:

        - ``"table"``: all; ``bias`` is ``[H, Lq + Lk - 1]``, entry ``j - i + Lq - 1``. With a state, coming or going, it is centred
          instead, so that one table serves all calls: ``[H, 2n - 1]``, entry ``n - 1`` for distance 0.
        - ``"clipped"``: those up to ``R`` to either side, farther ones share the entry at that end; ``[H, 2R + 1]``.
        - ``"buckets"``: T5's; ``[H, buckets]``.
        - ``"grid"``: displacements in an image whose pixels are the tokens, row after row; ``[H, 2 height - 1, 2 width - 1]``.
    max_distance, bidirectional : int, bool
        Of ``"buckets"``: the distance from which on all share the last bucket, and whether half of the buckets are for keys after
        the query.
    feature_map : str
        ``phi``; see `kernelized_attention`.
    maps : pair of arrays, optional
        What ``feature_map="hedgehog"`` learns.
    algorithm : str
        ``"tiled"`` (L**2), ``"fft"`` (L log L), ``"piecewise"`` (L times the number of constant stretches) or ``"auto"``.
    is_causal, offset, key_padding_mask, cu_seqlens, normalize, initial_state, output_final_state
        As everywhere in `longspan.ops`.

    Returns
    -------
    array ``[B, H, Lq, dv]``, or ``(array, State)``

    Notes
    -----
    O(L) time where ``bias`` is constant in long stretches, as the far ends of ``"clipped"`` and ``"buckets"`` are; else O(L log L)
    or, on tiles, O(L**2). `longspan.explain` says which, and why.

    References
    ----------
    Luo et al., *Stable, fast and accurate: kernelized attention with relative positional encoding*, 2021 (arXiv:2106.12566).
    Buckets: Raffel et al., *Exploring the limits of transfer learning*, 2020.

    Examples
    --------
    >>> import numpy as np
    >>> from longspan import ops
    >>> random = np.random.default_rng(0)
    >>> q, k, v = random.standard_normal((3, 1, 2, 100, 8), np.float32)
    >>> bias = random.standard_normal((2, 2 * 16 + 1), np.float32)
    >>> out = ops.toeplitz_attention(q, k, v, bias, kind="clipped", is_causal=True)

    The definition, in quadratic time:

    >>> phi = lambda x: np.where(x > 0, x + 1, np.exp(x))
    >>> i, j = np.ogrid[:100, :100]
    >>> w = np.tril(phi(q) @ phi(k).swapaxes(2, 3) * np.exp(bias[:, np.clip(j - i, -16, 16) + 16]))
    >>> np.allclose(out, w / w.sum(-1, keepdims=True) @ v, atol=1e-4)
    True
    """
    operation = "toeplitz_attention"
    centred = initial_state is not None or output_final_state
    options = toeplitz_options(
        operation, bias, kind, max_distance, bidirectional, feature_map, normalize, algorithm, centred
    )  # fmt: skip
    whole = kind == "table" and not centred
    if whole and len(getattr(q, "shape", ())) == 4 and len(getattr(k, "shape", ())) == 4:
        expected = q.shape[2] + k.shape[2] - 1
        if bias.shape[1] != expected:
            raise ValueError(f"{operation}: bias: expected shape (heads, Lq + Lk - 1 = {expected}), "
                             f"got shape {tuple(bias.shape)}")  # fmt: skip
    return attend(
        operation, "toeplitz", options, q, k, v, (bias, *_options.maps(operation, feature_map, maps)),
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def toeplitz_attention_step(
    q, k, v, bias, state=None, *, kind="table", max_distance=128, bidirectional=True, feature_map="elu+1", maps=None,
    normalize=True,
):  # fmt: skip
    """One token of `toeplitz_attention` under ``is_causal=True``: ``(output [B, H, dv], state)``; see `longspan.ops`. A ``bias`` of
    kind ``"table"`` is centred, ``[H, 2n - 1]``, and must reach back as far as there are tokens. Time for distances up to R that have
    an entry of their own: O(R (m + dv) + m dv)."""
    operation = "toeplitz_attention_step"
    options = toeplitz_options(
        operation, bias, kind, max_distance, bidirectional, feature_map, normalize, "auto", True
    )  # fmt: skip
    parameters = (bias, *_options.maps(operation, feature_map, maps))
    return step(operation, "toeplitz", options, q, k, v, parameters, state)


def _first_distance(q: Any, offset: Any) -> int | None:
    """Distance of a table's first entry; what is no call is refused later, by name."""
    try:
        offset = offset if isinstance(offset, int) else operator.index(offset)
    except TypeError:
        return None
    return 1 - q.shape[2] - offset if len(getattr(q, "shape", ())) == 4 else None


_calls.declare(
    "toeplitz", toeplitz_attention,
    lambda q, offset, bias, *_: {"first": _first_distance(q, offset), "shape": tuple(bias.shape[1:])},
)  # fmt: skip
