"""The attention-free transformer."""

from typing import Any

import numpy as np

from .. import _calls, _options
from .._route import attend, is_tensor, step


def aft_local_options(operation: str, w: Any, by_position: bool) -> str:
    _options.expect_axes(operation, "w", w, 2, "(queries, 2s - 1)")
    if w.shape[1] % 2 != 1:
        raise ValueError(f"{operation}: w: expected shape (queries, 2s - 1), got shape {tuple(w.shape)}")
    return _options.as_object(by_position=by_position)


def aft_conv_options(
    operation: str, k: Any, w: Any, gamma: Any, beta: Any, axes: int, image: Any = None
) -> tuple[Any, tuple[Any, ...], str]:
    _options.expect_axes(operation, "k", k, axes, "(batch, heads, keys)" if axes == 3 else "(batch, heads)")
    if image is None:
        _options.expect_axes(operation, "w", w, 2, "(heads, taps)")
    else:
        sides = list(image) if isinstance(image, (tuple, list)) else []
        if len(sides) != 2:
            raise TypeError(f"{operation}: image: expected (height, width), got {image!r}")
        for side in sides:
            _options.expect_integer(operation, "image", side, 1, _options.MOST)
        _options.expect_axes(operation, "w", w, 3, "(heads, rows of taps, taps)")
    if (gamma is None) != (beta is None):
        raise ValueError(f"{operation}: beta: expected both gamma and beta or neither, got one")
    normalized = gamma is not None
    options = _options.as_object(normalized=normalized) if image is None else _options.as_object(normalized=normalized, image=tuple(image))
    return k[..., None], (w, gamma, beta) if normalized else (w,), options


def aft_local(
    q, k, v, w, *, is_causal=False, offset=0, key_padding_mask=None, cu_seqlens=None, initial_state=None,
    output_final_state=False,
):  # fmt: skip
    """AFT-local (Zhai et al., 2021, arXiv:2105.14103): a learned bias for each pair of near positions.

    ``out_i = sigmoid(q_i) * sum_j e_ij v_j / sum_j e_ij`` with ``e_ij = exp(k_j + w_ij)``, channel by channel.

    Parameters
    ----------
    q, k, v : array ``[B, H, L, D]``
        Queries, keys and values of one width; ``[B, Hkv, Lk, D]`` for keys and values.
    w : array ``[Lq, 2s - 1]``
        For all heads: column ``r`` is the bias of the key at distance ``r - (s - 1)`` from the query, which stands at ``i +
        offset``. It is 0, not -inf, for keys ``s`` or more away. With a state, coming or going, row ``t`` is for the query at
        position ``t`` of the whole sequence.
    is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state
        As everywhere in `longspan.ops`.

    Returns
    -------
    array ``[B, H, Lq, D]``, or ``(array, State)``

    Notes
    -----
    O(L s D) time: keys outside of the window are two running means.

    Examples
    --------
    >>> import numpy as np
    >>> from longspan import ops
    >>> random = np.random.default_rng(0)
    >>> q, k, v = random.standard_normal((3, 1, 2, 100, 8), np.float32)
    >>> w = random.standard_normal((100, 2 * 4 - 1), np.float32)
    >>> out = ops.aft_local(q, k, v, w)

    The definition, in quadratic time:

    >>> i, j = np.ogrid[:100, :100]
    >>> bias = np.where(abs(j - i) < 4, w[i, np.clip(j - i + 3, 0, 6)], 0)
    >>> e = np.exp(k[:, :, None] + bias[..., None])
    >>> means = (e * v[:, :, None]).sum(3) / e.sum(3)
    >>> np.allclose(out, means / (1 + np.exp(-q)), atol=1e-4)
    True
    """
    operation = "aft_local"
    by_position = initial_state is not None or output_final_state
    options = aft_local_options(operation, w, by_position)
    return attend(
        operation, "aft-local", options, q, k, v, (w,),
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def aft_local_step(q, k, v, w, state=None):
    """One token of `aft_local` under ``is_causal=True``: ``(output [B, H, dv], state)``; see `longspan.ops`. ``w`` has a row for each
    position of the whole sequence, ``[n, 2s - 1]``."""
    operation = "aft_local_step"
    return step(operation, "aft-local", aft_local_options(operation, w, True), q, k, v, (w,), state)


def aft_simple(
    q, k, v, *, is_causal=False, offset=0, key_padding_mask=None, cu_seqlens=None, initial_state=None,
    output_final_state=False,
):  # fmt: skip
    """AFT-simple (Zhai et al., 2021, arXiv:2105.14103): `aft_local` without biases, the mechanism of the least time.

    ``out_i = sigmoid(q_i) * sum_j exp(k_j) v_j / sum_j exp(k_j)``, channel by channel.

    Parameters
    ----------
    q, k, v : array ``[B, H, L, D]``
        Queries, keys and values of one width; ``[B, Hkv, Lk, D]`` for keys and values.
    is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state
        As everywhere in `longspan.ops`.

    Returns
    -------
    array ``[B, H, Lq, D]``, or ``(array, State)``

    Notes
    -----
    O(L D) time.

    Examples
    --------
    >>> import numpy as np
    >>> from longspan import ops
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 100, 8), np.float32)
    >>> out = ops.aft_simple(q, k, v, is_causal=True)
    >>> means = (np.exp(k) * v).cumsum(2) / np.exp(k).cumsum(2)
    >>> np.allclose(out, means / (1 + np.exp(-q)), atol=1e-4)
    True
    """
    return attend(
        "aft_simple", "aft-simple", "{}", q, k, v, (),
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def aft_simple_step(q, k, v, state=None):
    """One token of `aft_simple` under ``is_causal=True``: ``(output [B, H, dv], state)``; see `longspan.ops`."""
    return step("aft_simple_step", "aft-simple", "{}", q, k, v, (), state)


def aft_conv(
    q, k, v, w, *, gamma=None, beta=None, image=None, is_causal=False, offset=0, key_padding_mask=None, cu_seqlens=None,
    initial_state=None, output_final_state=False,
):  # fmt: skip
    """AFT-conv (Zhai et al., 2021, arXiv:2105.14103): one key a head, and a learned kernel over near distances.

    ``out_i = sigmoid(q_i) * sum_j e_ij v_j / sum_j e_ij`` with ``e_ij = exp(k_j + w[j - i - offset])``, one number for all
    channels of a head.

    Parameters
    ----------
    q, v : array ``[B, H, Lq, D]``, ``[B, Hkv, Lk, D]``
        Queries and values.
    k : array ``[B, Hkv, Lk]``
        Keys.
    w : array ``[H, s]``, or ``[H, rows, s]`` with ``image``
        The kernel: for the last ``s`` keys under a causal mask, else centred on the query. Beyond it the bias is 0.
    gamma, beta : array ``[H]``, optional
        Both or neither: the kernel is ``gamma (w - mean) / std + beta``, as published.
    image : (int, int), optional
        Height and width of the image whose pixels the tokens are, row after row; the kernel is centred in both directions. Such a
        call looks both ways and has no state.
    is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state
        As everywhere in `longspan.ops`.

    Returns
    -------
    array ``[B, H, Lq, D]``, or ``(array, State)``

    Notes
    -----
    O(L s D) time.

    Examples
    --------
    >>> import numpy as np
    >>> from longspan import ops
    >>> random = np.random.default_rng(0)
    >>> q, v = random.standard_normal((2, 1, 2, 100, 8), np.float32)
    >>> k = random.standard_normal((1, 2, 100), np.float32)
    >>> w = random.standard_normal((2, 5), np.float32)
    >>> out = ops.aft_conv(q, k, v, w)

    The definition, in quadratic time:

    >>> i, j = np.ogrid[:100, :100]
    >>> e = np.exp(k[:, :, None] + np.where(abs(j - i) <= 2, w[:, np.clip(j - i + 2, 0, 4)], 0))
    >>> np.allclose(out, e / e.sum(-1, keepdims=True) @ v / (1 + np.exp(-q)), atol=1e-4)
    True
    """
    operation = "aft_conv"
    k, parameters, options = aft_conv_options(operation, k, w, gamma, beta, 3, image)
    return attend(
        operation, "aft-conv", options, q, k, v, parameters,
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def aft_conv_step(q, k, v, w, state=None, *, gamma=None, beta=None):
    """One token of `aft_conv` under ``is_causal=True``: ``(output [B, H, dv], state)``; see `longspan.ops`. Its key is ``[B, Hkv]``, or
    ``[B, Hkv, 1]`` with a token axis."""
    operation = "aft_conv_step"
    k, parameters, options = aft_conv_options(operation, k, w, gamma, beta, 2 if getattr(q, "ndim", 0) == 3 else 3)
    return step(operation, "aft-conv", options, q, k, v, parameters, state)


def aft_full(
    q, k, v, w=None, u=None, z=None, *, is_causal=False, offset=0, key_padding_mask=None, initial_state=None,
    output_final_state=False,
):  # fmt: skip
    """AFT-full (Zhai et al., 2021, arXiv:2105.14103): a learned bias for every pair of positions.

    ``out_i = sigmoid(q_i) * sum_j e_ij v_j / sum_j e_ij`` with ``e_ij = exp(k_j + w_ij)``, channel by channel.

    Parameters
    ----------
    q, k, v : array ``[B, H, L, D]``
        Queries, keys and values of one width; ``[B, Hkv, Lk, D]`` for keys and values.
    w : array ``[Lq, Lk]``, optional
        The biases. With a state, coming or going, rows and columns are positions of the whole sequence, ``[n, n]``; so are rows of
        ``u`` and ``z``.
    u, z : array ``[Lq, r]``, ``[Lk, r]``, optional
        In the place of ``w``: it is ``u @ z.T``, which is never formed.
    is_causal, offset, key_padding_mask, initial_state, output_final_state
        As everywhere in `longspan.ops`.

    Returns
    -------
    array ``[B, H, Lq, D]``, or ``(array, State)``

    Notes
    -----
    O(L**2 D) time; O(L) memory beside the biases.

    Examples
    --------
    >>> import numpy as np
    >>> from longspan import ops
    >>> random = np.random.default_rng(0)
    >>> q, k, v = random.standard_normal((3, 1, 2, 100, 8), np.float32)
    >>> u, z = random.standard_normal((2, 100, 3), np.float32)
    >>> out = ops.aft_full(q, k, v, u=u, z=z)
    >>> e = np.exp(k[:, :, None] + (u @ z.T)[..., None])
    >>> means = (e * v[:, :, None]).sum(3) / e.sum(3)
    >>> np.allclose(out, means / (1 + np.exp(-q)), atol=1e-4)
    True
    """
    operation = "aft_full"
    biases = _biases_of_pairs(operation, w, u, z)
    missing = None
    if initial_state is None and not output_final_state:
        q, offset, biases, missing = _by_position(operation, q, k, biases, is_causal, offset)
    out = attend(
        operation, "aft-full", "{}", q, k, v, biases,
        is_causal, offset, key_padding_mask, None, initial_state, output_final_state,
    )  # fmt: skip
    return out if missing is None else _padded(out, missing, (missing + out.shape[2], out.shape[3]))


def aft_full_step(q, k, v, w=None, u=None, z=None, state=None):
    """One token of `aft_full` under ``is_causal=True``: ``(output [B, H, dv], state)``; see `longspan.ops`. ``w`` has a row and a
    column, ``u`` and ``z`` a row, for each position of the whole sequence, of at most n tokens. O(t D) for the token after t others,
    and a state of O(n D)."""
    operation = "aft_full_step"
    return step(operation, "aft-full", "{}", q, k, v, _biases_of_pairs(operation, w, u, z), state)


def _biases_of_pairs(operation: str, w: Any, u: Any, z: Any) -> tuple[Any, ...]:
    if (w is None) == (u is None) or (u is None) != (z is None):
        raise ValueError(f"{operation}: w: expected w, or both u and z, got another choice of them")
    if w is not None:
        _options.expect_axes(operation, "w", w, 2, "(queries, keys)")
        return (w,)
    _options.expect_axes(operation, "u", u, 2, "(queries, rank)")
    _options.expect_axes(operation, "z", z, 2, "(keys, rank)")
    if u.shape[1] != z.shape[1]:
        raise ValueError(f"{operation}: z: expected shape (keys, {u.shape[1]}), got shape {tuple(z.shape)}")
    return (u, z)


def _by_position(
    operation: str, q: Any, k: Any, biases: tuple[Any, ...], is_causal: bool, offset: Any
) -> tuple[Any, int, tuple[Any, ...], int | None]:
    """Biases of one call as tables by position, as the kernels have them: queries, offset, tables, and how many queries
    that see no key were left out in front."""
    for name, array in (("q", q), ("k", k)):
        _options.expect_axes(operation, name, array, 4, "(batch, heads, tokens, features)")
    queries, keys = q.shape[2], k.shape[2]
    *_, z = biases
    given = (biases[0].shape[0], z.shape[1] if len(biases) == 1 else z.shape[0])
    if given != (queries, keys):
        wanted = f"w: expected shape {(queries, keys)}" if len(biases) == 1 else f"u, z: expected {queries} and {keys} rows"
        raise ValueError(f"{operation}: {wanted}, got {given}")
    _options.expect_integer(operation, "offset", offset, -(1 << 63), (1 << 63) - 1)
    offset = int(offset)
    # Biases ignore the offset: without a mask it changes nothing, and beyond the last key no more than at it.
    offset = min(offset, keys) if is_causal else 0
    missing = None
    rows = biases[0]
    if offset < 0:
        missing = min(-offset, queries)
        q, rows, offset, queries = q[:, :, missing:], rows[missing:], 0, queries - missing
    length = max(queries + offset, keys, 1)
    if len(biases) == 1:
        return q, offset, (_padded(rows, offset, (length, length)),), missing
    return q, offset, (_padded(rows, offset, (length, rows.shape[1])), _padded(z, 0, (length, z.shape[1]))), missing


def _padded(table: Any, first: int, shape: tuple[int, int]) -> Any:
    """``table`` as rows ``first ..`` of one of zeros, in its last two axes."""
    after = (shape[0] - first - table.shape[-2], shape[1] - table.shape[-1])
    if not first and after == (0, 0):
        return table
    if is_tensor(table):
        import torch

        return torch.nn.functional.pad(table, (0, after[1], first, after[0]))
    return np.pad(table, [(0, 0)] * (table.ndim - 2) + [(first, after[0]), (0, after[1])])


_calls.declare(
    "aft-full", aft_full, lambda q, offset, w, z=None: {"length": w.shape[0], "rank": None if z is None else w.shape[1]}
)
_calls.declare("aft-local", aft_local, lambda q, offset, w: {"window": (w.shape[-1] + 1) // 2, "length": w.shape[0]}, window=32)
_calls.declare("aft-simple", aft_simple)
_calls.declare(
    "aft-conv", aft_conv, lambda q, offset, w, *_: {"taps": w.shape[-1], "tap_rows": w.shape[1] if w.ndim == 3 else None}, taps=33
)
