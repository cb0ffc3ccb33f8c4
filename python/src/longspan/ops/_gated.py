"""Gated linear attention and the delta rule."""

from __future__ import annotations

from .. import _options
from .._route import attend, step


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
    options, gates = _options.gated(operation, log_decay, (), l2_norm, scale)
    return attend(
        operation, "gated", options, q, k, v, gates, is_causal, offset, key_padding_mask, cu_seqlens, initial_state,
        output_final_state,
    )  # fmt: skip


def gated_attention_step(q, k, v, log_decay=None, state=None, *, l2_norm=False, scale=None):
    """One token of `gated_attention`.

    Parameters
    ----------
    q, k, v, state
        A token, and the state before it: `longspan.ops`.
    log_decay : array ``[B, Hkv, 1]`` or ``[B, Hkv, 1, d]``, optional
        Its gates.
    l2_norm, scale : bool, float
        As in `gated_attention`, and the same for all tokens of a state.

    Returns
    -------
    array ``[B, H, dv]``, `State`

    Examples
    --------
    >>> import numpy as np
    >>> from longspan import ops
    >>> x, g = np.ones((1, 2, 8), np.float32), np.full((1, 2, 1), -0.5, np.float32)
    >>> out, state = ops.gated_attention_step(x, x, x, g)
    >>> out, state = ops.gated_attention_step(x, x, x, g, state, scale=1.0)
    >>> round(float(out[0, 0, 0]), 3), round(8 * (1 + float(np.exp(-0.5))), 3)
    (12.852, 12.852)
    """
    operation = "gated_attention_step"
    options, gates = _options.gated(operation, log_decay, (), l2_norm, scale)
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
    options, gates = _options.gated(operation, log_decay, (beta,), l2_norm, scale)
    return attend(
        operation, "delta", options, q, k, v, gates, is_causal, offset, key_padding_mask, cu_seqlens, initial_state,
        output_final_state,
    )  # fmt: skip


def delta_attention_step(q, k, v, beta, log_decay=None, state=None, *, l2_norm=True, scale=None):
    """One token of `delta_attention`.

    Parameters
    ----------
    q, k, v, state
        A token, and the state before it: `longspan.ops`.
    beta : array ``[B, Hkv, 1]``
        As in `delta_attention`.
    log_decay : array ``[B, Hkv, 1]`` or ``[B, Hkv, 1, d]``, optional
        Its gates.
    l2_norm, scale : bool, float
        As in `delta_attention`, and the same for all tokens of a state.

    Returns
    -------
    array ``[B, H, dv]``, `State`

    Examples
    --------
    >>> import numpy as np
    >>> from longspan import ops
    >>> x, beta = np.ones((1, 1, 4), np.float32), np.ones((1, 1, 1), np.float32)
    >>> out, state = ops.delta_attention_step(x, x, 3 * x, beta, scale=1.0)
    >>> out, state = ops.delta_attention_step(x, x, 5 * x, beta, state=state, scale=1.0)
    >>> [round(float(y), 3) for y in out[0, 0]]
    [5.0, 5.0, 5.0, 5.0]
    """
    operation = "delta_attention_step"
    options, gates = _options.gated(operation, log_decay, (beta,), l2_norm, scale)
    return step(operation, "delta", options, q, k, v, gates, state)
