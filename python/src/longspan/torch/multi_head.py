"""A drop-in for `torch.nn.MultiheadAttention` around any mechanism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._native import State
from ._states import TensorState
from .mechanisms import build


class MultiheadAttention(nn.Module):
    """`torch.nn.MultiheadAttention` with linear attention inside: same constructor, same parameter names, so that its
    ``state_dict`` loads.

    ``attention`` names the mechanism (``"kernelized"``, ``"shaw"`` ...) or is a function of ``(num_heads, head_dim)``
    that makes a module; further arguments are the mechanism's options: ``MultiheadAttention(512, 8, batch_first=True,
    attention="shaw", radius=16)``. The projection of ``"aft-conv"`` gives one number a head for keys; its
    ``in_proj_weight`` is narrower by that.

    What differs, because the weights of pairs are never formed: ``forward`` returns ``None`` for them; ``dropout`` drops
    numbers of the heads' outputs; ``attn_mask`` may say no more than ``is_causal`` does. ``add_bias_kv`` and
    ``add_zero_attn`` are refused.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        attention: str | Callable[..., nn.Module] = "kernelized",
        **attention_options: Any,
    ) -> None:
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
        self.attention = build(attention, num_heads, self.head_dim, **attention_options, **place)
        # Widths of projected queries, keys and values.
        self._widths = (embed_dim, num_heads * getattr(self.attention, "key_dim", self.head_dim), embed_dim)
        if self._qkv_same_embed_dim:
            self.in_proj_weight = nn.Parameter(torch.empty((sum(self._widths), embed_dim), **place))
            for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
                self.register_parameter(name, None)
        else:
            self.q_proj_weight = nn.Parameter(torch.empty((embed_dim, embed_dim), **place))
            self.k_proj_weight = nn.Parameter(torch.empty((self._widths[1], self.kdim), **place))
            self.v_proj_weight = nn.Parameter(torch.empty((embed_dim, self.vdim), **place))
            self.register_parameter("in_proj_weight", None)
        if bias:
            self.in_proj_bias = nn.Parameter(torch.empty(sum(self._widths), **place))
        else:
            self.register_parameter("in_proj_bias", None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **place)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        offset: int = 0,
    ) -> tuple[Tensor, None]:
        """``(output, None)``. Shapes as in `torch.nn.MultiheadAttention`: ``[batch, token, embed_dim]`` with
        ``batch_first``, else ``[token, batch, embed_dim]``, or ``[token, embed_dim]``.

        ``key_padding_mask`` ``[batch, keys]``: True, or -inf, is ignored. ``is_causal`` needs no ``attn_mask``.
        """
        if need_weights:
            raise ValueError("MultiheadAttention: need_weights: expected False, because the weights are never formed")
        if attn_mask is not None and not is_causal:
            raise ValueError("MultiheadAttention: attn_mask: expected None, or a causal mask with is_causal=True: other "
                             "masks of pairs cannot be had in linear time")  # fmt: skip
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
        q, k, v = (self._heads(x, axis) for x in self._project(query, key, value))
        out = self.attention(q, k, v, is_causal=is_causal, offset=offset, key_padding_mask=_ignored(key_padding_mask))
        out = out.transpose(1, 2).flatten(2)
        out = F.dropout(out, self.dropout, self.training)
        if axis == 1:
            out = out.transpose(0, 1)
        out = self.out_proj(out)
        return (out if batched else out.squeeze(axis)), None

    def step(
        self, token: Tensor, state: State | TensorState | None = None
    ) -> tuple[Tensor, State | TensorState]:
        """One token of causal self-attention, ``[batch, embed_dim]``: its output and the state with it taken in.

        Under ``torch.no_grad()`` the state is changed in place, and time and memory do not depend on how many tokens came
        before. Where gradients are recorded they flow through the states back to earlier tokens."""
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)) for x in self._project(token, token, token))
        dtype = self.out_proj.weight.dtype
        step: Any = self.attention.step
        out, after = step(q, k, v, state)
        return self.out_proj(out.flatten(1).to(dtype)), after

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

    def _heads(self, x: Tensor, batch_axis: int) -> Tensor:
        """``[batch, head, token, feature]``: the projection's own memory."""
        x = x.unflatten(-1, (self.num_heads, -1))
        return x.transpose(1, 2) if batch_axis == 0 else x.permute(1, 2, 0, 3)


def _ignored(key_padding_mask: Tensor | None) -> Tensor | None:
    """As booleans: `torch.nn.TransformerEncoder` turns masks into numbers to add, 0 and -inf."""
    if key_padding_mask is None or key_padding_mask.dtype == torch.bool:
        return key_padding_mask
    if not key_padding_mask.is_floating_point():
        raise TypeError(f"MultiheadAttention: key_padding_mask: expected bool, True where a key is ignored, or numbers "
                        f"0 and -inf, got {key_padding_mask.dtype}")  # fmt: skip
    ignored = key_padding_mask == -torch.inf
    # Reading values would break a compiled graph.
    if not torch.compiler.is_compiling() and not bool((ignored | (key_padding_mask == 0)).all()):
        raise ValueError("MultiheadAttention: key_padding_mask: expected only 0 and -inf among its numbers, got others")
    return ignored
