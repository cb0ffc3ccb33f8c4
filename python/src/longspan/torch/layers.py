"""Encoder and decoder layers with the arguments of torch's own, for `torch.nn.TransformerEncoder` and
`torch.nn.TransformerDecoder`.

They are not subclasses of torch's layers, which switch to a fused softmax attention when they can; to a type checker they are,
because torch's stacks ask for them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._native import State
from ._states import TensorState
from .multi_head import MultiheadAttention

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


if TYPE_CHECKING:
    from torch.nn import TransformerDecoderLayer as _Decoder
    from torch.nn import TransformerEncoderLayer as _Encoder
else:
    _Encoder = _Decoder = object


def _check_token(layer: nn.Module, token: Tensor) -> None:
    """With an axis of tokens every entry of a batch would be added to every other."""
    if token.dim() != 2:
        raise ValueError(f"{type(layer).__name__}.step: token: expected shape (batch, d_model), got shape {tuple(token.shape)}")


class _Layer(nn.Module):
    def __init__(
        self, d_model: int, dim_feedforward: int, dropout: float, activation: str | Callable[[Tensor], Tensor],
        layer_norm_eps: float, norm_first: bool, bias: bool, norms: int, place: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__()
        if isinstance(activation, str) and activation not in _ACTIVATIONS:
            raise ValueError(f"{type(self).__name__}: activation: expected relu, gelu or a function, got {activation!r}")
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias, **place)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, **place)
        self.norm_first = norm_first
        for index in range(1, norms + 1):
            setattr(self, f"norm{index}", nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, **place))
            setattr(self, f"dropout{index}", nn.Dropout(dropout))
        self.activation = _ACTIVATIONS[activation] if isinstance(activation, str) else activation

    def _residual(self, x: Tensor, index: int, branch: Callable[[Tensor], Any]) -> tuple[Tensor, list[Any]]:
        """With what a branch gives, and what else it gives."""
        norm: Callable[[Tensor], Tensor]
        norm, dropout = getattr(self, f"norm{index}"), getattr(self, f"dropout{index}")
        y, *others = branch(norm(x) if self.norm_first else x)
        y = x + dropout(y)
        return y if self.norm_first else norm(y), others

    def _feed_forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.linear2(self.dropout(self.activation(self.linear1(x)))),)


class TransformerEncoderLayer(_Layer, _Encoder):
    """`torch.nn.TransformerEncoderLayer` with linear attention, for `torch.nn.TransformerEncoder` or by itself.

    Parameter names are torch's.

    Parameters
    ----------
    d_model, nhead : int
        Width of a token; heads.
    dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device, dtype
        As in torch's layer.
    attention : str or callable
        The mechanism; see `MultiheadAttention`.
    gated_attention : bool
        Whether the heads' outputs go through a `GatedRMSNorm`.
    **attention_options
        The mechanism's options, and ``num_kv_heads``.

    Examples
    --------
    >>> import torch
    >>> from longspan.torch import TransformerEncoderLayer
    >>> layer = TransformerEncoderLayer(32, 4, 64, batch_first=True, attention="shaw", radius=16).eval()
    >>> x = torch.randn(2, 100, 32)
    >>> out = layer(x, is_causal=True)
    >>> with torch.no_grad():
    ...     _, state = layer(x[:, :99], is_causal=True, output_final_state=True)
    ...     last, state = layer.step(x[:, 99], state)
    >>> torch.testing.assert_close(last, out[:, 99], rtol=1e-4, atol=1e-4)

    >>> encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> encoder(x, is_causal=True, mask=torch.nn.Transformer.generate_square_subsequent_mask(100)).shape
    torch.Size([2, 100, 32])
    """

    self_attn: MultiheadAttention  # type: ignore[assignment]

    def __init__(
        self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu, layer_norm_eps: float = 1e-5, batch_first: bool = False,
        norm_first: bool = False, bias: bool = True, device: Any = None, dtype: torch.dtype | None = None, *,
        attention: str | Callable[..., nn.Module] = "kernelized", gated_attention: bool = False, **attention_options: Any,
    ) -> None:  # fmt: skip
        place = {"device": device, "dtype": dtype}
        super().__init__(d_model, dim_feedforward, dropout, activation, layer_norm_eps, norm_first, bias, 2, place)
        form: dict[str, Any] = {"batch_first": batch_first, "gated_attention": gated_attention, **place}
        self.self_attn = MultiheadAttention(d_model, nhead, dropout, bias, attention=attention, **form, **attention_options)

    def forward(
        self, src: Tensor, src_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None, is_causal: bool = False, *,
        positions: Tensor | None = None, cu_seqlens: Any = None, initial_state: State | TensorState | None = None,
        output_final_state: bool = False,
    ) -> Any:  # fmt: skip
        """The layer of all tokens.

        Parameters
        ----------
        src : Tensor
            ``[batch, token, d_model]`` with ``batch_first``, else ``[token, batch, d_model]``; or ``[token, d_model]``.
        src_mask, src_key_padding_mask, is_causal, cu_seqlens, initial_state, output_final_state
            As in `MultiheadAttention.forward`, masks without ``src_``.
        positions : Tensor ``[batch, token, n]``, optional
            Where tokens are, with ``attention="fourier"`` and ``axes=n``.

        Returns
        -------
        Tensor, or ``(Tensor, state)`` with ``output_final_state``
            Of the shape of ``src``. The state goes on with `step`.
        """
        x, (_, *state) = self._residual(src, 1, lambda x: self.self_attn(
            x, x, x, key_padding_mask=src_key_padding_mask, attn_mask=src_mask, is_causal=is_causal, cu_seqlens=cu_seqlens,
            initial_state=initial_state, output_final_state=output_final_state, q_positions=positions, k_positions=positions,
        ))  # fmt: skip
        out, _ = self._residual(x, 2, self._feed_forward)
        return (out, state[0]) if output_final_state else out

    def step(
        self, token: Tensor, state: State | TensorState | None = None, *, positions: Tensor | None = None
    ) -> tuple[Tensor, State | TensorState]:
        """One token of the layer under ``is_causal=True``, in time and memory that do not grow.

        Parameters
        ----------
        token, state, positions
            As in `MultiheadAttention.step`, without an axis of tokens.

        Returns
        -------
        Tensor ``[batch, d_model]``, State or `TensorState`
            The output, and the state with the token taken in.
        """
        _check_token(self, token)
        x, (after,) = self._residual(token, 1, lambda x: self.self_attn.step(x, state, positions=positions))
        return self._residual(x, 2, self._feed_forward)[0], after


class TransformerDecoderLayer(_Layer, _Decoder):
    """`torch.nn.TransformerDecoderLayer` with linear attention to itself and to the memory, for `torch.nn.TransformerDecoder` or by
    itself.

    Parameter names are torch's.

    Parameters
    ----------
    d_model, nhead : int
        Width of a token; heads.
    dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device, dtype
        As in torch's layer.
    attention, cross_attention : str or callable
        The mechanism of the self-attention, and of the attention to the memory; see `MultiheadAttention`.
    gated_attention : bool
        Whether the heads' outputs of both go through a `GatedRMSNorm`.
    **attention_options
        Options of the self-attention's mechanism, and its ``num_kv_heads``.

    Examples
    --------
    >>> import torch
    >>> from longspan.torch import TransformerDecoderLayer
    >>> layer = TransformerDecoderLayer(32, 4, 64, batch_first=True, attention="shaw", radius=16).eval()
    >>> x, memory = torch.randn(2, 100, 32), torch.randn(2, 50, 32)
    >>> out = layer(x, memory, tgt_is_causal=True)
    >>> with torch.no_grad():
    ...     _, state = layer(x[:, :99], memory, tgt_is_causal=True, output_final_state=True)
    ...     last, state = layer.step(x[:, 99], memory, state)
    >>> torch.testing.assert_close(last, out[:, 99], rtol=1e-4, atol=1e-4)
    """

    self_attn: MultiheadAttention  # type: ignore[assignment]
    multihead_attn: MultiheadAttention  # type: ignore[assignment]

    def __init__(
        self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu, layer_norm_eps: float = 1e-5, batch_first: bool = False,
        norm_first: bool = False, bias: bool = True, device: Any = None, dtype: torch.dtype | None = None, *,
        attention: str | Callable[..., nn.Module] = "kernelized", cross_attention: str | Callable[..., nn.Module] = "kernelized",
        gated_attention: bool = False, **attention_options: Any,
    ) -> None:  # fmt: skip
        place = {"device": device, "dtype": dtype}
        super().__init__(d_model, dim_feedforward, dropout, activation, layer_norm_eps, norm_first, bias, 3, place)
        form: dict[str, Any] = {"batch_first": batch_first, "gated_attention": gated_attention, **place}
        self.self_attn = MultiheadAttention(d_model, nhead, dropout, bias, attention=attention, **form, **attention_options)
        self.multihead_attn = MultiheadAttention(d_model, nhead, dropout, bias, attention=cross_attention, **form)

    def forward(
        self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None, memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None, tgt_is_causal: bool = False,
        memory_is_causal: bool = False, *, initial_state: State | TensorState | None = None, output_final_state: bool = False,
    ) -> Any:  # fmt: skip
        """The layer of all tokens.

        Parameters
        ----------
        tgt, memory : Tensor
            ``[batch, token, d_model]`` with ``batch_first``, else ``[token, batch, d_model]``; or ``[token, d_model]``.
        tgt_mask, tgt_key_padding_mask, tgt_is_causal, initial_state, output_final_state
            Of the self-attention, as in `MultiheadAttention.forward`.
        memory_mask, memory_key_padding_mask, memory_is_causal
            Of the attention to the memory.

        Returns
        -------
        Tensor, or ``(Tensor, state)`` with ``output_final_state``
            Of the shape of ``tgt``. The state goes on with `step`.
        """
        x, (_, *state) = self._residual(tgt, 1, lambda x: self.self_attn(
            x, x, x, key_padding_mask=tgt_key_padding_mask, attn_mask=tgt_mask, is_causal=tgt_is_causal,
            initial_state=initial_state, output_final_state=output_final_state,
        ))  # fmt: skip
        x, _ = self._residual(x, 2, lambda x: self.multihead_attn(
            x, memory, memory, key_padding_mask=memory_key_padding_mask, attn_mask=memory_mask, is_causal=memory_is_causal
        ))  # fmt: skip
        out, _ = self._residual(x, 3, self._feed_forward)
        return (out, state[0]) if output_final_state else out

    def step(
        self, token: Tensor, memory: Tensor, state: State | TensorState | None = None,
        memory_key_padding_mask: Tensor | None = None, *, position: int | None = None,
    ) -> tuple[Tensor, State | TensorState]:  # fmt: skip
        """One token of the layer under ``tgt_is_causal=True``.

        Parameters
        ----------
        token, state
            As in `TransformerEncoderLayer.step`.
        memory : Tensor
            All of it, as in `forward`: every token reads the whole memory.
        memory_key_padding_mask : Tensor ``[batch, keys]``, optional
            True, or -inf, is ignored.
        position : int, optional
            How many tokens were before this one: for a ``cross_attention`` that sees the order of tokens.

        Returns
        -------
        Tensor ``[batch, d_model]``, State or `TensorState`
            The output, and the state with the token taken in.

        Raises
        ------
        ValueError
            Without the position where it is needed.
        """
        _check_token(self, token)
        if position is None and getattr(self.multihead_attn.attention, "sees_order", False):
            raise ValueError(f"{type(self).__name__}.step: position: expected how many tokens were before, because the attention "
                             "to the memory sees their order, got None")  # fmt: skip

        axis = 1 if self.multihead_attn.batch_first else 0

        def attend_to_memory(x: Tensor) -> tuple[Tensor]:
            out, _ = self.multihead_attn(
                x.unsqueeze(axis), memory, memory, key_padding_mask=memory_key_padding_mask, offset=position or 0
            )
            return (out.squeeze(axis),)

        x, (after,) = self._residual(token, 1, lambda x: self.self_attn.step(x, state))
        x, _ = self._residual(x, 2, attend_to_memory)
        return self._residual(x, 3, self._feed_forward)[0], after
