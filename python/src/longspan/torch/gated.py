"""Gated linear attention and the delta rule as modules: their gates come with the keys."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from .. import _options
from .._native import State
from . import _operators
from ._states import TensorState
from .attention import Attention, draw_gates, log_decays

_GATES = {"none": 0, "head": 1}


class _Gated(Attention):
    def __init__(
        self, num_heads: int, head_dim: int, gates: tuple[str, ...], gate: str, l2_norm: bool, beta_max: float | None,
        num_kv_heads: int | None, place: dict[str, Any],
    ) -> None:  # fmt: skip
        name = type(self).__name__
        if gate not in gates:
            raise ValueError(f"{name}: gate: expected one of {', '.join(gates)}, got {gate!r}")
        if beta_max is not None and not 0 < beta_max <= 2:
            raise ValueError(f"{name}: beta_max: expected a number above 0, at most 2, got {beta_max!r}")
        # Rows of length 1 have products of at most 1 however wide they are.
        options = _options.as_object(gate=gate, l2_norm=l2_norm, scale=1.0 if l2_norm else None)
        super().__init__(num_heads, head_dim, options, num_kv_heads)
        self.gate = gate
        self.beta_max = beta_max
        numbers = _GATES.get(gate, head_dim)
        learned = {"rate": torch.empty(self.num_kv_heads, **place), "bias": torch.empty(self.num_kv_heads, numbers, **place)}
        self._learn(learned if numbers else {}, place)

    def _draw(self) -> None:
        if self._own:
            draw_gates(self.rate, self.bias)

    @property
    def key_dim(self) -> int:
        return self.head_dim + _GATES.get(self.gate, self.head_dim) + (self.beta_max is not None)

    def _gates(self, k: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        k, x, y = self._columns(k, _GATES.get(self.gate, self.head_dim), int(self.beta_max is not None))
        gates: tuple[Tensor, ...] = ()
        if self._own:
            log_decay = log_decays(self.rate, self.bias, x)
            gates = (log_decay[..., 0] if self.gate == "head" else log_decay,)
        return k, gates if self.beta_max is None else (*gates, self.beta_max * y[..., 0].sigmoid())

    def _parameters_at(self, q_positions: Tensor | None, k_positions: Tensor | None) -> tuple[Tensor, ...]:
        super()._parameters_at(q_positions, k_positions)
        # What is learned makes gates, and the kernels take these.
        return ()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, offset: int = 0,
        key_padding_mask: Tensor | None = None, cu_seqlens: Any = None, initial_state: State | TensorState | None = None,
        output_final_state: bool = False, q_positions: Tensor | None = None, k_positions: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """As `Attention.forward`, with keys ``[B, Hkv, L, key_dim]``. Without ``is_causal`` a row is the sum of its sequence read
        from the start and read from the end."""
        one_way = functools.partial(super().forward, is_causal=True, offset=offset, q_positions=q_positions, k_positions=k_positions)
        if is_causal:
            return one_way(q, k, v, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens, initial_state=initial_state,
                           output_final_state=output_final_state)  # fmt: skip
        name = type(self).__name__
        if initial_state is not None or output_final_state:
            raise ValueError(f"{name}: initial_state: expected is_causal=True beside states, got False")
        ignored = None if key_padding_mask is None else key_padding_mask.flip(-1)
        bounds = tuple([None if bound is None else q.shape[2] - bound.flip(0) for bound in _operators.as_boundaries(name, cu_seqlens)])
        backwards = one_way(*(x.flip(2) for x in (q, k, v)), key_padding_mask=ignored, cu_seqlens=None if cu_seqlens is None else bounds)
        return one_way(q, k, v, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens) + backwards.flip(2)


class GatedAttention(_Gated):
    """`longspan.ops.gated_attention` as a module, whose gates come with the keys.

    A key is ``[k | x]`` with ``log_decay = -exp(rate) softplus(x + bias)``. It learns ``rate``, ``[num_kv_heads]``, and ``bias``,
    ``[num_kv_heads, 1]`` or ``[num_kv_heads, head_dim]``, which start as Mamba-2's.

    Parameters
    ----------
    gate : str
        ``"head"``: one number a head decays the state; ``"channel"``: one each channel of the key; ``"none"``.
    l2_norm : bool
        Queries and keys are divided by their length, and outputs then by nothing else.
    num_heads, head_dim, num_kv_heads, device, dtype
        As in `Attention`.

    Examples
    --------
    >>> import torch
    >>> from longspan.torch import GatedAttention
    >>> attention = GatedAttention(4, 8)
    >>> q, v = torch.randn(2, 2, 4, 100, 8)
    >>> k = torch.randn(2, 4, 100, attention.key_dim)
    >>> attention(q, k, v, is_causal=True).shape
    torch.Size([2, 4, 100, 8])
    """

    mechanism = "gated"

    def __init__(
        self, num_heads: int, head_dim: int, *, gate: str = "head", l2_norm: bool = True, num_kv_heads: int | None = None,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        place = {"device": device, "dtype": dtype}
        super().__init__(num_heads, head_dim, ("none", "head", "channel"), gate, l2_norm, None, num_kv_heads, place)


class DeltaAttention(_Gated):
    """`longspan.ops.delta_attention` without a gate as a module; ``beta`` comes with the keys.

    A key is ``[k | y]`` with ``beta = beta_max sigmoid(y)``. It learns nothing.

    Parameters
    ----------
    beta_max : float
        What ``beta`` is less than, at most 2.
    num_heads, head_dim, num_kv_heads, device, dtype
        As in `Attention`.

    Examples
    --------
    >>> import torch
    >>> from longspan.torch import DeltaAttention
    >>> attention = DeltaAttention(4, 8)
    >>> q, v = torch.randn(2, 2, 4, 100, 8)
    >>> attention(q, torch.randn(2, 4, 100, 9), v, is_causal=True).shape
    torch.Size([2, 4, 100, 8])
    """

    mechanism = "delta"

    def __init__(
        self, num_heads: int, head_dim: int, *, beta_max: float = 1.0, num_kv_heads: int | None = None, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_heads, head_dim, ("none",), "none", True, beta_max, num_kv_heads, {"device": device, "dtype": dtype})


class GatedDeltaAttention(_Gated):
    """`longspan.ops.delta_attention` as a module, whose gates come with the keys: gated DeltaNet, KDA.

    A key is ``[k | x | y]`` with ``log_decay = -exp(rate) softplus(x + bias)`` and ``beta = beta_max sigmoid(y)``. It learns ``rate``,
    ``[num_kv_heads]``, and ``bias``, ``[num_kv_heads, 1]`` or ``[num_kv_heads, head_dim]``, which start as Mamba-2's.

    Parameters
    ----------
    gate : str
        ``"head"``: one number a head decays the state; ``"channel"``: one each channel of the key.
    beta_max : float
        What ``beta`` is less than, at most 2.
    num_heads, head_dim, num_kv_heads, device, dtype
        As in `Attention`.

    Examples
    --------
    >>> import torch
    >>> from longspan.torch import GatedDeltaAttention
    >>> attention = GatedDeltaAttention(4, 8, gate="channel")
    >>> q, v = torch.randn(2, 2, 4, 100, 8)
    >>> k = torch.randn(2, 4, 100, attention.key_dim)
    >>> attention(q, k, v).shape
    torch.Size([2, 4, 100, 8])
    """

    mechanism = "delta"

    def __init__(
        self, num_heads: int, head_dim: int, *, gate: str = "head", beta_max: float = 1.0, num_kv_heads: int | None = None,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        place = {"device": device, "dtype": dtype}
        super().__init__(num_heads, head_dim, ("head", "channel"), gate, True, beta_max, num_kv_heads, place)
