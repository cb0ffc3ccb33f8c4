"""Gated linear attention and the delta rule under the names that users of flash-linear-attention and mamba-ssm know, on the CPU.

Shapes and arguments are theirs: ``[batch, token, head, feature]``, states as plain tensors ``[batch, head, key, value]`` of float32,
``cu_seqlens`` for packed sequences. All of it has gradients, states too. Sums are float32 (float64 for inputs of float64); outputs have
the type of ``q``. What these kernels do not do is refused by name; tensors on other devices are for flash-linear-attention itself.

The formulas are in the kernels' ``gated/README.md``; ``longspan.transformers.accelerate`` brings them to models of `transformers`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import _calls, _options, ops
from ._calls import Request
from .torch import _dispatch
from .torch._chunked import check_packed
from .torch._states import TensorState

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_simple_gla",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_simple_gla",
    "mamba_chunk_scan_combined",
]

Result = tuple[Tensor, Tensor | None]


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """The gated delta rule: ``S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - (e^{g_t} S_{t-1})^T k_t)^T``, ``o_t = scale S_t^T q_t``.

    Parameters
    ----------
    q, k : Tensor ``[batch, token, head, key]``
        Queries and keys. Values may have a multiple of their heads: each then serves as many value heads that follow each other.
    v : Tensor ``[batch, token, value_head, value]``
        Values.
    g : Tensor ``[batch, token, value_head]``, optional
        Log decays, at most 0. Without it nothing decays.
    beta : Tensor ``[batch, token, value_head]``, optional
        From 0 to 2; 1 without it.
    scale : float, optional
        ``1 / sqrt(key)`` without it.
    initial_state : Tensor ``[batch, value_head, key, value]``, optional
        The state before the first token; of packed sequences one for each.
    output_final_state : bool
        Whether to return the state after the last token.
    use_qk_l2norm_in_kernel : bool
        Whether queries and keys are divided by their length.
    cu_seqlens : Tensor of integers, optional
        Boundaries of packed sequences, with a batch of 1.

    Returns
    -------
    tuple
        Output, as ``v``, and the final state or ``None``.

    Examples
    --------
    >>> import torch
    >>> from longspan import fla
    >>> q, k, v = torch.randn(3, 1, 100, 4, 16)
    >>> g, beta = -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
    >>> out, state = fla.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
    >>> out.shape, state.shape
    (torch.Size([1, 100, 4, 16]), torch.Size([1, 4, 16, 16]))
    """
    beta = v.new_ones(v.shape[:3]) if beta is None else beta
    return _run("chunk_gated_delta_rule", "delta", q, k, v, g, beta, scale, initial_state, output_final_state,
                use_qk_l2norm_in_kernel, cu_seqlens)  # fmt: skip


def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """The delta rule: `chunk_gated_delta_rule` without decay.

    Parameters
    ----------
    q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
        As there.
    """
    return chunk_gated_delta_rule(
        q, k, v, None, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Kimi delta attention: `chunk_gated_delta_rule` with a decay for each channel of the key.

    Parameters
    ----------
    q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
        As there.
    g : Tensor ``[batch, token, value_head, key]``
        Log decays, at most 0.
    """
    _expect("chunk_kda", ("g", g, 4), ("beta", beta, 3))
    return _run("chunk_kda", "delta", q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                cu_seqlens)  # fmt: skip


def chunk_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Gated linear attention: ``S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T``, ``o_t = scale S_t^T q_t``.

    Parameters
    ----------
    q, k, v, scale, initial_state, output_final_state, cu_seqlens
        As in `chunk_gated_delta_rule`.
    g : Tensor ``[batch, token, value_head, key]``
        Log decays, at most 0.
    """
    _expect("chunk_gla", ("g", g, 4))
    return _run("chunk_gla", "gated", q, k, v, g, None, scale, initial_state, output_final_state, False, cu_seqlens)


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Gated linear attention with one decay a head: `chunk_gla` whose ``g`` is ``[batch, token, value_head]``.

    Parameters
    ----------
    q, k, v, scale, initial_state, output_final_state, cu_seqlens
        As in `chunk_gated_delta_rule`.
    g : Tensor ``[batch, token, value_head]``, optional
        Log decays, at most 0.
    g_gamma : Tensor ``[value_head]``, optional
        In its place the same log decay for all tokens: retention.
    """
    if g is not None and g_gamma is not None:
        raise ValueError("chunk_simple_gla: g_gamma: expected None beside g, got both")
    if g_gamma is not None:
        _expect("chunk_simple_gla", ("v", v, 4))
        _expect("chunk_simple_gla", ("g_gamma", g_gamma, v.shape[2:3]))
        g = g_gamma.expand(v.shape[:3])
    return _run("chunk_simple_gla", "gated", q, k, v, g, None, scale, initial_state, output_final_state, False, cu_seqlens,
                "g" if g_gamma is None else "g_gamma")  # fmt: skip


# One token at a time or many: the kernels are the same.
fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
fused_recurrent_delta_rule = chunk_delta_rule
fused_recurrent_kda = chunk_kda
fused_recurrent_gla = chunk_gla
fused_recurrent_simple_gla = chunk_simple_gla


def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int | None = None, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> Any:  # fmt: skip
    """Mamba-2's scan (SSD): ``S_t = e^{dt_t A} S_{t-1} + dt_t B_t x_t^T``, ``y_t = S_t^T C_t + D x_t``.

    Parameters
    ----------
    x : Tensor ``[batch, token, head, width]``
        What goes through the state.
    dt : Tensor ``[batch, token, head]``
        Steps of time.
    A : Tensor ``[head]``
        At most 0.
    B, C : Tensor ``[batch, token, group, state]``
        Keys and queries; the heads of a group follow each other.
    chunk_size : int, optional
        Not looked at: chunks are the kernels' own.
    D : Tensor ``[head]`` or ``[head, width]``, optional
        What is added of ``x``.
    z : Tensor as ``x``, optional
        The output is multiplied by ``silu(z)``.
    dt_bias : Tensor ``[head]``, optional
        Added to ``dt``.
    initial_states : Tensor ``[batch, head, width, state]``, optional
        States before the first token.
    seq_idx : Tensor of integers ``[batch, token]``, optional
        The sequence that each token belongs to; no state reaches beyond it.
    cu_seqlens : Tensor of integers, optional
        Boundaries of packed sequences, with a batch of 1.
    dt_softplus : bool
        Whether ``dt`` goes through softplus.
    dt_limit : tuple of float
        Bounds of ``dt``.
    return_final_states : bool
        Whether to return the states after the last token too.

    Returns
    -------
    Tensor or tuple
        Output as ``x``, and with ``return_final_states`` the states.

    Examples
    --------
    >>> import torch
    >>> from longspan import fla
    >>> x, dt = torch.randn(1, 100, 4, 16), torch.rand(1, 100, 4)
    >>> B, C = torch.randn(2, 1, 100, 1, 8)
    >>> y, states = fla.mamba_chunk_scan_combined(x, dt, -torch.ones(4), B, C, return_final_states=True)
    >>> y.shape, states.shape
    (torch.Size([1, 100, 4, 16]), torch.Size([1, 4, 16, 8]))
    """
    operation = "mamba_chunk_scan_combined"
    _expect(operation, ("x", x, 4), ("dt", dt, 3), ("A", A, 1), ("B", B, 4), ("C", C, 4))
    batch, tokens, heads, width = x.shape
    several = batch if cu_seqlens is None or initial_states is None else len(_calls.boundaries(operation, cu_seqlens)[0]) - 1
    _expect(
        operation, ("dt", dt, x.shape[:3]), ("A", A, (heads,)), ("B", B, (batch, tokens, *B.shape[2:])), ("C", C, B.shape),
        ("D", D, (heads, width) if isinstance(D, Tensor) and D.dim() == 2 else (heads,)), ("z", z, x.shape),
        ("dt_bias", dt_bias, (heads,)), ("initial_states", initial_states, (several, heads, width, B.shape[3])),
    )  # fmt: skip
    groups = B.shape[2]
    if not groups or heads % groups:
        raise ValueError(f"{operation}: B: expected groups of which each has as many of the {heads} heads, got {groups}")
    if not isinstance(dt_limit, (tuple, list)) or len(dt_limit) != 2:
        raise TypeError(f"{operation}: dt_limit: expected two numbers, the least and the largest, got {dt_limit!r}")
    if seq_idx is not None:
        if initial_states is not None or return_final_states or cu_seqlens is not None:
            raise ValueError(f"{operation}: seq_idx: expected None with states or cu_seqlens, got both; a model wants use_cache=False")
        cu_seqlens = sequences(operation, seq_idx, x.shape[:2])
        x, dt, B, C = (tensor.flatten(0, 1)[None] for tensor in (x, dt, B, C))
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    dt = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    before = None if initial_states is None else initial_states.transpose(2, 3)
    out, after = _run(
        operation, "gated", C.to(wide), B, x.to(wide) * dt[..., None], dt * A.to(wide), None, 1.0, before, return_final_states, False,
        cu_seqlens, "dt * A",
    )  # fmt: skip
    if D is not None:
        out = out + x * (D if D.dim() == 2 else D[:, None])
    out = out.reshape(batch, tokens, heads, width)
    if z is not None:
        out = out * F.silu(z)
    out = out.to(x.dtype)
    return (out, after.transpose(2, 3)) if after is not None else out


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None, initial_states: Tensor | None = None,
    return_final_states: bool = False, activation: str | None = None,
) -> Any:  # fmt: skip
    """The short convolution of these models: each channel a sum over its last tokens, with SiLU or without.

    Parameters
    ----------
    x : Tensor ``[batch, channel, token]``
        Inputs.
    weight : Tensor ``[channel, taps]``
        The last tap weighs a token itself.
    bias : Tensor ``[channel]``, optional
        Added to the sum.
    seq_idx : Tensor of integers ``[batch, token]``, optional
        The sequence that each token belongs to; no sum reaches beyond it.
    initial_states : Tensor ``[batch, channel, taps - 1]``, optional
        The tokens before the first, instead of zeros.
    return_final_states : bool
        Whether to return the last ``taps - 1`` tokens too.
    activation : str, optional
        ``"silu"`` or ``"swish"``.

    Returns
    -------
    Tensor or tuple
        Output as ``x``, and with ``return_final_states`` the tokens that the next call begins with.

    Examples
    --------
    >>> import torch
    >>> from longspan import fla
    >>> x, weight = torch.randn(1, 6, 100), torch.randn(6, 4)
    >>> whole = fla.causal_conv1d_fn(x, weight, activation="silu")
    >>> first, state = fla.causal_conv1d_fn(x[..., :60], weight, activation="silu", return_final_states=True)
    >>> rest = fla.causal_conv1d_fn(x[..., 60:], weight, activation="silu", initial_states=state)
    >>> torch.allclose(torch.cat([first, rest], dim=2), whole, atol=1e-6)
    True
    """
    operation = "causal_conv1d_fn"
    if seq_idx is not None and (initial_states is not None or return_final_states):
        raise ValueError(f"{operation}: seq_idx: expected None with states, because each sequence has its own, got both")
    _expect_convolution(operation, x, weight, bias, activation)
    batch, channels, tokens = x.shape
    before = weight.shape[1] - 1
    _expect(operation, ("initial_states", initial_states, (batch, channels, before)))
    seen = x if initial_states is None else torch.cat([initial_states.to(x.dtype), x], dim=2)
    bounds = None if seq_idx is None else sequences(operation, seq_idx, (batch, tokens))
    out = _convolve(seen, tokens, weight, bias, activation, bounds).to(x.dtype)
    if not return_final_states:
        return out
    return out, F.pad(seen, (max(before - seen.shape[2], 0), 0))[:, :, -before:] if before else seen[:, :, :0]


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """`causal_conv1d_fn` token by token.

    Parameters
    ----------
    x : Tensor ``[batch, channel]`` or ``[batch, channel, token]``
        The next token, or a few.
    conv_state : Tensor ``[batch, channel, n]``
        The last ``n >= taps - 1`` tokens, changed in place.
    weight, bias, activation
        As there.

    Returns
    -------
    Tensor
        Output as ``x``.

    Examples
    --------
    >>> import torch
    >>> from longspan import fla
    >>> state = torch.zeros(1, 6, 3)
    >>> fla.causal_conv1d_update(torch.ones(1, 6), state, torch.ones(6, 4))[0, 0]
    tensor(1.)
    >>> fla.causal_conv1d_update(torch.ones(1, 6), state, torch.ones(6, 4))[0, 0]
    tensor(2.)
    """
    operation = "causal_conv1d_update"
    new = x[..., None] if x.dim() == 2 else x
    _expect_convolution(operation, new, weight, bias, activation)
    _expect(operation, ("conv_state", conv_state, 3))
    kept, before, tokens = conv_state.shape[2], weight.shape[1] - 1, new.shape[2]
    _expect(operation, ("conv_state", conv_state, (*new.shape[:2], kept)))
    if kept < before:
        raise ValueError(f"{operation}: conv_state: expected {before} tokens or more, one less than taps, got {kept}")
    seen = torch.cat([conv_state, new], dim=2)
    out = _convolve(seen[:, :, kept - before :], tokens, weight, bias, activation, None).to(x.dtype)
    conv_state.copy_(seen[:, :, tokens:])
    return out[..., 0] if x.dim() == 2 else out


def sequences(operation: str, seq_idx: Tensor, shape: Sequence[int]) -> Tensor:
    """Boundaries in one long sequence of all rows of a batch, cut where another begins."""
    if not isinstance(seq_idx, Tensor) or tuple(seq_idx.shape) != tuple(shape):
        got = tuple(seq_idx.shape) if isinstance(seq_idx, Tensor) else type(seq_idx).__name__
        raise ValueError(f"{operation}: seq_idx: expected a tensor of shape {tuple(shape)}, got {got}")
    changes = torch.ones(*shape, dtype=torch.bool, device=seq_idx.device)
    changes[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return F.pad(changes.flatten().nonzero().flatten(), (0, 1), value=changes.numel())


def _convolve(seen: Tensor, tokens: int, weight: Tensor, bias: Tensor | None, activation: str | None, bounds: Tensor | None) -> Tensor:
    """The outputs of the last tokens of those that are seen, in the wider type of tokens and weights."""
    batch, channels, count = seen.shape
    wide = torch.promote_types(seen.dtype, weight.dtype)
    weight, bias = weight.to(wide), None if bias is None else bias.to(wide)
    if tokens == 1 and count == weight.shape[1] and channels:
        # One window, for which a token of a model waits in each layer: PyTorch begins sooner.
        one = F.conv1d(seen.to(wide), weight[:, None], bias, groups=channels)
        return F.silu(one) if activation else one
    # In heads of adjacent channels, each what a core works on at a time.
    width = next(n for n in range(min(channels, 128), 0, -1) if channels % n == 0) if channels else 1
    heads = (channels // width, width)
    rows = seen.to(wide).transpose(1, 2).contiguous()
    rows = rows if bounds is None else rows.reshape(1, batch * tokens, channels)
    out: Tensor = ops.depthwise_convolution(
        rows.unflatten(2, heads).transpose(1, 2), weight.flip(1).unflatten(0, heads).transpose(1, 2),
        None if bias is None else bias.unflatten(0, heads), silu=activation is not None, cu_seqlens=bounds,
    )  # fmt: skip
    return out.transpose(1, 2).flatten(2).view(batch, count, channels).transpose(1, 2)[:, :, count - tokens :]


def _expect_convolution(operation: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    _expect(operation, ("x", x, 3), ("weight", weight, 2))
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"{operation}: activation: expected None, 'silu' or 'swish', got {activation!r}")
    _expect(operation, ("weight", weight, (x.shape[1], weight.shape[1])), ("bias", bias, (x.shape[1],)))
    if not 1 <= weight.shape[1] <= 64:
        raise ValueError(f"{operation}: weight: expected 1 to 64 taps, got {weight.shape[1]}")


def _expect(operation: str, *given: tuple[str, Any, int | Sequence[int]]) -> None:
    """Refuses what is no tensor of floating-point numbers of so many axes or, where there is one, of this shape."""
    for name, tensor, shape in given:
        of_axes = isinstance(shape, int)
        if tensor is None and not of_axes:
            continue
        wanted = shape if isinstance(shape, int) else tuple(shape)
        expected = f"a tensor of {wanted} axes" if of_axes else f"shape {wanted}"
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{operation}: {name}: expected {expected}, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise TypeError(f"{operation}: {name}: expected floating-point numbers, got {tensor.dtype}")
        if (tensor.dim() if of_axes else tuple(tensor.shape)) != wanted:
            raise ValueError(f"{operation}: {name}: expected {expected}, got {'shape ' if of_axes else ''}{tuple(tensor.shape)}")


def _run(
    operation: str, mechanism: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, scale: float | None,
    initial_state: Tensor | None, output_final_state: bool, l2_norm: bool, cu_seqlens: Tensor | None, decays: str = "g",
) -> Result:  # fmt: skip
    _expect(operation, ("q", q, 4), ("k", k, 4), ("v", v, 4))
    batch, tokens, heads, width = k.shape
    value_heads, columns = v.shape[2:]
    _expect(operation, ("q", q, k.shape), ("v", v, (batch, tokens, value_heads, columns)))
    if q.device.type != "cpu":
        raise ValueError(f"{operation}: q: expected tensors on the cpu, got {q.device}; there use flash-linear-attention, "
                         "whose functions have the same names and arguments")  # fmt: skip
    if heads == 0 or value_heads % heads:
        raise ValueError(f"{operation}: v: expected a multiple of the {heads} heads of keys, got {value_heads}")
    by_channel = isinstance(g, Tensor) and g.dim() == 4
    each = (batch, tokens, value_heads)
    _expect(operation, ("g", g, (*each, width) if by_channel else each), ("beta", beta, each))
    _options.expect_scale(operation, scale)
    apart = cu_seqlens is not None and (initial_state is not None or output_final_state)
    bounds, others = _calls.boundaries(operation, cu_seqlens) if apart else ([], [])
    states = (len(bounds) - 1 if apart else batch, value_heads, width, columns)
    _expect(operation, ("initial_state", initial_state, states))
    if apart:
        # Each sequence with a state of its own.
        check_packed(operation, (bounds, others), q.transpose(1, 2), k.transpose(1, 2))
        found = []
        # Without any sequence the types of an empty one.
        for n, (start, end) in enumerate(list(zip(bounds, bounds[1:])) or [(0, 0)]):
            pieces: Any = [None if x is None else x[:, start:end] for x in (q, k, v, g, beta)]
            before = initial_state[n : n + 1] if initial_state is not None and states[0] else None
            found.append(_run(operation, mechanism, *pieces, scale, before, True, l2_norm, None, decays))  # type: ignore[call-arg]
        outs, afters = zip(*found)
        return torch.cat(outs, dim=1), torch.cat(afters)[: states[0]] if output_final_state else None
    dtype = q.dtype
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    q, k, v = (x.to(wide).transpose(1, 2) for x in (q, k, v))
    gates = tuple([x.to(wide).transpose(1, 2).contiguous() for x in (g, beta) if x is not None])
    gate = "none" if g is None else "channel" if by_channel else "head"
    options = _options.as_object(gate=gate, l2_norm=l2_norm, scale=None if scale is None else float(scale))
    state = None
    if initial_state is not None or output_final_state:
        kind = _dispatch.shape_of_states(Request(mechanism, options, operation, True, 0), (q, k, v, *gates))
        if initial_state is not None:
            rest = initial_state.new_zeros(batch, value_heads, sum(kind[2]) - width * columns)
            numbers = torch.cat([initial_state.flatten(2), rest], dim=2).to(wide)
            state = TensorState(*kind, numbers)
    try:
        result = _dispatch.attend(
            operation, mechanism, options, q, k, v, gates, is_causal=True, cu_seqlens=cu_seqlens, initial_state=state,
            output_final_state=output_final_state, token_major=True,
        )  # fmt: skip
    except ValueError as error:
        # By the name that the caller knows.
        raise ValueError(str(error).replace(": log_decay:", f": {decays}:")) from None
    # Callers take views of outputs, which kernels write as they are taken, and torch's own operations, under transforms, do not.
    if not output_final_state:
        return result.transpose(1, 2).to(dtype).contiguous(), None
    out, after = result
    numbers = _dispatch.as_tensors(operation, after).numbers
    return out.transpose(1, 2).to(dtype).contiguous(), numbers[..., : width * columns].unflatten(2, (width, columns))
