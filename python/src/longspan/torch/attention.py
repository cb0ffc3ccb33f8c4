"""What all mechanisms have in common as modules."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import _calls, _options, _route
from .._native import State
from . import _dispatch
from ._states import TensorState

def log_decays(rate: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """Gates of numbers ``x [batch, kv_heads, tokens, n]`` that come with the keys, by what is learned."""
    return -(rate.exp()[:, None, None] * F.softplus(x + bias[:, None]))


def draw_gates(rate: Tensor, bias: Tensor) -> None:
    """As Mamba-2: e^rate from 1 to 16, the softplus of the bias from 0.001 to 0.1."""
    nn.init.uniform_(rate, 0.0, math.log(16.0))
    nn.init.uniform_(bias, math.log(1e-3), math.log(1e-1))


def refuse_hooks(module: nn.Module) -> None:
    """A step is no call of the module, so hooks of its calls would be passed over."""
    if module._forward_hooks or module._forward_pre_hooks:
        raise RuntimeError(f"{type(module).__name__}.step: forward hooks: expected none, because a step is no call of forward, got "
                           "some; remove them, or call the module on the whole sequence")  # fmt: skip


#: Mechanisms that do not see the order of tokens by themselves.
WITHOUT_ORDER = ("kernelized", "aft-simple", "softmax", "softmax-window", "gated", "delta", "gated-delta")


class Attention(nn.Module):
    """A mechanism with its options and parameters: the base class of all, not to be made itself. Their ``device`` and ``dtype`` are
    those of what they learn, as in torch's modules.

    Parameters
    ----------
    num_heads, head_dim : int
        Query heads; elements in one.
    options : str
        The mechanism's options as JSON.
    num_kv_heads : int, optional
        Key/value heads, a divisor of ``num_heads``, which is the default.

    Examples
    --------
    >>> import torch
    >>> from longspan.torch import ShawAttention
    >>> from longspan.torch.attention import Attention
    >>> attention = ShawAttention(4, 8, radius=3)
    >>> isinstance(attention, Attention), attention.mechanism, attention.key_dim
    (True, 'shaw', 8)
    >>> q, k, v = torch.randn(3, 2, 4, 100, 8)
    >>> out = attention(q, k, v, is_causal=True)

    A prompt at once, then token by token:

    >>> with torch.no_grad():
    ...     _, state = attention(q[:, :, :99], k[:, :, :99], v[:, :, :99], is_causal=True, output_final_state=True)
    ...     last, state = attention.step(q[:, :, 99], k[:, :, 99], v[:, :, 99], state)
    >>> torch.testing.assert_close(last, out[:, :, 99])
    """

    #: Name in `longspan.mechanisms`.
    mechanism: ClassVar[str]
    #: The processes that hold the rest of its sequences: `longspan.torch.distributed.context_parallel`.
    over: Any = None
    rate: nn.Parameter
    bias: nn.Parameter

    def __init__(self, num_heads: int, head_dim: int, options: str, num_kv_heads: int | None = None) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, size in (("num_heads", num_heads), ("head_dim", head_dim), ("num_kv_heads", kv_heads)):
            _options.expect_integer(type(self).__name__, name, size, 1, _options.MOST)
        if num_heads % kv_heads:
            raise ValueError(f"{type(self).__name__}: num_kv_heads: expected a divisor of num_heads = {num_heads}, "
                             f"got {kv_heads}")  # fmt: skip
        self.num_heads = num_heads
        self.num_kv_heads = kv_heads
        self.head_dim = head_dim
        self._options = options
        # Names of the mechanism's own parameters, and of the feature map's.
        self._own: tuple[str, ...] = ()
        self._maps: tuple[str, ...] = ()
        settings = _calls.settings(options)
        # Whether tokens bring decays to a mechanism that need not have them.
        self._gate = settings.get("gate") is True
        #: Whether an output depends on where its query stands.
        self.sees_order = self.mechanism not in WITHOUT_ORDER or settings.get("decay") is not None or self._gate

    @property
    def key_dim(self) -> int:
        """Numbers in a key of one head."""
        return self.head_dim + self._gate

    def _columns(self, k: Tensor, *widths: int) -> list[Tensor]:
        """Keys, and what came with them in more columns, also of one token with an axis of tokens."""
        if k.shape[-1] != self.key_dim:
            raise ValueError(f"{type(self).__name__}: k: expected keys of key_dim = {self.key_dim} numbers, got {k.shape[-1]}")
        k, *more = k.split([self.head_dim, *widths], -1)
        return [k, *(x if x.dim() == 4 else x[:, :, None] for x in more)]

    def _gates(self, k: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Keys, and the gates that came with them."""
        if not self._gate:
            return k, ()
        k, x = self._columns(k, 1)
        return k, (log_decays(self.rate, self.bias, x)[..., 0],)

    def _named(self, names: Sequence[str]) -> tuple[Tensor, ...]:
        return tuple([getattr(self, name) for name in names])

    def _learned(self) -> tuple[Tensor, ...]:
        """The mechanism's parameters in the kernels' order."""
        return tuple([getattr(self, name) for name in self._own + self._maps])

    def _parameters_at(self, q_positions: Tensor | None, k_positions: Tensor | None) -> tuple[Tensor, ...]:
        """The parameters of a call at these positions."""
        for name, positions in (("q_positions", q_positions), ("k_positions", k_positions)):
            if positions is not None:
                raise ValueError(f"{type(self).__name__}: {name}: expected None, because the mechanism counts tokens, "
                                 "got a tensor")  # fmt: skip
        return self._learned()

    @staticmethod
    def _like(q: Tensor, parameters: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Parameters of half precision for queries in float32."""
        if getattr(q, "dtype", None) is torch.float32 and any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters):
            return tuple([parameter.float() for parameter in parameters])
        return parameters

    def _learn(self, place: dict[str, Any], **shaped: Any) -> None:
        """Makes and draws what is learned, as the compiled mechanism lists it; so wrong options are refused now rather than when the module
        is first called. ``shaped`` are the options that follow from the shapes of what is learned."""
        native = _calls.cached(self.mechanism, self._options, type(self).__name__, tuple(shaped.items()))
        for name, shape in native.parameter_shapes((1, self.num_heads, self.num_kv_heads, 1, 1, self.head_dim, self.head_dim)):
            if name.startswith("map_"):
                self._maps += (name,)
            elif name != "log_decay" and not name.endswith("_positions"):
                self._own += (name,)
            else:
                continue
            # A gate of one number a head has an axis of numbers here.
            shape = [*shape, 1] if name == "bias" and len(shape) == 1 else shape
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **place)))
        if self._gate:
            self.rate = nn.Parameter(torch.empty(self.num_kv_heads, **place))
            self.bias = nn.Parameter(torch.empty(self.num_kv_heads, 1, **place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws what is learned anew."""
        self._draw()
        if self._gate:
            draw_gates(self.rate, self.bias)
        for matrix in self._named(self._maps):
            if matrix.shape[1] == matrix.shape[2]:
                with torch.no_grad():
                    matrix.copy_(torch.eye(self.head_dim, dtype=matrix.dtype, device=matrix.device).expand_as(matrix))
            else:
                nn.init.normal_(matrix, std=self.head_dim**-0.5)

    def _draw(self) -> None:
        """Draws what is learned beside the feature map's matrices."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, offset: int = 0,
        key_padding_mask: Tensor | None = None, cu_seqlens: Any = None, initial_state: State | TensorState | None = None,
        output_final_state: bool = False, q_positions: Tensor | None = None, k_positions: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """The attention of ``q`` to ``k`` and ``v``.

        Parameters
        ----------
        q : Tensor ``[B, H, Lq, d]``
            Queries.
        k, v : Tensor ``[B, Hkv, Lk, d]``, ``[B, Hkv, Lk, dv]``
            Keys and values.
        is_causal, offset : bool, int
            Query ``i`` sees the keys ``j <= i + offset``; without a mask, all.
        key_padding_mask : bool Tensor ``[B, Lk]``, optional
            True is ignored.
        cu_seqlens : sequence of int, Tensor, or a pair of them, optional
            Boundaries of packed sequences, ``[0, end of the first, ..., L]``; ``B = 1``.
        initial_state, output_final_state : State or `TensorState`, bool
            The tokens before; whether to return the state, too. Causal only.
        q_positions, k_positions : Tensor ``[B, Lq, n]``, ``[B, Lk, n]``, optional
            Of a `FourierAttention` with ``axes=n``.

        Returns
        -------
        Tensor ``[B, H, Lq, dv]``, or ``(Tensor, state)``
            Laid out token by token. The state is a `TensorState` where gradients are recorded.
        """
        if self.over is not None:
            if initial_state is not None:
                raise ValueError(f"{type(self).__name__}: initial_state: expected None over several processes, got a state")
            initial_state = self.over
        k, gates = self._gates(k)
        parameters = self._like(q, (*self._parameters_at(q_positions, k_positions), *gates))
        return _dispatch.attend(
            type(self).__name__, self.mechanism, self._options, q, k, v, parameters, is_causal, offset,
            key_padding_mask, cu_seqlens, initial_state, output_final_state, token_major=True,
        )  # fmt: skip

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | TensorState | None = None, *, q_positions: Tensor | None = None,
        k_positions: Tensor | None = None,
    ) -> tuple[Tensor, State | TensorState]:  # fmt: skip
        """One token of the causal attention, in time and memory that do not grow.

        Parameters
        ----------
        q, k, v : Tensor ``[B, H, d]``, ``[B, Hkv, d]``, ``[B, Hkv, dv]``
            The token.
        state : State or `TensorState`, optional
            What a call or the last step returned; ``None`` starts a sequence. A `State` is changed in place.
        q_positions, k_positions : Tensor ``[B, 1, n]``, optional
            Of a `FourierAttention` with ``axes=n``.

        Returns
        -------
        Tensor ``[B, H, dv]``, State or `TensorState`
            The output, and the state with the token taken in. Where gradients are recorded a new `TensorState` comes back,
            which holds on to all tokens before; generate under ``torch.no_grad()``.
        """
        refuse_hooks(self)
        name = type(self).__name__
        k, gates = self._gates(k)
        learned = self._like(q, (*self._parameters_at(q_positions, k_positions), *gates))
        out: tuple[Tensor, State | TensorState] = _dispatch.step(name, self.mechanism, self._options, q, k, v, learned, state)
        return out

    def combine(self, earlier: Any, later: Any) -> Any:
        """The state after two segments of tokens from the state of each; see `longspan.combine`.

        Parameters
        ----------
        earlier, later : State or `TensorState`
            ``later`` was computed from no state.

        Returns
        -------
        State or `TensorState`
            The latter where one of them is.

        Examples
        --------
        >>> import torch
        >>> from longspan.torch import KernelizedAttention
        >>> attention = KernelizedAttention(4, 8)
        >>> x = torch.randn(2, 4, 100, 8)
        >>> halves = [attention(h, h, h, is_causal=True, output_final_state=True)[1] for h in x.split(50, dim=2)]
        >>> attention.combine(*halves)
        <longspan.State of kernelized, batch 2, 4 key/value heads, 80 numbers of float32 each>
        """
        name, learned = type(self).__name__, self._learned()
        native = _calls.mechanism(self.mechanism, self._options, name, learned)
        return _route.combine(f"{name}.combine", native, self._options, earlier, later, learned)

    def extra_repr(self) -> str:
        return f"{self.num_heads}, {self.head_dim}, {self._options[1:-1]}"
