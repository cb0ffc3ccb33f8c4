"""Short convolutions, with gates and without: what looks at neighbours, between layers of attention."""

from typing import Any

from .. import _calls, _options
from .._route import attend, step


def short_convolution_options(operation: str, taps: Any, silu: bool) -> str:
    _options.expect_axes(operation, "taps", taps, 3, "(kv_heads, width, head_dim)")
    _options.expect_type(operation, "silu", silu, bool)
    return _options.as_object(silu=silu)


def depthwise_convolution_options(operation: str, taps: Any, bias: Any, silu: bool) -> tuple[str, tuple[Any, ...]]:
    _options.expect_axes(operation, "taps", taps, 3, "(heads, width, d)")
    if bias is not None:
        _options.expect_axes(operation, "bias", bias, 2, "(heads, d)")
    _options.expect_type(operation, "silu", silu, bool)
    parameters = (taps,) if bias is None else (taps, bias)
    return _options.as_object(silu=silu, gated=False, bias=bias is not None), parameters


def short_convolution(
    q, k, v, taps, *, silu=True, is_causal=False, offset=0, key_padding_mask=None, cu_seqlens=None, initial_state=None,
    output_final_state=False,
):  # fmt: skip
    """A few learned taps over the latest tokens, channel by channel, between two gates.

    ``out_i = q_i * silu(sum_t taps_t * k_j * v_j)`` with ``j = i + offset - t``, for ``t`` from 0 to ``width - 1``.

    Parameters
    ----------
    q : array ``[B, H, Lq, d]``
        What gates the result.
    k, v : array ``[B, Hkv, Lk, d]``
        The values, and what gates them.
    taps : array ``[Hkv, width, d]``
        ``taps[:, t]`` weighs the token ``t`` places back. Up to 64 of them.
    silu : bool
        Without it the sum of the taps is gated as it is.
    is_causal, offset : bool, int
        Query ``i`` stands at key ``i + offset``. It looks back under every mask, so ``is_causal`` changes nothing but that states are
        taken and given.
    key_padding_mask : array of bool ``[B, Lk]``, optional
        True is ignored: such a key counts as 0.
    cu_seqlens, initial_state, output_final_state
        As everywhere in `longspan.ops`.

    Returns
    -------
    array ``[B, H, Lq, d]``, or ``(array, State)``

    Raises
    ------
    ValueError
        For values that are not as wide as queries.

    Notes
    -----
    O(L width d) time. A state holds the last ``width - 1`` products ``k * v``.

    References
    ----------
    Arora et al., *Zoology: measuring and improving recall in efficient language models*, 2023 (arXiv:2312.04927); with SiLU: Gu, Dao,
    *Mamba*, 2023 (arXiv:2312.00752).

    Examples
    --------
    >>> import numpy as np
    >>> from longspan import ops
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 100, 8), np.float32)
    >>> taps = np.random.default_rng(1).standard_normal((2, 3, 8), np.float32)
    >>> out = ops.short_convolution(q, k, v, taps)

    The definition:

    >>> u = np.pad(k * v, ((0, 0), (0, 0), (2, 0), (0, 0)))
    >>> s = sum(taps[:, t, None] * u[:, :, 2 - t : 102 - t] for t in range(3))
    >>> np.allclose(out, q * s / (1 + np.exp(-s)), atol=1e-4)
    True
    """
    operation = "short_convolution"
    return attend(
        operation, "short-convolution", short_convolution_options(operation, taps, silu), q, k, v, (taps,),
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def short_convolution_step(q, k, v, taps, state=None, *, silu=True):
    """One token of `short_convolution`: ``(output [B, H, d], state)``; see `longspan.ops`."""
    operation = "short_convolution_step"
    options = short_convolution_options(operation, taps, silu)
    return step(operation, "short-convolution", options, q, k, v, (taps,), state)


def depthwise_convolution(
    x, taps, bias=None, *, silu=False, key_padding_mask=None, cu_seqlens=None, initial_state=None, output_final_state=False
):  # fmt: skip
    """A few learned taps over the latest tokens, channel by channel: the causal convolution of Mamba-2, Qwen3-Next and their kin.

    ``out_i = bias + sum_t taps_t * x_{i - t}``, for ``t`` from 0 to ``width - 1``; with ``silu`` the SiLU of that. There are no gates,
    as `short_convolution` has.

    Parameters
    ----------
    x : array ``[B, H, L, d]``
        The channels, in heads of any width. What lies as ``[B, L, H * d]`` is taken as it lies.
    taps : array ``[H, width, d]``
        ``taps[:, t]`` weighs the token ``t`` places back. Up to 64 of them.
    bias : array ``[H, d]``, optional
        Added to each sum.
    silu : bool
        Whether sums go through SiLU.
    key_padding_mask : array of bool ``[B, L]``, optional
        True is ignored: such a token counts as 0.
    cu_seqlens : sequence of int, optional
        Boundaries of packed sequences, ``[0, end of the first, ..., L]``; ``B = 1``.
    initial_state, output_final_state
        As everywhere in `longspan.ops`.

    Returns
    -------
    array ``[B, H, L, d]``, or ``(array, State)``

    Raises
    ------
    ValueError
        For more than 64 taps.

    Notes
    -----
    O(L width d) time. A state holds the last ``width - 1`` tokens.

    References
    ----------
    Gu, Dao, *Mamba*, 2023 (arXiv:2312.00752).

    Examples
    --------
    >>> import numpy as np
    >>> from longspan import ops
    >>> x = np.random.default_rng(0).standard_normal((1, 2, 100, 8), np.float32)
    >>> taps = np.random.default_rng(1).standard_normal((2, 3, 8), np.float32)
    >>> out = ops.depthwise_convolution(x, taps)

    The definition:

    >>> u = np.pad(x, ((0, 0), (0, 0), (2, 0), (0, 0)))
    >>> np.allclose(out, sum(taps[:, t, None] * u[:, :, 2 - t : 102 - t] for t in range(3)), atol=1e-5)
    True
    """
    operation = "depthwise_convolution"
    options, parameters = depthwise_convolution_options(operation, taps, bias, silu)
    none = _no_columns(operation, x, 4)
    return attend(
        operation, "short-convolution", options, none, none, x, parameters,
        True, 0, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def depthwise_convolution_step(x, taps, bias=None, state=None, *, silu=False):
    """One token of `depthwise_convolution`, ``x [B, H, d]`` or with a token axis of length 1: ``(output, state)``; see
    `longspan.ops`."""
    operation = "depthwise_convolution_step"
    options, parameters = depthwise_convolution_options(operation, taps, bias, silu)
    none = _no_columns(operation, x, 3)
    return step(operation, "short-convolution", options, none, none, x, parameters, state)


def _no_columns(operation: str, x: Any, least: int) -> Any:
    """Queries and keys of a convolution without gates: there are none, so they have no gradient either."""
    if len(getattr(x, "shape", ())) < least:
        raise ValueError(f"{operation}: x: expected {least} axes, got {len(getattr(x, 'shape', ()))}")
    return (x.detach() if hasattr(x, "detach") else x)[..., :0]


_calls.declare("short-convolution", short_convolution, lambda q, offset, taps, *_: {"width": taps.shape[1]}, width=4)
