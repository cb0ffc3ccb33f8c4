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
    The `State` of the tokens before, and whether to return ``(output, state)``. Causal, without gradients, on the CPU.
``algorithm``
    ``"auto"`` or one of `mechanisms`' names for the mechanism. All are exact; see `explain`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _native
from ._native import State

__all__ = [
    "Plan",
    "State",
    "aft_conv",
    "aft_conv_step",
    "aft_full",
    "aft_local",
    "aft_local_step",
    "aft_simple",
    "aft_simple_step",
    "explain",
    "fourier_attention",
    "fourier_attention_step",
    "kernelized_attention",
    "kernelized_attention_step",
    "mechanisms",
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

    ``feature_map`` is ``phi``: ``"elu+1"``, ``"relu"``, ``"softplus"``, ``"exp"``, ``"identity"``. The other arguments
    are described at the top of this module.
    """
    operation = "kernelized_attention"
    options = _kernel_options(operation, k, feature_map, decay, normalize, algorithm)
    return _attend(
        operation, "kernelized", options, q, k, v, (),
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def kernelized_attention_step(q, k, v, state=None, *, feature_map="elu+1", decay=None, normalize=True):
    """One token of `kernelized_attention` with ``is_causal=True``: returns ``(output, state)``.

    ``q`` is ``[B, H, d]`` (or ``[B, H, 1, d]``, and so the output). ``state`` is changed in place; ``None`` starts one.
    Time and memory do not depend on how many tokens came before.
    """
    operation = "kernelized_attention_step"
    options = _kernel_options(operation, k, feature_map, decay, normalize, "auto")
    return _step(operation, "kernelized", options, q, k, v, (), state)


def shaw_attention(
    q,
    k,
    v,
    rel,
    *,
    kernelized=True,
    feature_map="elu+1",
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
    options = _shaw_options(
        operation, k, rel, kernelized, feature_map, rel_feature_map, decay, normalize, algorithm
    )  # fmt: skip
    return _attend(
        operation, "shaw", options, q, k, v, (rel,),
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
    rel_feature_map="same",
    decay=None,
    normalize=True,
):
    """One token of `shaw_attention` with ``is_causal=True``; otherwise as `kernelized_attention_step`."""
    operation = "shaw_attention_step"
    options = _shaw_options(operation, k, rel, kernelized, feature_map, rel_feature_map, decay, normalize, "auto")
    return _step(operation, "shaw", options, q, k, v, (rel,), state)


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
    options, parameters = _fourier(
        operation, k, a, b, c, beta, q_positions, k_positions, normalizer, wave, feature_map, decay, algorithm
    )  # fmt: skip
    return _attend(
        operation, "fourier", options, q, k, v, parameters,
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def fourier_attention_step(
    q, k, v, a, b=None, c=None, beta=None, state=None, *, normalizer="one_plus", wave="each", feature_map="elu+1",
    decay=None,
):  # fmt: skip
    """One token of `fourier_attention` with ``is_causal=True`` and counted positions; the state counts."""
    operation = "fourier_attention_step"
    options, parameters = _fourier(
        operation, k, a, b, c, beta, None, None, normalizer, wave, feature_map, decay, "auto"
    )  # fmt: skip
    return _step(operation, "fourier", options, q, k, v, parameters, state)


def toeplitz_attention(
    q,
    k,
    v,
    bias,
    *,
    feature_map="elu+1",
    is_causal=False,
    offset=0,
    key_padding_mask=None,
    cu_seqlens=None,
    normalize=True,
    initial_state=None,
    output_final_state=False,
    algorithm="auto",
):
    """A learned weight for every distance: ``w_ij = phi(q_i) . phi(k_j) exp(bias[j - i + Lq - 1])`` (Luo et al. 2021).

    ``bias`` is ``[H, Lq + Lk - 1]``. With a state, coming or going, it is centred instead, so that one table serves all
    calls: ``[H, 2n - 1]`` for distances up to ``n - 1``, entry ``n - 1`` for distance 0. The other arguments are described
    at the top of this module.
    """
    operation = "toeplitz_attention"
    centred = initial_state is not None or output_final_state
    options = _toeplitz_options(operation, bias, feature_map, normalize, algorithm, centred)
    if not centred and len(getattr(q, "shape", ())) == 4 and len(getattr(k, "shape", ())) == 4:
        expected = q.shape[2] + k.shape[2] - 1
        if bias.shape[1] != expected:
            raise ValueError(f"{operation}: bias: expected shape (heads, Lq + Lk - 1 = {expected}), "
                             f"got shape {tuple(bias.shape)}")  # fmt: skip
    return _attend(
        operation, "toeplitz", options, q, k, v, (bias,),
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def toeplitz_attention_step(q, k, v, bias, state=None, *, feature_map="elu+1", normalize=True):
    """One token of `toeplitz_attention` with ``is_causal=True``; ``bias`` is centred, ``[H, 2n - 1]``, and must reach back
    as far as there are tokens."""
    operation = "toeplitz_attention_step"
    options = _toeplitz_options(operation, bias, feature_map, normalize, "auto", True)
    return _step(operation, "toeplitz", options, q, k, v, (bias,), state)


def aft_full(q, k, v, w=None, u=None, z=None, *, is_causal=False, offset=0, key_padding_mask=None):
    """AFT-full: `aft_local` with a bias for every pair, ``w`` ``[Lq, Lk]``, or ``w = u @ z.T`` with ``u`` ``[Lq, r]`` and
    ``z`` ``[Lk, r]``. Computed as a window over the whole sequence, with a table of up to ``2 Lq Lk`` biases."""
    operation = "aft_full"
    if (w is None) == (u is None) or (u is None) != (z is None):
        raise ValueError(f"{operation}: w: expected w, or both u and z, got another choice of them")
    if w is None:
        _expect_axes(operation, "u", u, 2, "(queries, rank)")
        _expect_axes(operation, "z", z, 2, "(keys, rank)")
        if u.shape[1] != z.shape[1]:
            raise ValueError(f"{operation}: z: expected shape (keys, {u.shape[1]}), got shape {tuple(z.shape)}")
        w = u @ z.swapaxes(0, 1)
    _expect_axes(operation, "w", w, 2, "(queries, keys)")
    queries, keys = w.shape
    for name, array, tokens in (("q", q, queries), ("k", k, keys)):
        _expect_axes(operation, name, array, 4, "(batch, heads, tokens, features)")
        if array.shape[2] != tokens:
            raise ValueError(f"{operation}: w: expected shape ({q.shape[2]}, {k.shape[2]}), got shape {tuple(w.shape)}")
    if not isinstance(offset, int):
        raise TypeError(f"{operation}: offset: expected an integer that fits 64 bits, got {offset!r}")
    reach = max(queries + offset, keys - offset, 1)
    if reach > 1 << 23:
        raise ValueError(f"{operation}: offset: expected one within the sequence, got {offset}")
    if keys == 0:
        w = w.new_zeros((queries, 1)) if _is_tensor(w) else np.zeros((queries, 1), w.dtype)
    if _is_tensor(w):
        import torch

        key = torch.arange(queries, device=w.device)[:, None] + torch.arange(1 - reach, reach, device=w.device) + offset
        table = torch.where((key >= 0) & (key < keys), w.gather(1, key.clamp(0, w.shape[1] - 1)), 0)
    else:
        key = np.arange(queries)[:, None] + np.arange(1 - reach, reach) + offset
        table = np.where((key >= 0) & (key < keys), np.take_along_axis(w, key.clip(0, w.shape[1] - 1), 1), 0)
        table = table.astype(w.dtype, copy=False)
    options = _local_options(operation, table, False)
    return _attend(
        operation, "aft-local", options, q, k, v, (table,), is_causal, offset, key_padding_mask, None, None, False
    )  # fmt: skip


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
    options = _local_options(operation, w, by_position)
    return _attend(
        operation, "aft-local", options, q, k, v, (w,),
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def aft_local_step(q, k, v, w, state=None):
    """One token of `aft_local` with ``is_causal=True``; ``w`` has a row for each position."""
    operation = "aft_local_step"
    return _step(operation, "aft-local", _local_options(operation, w, True), q, k, v, (w,), state)


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
    q, k, v, w, *, gamma=None, beta=None, is_causal=False, offset=0, key_padding_mask=None, cu_seqlens=None,
    initial_state=None, output_final_state=False,
):  # fmt: skip
    """AFT-conv: `aft_local` with one key a head, ``k`` ``[B, H, L]``, and one kernel a head, ``w`` ``[H, s]``.

    The kernel's taps are for the last ``s`` keys under a causal mask, else centred on the query. With ``gamma`` and
    ``beta``, ``[H]`` each, the kernel is ``gamma (w - mean) / std + beta``, as published.
    """
    operation = "aft_conv"
    k, parameters, options = _conv(operation, k, w, gamma, beta, 3)
    return _attend(
        operation, "aft-conv", options, q, k, v, parameters,
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def aft_conv_step(q, k, v, w, state=None, *, gamma=None, beta=None):
    """One token of `aft_conv` with ``is_causal=True``; ``k`` is ``[B, H]`` beside a ``q`` of ``[B, H, d]``."""
    operation = "aft_conv_step"
    k, parameters, options = _conv(operation, k, w, gamma, beta, 2 if getattr(q, "ndim", 0) == 3 else 3)
    return _step(operation, "aft-conv", options, q, k, v, parameters, state)


def softmax_attention(
    q, k, v, *, scale=None, capacity=4096, is_causal=False, offset=0, key_padding_mask=None, cu_seqlens=None,
    initial_state=None, output_final_state=False,
):  # fmt: skip
    """Softmax attention, the baseline: ``softmax(scale q k^T) v``, with ``scale = 1 / sqrt(d)`` by default.

    A state is a cache of ``capacity`` keys and values. The other arguments are described at the top of this module.
    """
    operation = "softmax_attention"
    return _attend(
        operation, "softmax", _softmax_options(operation, scale, capacity), q, k, v, (),
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def softmax_attention_step(q, k, v, state=None, *, scale=None, capacity=4096):
    """One token of `softmax_attention` with ``is_causal=True``."""
    operation = "softmax_attention_step"
    return _step(operation, "softmax", _softmax_options(operation, scale, capacity), q, k, v, (), state)


# Options are JSON text: what a torch operator can take, and what names a compiled mechanism in a cache.


def _json(value: Any) -> str:
    """JSON of an option. Not the module json, which torch.compile cannot look into."""
    if value is None:
        return "null"
    if value is True:
        return "true"
    if value is False:
        return "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join([_json(entry) for entry in value]) + "]"
    return repr(value)


def _object(**options: Any) -> str:
    return "{" + ", ".join([f'"{name}": {_json(value)}' for name, value in options.items()]) + "}"


def _expect_type(operation: str, name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{operation}: {name}: expected {kind.__name__}, got {type(value).__name__}")


def _decay(operation: str, k: Any, decay: Any) -> list[float] | None:
    if decay is None:
        return None
    if isinstance(decay, (int, float)):
        numbers = [float(decay)] * (k.shape[1] if getattr(k, "ndim", 0) > 1 else 1)
    else:
        try:
            numbers = [float(gamma) for gamma in decay]
        except TypeError:
            kind = type(decay).__name__
            raise TypeError(f"{operation}: decay: expected a number or a sequence of numbers, got {kind}") from None
    for gamma in numbers:
        if not 0.0 < gamma <= 1.0:
            raise ValueError(f"{operation}: decay: expected numbers in (0, 1], got {gamma}")
    return numbers


def _kernel_options(
    operation: str, k: Any, feature_map: str, decay: Any, normalize: bool, algorithm: str, **more: Any
) -> str:
    _expect_type(operation, "feature_map", feature_map, str)
    _expect_type(operation, "algorithm", algorithm, str)
    _expect_type(operation, "normalize", normalize, bool)
    if not more and decay is None:
        return _plain_options(feature_map, normalize, algorithm)
    decay = _decay(operation, k, decay)
    return _object(feature_map=feature_map, decay=decay, normalize=normalize, algorithm=algorithm, **more)


def _plain_options(feature_map: str, normalize: bool, algorithm: str) -> str:
    return f'{{"feature_map": {_json(feature_map)}, "normalize": {_json(normalize)}, "algorithm": {_json(algorithm)}}}'


def _shaw_options(
    operation: str,
    k: Any,
    rel: Any,
    kernelized: bool,
    feature_map: str,
    rel_feature_map: str,
    decay: Any,
    normalize: bool,
    algorithm: str,
) -> str:
    _expect_type(operation, "kernelized", kernelized, bool)
    if rel_feature_map not in ("same", "identity"):
        raise ValueError(f"{operation}: rel_feature_map: expected 'same' or 'identity', got {rel_feature_map!r}")
    shape = getattr(rel, "shape", None)
    if shape is None:
        raise TypeError(f"{operation}: rel: expected an array like q, got {type(rel).__name__}")
    if len(shape) not in (2, 3) or shape[-2] % 2 != 1:
        raise ValueError(
            f"{operation}: rel: expected shape (heads, 2R+1, head_dim) or (2R+1, head_dim), got shape {tuple(shape)}"
        )
    return _kernel_options(
        operation, k, feature_map, decay, normalize, algorithm, kernelized=kernelized, rel_feature_map=rel_feature_map
    )  # fmt: skip


def _softmax_options(operation: str, scale: float | None, capacity: int) -> str:
    if scale is not None and not isinstance(scale, (int, float)):
        raise TypeError(f"{operation}: scale: expected a number or None, got {type(scale).__name__}")
    if scale is not None and not abs(scale) < float("inf"):
        raise ValueError(f"{operation}: scale: expected a finite number, got {scale}")
    if not isinstance(capacity, int):
        raise TypeError(f"{operation}: capacity: expected an integer, got {type(capacity).__name__}")
    if not 0 <= capacity <= 1 << 32:
        raise ValueError(f"{operation}: capacity: expected between 0 and 2**32 tokens, got {capacity}")
    return _object(scale=None if scale is None else float(scale), capacity=capacity)


_FREE = {"one_plus": (), "dominant": ("c", "beta"), "unrotated": ("c",), "none": ("c", "beta"), "literal": ("c",)}


def _fourier(
    operation, k, a, b, c, beta, q_positions, k_positions, normalizer, wave, feature_map, decay, algorithm
) -> tuple[str, tuple[Any, ...]]:
    if normalizer not in _FREE:
        raise ValueError(f"{operation}: normalizer: expected one of {', '.join(_FREE)}, got {normalizer!r}")
    if wave not in ("each", "pairs"):
        raise ValueError(f"{operation}: wave: expected 'each' or 'pairs', got {wave!r}")
    wanted = () if wave == "pairs" else ("b", *_FREE[normalizer])
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
    _expect_type(operation, "feature_map", feature_map, str)
    _expect_type(operation, "algorithm", algorithm, str)
    options = _object(
        wave=wave, normalizer=normalizer, axes=axes, feature_map=feature_map, decay=_decay(operation, k, decay),
        algorithm=algorithm,
    )  # fmt: skip
    return options, tuple(parameters)


def _expect_axes(operation: str, name: str, value: Any, axes: int, shape: str) -> None:
    given = getattr(value, "shape", None)
    if given is None:
        raise TypeError(f"{operation}: {name}: expected an array like q, got {type(value).__name__}")
    if len(given) != axes:
        raise ValueError(f"{operation}: {name}: expected shape {shape}, got shape {tuple(given)}")


def _toeplitz_options(operation, bias, feature_map, normalize, algorithm, centred) -> str:
    _expect_axes(operation, "bias", bias, 2, "(heads, distances)")
    if centred and bias.shape[1] % 2 != 1:
        raise ValueError(f"{operation}: bias: expected shape (heads, 2n - 1) with a state, got {tuple(bias.shape)}")
    _expect_type(operation, "feature_map", feature_map, str)
    _expect_type(operation, "algorithm", algorithm, str)
    _expect_type(operation, "normalize", normalize, bool)
    return _object(centred=centred, feature_map=feature_map, normalize=normalize, algorithm=algorithm)


def _local_options(operation, w, by_position) -> str:
    _expect_axes(operation, "w", w, 2, "(queries, 2s - 1)")
    if w.shape[1] % 2 != 1:
        raise ValueError(f"{operation}: w: expected shape (queries, 2s - 1), got shape {tuple(w.shape)}")
    return _object(by_position=by_position)


def _conv(operation, k, w, gamma, beta, axes) -> tuple[Any, tuple[Any, ...], str]:
    _expect_axes(operation, "k", k, axes, "(batch, heads, keys)" if axes == 3 else "(batch, heads)")
    _expect_axes(operation, "w", w, 2, "(heads, taps)")
    if (gamma is None) != (beta is None):
        raise ValueError(f"{operation}: beta: expected both gamma and beta or neither, got one")
    normalized = gamma is not None
    return k[..., None], (w, gamma, beta) if normalized else (w,), _object(normalized=normalized)


def _first_distance(q: Any, offset: Any) -> int | None:
    """Distance of a Toeplitz table's first entry; what is no call is refused later, by name."""
    return 1 - q.shape[2] - offset if len(getattr(q, "shape", ())) == 4 and isinstance(offset, int) else None


#: What a mechanism learns from the shapes of its parameters. Not among the options that an operator is given: under
#: torch.compile a size may be a symbol, which no text can hold.
_SHAPED: dict[str, Callable[..., dict[str, Any]]] = {
    "shaw": lambda q, offset, rel: {"radius": rel.shape[-2] // 2, "shared": rel.ndim == 2},
    "toeplitz": lambda q, offset, bias: {"first": _first_distance(q, offset), "count": bias.shape[-1]},
    "aft-local": lambda q, offset, w: {"window": (w.shape[-1] + 1) // 2, "length": w.shape[0]},
    "aft-conv": lambda q, offset, w, *_: {"taps": w.shape[-1]},
}


def _mechanism(
    name: str, options: str, operation: str, parameters: Sequence[Any], q: Any = None, offset: int = 0
) -> _native.Mechanism:
    if name in _SHAPED:
        shaped = _SHAPED[name](q, offset, *parameters)
        return _cached(name, options, operation, tuple(shaped.items()))
    return _cached(name, options, operation)


@functools.lru_cache(maxsize=1024)
def _cached(name: str, options: str, operation: str, shaped: tuple[tuple[str, Any], ...] = ()) -> _native.Mechanism:
    if shaped:
        options = ", ".join(part for part in (options.strip()[1:-1], _object(**dict(shaped))[1:-1]) if part.strip())
        options = "{" + options + "}"
    return _native.Mechanism(name, options, operation)


# Arguments on their way to the kernels.


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _pair_of_boundaries(operation: str, cu_seqlens: Any) -> tuple[list[int], list[int]] | None:
    """Boundaries on the query and the key axis."""
    if cu_seqlens is None:
        return None
    pair = isinstance(cu_seqlens, tuple) and len(cu_seqlens) == 2 and all(hasattr(c, "__len__") for c in cu_seqlens)
    lists = []
    for bounds in cu_seqlens if pair else (cu_seqlens,):
        try:
            numbers = bounds.tolist() if hasattr(bounds, "tolist") else list(bounds)
        except TypeError:
            numbers = [None]
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            raise TypeError(f"{operation}: cu_seqlens: expected integers, or a pair of such lists, got {cu_seqlens!r}")
        if any(number < 0 for number in numbers):
            raise ValueError(f"{operation}: cu_seqlens: expected numbers from 0 on, got {numbers}")
        lists.append(numbers)
    return lists[0], lists[-1]


_NATIVE_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


def _widened(operation: str, arrays: Sequence[Any], names: Sequence[str]) -> tuple[list[Any], Any]:
    """NumPy arrays in a type that the kernels have, and the half precision that the result goes back to, if any."""
    first = arrays[0]
    for name, array in zip(names, arrays):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{operation}: {name}: expected a numpy.ndarray or a torch.Tensor, all of one kind, "
                            f"got {type(array).__module__}.{type(array).__qualname__}")  # fmt: skip
    if first.dtype.name not in ("float16", "bfloat16"):
        return list(arrays), None
    for name, array in zip(names, arrays):
        if array.dtype != first.dtype:
            raise TypeError(f"{operation}: {name}: expected {first.dtype} like q, got {array.dtype}")
    return [array.astype(np.float32) for array in arrays], first.dtype


_PARAMETERS = {"shaw": ("rel",), "toeplitz": ("bias",), "aft-local": ("w",), "aft-conv": ("w", "gamma", "beta")}


def _names(mechanism: str, parameters: Sequence[Any]) -> list[str]:
    """Names of a call's arrays. More names than arrays do no harm: zip stops at the shorter."""
    if mechanism == "fourier":
        return ["q", "k", "v", "a", "b", *(["c, beta or positions"] * len(parameters))]
    return ["q", "k", "v", *_PARAMETERS.get(mechanism, ())]


def _check_state(operation: str, name: str, state: Any) -> None:
    if state is not None and not isinstance(state, State):
        raise TypeError(f"{operation}: {name}: expected a longspan.State, got {type(state).__name__}")


def _attend(
    operation, mechanism, options, q, k, v, parameters,
    is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
):  # fmt: skip
    if _is_tensor(q):
        from .torch import _dispatch

        return _dispatch.attend(
            operation, mechanism, options, q, k, v, parameters,
            is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
        )  # fmt: skip
    half = None
    if type(q) is not np.ndarray or q.dtype not in _NATIVE_DTYPES:
        (q, k, v, *parameters), half = _widened(operation, (q, k, v, *parameters), _names(mechanism, parameters))
    _check_state(operation, "initial_state", initial_state)
    packed = None if cu_seqlens is None else _pair_of_boundaries(operation, cu_seqlens)
    out, _, state = _mechanism(mechanism, options, operation, parameters, q, offset).forward(
        q, k, v, tuple(parameters), is_causal, offset, key_padding_mask, packed, initial_state, output_final_state
    )
    if half is not None:
        out = out.astype(half)
    return (out, state) if output_final_state else out


def _step(operation, mechanism, options, q, k, v, parameters, state):
    _check_state(operation, "state", state)
    tensors = _is_tensor(q)
    if tensors:
        from .torch import _dispatch

        (q, k, v, *parameters), back = _dispatch.as_arrays(operation, (q, k, v, *parameters), _names(mechanism, parameters))
        half = None
    else:
        (q, k, v, *parameters), half = _widened(operation, (q, k, v, *parameters), _names(mechanism, parameters))
    with_token = q.ndim == 4
    if with_token:
        for name, array in (("q", q), ("k", k), ("v", v)):
            if array.ndim != 4 or array.shape[2] != 1:
                raise ValueError(f"{operation}: {name}: expected one token, shape (batch, heads, 1, features), "
                                 f"got shape {array.shape}")  # fmt: skip
        q, k, v = q[:, :, 0], k[:, :, 0], v[:, :, 0]
    out, state = _mechanism(mechanism, options, operation, parameters).step(q, k, v, tuple(parameters), state)
    if with_token:
        out = out[:, :, None]
    if tensors:
        return back(out), state
    return (out if half is None else out.astype(half)), state


# What there is, and which algorithm a call would run.


@dataclass(frozen=True)
class MechanismInfo:
    """One mechanism."""

    name: str
    summary: str
    function: str
    algorithms: tuple[str, ...]
    options: tuple[str, ...]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "kernelized": kernelized_attention,
    "shaw": shaw_attention,
    "fourier": fourier_attention,
    "toeplitz": toeplitz_attention,
    "aft-local": aft_local,
    "aft-simple": aft_simple,
    "aft-conv": aft_conv,
    "softmax": softmax_attention,
}

#: Options without which a mechanism cannot be explained, and what stands for them.
_EXPLAINED = {"shaw": {"radius": 16}, "aft-local": {"window": 32}, "aft-conv": {"taps": 33}}


def mechanisms() -> dict[str, MechanismInfo]:
    """Every mechanism by its name, with the function that calls it, its options and the algorithms that can be forced."""
    found = {}
    for name, summary, algorithms in _native.mechanisms():
        function = _FUNCTIONS[name]
        options = tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY)
        found[name] = MechanismInfo(name, summary, function.__name__, tuple(algorithms), options)
    return found


@dataclass(frozen=True)
class Plan:
    """Which algorithm a call runs, and why."""

    algorithm: str
    reason: str
    #: For each algorithm its ``flops``, ``published_elements``, ``scratch_bytes`` for one head, and predicted
    #: ``seconds`` on one thread.
    estimates: tuple[_native.Estimate, ...]

    def __str__(self) -> str:
        lines = [f"{self.algorithm}: {self.reason}"]
        lines += [
            f"  {e['algorithm']:<10} {e['flops']:10.3g} flops  {e['scratch_bytes']:10.3g} B scratch a head  "
            f"{e['seconds'] * 1e3:10.4g} ms on one thread"
            for e in self.estimates
        ]
        return "\n".join(lines)


def explain(
    mechanism: str = "kernelized",
    *,
    batch: int = 1,
    heads: int = 8,
    kv_heads: int | None = None,
    queries: int = 1024,
    keys: int | None = None,
    head_dim: int = 64,
    value_dim: int | None = None,
    is_causal: bool = False,
    offset: int = 0,
    **options: Any,
) -> Plan:
    """Which algorithm a call of these sizes would run, and why: ``print(longspan.explain("shaw", queries=4096, radius=64))``.

    ``options`` are those of the mechanism (``feature_map``, ``algorithm`` ...), and ``radius`` of
    ``"shaw"``, ``window`` of ``"aft-local"``, ``taps`` of ``"aft-conv"``.
    """
    sizes = {"batch": batch, "heads": heads, "kv_heads": heads if kv_heads is None else kv_heads, "queries": queries,
             "keys": queries if keys is None else keys, "head_dim": head_dim,
             "value_dim": head_dim if value_dim is None else value_dim}  # fmt: skip
    for name, size in sizes.items():
        if not isinstance(size, int):
            raise TypeError(f"explain: {name}: expected an integer, got {type(size).__name__}")
        if not 0 <= size < 1 << 40:
            raise ValueError(f"explain: {name}: expected a size from 0 on, got {size}")
    _expect_type("explain", "mechanism", mechanism, str)
    options = {**_EXPLAINED.get(mechanism, {}), **options}
    if mechanism == "toeplitz":
        options = {"first": 1 - sizes["queries"] - offset, "count": max(sizes["queries"] + sizes["keys"] - 1, 1), **options}
    if "decay" in options:
        options["decay"] = _decay("explain", np.empty((1, sizes["kv_heads"])), options["decay"])
    native = _cached(mechanism, _object(**options), "explain")
    algorithm, reason, estimates = native.plan(*sizes.values(), is_causal, offset)
    return Plan(algorithm, reason, tuple(estimates))
