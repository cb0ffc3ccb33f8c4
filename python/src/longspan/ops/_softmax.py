"""Softmax attention, the baseline."""

from .. import _calls, _options
from .._route import attend, step


def softmax_options(operation: str, scale: float | None, capacity: int, window: int | None) -> str:
    _options.expect_scale(operation, scale)
    _options.expect_integer(operation, "capacity", capacity, 0, 1 << 32)
    if window is not None:
        _options.expect_integer(operation, "window", window, 1, 1 << 22)
    return _options.as_object(scale=None if scale is None else float(scale), capacity=capacity, window=window)


def softmax_attention(
    q, k, v, *, scale=None, capacity=4096, window=None, is_causal=False, offset=0, key_padding_mask=None, cu_seqlens=None,
    initial_state=None, output_final_state=False,
):  # fmt: skip
    """Softmax attention, the baseline, in quadratic time; with a window in linear time.

    ``out_i = sum_j w_ij v_j / sum_j w_ij`` with ``w_ij = exp(scale q_i . k_j)``, over the keys with ``|j - i - offset| < window``.

    Parameters
    ----------
    q, k, v : array ``[B, H, Lq, d]``, ``[B, Hkv, Lk, d]``, ``[B, Hkv, Lk, dv]``
        Queries, keys and values.
    scale : float, optional
        ``1 / sqrt(d)`` by default.
    capacity : int
        Tokens that a state has room for: a cache of keys and values.
    window : int, optional
        A query sees the keys at distances below it, its own place among them; by default all. A state is a ring of so many keys and
        values, whatever the capacity.
    is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state
        As everywhere in `longspan.ops`.

    Returns
    -------
    array ``[B, H, Lq, dv]``, or ``(array, State)``

    Raises
    ------
    MemoryError
        Where there is no memory for a state of ``capacity`` tokens.

    Notes
    -----
    O(L**2 (d + dv)) time, with a window O(L window (d + dv)); no L x L matrix is formed.

    References
    ----------
    Vaswani et al., *Attention is all you need*, 2017 (arXiv:1706.03762).

    Examples
    --------
    >>> import numpy as np
    >>> from longspan import ops
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 100, 8), np.float32)
    >>> w = np.exp(q @ k.swapaxes(2, 3) / np.sqrt(8))
    >>> np.allclose(ops.softmax_attention(q, k, v), w / w.sum(-1, keepdims=True) @ v, atol=1e-4)
    True
    """
    operation = "softmax_attention"
    return attend(
        operation, "softmax", softmax_options(operation, scale, capacity, window), q, k, v, (),
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def softmax_attention_step(q, k, v, state=None, *, scale=None, capacity=4096, window=None):
    """One token of `softmax_attention` under ``is_causal=True``: ``(output [B, H, dv], state)``; see `longspan.ops`. O(t (d + dv)) for
    the token after t others, the cost that the other mechanisms, and windows, do away with; a ``ValueError`` where the state holds
    ``capacity`` tokens already, without a window."""
    operation = "softmax_attention_step"
    return step(operation, "softmax", softmax_options(operation, scale, capacity, window), q, k, v, (), state)


_calls.declare("softmax", softmax_attention)
