"""Fourier positions."""

from typing import Any

from .. import _calls, _options
from .._route import attend, step


#: Which parameters a normaliser of Fourier positions leaves free, besides ``b``.
FREE: dict[str, tuple[str, ...]] = {
    "one_plus": (), "dominant": ("c", "beta"), "unrotated": ("c",), "none": ("c", "beta"), "literal": ("c",),
}  # fmt: skip


def fourier_options(
    operation: str, k: Any, a: Any, b: Any, c: Any, beta: Any, q_positions: Any, k_positions: Any, normalizer: str, wave: str,
    feature_map: str, decay: Any, algorithm: str, log_decay: Any = None, **more: Any,
) -> tuple[str, tuple[Any, ...]]:  # fmt: skip
    if normalizer not in FREE:
        raise ValueError(f"{operation}: normalizer: expected one of {', '.join(FREE)}, got {normalizer!r}")
    if wave not in ("each", "pairs"):
        raise ValueError(f"{operation}: wave: expected 'each' or 'pairs', got {wave!r}")
    if wave == "pairs" and normalizer in ("one_plus", "dominant"):
        raise ValueError(f"{operation}: normalizer: expected unrotated, literal or none with wave='pairs', got {normalizer!r}")
    wanted = () if wave == "pairs" else ("b", *FREE[normalizer])
    parameters = [a]
    for name, value in (("b", b), ("c", c), ("beta", beta)):
        if (value is not None) != (name in wanted):
            expected, got = ("an array", "None") if name in wanted else ("None", "an array")
            raise ValueError(f"{operation}: {name}: expected {expected} with wave={wave!r} and "
                             f"normalizer={normalizer!r}, got {got}")  # fmt: skip
        if value is not None:
            parameters.append(value)
    if (q_positions is None) != (k_positions is None):
        raise ValueError(f"{operation}: k_positions: expected both q_positions and k_positions or neither, got one")
    axes = None
    if q_positions is not None:
        axes = int(a.shape[-1]) if len(getattr(a, "shape", ())) == 3 else 1
        parameters += [q_positions, k_positions]
    _options.expect_type(operation, "feature_map", feature_map, str)
    _options.expect_type(operation, "algorithm", algorithm, str)
    options = _options.as_object(
        wave=wave, normalizer=normalizer, axes=axes, feature_map=feature_map, algorithm=algorithm,
        **_options.falling(operation, k, decay, log_decay), **more,
    )  # fmt: skip
    return options, tuple(parameters)


def fourier_attention(
    q, k, v, a, b=None, c=None, beta=None, *, q_positions=None, k_positions=None, normalizer="one_plus", wave="each",
    feature_map="elu+1", maps=None, is_causal=False, offset=0, key_padding_mask=None, cu_seqlens=None, decay=None,
    log_decay=None, initial_state=None, output_final_state=False, algorithm="auto",
):  # fmt: skip
    """Kernelized attention with Fourier positions, real-valued and of any dimension, in linear time.

    ``w_ij = sum_m phi(q_i)_m phi(k_j)_m (beta_m + c_m cos(b_m + a_m . (p_i - p_j)))``; ``out_i`` is ``sum_j w_ij v_j``, divided as
    ``normalizer`` says.

    Parameters
    ----------
    q, k, v : array ``[B, H, Lq, d]``, ``[B, Hkv, Lk, d]``, ``[B, Hkv, Lk, dv]``
        Queries, keys and values.
    a : array ``[Hkv, m, n]``
        Angular frequencies of ``m`` features (``d`` of them, unless ``feature_map`` makes others) along ``n`` axes of positions.
    b : array ``[H, m]``, optional
        Phases.
    c, beta : array ``[H, m]``, optional
        Amplitudes and constants, as far as ``normalizer`` leaves them free.
    q_positions, k_positions : array ``[B, Lq, n]``, ``[B, Lk, n]``, optional
        Real numbers, also of float32 where the others are of half precision. Without them query ``i`` is at ``i + offset``, key
        ``j`` at ``j``, and ``n`` is 1. Calls with states take them as they are: count near 0 there, or the gradient of ``a`` loses digits.
    normalizer : str
        What a row is divided by:

        - ``"one_plus"``: the sum of its weights, with ``c = beta = 1`` (give neither); no weight is negative.
        - ``"dominant"``: the same with ``c`` and ``beta`` free, and ``|c| + softplus(beta)`` in the place of ``beta``; no weight is
          negative.
        - ``"unrotated"``: ``sum_j phi(q_i) . phi(k_j)``; ``c`` free, no ``beta``.
        - ``"none"``: nothing; ``c`` and ``beta`` free.
        - ``"literal"``: as published, the sum of its weights with ``c`` free and no ``beta``.
    wave : str
        ``"each"``, or ``"pairs"``: features ``k`` and ``k + m/2`` are turned as a pair (rotary positions). Then ``a`` is
        ``[Hkv, m/2, n]``, there is no ``b``, ``c`` or ``beta``, and the normaliser is ``"unrotated"``, ``"literal"`` or ``"none"``.
    feature_map : str
        ``phi``; see `kernelized_attention`.
    maps : pair of arrays, optional
        What ``feature_map="hedgehog"`` learns.
    is_causal, offset, key_padding_mask, cu_seqlens, decay, log_decay, initial_state, output_final_state, algorithm
        As everywhere in `longspan.ops`.

    Returns
    -------
    array ``[B, H, Lq, dv]``, or ``(array, State)``

    Raises
    ------
    ValueError
        Where ``"literal"`` would divide some row by a negative number, among others.

    Notes
    -----
    O(L m (dv + n)) time: three times the products of `kernelized_attention`, with ``"pairs"`` once. ``a``, phases, amplitudes and
    positions have gradients.

    References
    ----------
    Rotary positions and ``"unrotated"``: Su et al., *RoFormer*, 2021 (arXiv:2104.09864).

    Examples
    --------
    >>> import numpy as np
    >>> from longspan import ops
    >>> random = np.random.default_rng(0)
    >>> q, k, v = random.standard_normal((3, 1, 2, 100, 8), np.float32)
    >>> a, b = random.standard_normal((2, 8, 1), np.float32), random.standard_normal((2, 8), np.float32)
    >>> times = np.sort(random.uniform(0, 50, (1, 100, 1))).astype(np.float32)    # irregular
    >>> out = ops.fourier_attention(q, k, v, a, b, q_positions=times, k_positions=times)

    The definition, in quadratic time:

    >>> phi = lambda x: np.where(x > 0, x + 1, np.exp(x))
    >>> angle = b[:, None, None] + (times - times.swapaxes(1, 2))[..., None] * a[:, None, None, :, 0]
    >>> w = np.einsum("bhim,bhjm,hijm->bhij", phi(q), phi(k), 1 + np.cos(angle))
    >>> np.allclose(out, w / w.sum(-1, keepdims=True) @ v, atol=1e-4)
    True
    """
    operation = "fourier_attention"
    options, parameters = fourier_options(
        operation, k, a, b, c, beta, q_positions, k_positions, normalizer, wave, feature_map, decay, algorithm, log_decay
    )  # fmt: skip
    parameters += _options.maps(operation, feature_map, maps) + _options.gates(log_decay)
    return attend(
        operation, "fourier", options, q, k, v, parameters,
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def fourier_attention_step(
    q, k, v, a, b=None, c=None, beta=None, state=None, *, q_positions=None, k_positions=None, normalizer="one_plus",
    wave="each", feature_map="elu+1", maps=None, decay=None, log_decay=None,
):  # fmt: skip
    """One token of `fourier_attention` under ``is_causal=True``: ``(output [B, H, dv], state)``; see `longspan.ops`. ``q_positions``
    and ``k_positions``, ``[B, 1, n]``, say where the token is; without them the state counts. ``log_decay`` is that of the token, ``[B,
    Hkv]``."""
    operation = "fourier_attention_step"
    options, parameters = fourier_options(
        operation, k, a, b, c, beta, q_positions, k_positions, normalizer, wave, feature_map, decay, "auto", log_decay
    )  # fmt: skip
    parameters += _options.maps(operation, feature_map, maps) + _options.gates(log_decay)
    return step(operation, "fourier", options, q, k, v, parameters, state)


_calls.declare("fourier", fourier_attention)
