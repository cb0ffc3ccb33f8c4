"""Gated linear attention and the delta rule as modules: their gates come with the keys."""

from typing import Any

import torch
from torch import Tensor, nn

from .. import _options
from .._calls import Request
from .._native import State
from ..ops._convolution import depthwise_convolution_options
from . import _dispatch, _operators
from ._states import TensorState
from .attention import Attention, draw_gates, log_decays, refuse_hooks

_GATES = {"none": 0, "head": 1}
_TAPS = ("query_taps", "key_taps", "value_taps")


class _Gated(Attention):
    def __init__(
        self, num_heads: int, head_dim: int, gates: tuple[str, ...], gate: str, l2_norm: bool, beta_max: float | None,
        convolution: int | None, num_kv_heads: int | None, device: Any, dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        if gate not in gates:
            raise ValueError(f"{name}: gate: expected one of {', '.join(gates)}, got {gate!r}")
        if beta_max is not None and not 0 < beta_max <= 2:
            raise ValueError(f"{name}: beta_max: expected a number above 0, at most 2, got {beta_max!r}")
        if convolution is not None:
            _options.expect_integer(name, "convolution", convolution, 1, 64)
        # Rows of length 1 have products of at most 1 however wide they are.
        recurrence = {"gate": gate, "l2_norm": l2_norm, "scale": 1.0 if l2_norm else None}
        options = _options.as_object(**recurrence, learned=True, beta_max=beta_max, convolution=convolution)
        super().__init__(num_heads, head_dim, options, num_kv_heads)
        #: Options of the operator, which is given gates, and what is convolved already.
        self._recurrence = _options.as_object(**recurrence)
        self.gate = gate
        self.beta_max = beta_max
        self.convolution = convolution
        self._learn({"device": device, "dtype": dtype})

    def _draw(self) -> None:
        if "rate" in self._own:
            draw_gates(self.rate, self.bias)
        if self.convolution is not None:
            for taps in self._named(_TAPS):
                nn.init.uniform_(taps, -(self.convolution**-0.5), self.convolution**-0.5)

    def _learned(self) -> tuple[Tensor, ...]:
        # A gate of one number a head has no axis of numbers there.
        flat = "bias" if self.gate == "head" else None
        return tuple([getattr(self, name).flatten() if name == flat else getattr(self, name) for name in self._own])

    @property
    def key_dim(self) -> int:
        return self.head_dim + _GATES.get(self.gate, self.head_dim) + (self.beta_max is not None)

    def _gates(self, k: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        k, x, y = self._columns(k, _GATES.get(self.gate, self.head_dim), int(self.beta_max is not None))
        gates: tuple[Tensor, ...] = ()
        if "rate" in self._own:
            log_decay = log_decays(self.rate, self.bias, x)
            gates = (log_decay[..., 0] if self.gate == "head" else log_decay,)
        return k, gates if self.beta_max is None else (*gates, self.beta_max * y[..., 0].sigmoid())

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, offset: int = 0,
        key_padding_mask: Tensor | None = None, cu_seqlens: Any = None, initial_state: State | TensorState | None = None,
        output_final_state: bool = False, q_positions: Tensor | None = None, k_positions: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """As `Attention.forward`, with keys ``[B, Hkv, L, key_dim]``. Without ``is_causal`` a row is the sum of its sequence read
        from the start and read from the end, both behind one convolution, which looks back."""
        self._parameters_at(q_positions, k_positions)
        if not is_causal and (initial_state is not None or output_final_state):
            raise ValueError(f"{type(self).__name__}: initial_state: expected is_causal=True beside states, got False")
        mask = {"key_padding_mask": key_padding_mask, "cu_seqlens": cu_seqlens}
        if self.convolution is None:
            return self._attend(q, k, v, is_causal, offset, initial_state, output_final_state, **mask)
        pasts: Any = (None, None, None)
        if initial_state is not None:
            initial_state, pasts = self._split(q, k, v, initial_state)
        k, gates = k.split([self.head_dim, self.key_dim - self.head_dim], -1)
        taps = self._like(q, self._named(_TAPS))
        behind = [self._convolve(*one, output_final_state, **mask) for one in zip((q, k, v), taps, pasts)]
        (q, _), (k, _), (v, _) = behind
        out = self._attend(
            q, torch.cat([k, gates], -1), v, is_causal, offset, initial_state, output_final_state, **mask
        )  # fmt: skip
        return (out[0], self._joined(q, k, v, out[1], [past for _, past in behind])) if output_final_state else out

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, offset: int, initial_state: State | TensorState | None,
        output_final_state: bool, key_padding_mask: Tensor | None, cu_seqlens: Any,
    ) -> Any:  # fmt: skip
        """The recurrence, on what is convolved already."""
        if not is_causal:
            ignored = None if key_padding_mask is None else key_padding_mask.flip(-1)
            bounds = _operators.as_boundaries(type(self).__name__, cu_seqlens)
            turned = None if cu_seqlens is None else tuple([q.shape[2] - bound.flip(0) for bound in bounds if bound is not None])
            backwards = self._attend(q.flip(2), k.flip(2), v.flip(2), True, offset, None, False, ignored, turned)
        k, gates = self._gates(k)
        onwards = _dispatch.attend(
            type(self).__name__, self.mechanism, self._recurrence, q, k, v, self._like(q, gates), True, offset, key_padding_mask,
            cu_seqlens, initial_state, output_final_state, token_major=True,
        )  # fmt: skip
        return onwards if is_causal else onwards + backwards.flip(2)

    def _convolve(
        self, x: Tensor, taps: Tensor, past: Tensor | None, output_final_state: bool, **mask: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Rows behind a convolution, after those of the ``past``, and its last rows where they are wanted."""
        name, none, before = type(self).__name__, x.detach()[..., :0], taps.shape[1] - 1
        options, parameters = depthwise_convolution_options(name, taps, None, True)
        call = Request("short-convolution", options, name, True, 0)
        state = None
        if past is not None:
            # Rows that are not there are 0.
            rows = past.reshape(*x.shape[:2], before * x.shape[3])
            rows = torch.cat([rows, rows.new_full((*x.shape[:2], 1), before)], -1)
            state = TensorState(*_dispatch.shape_of_states(call, (none, none, x, taps)), rows)
        out = _dispatch.attend(
            name, "short-convolution", options, none, none, x, parameters, True, initial_state=state,
            output_final_state=output_final_state, **mask,
        )  # fmt: skip
        return (out[0], _dispatch.as_tensors(name, out[1]).numbers[..., :-1]) if output_final_state else (out, None)

    def _shapes(self, q: Tensor, k: Tensor, v: Tensor) -> list[_operators.Shape]:
        """What states are like, and those of the recurrence among them: the first two parts, and zeros up to the next cache line. In
        parts 3 to 5 the former hold the latest rows of queries, keys and values."""
        calls = [Request(self.mechanism, options, type(self).__name__, True, 0) for options in (self._options, self._recurrence)]
        return [_dispatch.shape_of_states(call, (q, k, v)) for call in calls]

    def _split(self, q: Tensor, k: Tensor, v: Tensor, state: State | TensorState) -> tuple[TensorState, list[Tensor]]:
        whole, recurrence = self._shapes(q, k, v)
        numbers = _dispatch.initial_numbers(type(self).__name__, whole, (q, k), state)
        sums, gates, _, *pasts = numbers.split(list(whole[2]), -1)
        padding = sums.new_zeros((*sums.shape[:2], recurrence[2][2]))
        return TensorState(*recurrence, torch.cat([sums, gates, padding], -1)), pasts

    def _joined(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | TensorState, pasts: list[Tensor | None]
    ) -> State | TensorState:
        whole, recurrence = self._shapes(q, k, v)
        sums, gates, *_ = _dispatch.as_tensors(type(self).__name__, state).numbers.split(list(recurrence[2]), -1)
        padding = sums.new_zeros((*sums.shape[:2], whole[2][2]))
        rows = [past.reshape(*sums.shape[:2], size) for past, size in zip(pasts, whole[2][3:]) if past is not None]
        joined = TensorState(*whole, torch.cat([sums, gates, padding, *rows], -1))
        return joined.detach() if isinstance(state, State) else joined

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | TensorState | None = None, *, q_positions: Tensor | None = None,
        k_positions: Tensor | None = None,
    ) -> tuple[Tensor, State | TensorState]:  # fmt: skip
        """As `Attention.step`, with a key ``[B, Hkv, key_dim]``."""
        refuse_hooks(self)
        name = type(self).__name__
        learned = self._like(q, self._parameters_at(q_positions, k_positions))
        call = Request(self.mechanism, self._options, name, True, 0)
        if _dispatch.route(call, (q, k, v, *learned), state, True) is _dispatch.Route.KERNELS:
            # They make gates of keys, and have the convolutions, themselves.
            stepped: tuple[Tensor, State] = _dispatch.step(name, self.mechanism, self._options, q, k, v, learned, state)
            return stepped
        with_token = q.dim() == 4
        tokens = (q, k, v) if with_token else tuple([x[:, :, None] for x in (q, k, v)])
        out, after = self.forward(*tokens, is_causal=True, initial_state=state, output_final_state=True)
        return out if with_token else out[:, :, 0], after


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
    convolution : int, optional
        Tokens that a short convolution with SiLU of queries, keys and values sees, before anything else; without it there is none. It
        learns ``query_taps``, ``key_taps`` and ``value_taps``, ``[heads, convolution, head_dim]``, each head its own, and a state holds the
        latest ``convolution - 1`` rows of each besides. States then have no sum.
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
        self, num_heads: int, head_dim: int, *, gate: str = "head", l2_norm: bool = True, convolution: int | None = None,
        num_kv_heads: int | None = None, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_heads, head_dim, ("none", "head", "channel"), gate, l2_norm, None, convolution, num_kv_heads, device, dtype)


class DeltaAttention(_Gated):
    """`longspan.ops.delta_attention` without a gate as a module; ``beta`` comes with the keys.

    A key is ``[k | y]`` with ``beta = beta_max sigmoid(y)``. Without a convolution it learns nothing.

    Parameters
    ----------
    beta_max : float
        What ``beta`` is less than, at most 2.
    convolution : int, optional
        As in `GatedAttention`.
    num_heads, head_dim, num_kv_heads, device, dtype
        As in `Attention`.
    """

    mechanism = "delta"

    def __init__(
        self, num_heads: int, head_dim: int, *, beta_max: float = 1.0, convolution: int | None = None, num_kv_heads: int | None = None,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_heads, head_dim, ("none",), "none", True, beta_max, convolution, num_kv_heads, device, dtype)


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
    convolution : int, optional
        As in `GatedAttention`.
    num_heads, head_dim, num_kv_heads, device, dtype
        As in `Attention`.
    """

    mechanism = "delta"

    def __init__(
        self, num_heads: int, head_dim: int, *, gate: str = "head", beta_max: float = 1.0, convolution: int | None = None,
        num_kv_heads: int | None = None, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_heads, head_dim, ("head", "channel"), gate, True, beta_max, convolution, num_kv_heads, device, dtype)
