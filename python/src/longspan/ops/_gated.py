"""Gated linear attention and the delta rule."""

from typing import Any

from .. import _calls, _options
from .._route import attend, step


def gated_options(
    operation: str, log_decay: Any, others: tuple[Any, ...], l2_norm: bool, scale: float | None
) -> tuple[str, tuple[Any, ...]]:
    _options.expect_type(operation, "l2_norm", l2_norm, bool)
    _options.expect_scale(operation, scale)
    for beta in others:
        _options.expect_axes(operation, "beta", beta, 3, "(batch, kv_heads, tokens)")
    if log_decay is None:
        return _options.as_object(gate="none", l2_norm=l2_norm, scale=scale), others
    axes = getattr(log_decay, "ndim", None)
    if axes not in (3, 4):
        _options.expect_axes(operation, "log_decay", log_decay, 3, "(batch, kv_heads, tokens), or with a last axis of head_dim")
    return _options.as_object(gate="head" if axes == 3 else "channel", l2_norm=l2_norm, scale=scale), (log_decay, *others)


def gated_attention(
    q, k, v, log_decay=None, *, l2_norm=False, scale=None, is_causal=True, offset=0, key_padding_mask=None, cu_seqlens=None,
    initial_state=None, output_final_state=False,
):  # fmt: skip
    """Gated linear attention: a state that decays by what each token says.

    ``S_t = e^{g_t} S_{t-1} + k_t v_t^T``, ``out_t = scale S_t^T q_t``. Retention, Mamba-2's SSD, GLA.

    Parameters
    ----------
    q : array ``[B, H, L, d]``
        Queries.
    k, v : array ``[B, Hkv, L, d]``, ``[B, Hkv, L, dv]``
        Keys and values. Values, gates and outputs may have a multiple of these heads: so many that follow each other then read the same
        queries and keys.
    log_decay : array ``[B, Hkv, L]`` or ``[B, Hkv, L, d]``, optional
        ``g``, at most 0: one number a head, or one a channel of the key. Without it nothing decays.
    l2_norm : bool
        Queries and keys are divided by their length, ``x / sqrt(|x|^2 + 1e-6)``.
    scale : float, optional
        ``1 / sqrt(d)`` without it.
    is_causal, offset : bool, int
        True and 0: a state knows no later token.
    key_padding_mask : array of bool ``[B, L]``, optional
        True is ignored: such a token leaves the state as it was.
    cu_seqlens, initial_state, output_final_state
        As everywhere in `longspan.ops`.

    Returns
    -------
    array ``[B, H, L, dv]``, or ``(array, State)``

    Raises
    ------
    ValueError
        For a mask that is not causal, and on the CPU for a log decay above 0.

    Notes
    -----
    O(L d dv) time. A state holds ``S`` and the sum of the log decays; two of them add up (`longspan.combine`).

    Under the names of flash-linear-attention, with tokens before heads: `longspan.fla`.

    References
    ----------
    Yang et al., *Gated linear attention transformers with hardware-efficient training*, 2024 (arXiv:2312.06635); Dao, Gu, *Transformers
    are SSDs*, 2024 (arXiv:2405.21060).

    Examples
    --------
    >>> import numpy as np
    >>> from longspan import ops
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 100, 8), np.float32)
    >>> g = -np.random.default_rng(1).random((1, 2, 100), np.float32)
    >>> out = ops.gated_attention(q, k, v, g)

    The definition:

    >>> s = np.zeros((1, 2, 8, 8))
    >>> for t in range(100):
    ...     s = np.exp(g[:, :, t, None, None]) * s + k[:, :, t, :, None] * v[:, :, t, None]
    >>> np.allclose(out[:, :, 99], np.einsum("bhij,bhi->bhj", s, q[:, :, 99]) / 8**0.5, atol=1e-5)
    True
    """
    operation = "gated_attention"
    options, gates = gated_options(operation, log_decay, (), l2_norm, scale)
    return attend(
        operation, "gated", options, q, k, v, gates, is_causal, offset, key_padding_mask, cu_seqlens, initial_state,
        output_final_state,
    )  # fmt: skip


def gated_attention_step(q, k, v, log_decay=None, state=None, *, l2_norm=False, scale=None):
    """One token of `gated_attention`: ``(output [B, H, dv], state)``; see `longspan.ops`. ``log_decay`` is the token's, ``[B, Hkv, 1]``
    or ``[B, Hkv, 1, d]``."""
    operation = "gated_attention_step"
    options, gates = gated_options(operation, log_decay, (), l2_norm, scale)
    return step(operation, "gated", options, q, k, v, gates, state)


def delta_attention(
    q, k, v, beta, log_decay=None, *, l2_norm=True, scale=None, is_causal=True, offset=0, key_padding_mask=None, cu_seqlens=None,
    initial_state=None, output_final_state=False,
):  # fmt: skip
    """The (gated) delta rule: a state that corrects what it knows of a key.

    ``S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - (e^{g_t} S_{t-1})^T k_t)^T``, ``out_t = scale S_t^T q_t``. DeltaNet, gated DeltaNet, KDA.

    Parameters
    ----------
    q : array ``[B, H, L, d]``
        Queries.
    k, v : array ``[B, Hkv, L, d]``, ``[B, Hkv, L, dv]``
        Keys and values. Values, gates and outputs may have a multiple of these heads, as in `gated_attention`.
    beta : array ``[B, Hkv, L]``
        From 0, which leaves the state as it was, over 1, which replaces what it gives for the key, to 2.
    log_decay, l2_norm, scale, is_causal, offset, key_padding_mask, cu_seqlens
        As in `gated_attention`. Keys that are longer than 1 let the state grow without end where ``beta |k|^2`` is above 2.
    initial_state, output_final_state
        As everywhere in `longspan.ops`.

    Returns
    -------
    array ``[B, H, L, dv]``, or ``(array, State)``

    Raises
    ------
    ValueError
        For a mask that is not causal, and on the CPU for a log decay above 0 or a ``beta`` outside of ``[0, 2]``.

    Notes
    -----
    O(L d dv) time. States have no sum: what a token adds depends on the state before it.

    Under the names of flash-linear-attention, with tokens before heads: `longspan.fla`.

    References
    ----------
    Yang et al., *Parallelizing linear transformers with the delta rule over sequence length*, 2024 (arXiv:2406.06484); *Gated delta
    networks*, 2025 (arXiv:2412.06464); Kimi Team, *Kimi Linear*, 2025 (arXiv:2510.26692).

    Examples
    --------
    >>> import numpy as np
    >>> from longspan import ops
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 100, 8), np.float32)
    >>> beta = np.random.default_rng(1).random((1, 2, 100), np.float32)
    >>> out = ops.delta_attention(q, k, v, beta, l2_norm=True)
    >>> out.shape
    (1, 2, 100, 8)
    """
    operation = "delta_attention"
    options, gates = gated_options(operation, log_decay, (beta,), l2_norm, scale)
    return attend(
        operation, "delta", options, q, k, v, gates, is_causal, offset, key_padding_mask, cu_seqlens, initial_state,
        output_final_state,
    )  # fmt: skip


def delta_attention_step(q, k, v, beta, log_decay=None, state=None, *, l2_norm=True, scale=None):
    """One token of `delta_attention`: ``(output [B, H, dv], state)``; see `longspan.ops`. ``beta``, ``[B, Hkv, 1]``, and ``log_decay``,
    ``[B, Hkv, 1]`` or ``[B, Hkv, 1, d]``, are the token's."""
    operation = "delta_attention_step"
    options, gates = gated_options(operation, log_decay, (beta,), l2_norm, scale)
    return step(operation, "delta", options, q, k, v, gates, state)


_calls.declare("gated", gated_attention)
_calls.declare("delta", delta_attention)
