"""States that carry a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._native import State


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class TensorState:
    """A `longspan.State` whose numbers are a tensor, so that gradients flow through it.

    They flow from a loss over later tokens back to earlier ones, or to a state that is itself learned. Functions of
    `longspan.ops` and modules return one in the place of a `State` where one of their tensors requires a gradient, and take
    either. Numbers that are not differentiable, such as a count of tokens, get a gradient of 0.

    Parameters
    ----------
    mechanism : str
        Name of the mechanism whose state it is.
    options : str
        The version of its layout and a fingerprint of the options that made it.
    parts : tuple of int
        Numbers in each part of one head's state.
    numbers : Tensor ``[batch, kv_heads, sum(parts)]``
        Of float32 or float64.

    Examples
    --------
    >>> import torch
    >>> from longspan import ops
    >>> from longspan.torch import TensorState
    >>> x = torch.randn(2, 4, 100, 8, requires_grad=True)
    >>> _, state = ops.kernelized_attention(x, x, x, is_causal=True, output_final_state=True)
    >>> type(state).__name__, state.requires_gradient, state.batch, state.kv_heads
    ('TensorState', True, 2, 4)

    The gradient of a later token's output with respect to earlier tokens, and truncated backpropagation, which cuts it off:

    >>> token = torch.randn(2, 4, 8)
    >>> out, after = ops.kernelized_attention_step(token, token, token, state)
    >>> bool(torch.autograd.grad(out.sum(), x)[0].any())
    True
    >>> TensorState.of(state.detach()).requires_gradient
    False
    >>> state.select([0, 0, 1]).clone().batch
    3
    """

    mechanism: str
    options: str
    parts: tuple[int, ...]
    numbers: Tensor

    def __post_init__(self) -> None:
        # Beside sums it counts tokens, which narrower types do beyond some thousand by steps.
        if self.numbers.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"TensorState: numbers: expected float32 or float64, got {self.numbers.dtype}")

    @classmethod
    def of(cls, state: State) -> TensorState:
        """The same numbers, as a tensor of their own.

        Parameters
        ----------
        state : State
            A plain state.

        Returns
        -------
        TensorState
            Without gradient until ``numbers.requires_grad_()``.
        """
        return cls(state.mechanism, state.options, tuple(state.parts), torch.from_numpy(state.numbers))

    @property
    def requires_gradient(self) -> bool:
        """Whether gradients flow through it."""
        return self.numbers.requires_grad

    @property
    def batch(self) -> int:
        """Independent sequences."""
        return self.numbers.shape[0]

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.numbers.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return self.numbers.nbytes

    def detach(self) -> State:
        """The plain state, without gradient: what truncated backpropagation carries on.

        Returns
        -------
        State
            With numbers of its own.
        """
        return State(
            self.mechanism, self.options, self.batch, self.kv_heads, self.parts, self.numbers.detach().cpu().contiguous().numpy()
        )

    def clone(self) -> TensorState:
        """A state of its own with the same numbers and the same gradient.

        Returns
        -------
        TensorState
            What happens to one no longer changes the other.
        """
        return TensorState(self.mechanism, self.options, self.parts, self.numbers.clone())

    def to(self, device: torch.device | str) -> TensorState:
        """The same state on another device: the layout is the same on all.

        Parameters
        ----------
        device : torch.device or str
            Where to.

        Returns
        -------
        TensorState
            With the same gradient.

        Examples
        --------
        >>> import torch
        >>> from longspan import ops
        >>> from longspan.torch import TensorState
        >>> x = torch.randn(2, 4, 100, 8)
        >>> _, state = ops.kernelized_attention(x, x, x, is_causal=True, output_final_state=True)
        >>> TensorState.of(state).to("meta").numbers.device.type
        'meta'
        """
        return TensorState(self.mechanism, self.options, self.parts, self.numbers.to(device))

    def select(self, indices: Sequence[int] | Tensor) -> TensorState:
        """The states of some batch entries, such as the beams that survive.

        Parameters
        ----------
        indices : sequence of int, or Tensor of integers
            Entries from 0 to ``batch - 1``, in the order wanted; one may come several times.

        Returns
        -------
        TensorState
            Its ``batch`` is ``len(indices)``.

        Raises
        ------
        TypeError, ValueError
            For other indices; negative ones are refused.
        """
        given = torch.as_tensor(indices, device=None if isinstance(indices, Tensor) else "cpu")
        if given.dim() != 1 or (given.numel() and given.dtype not in _INTEGERS):
            raise TypeError(f"TensorState.select: indices: expected a list of integers, got {indices!r}")
        chosen = given.to(self.numbers.device, torch.long)
        if bool(((chosen < 0) | (chosen >= self.batch)).any()):
            raise ValueError(f"TensorState.select: indices: expected integers from 0 to {self.batch - 1}, got {indices!r}")
        return TensorState(self.mechanism, self.options, self.parts, self.numbers.index_select(0, chosen))
