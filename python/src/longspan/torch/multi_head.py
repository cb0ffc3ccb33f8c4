"""A drop-in for `torch.nn.MultiheadAttention` around any mechanism."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._native import State
from ._states import TensorState
from .attention import refuse_hooks
from .gated_norm import GatedRMSNorm, before_norm
from .mechanisms import build


class MultiheadAttention(nn.Module):
    """`torch.nn.MultiheadAttention` with linear attention inside: same constructor, same parameter names, so that its
    ``state_dict`` loads.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width of a token; heads, each ``embed_dim / num_heads`` wide.
    dropout : float
        Share of the numbers of the heads' outputs that training drops.
    bias : bool
        Whether projections have biases.
    add_bias_kv, add_zero_attn : bool
        Only False.
    kdim, vdim : int, optional
        Widths of ``key`` and ``value`` tokens; ``embed_dim`` by default.
    batch_first : bool
        ``[batch, token, embed_dim]`` instead of torch's ``[token, batch, embed_dim]``.
    device, dtype
        As in torch's modules.
    attention : str or callable
        The mechanism (``"kernelized"``, ``"shaw"`` ...), or a function of ``(num_heads, head_dim)`` that makes a module.
    gated_attention : bool
        Whether the heads' outputs go through a `GatedRMSNorm` before the output projection; its gates are a projection of the queries.
    num_kv_heads : int, optional
        Key/value heads, each shared among ``num_heads / num_kv_heads`` query heads (grouped queries).
    **attention_options
        The mechanism's options: those of `KernelizedAttention`, `ShawAttention` ...

    Raises
    ------
    ValueError
        For sizes that do not fit, and for what has no meaning here.

    Notes
    -----
    What differs from torch's, because the weights of pairs are never formed: ``forward`` returns ``None`` for them; ``dropout``
    drops numbers of the heads' outputs; ``attn_mask`` may only be a causal mask or one that ignores whole keys; ``add_bias_kv``
    and ``add_zero_attn`` are refused. The projection of ``"aft-conv"`` gives one number a head for keys; its ``in_proj_weight``
    is narrower by that.

    O(L embed_dim**2) time for the projections, beside the mechanism's.

    Examples
    --------
    >>> import torch
    >>> from longspan.torch import MultiheadAttention
    >>> attention = MultiheadAttention(32, 4, batch_first=True, attention="shaw", radius=16).eval()
    >>> x = torch.randn(2, 100, 32)
    >>> out, _ = attention(x, x, x, is_causal=True)

    A prompt at once, then token by token:

    >>> with torch.no_grad():
    ...     prompt = x[:, :99]
    ...     _, _, state = attention(prompt, prompt, prompt, is_causal=True, output_final_state=True)
    ...     last, state = attention.step(x[:, 99], state)
    >>> torch.testing.assert_close(last, out[:, 99], rtol=1e-4, atol=1e-4)
    """

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, add_bias_kv: bool = False,
        add_zero_attn: bool = False, kdim: int | None = None, vdim: int | None = None, batch_first: bool = False,
        device: Any = None, dtype: torch.dtype | None = None, *, attention: str | Callable[..., nn.Module] = "kernelized",
        gated_attention: bool = False, num_kv_heads: int | None = None, **attention_options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"MultiheadAttention: num_heads: expected a divisor of embed_dim = {embed_dim}, "
                             f"got {num_heads}")  # fmt: skip
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"MultiheadAttention: dropout: expected a number in [0, 1], got {dropout}")
        if add_bias_kv or add_zero_attn:
            raise ValueError("MultiheadAttention: add_bias_kv and add_zero_attn have no meaning here; leave them out")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self._qkv_same_embed_dim = self.kdim == embed_dim and self.vdim == embed_dim
        place = {"device": device, "dtype": dtype}
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads is not None:
            attention_options["num_kv_heads"] = num_kv_heads
        self.attention = build(attention, num_heads, self.head_dim, **attention_options, **place)
        # Heads and widths of projected queries, keys and values.
        self._head_counts = (num_heads, self.num_kv_heads, self.num_kv_heads)
        key_dim = getattr(self.attention, "key_dim", self.head_dim)
        self._widths = (embed_dim, self.num_kv_heads * key_dim, self.num_kv_heads * self.head_dim)
        if self._qkv_same_embed_dim:
            self.in_proj_weight = nn.Parameter(torch.empty((sum(self._widths), embed_dim), **place))
            for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
                self.register_parameter(name, None)
        else:
            self.q_proj_weight = nn.Parameter(torch.empty((embed_dim, embed_dim), **place))
            self.k_proj_weight = nn.Parameter(torch.empty((self._widths[1], self.kdim), **place))
            self.v_proj_weight = nn.Parameter(torch.empty((self._widths[2], self.vdim), **place))
            self.register_parameter("in_proj_weight", None)
        if bias:
            self.in_proj_bias = nn.Parameter(torch.empty(sum(self._widths), **place))
        else:
            self.register_parameter("in_proj_bias", None)
        self.gated_attention = gated_attention
        if gated_attention:
            # A projection of its own, so that the others are torch's.
            self.gate_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **place)
            self.gated_norm = GatedRMSNorm(num_heads, self.head_dim, **place)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **place)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        if self.gated_attention:
            nn.init.xavier_uniform_(self.gate_proj.weight)
            if self.gate_proj.bias is not None:
                nn.init.zeros_(self.gate_proj.bias)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None, need_weights: bool = False,
        attn_mask: Tensor | None = None, average_attn_weights: bool = True, is_causal: bool = False, *, offset: int = 0,
        cu_seqlens: Any = None, initial_state: State | TensorState | None = None, output_final_state: bool = False,
        q_positions: Tensor | None = None, k_positions: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """The attention of ``query`` to ``key`` and ``value``.

        Parameters
        ----------
        query, key, value : Tensor
            ``[batch, token, embed_dim]`` with ``batch_first``, else ``[token, batch, embed_dim]``; or ``[token, embed_dim]``.
        key_padding_mask : Tensor ``[batch, keys]``, optional
            True, or -inf, is ignored.
        need_weights, average_attn_weights : bool
            Torch's; the weights are never formed, so ``need_weights`` may only be False.
        attn_mask : Tensor ``[queries, keys]``, optional
            Only a causal mask, or one that ignores the same keys for all queries: True, or -inf, is ignored.
        is_causal : bool
            Query ``i`` sees the keys ``j <= i + offset``. It needs no ``attn_mask``, and one beside it is not looked at.
        offset, cu_seqlens, initial_state, output_final_state, q_positions, k_positions
            As in `longspan.torch.attention.Attention.forward`.

        Returns
        -------
        ``(output, None)``, or ``(output, None, state)`` with ``output_final_state``
            The output has the shape of ``query``. A query that sees no key gets the output's bias alone.

        Raises
        ------
        ValueError
            For masks that have no linear form, among others.
        """
        if need_weights:
            raise ValueError("MultiheadAttention: need_weights: expected False, because the weights are never formed")
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() not in (2, 3) or tensor.dim() != query.dim():
                raise ValueError(f"MultiheadAttention: {name}: expected three axes, or two for all of query, key and "
                                 f"value, got shape {tuple(tensor.shape)}")  # fmt: skip
        batched = query.dim() == 3
        axis = 0 if self.batch_first or not batched else 1
        if not batched:
            one = query is key, key is value
            query = query.unsqueeze(axis)
            key = query if one[0] else key.unsqueeze(axis)
            value = key if one[1] else value.unsqueeze(axis)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        ignored = _ignored(key_padding_mask)
        if attn_mask is not None and not is_causal:
            if offset:
                raise ValueError(f"{type(self).__name__}: attn_mask: expected None beside an offset, because a mask says itself what is "
                                 f"seen; use is_causal=True, got one and offset={offset}")  # fmt: skip
            tokens = 1 - axis
            is_causal, ignored = _understood(attn_mask, ignored, key.shape[axis], query.shape[tokens], key.shape[tokens])
        q, k, v = (self._heads(x, heads, axis) for x, heads in zip(self._project(query, key, value), self._head_counts))
        more: dict[str, Any] = {"cu_seqlens": cu_seqlens, "initial_state": initial_state, "q_positions": q_positions,
                                "k_positions": k_positions}  # fmt: skip
        # A module of the user's own need not know of what is not asked for.
        more = {name: value for name, value in more.items() if value is not None}
        if output_final_state:
            more["output_final_state"] = True
        if self.gated_attention:
            q, k, v = before_norm(q, k, v)
        out = self.attention(q, k, v, is_causal=is_causal, offset=offset, key_padding_mask=ignored, **more)
        if output_final_state:
            out, state = out
        out = out.transpose(1, 2).flatten(2)
        if self.gated_attention:
            gate = self.gate_proj(query)
            out = self.gated_norm(out, gate if axis == 0 else gate.transpose(0, 1))
        out = F.dropout(out, self.dropout, self.training)
        if axis == 1:
            out = out.transpose(0, 1)
        out = self.out_proj(out)
        out = out if batched else out.squeeze(axis)
        return (out, None, state) if output_final_state else (out, None)

    def step(
        self, token: Tensor, state: State | TensorState | None = None, *, positions: Tensor | None = None
    ) -> tuple[Tensor, State | TensorState]:
        """One token of causal self-attention, in time and memory that do not grow.

        Parameters
        ----------
        token : Tensor ``[batch, embed_dim]``
            The token.
        state : State or `TensorState`, optional
            What a call or the last step returned; ``None`` starts a sequence. Under ``torch.no_grad()`` it is changed in place.
        positions : Tensor ``[batch, 1, n]``, optional
            Where the token is, with ``attention="fourier"`` and ``axes=n``.

        Returns
        -------
        Tensor ``[batch, embed_dim]``, State or `TensorState`
            The output, and the state with the token taken in. Where gradients are recorded they flow through states back to earlier
            tokens.
        """
        refuse_hooks(self)
        if token.dim() == 3 and token.shape[1] == 1:
            token = token[:, 0]
        if token.dim() != 2 or token.shape[1] != self.embed_dim:
            raise ValueError(f"{type(self).__name__}.step: token: expected shape (batch, {self.embed_dim}), got shape {tuple(token.shape)}")
        q, k, v = (x.unflatten(1, (heads, -1)) for x, heads in zip(self._project(token, token, token), self._head_counts))
        more = {} if positions is None else {"q_positions": positions, "k_positions": positions}
        if self.gated_attention:
            q, k, v = before_norm(q, k, v)
        attention: Any = self.attention
        out, after = attention.step(q, k, v, state, **more)
        out = out.flatten(1)
        if self.gated_attention:
            out = self.gated_norm(out, self.gate_proj(token))
        return self.out_proj(F.dropout(out, self.dropout, self.training)), after

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        biases: Sequence[Tensor | None] = (None, None, None)
        if self.in_proj_weight is None:
            weights: Sequence[Tensor] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key and key is value:
            all_three = F.linear(query, self.in_proj_weight, self.in_proj_bias)
            return tuple(all_three.split(self._widths, dim=-1))
        else:
            weights = self.in_proj_weight.split(self._widths)
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.split(self._widths)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases))

    @staticmethod
    def _heads(x: Tensor, heads: int, batch_axis: int) -> Tensor:
        """``[batch, head, token, feature]``: the projection's own memory."""
        x = x.unflatten(-1, (heads, -1))
        return x.transpose(1, 2) if batch_axis == 0 else x.permute(1, 2, 0, 3)


def _ignored(mask: Tensor | None, name: str = "key_padding_mask") -> Tensor | None:
    """As booleans: `torch.nn.TransformerEncoder` turns masks into numbers to add, 0 and -inf."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise TypeError(f"MultiheadAttention: {name}: expected bool, True where a key is ignored, or numbers 0 and -inf, "
                        f"got {mask.dtype}")  # fmt: skip
    ignored = mask == -torch.inf
    understood, message = (ignored | (mask == 0)).all(), f"MultiheadAttention: {name}: expected only 0 and -inf among its numbers, got others"
    if torch.compiler.is_compiling():
        # Reading the value would break the graph.
        torch.ops.aten._assert_async.msg(understood, message)
    elif not bool(understood):
        raise ValueError(message)
    return ignored


def _is_causal(masked: Tensor) -> bool:
    """Whether row ``i`` hides the keys after ``i`` and no others, found without a second mask to compare with."""
    queries, keys = masked.shape
    seen = torch.arange(1, queries + 1, device=masked.device).clamp(max=keys)
    if keys == 0 or not torch.equal(keys - masked.sum(1), seen):
        return keys == 0
    # As many as there are after `i`, and the first of them is the next one.
    hiding = masked[: keys - 1]
    return torch.equal(hiding.view(torch.uint8).argmax(1), seen[: len(hiding)])


def _understood(
    attn_mask: Tensor, ignored: Tensor | None, batch: int, queries: int, keys: int
) -> tuple[bool, Tensor | None]:
    """Whether a mask of pairs is the causal one, and which keys are ignored if it is the same for all queries."""
    expected = ("expected a causal mask, or one that ignores the same keys for all queries (others take quadratic time; of one whose "
                "last row sees all keys, is_causal=True and offset=keys - queries)")  # fmt: skip
    if torch.compiler.is_compiling():
        raise ValueError("MultiheadAttention: attn_mask: expected None in a compiled function, which cannot look at it; say "
                         "is_causal=True or key_padding_mask instead")  # fmt: skip
    if tuple(attn_mask.shape) != (queries, keys):
        raise ValueError(f"MultiheadAttention: attn_mask: {expected}, of shape {(queries, keys)}, got shape "
                         f"{tuple(attn_mask.shape)}")  # fmt: skip
    masked = _ignored(attn_mask, "attn_mask")
    assert masked is not None
    if _is_causal(masked):
        return True, ignored
    if queries and not bool((masked == masked[:1]).all()):
        raise ValueError(f"MultiheadAttention: attn_mask: {expected}, got another one")
    if not bool(masked.any()):
        return False, ignored
    everywhere = masked[:1].expand(batch, keys)
    return False, everywhere if ignored is None else ignored | everywhere
