"""Attention on NumPy arrays and torch tensors.

Shapes are ``[batch, head, token, feature]``: ``q`` is ``[B, H, Lq, d]``, ``k`` ``[B, Hkv, Lk, d]``, ``v`` ``[B, Hkv, Lk, dv]``
and the output ``[B, H, Lq, dv]``; ``H`` is a multiple of ``Hkv`` (grouped queries). All arrays of a call are of one kind
(NumPy, or torch on one device) and one type: float32, float64, or float16 and bfloat16, which are computed in float32.

**Copies.** Arrays and CPU tensors of float32 and float64 whose last axis is contiguous are read where they lie, whatever
the other strides (so a transposed projection is no copy), and results are returned without one. Copied first are half
precision, negative strides, a last axis with gaps, misaligned or byte-swapped memory.

**Torch.** Tensors that require a gradient, and whatever happens under ``torch.compile`` or ``torch.export``, go through the
operators of `longspan.torch`; tensors on another device through its chunked formulation, on that device.

**Arguments that mean the same everywhere.**

``is_causal``
    Query ``i`` sees the keys ``j <= i + offset``. Otherwise every query sees every key.
``offset``
    Query ``i`` stands at key ``i + offset``. 0 aligns the starts, ``Lk - Lq`` the ends; also what relative distances
    ``j - (i + offset)`` refer to.
``key_padding_mask``
    ``[B, Lk]`` of bool, **True is ignored**, as in torch. A row that sees no key gives 0.
``cu_seqlens``
    Several sequences end to end on the token axis, ``B = 1``: ``[0, end of the first, ..., L]``, or a pair of such lists
    for the query and the key axis.
``decay``
    A number in (0, 1], or one for each key/value head: the weight of a key falls by it with every token. Causal only.
``normalize``
    Divide by the sum of the weights.
``initial_state``, ``output_final_state``
    The `State` of the tokens before, and whether to return ``(output, state)``. Causal, on the CPU. Where a tensor requires a
    gradient the state is a `longspan.torch.TensorState`, through which gradients flow.
``algorithm``
    ``"auto"`` or one of `mechanisms`' names for the mechanism. All are exact; see `explain`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _options
from ._native import State
from ._route import attend as _attend
from ._route import is_tensor as _is_tensor
from ._route import step as _step

__all__ = [
    "State",
    "aft_conv",
    "aft_conv_step",
    "aft_full",
    "aft_full_step",
    "aft_local",
    "aft_local_step",
    "aft_simple",
    "aft_simple_step",
    "fourier_attention",
    "fourier_attention_step",
    "kernelized_attention",
    "kernelized_attention_step",
    "shaw_attention",
    "shaw_attention_step",
    "softmax_attention",
    "softmax_attention_step",
    "toeplitz_attention",
    "toeplitz_attention_step",
]


def kernelized_attention(
    q,
    k,
    v,
    *,
    feature_map="elu+1",
    maps=None,
    is_causal=False,
    offset=0,
    key_padding_mask=None,
    cu_seqlens=None,
    decay=None,
    normalize=True,
    initial_state=None,
    output_final_state=False,
    algorithm="auto",
):
    """``out_i = sum_j w_ij v_j / sum_j w_ij`` with ``w_ij = phi(q_i) . phi(k_j)``, in linear time (Katharopoulos 2020).

    ``feature_map`` is ``phi``. It takes each number by itself: ``"elu+1"``, ``"relu"``, ``"softplus"``, ``"exp"``,
    ``"identity"``; or a row of ``d`` numbers to ``m`` features:

    - ``"elu+1"`` and ``"softplus"`` are ``exp(x)`` far below 0. In float32 a row whose largest weight falls below about
      ``exp(-87)`` gives 0, as with ``q`` and ``k`` at -44 and less; ``"exp"``, which keeps a common exponent, and float64 do not.
    - ``"prf"``: positive random features (Performer), ``"prf:128:seed=7"`` for 128 of them drawn from the seed 7;
      ``"nprf"`` the same of rows of length 1.
    - ``"dpfp:2"``: products of neighbours among ``[relu(x), relu(-x)]``, 2 d of them for each of 2 neighbours.
    - ``"taylor2"``: so that the weight is ``1 + s + s**2 / 2`` with ``s = q . k / sqrt(d)``.
    - ``"hedgehog"``: softmax of ``[W x, -W x]``, ``"hedgehog:exp"`` their exponentials. ``maps`` is ``W`` for queries,
      ``[H, width, d]``, and for keys, ``[Hkv, width, d]``; ``"hedgehog:32"`` says a width other than ``d``.

    The other arguments are described at the top of this module.
    """
    operation = "kernelized_attention"
    options = _options.kernel(operation, k, feature_map, decay, normalize, algorithm)
    return _attend(
        operation, "kernelized", options, q, k, v, _options.maps(operation, feature_map, maps),
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def kernelized_attention_step(q, k, v, state=None, *, feature_map="elu+1", maps=None, decay=None, normalize=True):
    """One token of `kernelized_attention` with ``is_causal=True``: returns ``(output, state)``.

    ``q`` is ``[B, H, d]`` (or ``[B, H, 1, d]``, and so the output). ``state`` is changed in place; ``None`` starts one.
    Time and memory do not depend on how many tokens came before.
    """
    operation = "kernelized_attention_step"
    options = _options.kernel(operation, k, feature_map, decay, normalize, "auto")
    return _step(operation, "kernelized", options, q, k, v, _options.maps(operation, feature_map, maps), state)


def shaw_attention(
    q,
    k,
    v,
    rel,
    *,
    kernelized=True,
    feature_map="elu+1",
    maps=None,
    rel_feature_map="same",
    is_causal=False,
    offset=0,
    key_padding_mask=None,
    cu_seqlens=None,
    decay=None,
    normalize=True,
    initial_state=None,
    output_final_state=False,
    algorithm="auto",
):
    """Shaw's relative positions in linear time: ``w_ij = phi(q_i) . (phi(k_j) + rho(rel[clip(j - i - offset, -R, R) + R]))``.

    ``rel`` is ``[H, 2R+1, d]``, or ``[2R+1, d]`` for all heads: row 0 stands for "R or more before", row R for "here",
    row 2R for "R or more after". ``kernelized=False`` leaves ``phi(k_j)`` out. ``rel_feature_map`` is ``rho``: ``"same"``
    as ``feature_map``, or ``"identity"``. The other arguments are described at the top of this module.
    """
    operation = "shaw_attention"
    options = _options.shaw(
        operation, k, rel, kernelized, feature_map, rel_feature_map, decay, normalize, algorithm
    )  # fmt: skip
    return _attend(
        operation, "shaw", options, q, k, v, (rel, *_options.maps(operation, feature_map, maps)),
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def shaw_attention_step(
    q,
    k,
    v,
    rel,
    state=None,
    *,
    kernelized=True,
    feature_map="elu+1",
    maps=None,
    rel_feature_map="same",
    decay=None,
    normalize=True,
):
    """One token of `shaw_attention` with ``is_causal=True``; otherwise as `kernelized_attention_step`."""
    operation = "shaw_attention_step"
    options = _options.shaw(operation, k, rel, kernelized, feature_map, rel_feature_map, decay, normalize, "auto")
    parameters = (rel, *_options.maps(operation, feature_map, maps))
    return _step(operation, "shaw", options, q, k, v, parameters, state)


def fourier_attention(
    q,
    k,
    v,
    a,
    b=None,
    c=None,
    beta=None,
    *,
    q_positions=None,
    k_positions=None,
    normalizer="one_plus",
    wave="each",
    feature_map="elu+1",
    maps=None,
    is_causal=False,
    offset=0,
    key_padding_mask=None,
    cu_seqlens=None,
    decay=None,
    initial_state=None,
    output_final_state=False,
    algorithm="auto",
):
    """Fourier positions in linear time: ``w_ij = sum_m phi(q_i)_m phi(k_j)_m (beta_m + c_m cos(b_m + a_m . (p_i - p_j)))``.

    ``a`` is ``[Hkv, d, n]`` for positions of ``n`` axes, ``b``, ``c`` and ``beta`` ``[H, d]``. Positions ``q_positions``
    ``[B, Lq, n]`` and ``k_positions`` ``[B, Lk, n]`` are real numbers; without them query ``i`` is at ``i + offset``, key
    ``j`` at ``j``, and ``n`` is 1. ``normalizer`` says what a row is divided by, and which of ``c`` and ``beta`` there are:

    - ``"one_plus"``: ``c = beta = 1`` (give neither); no weight is negative.
    - ``"dominant"``: ``c`` and ``beta`` free, and ``|c| + softplus(beta)`` takes beta's place; no weight is negative.
    - ``"unrotated"``: ``c`` free, no beta; divided by ``sum_j phi(q_i) . phi(k_j)``.
    - ``"none"``: ``c`` and ``beta`` free, undivided.
    - ``"literal"``: as published, ``c`` free, no beta, divided by the sum of the weights; a ``ValueError`` where that is
      negative in some row.

    ``wave="pairs"`` turns features ``k`` and ``k + d/2`` as a pair (rotary positions): ``a`` is ``[Hkv, d/2, n]``, and there
    is no ``b``, ``c`` or ``beta``. The other arguments are described at the top of this module.
    """
    operation = "fourier_attention"
    options, parameters = _options.fourier(
        operation, k, a, b, c, beta, q_positions, k_positions, normalizer, wave, feature_map, decay, algorithm
    )  # fmt: skip
    parameters += _options.maps(operation, feature_map, maps)
    return _attend(
        operation, "fourier", options, q, k, v, parameters,
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def fourier_attention_step(
    q, k, v, a, b=None, c=None, beta=None, state=None, *, q_positions=None, k_positions=None, normalizer="one_plus",
    wave="each", feature_map="elu+1", maps=None, decay=None,
):  # fmt: skip
    """One token of `fourier_attention` with ``is_causal=True``, at the positions ``q_positions`` and ``k_positions``,
    ``[B, 1, n]``, or counted; then the state counts."""
    operation = "fourier_attention_step"
    options, parameters = _options.fourier(
        operation, k, a, b, c, beta, q_positions, k_positions, normalizer, wave, feature_map, decay, "auto"
    )  # fmt: skip
    parameters += _options.maps(operation, feature_map, maps)
    return _step(operation, "fourier", options, q, k, v, parameters, state)


def toeplitz_attention(
    q,
    k,
    v,
    bias,
    *,
    kind="table",
    max_distance=128,
    bidirectional=True,
    feature_map="elu+1",
    maps=None,
    is_causal=False,
    offset=0,
    key_padding_mask=None,
    cu_seqlens=None,
    normalize=True,
    initial_state=None,
    output_final_state=False,
    algorithm="auto",
):
    """A learned weight for every distance: ``w_ij = phi(q_i) . phi(k_j) exp(b[j - i - offset])`` (Luo et al. 2021).

    ``kind`` says which distances have an entry of their own in ``bias``:

    - ``"table"``: all; ``bias`` is ``[H, Lq + Lk - 1]``, entry ``j - i + Lq - 1``. With a state, coming or going, it is
      centred instead, so that one table serves all calls: ``[H, 2n - 1]``, entry ``n - 1`` for distance 0.
    - ``"clipped"``: those up to ``R`` to either side, farther ones share the entry at that end; ``[H, 2R + 1]``.
    - ``"buckets"``: T5's; ``[H, buckets]``, with ``max_distance``, and half of the buckets for keys after the query if
      ``bidirectional``.
    - ``"grid"``: displacements in an image whose pixels are the tokens, row after row; ``[H, 2 height - 1, 2 width - 1]``.

    The other arguments are described at the top of this module.
    """
    operation = "toeplitz_attention"
    centred = initial_state is not None or output_final_state
    options = _options.toeplitz(
        operation, bias, kind, max_distance, bidirectional, feature_map, normalize, algorithm, centred
    )  # fmt: skip
    whole = kind == "table" and not centred
    if whole and len(getattr(q, "shape", ())) == 4 and len(getattr(k, "shape", ())) == 4:
        expected = q.shape[2] + k.shape[2] - 1
        if bias.shape[1] != expected:
            raise ValueError(f"{operation}: bias: expected shape (heads, Lq + Lk - 1 = {expected}), "
                             f"got shape {tuple(bias.shape)}")  # fmt: skip
    return _attend(
        operation, "toeplitz", options, q, k, v, (bias, *_options.maps(operation, feature_map, maps)),
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def toeplitz_attention_step(
    q,
    k,
    v,
    bias,
    state=None,
    *,
    kind="table",
    max_distance=128,
    bidirectional=True,
    feature_map="elu+1",
    maps=None,
    normalize=True,
):
    """One token of `toeplitz_attention` with ``is_causal=True``. A ``bias`` of kind ``"table"`` is centred, ``[H, 2n - 1]``,
    and must reach back as far as there are tokens."""
    operation = "toeplitz_attention_step"
    options = _options.toeplitz(
        operation, bias, kind, max_distance, bidirectional, feature_map, normalize, "auto", True
    )  # fmt: skip
    parameters = (bias, *_options.maps(operation, feature_map, maps))
    return _step(operation, "toeplitz", options, q, k, v, parameters, state)


def aft_full(
    q, k, v, w=None, u=None, z=None, *, is_causal=False, offset=0, key_padding_mask=None, initial_state=None,
    output_final_state=False,
):  # fmt: skip
    """AFT-full: `aft_local` with a bias for every pair, ``w`` ``[Lq, Lk]``, or ``w = u @ z.T`` with ``u`` ``[Lq, r]`` and
    ``z`` ``[Lk, r]``, which is never formed. O(Lq Lk) time, O(L) memory beside the biases.

    With a state, coming or going, rows are positions of the whole sequence: ``w`` is ``[n, n]``, ``u`` and ``z``
    ``[n, r]``, for sequences of up to ``n`` tokens.
    """
    operation = "aft_full"
    biases = _biases_of_pairs(operation, w, u, z)
    missing = None
    if initial_state is None and not output_final_state:
        q, offset, biases, missing = _by_position(operation, q, k, biases, is_causal, offset)
    out = _attend(
        operation, "aft-full", "{}", q, k, v, biases,
        is_causal, offset, key_padding_mask, None, initial_state, output_final_state,
    )  # fmt: skip
    if missing is None:
        return out
    if _is_tensor(out):
        import torch

        return torch.cat([out.new_zeros((*out.shape[:2], missing, out.shape[3])), out], 2)
    return np.concatenate([np.zeros((*out.shape[:2], missing, out.shape[3]), out.dtype), out], 2)


def aft_full_step(q, k, v, w=None, u=None, z=None, state=None):
    """One token of `aft_full` with ``is_causal=True``; biases are ``[n, n]``, or ``[n, r]`` each, by position."""
    operation = "aft_full_step"
    return _step(operation, "aft-full", "{}", q, k, v, _biases_of_pairs(operation, w, u, z), state)


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
    if not isinstance(offset, int) or isinstance(offset, bool):
        raise TypeError(f"{operation}: offset: expected an integer that fits 64 bits, got {offset!r}")
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
    """``table`` as rows ``first ..`` of one of zeros."""
    after = (shape[0] - first - table.shape[0], shape[1] - table.shape[1])
    if not first and after == (0, 0):
        return table
    if _is_tensor(table):
        import torch

        return torch.nn.functional.pad(table, (0, after[1], first, after[0]))
    return np.pad(table, ((first, after[0]), (0, after[1])))


def aft_local(
    q, k, v, w, *, is_causal=False, offset=0, key_padding_mask=None, cu_seqlens=None, initial_state=None,
    output_final_state=False,
):  # fmt: skip
    """AFT-local: ``sigmoid(q_i) * sum_j exp(k_j + w_ij) v_j / sum_j exp(k_j + w_ij)``, channel by channel (Zhai et al. 2021).

    ``w`` is ``[Lq, 2s - 1]``, for all heads: column ``r`` is the bias of the key at distance ``r - (s - 1)`` from the query,
    which stands at ``i + offset``; it is 0, not -inf, for keys ``s`` or more away. With a state, coming or going, row ``t``
    is for the query at position ``t`` of the whole sequence. All of q, k, v are ``[B, H, L, D]`` of one width. The other
    arguments are described at the top of this module.
    """
    operation = "aft_local"
    by_position = initial_state is not None or output_final_state
    options = _options.aft_local(operation, w, by_position)
    return _attend(
        operation, "aft-local", options, q, k, v, (w,),
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def aft_local_step(q, k, v, w, state=None):
    """One token of `aft_local` with ``is_causal=True``; ``w`` has a row for each position."""
    operation = "aft_local_step"
    return _step(operation, "aft-local", _options.aft_local(operation, w, True), q, k, v, (w,), state)


def aft_simple(
    q, k, v, *, is_causal=False, offset=0, key_padding_mask=None, cu_seqlens=None, initial_state=None,
    output_final_state=False,
):  # fmt: skip
    """AFT-simple: `aft_local` without biases."""
    return _attend(
        "aft_simple", "aft-simple", "{}", q, k, v, (),
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def aft_simple_step(q, k, v, state=None):
    """One token of `aft_simple` with ``is_causal=True``."""
    return _step("aft_simple_step", "aft-simple", "{}", q, k, v, (), state)


def aft_conv(
    q, k, v, w, *, gamma=None, beta=None, image=None, is_causal=False, offset=0, key_padding_mask=None, cu_seqlens=None,
    initial_state=None, output_final_state=False,
):  # fmt: skip
    """AFT-conv: `aft_local` with one key a head, ``k`` ``[B, H, L]``, and one kernel a head, ``w`` ``[H, s]``.

    The kernel's taps are for the last ``s`` keys under a causal mask, else centred on the query. With ``gamma`` and
    ``beta``, ``[H]`` each, the kernel is ``gamma (w - mean) / std + beta``, as published.

    With ``image=(height, width)`` the tokens are an image's, row after row, and ``w`` is ``[H, rows, s]``, centred on the
    query in both directions; such a call looks both ways and has no state.
    """
    operation = "aft_conv"
    k, parameters, options = _options.aft_conv(operation, k, w, gamma, beta, 3, image)
    return _attend(
        operation, "aft-conv", options, q, k, v, parameters,
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def aft_conv_step(q, k, v, w, state=None, *, gamma=None, beta=None):
    """One token of `aft_conv` with ``is_causal=True``; ``k`` is ``[B, H]`` beside a ``q`` of ``[B, H, d]``."""
    operation = "aft_conv_step"
    k, parameters, options = _options.aft_conv(operation, k, w, gamma, beta, 2 if getattr(q, "ndim", 0) == 3 else 3)
    return _step(operation, "aft-conv", options, q, k, v, parameters, state)


def softmax_attention(
    q, k, v, *, scale=None, capacity=4096, window=None, is_causal=False, offset=0, key_padding_mask=None, cu_seqlens=None,
    initial_state=None, output_final_state=False,
):  # fmt: skip
    """Softmax attention, the baseline: ``softmax(scale q k^T) v``, with ``scale = 1 / sqrt(d)`` by default.

    With a ``window`` a query sees the keys at distances below it alone (``window`` of them under a causal mask, its own place among
    them): sliding-window attention, O(L window). A state is a cache of ``capacity`` keys and values, or with a window a ring of as many,
    whatever the capacity. The other arguments are described at the top of this module.
    """
    operation = "softmax_attention"
    return _attend(
        operation, "softmax", _options.softmax(operation, scale, capacity, window), q, k, v, (),
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def softmax_attention_step(q, k, v, state=None, *, scale=None, capacity=4096, window=None):
    """One token of `softmax_attention` with ``is_causal=True``."""
    operation = "softmax_attention_step"
    return _step(operation, "softmax", _options.softmax(operation, scale, capacity, window), q, k, v, (), state)
