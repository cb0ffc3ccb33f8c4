"""One module for each mechanism: attention over heads, with what it learns.

All are made from ``(num_heads, head_dim)`` and options by name, and called with ``q``, ``k``, ``v`` as
``[batch, head, token, feature]``; see `longspan.ops` for formulas and arguments. Projections are `MultiheadAttention`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import ops
from .._native import State
from . import _dispatch


class Attention(nn.Module):
    """A mechanism with its options and parameters."""

    #: Name in `longspan.mechanisms`.
    mechanism: ClassVar[str]

    def __init__(self, num_heads: int, head_dim: int, options: str) -> None:
        super().__init__()
        for name, size in (("num_heads", num_heads), ("head_dim", head_dim)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{type(self).__name__}: {name}: expected an integer from 1 on, got {size!r}")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self._options = options

    def _learned(self) -> tuple[Tensor, ...]:
        """The mechanism's parameters in the kernels' order."""
        return ()

    def _check(self) -> None:
        """Refuses wrong options when the module is made rather than when it is first called."""
        ops._mechanism(self.mechanism, self._options, type(self).__name__, self._learned())

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool = False,
        offset: int = 0,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Any = None,
        initial_state: State | None = None,
        output_final_state: bool = False,
    ) -> Any:
        """``[batch, head, query, feature]``, laid out token by token; with the state if it is wanted."""
        return _dispatch.attend(
            type(self).__name__, self.mechanism, self._options, q, k, v, self._learned(), is_causal, offset,
            key_padding_mask, cu_seqlens, initial_state, output_final_state, token_major=True,
        )  # fmt: skip

    @torch.no_grad()
    def step(self, q: Tensor, k: Tensor, v: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """One token of the causal attention, ``[batch, head, feature]``: its output, and the state with it taken in."""
        return ops._step(type(self).__name__, self.mechanism, self._options, q, k, v, self._learned(), state)

    def extra_repr(self) -> str:
        return f"{self.num_heads}, {self.head_dim}, {self._options[1:-1]}"


class KernelizedAttention(Attention):
    """`longspan.ops.kernelized_attention` as a module; it learns nothing.

    ``decay`` may be ``None``, one number, or one for each head.
    """

    mechanism = "kernelized"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        feature_map: str = "elu+1",
        decay: float | Sequence[float] | None = None,
        normalize: bool = True,
        algorithm: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        decay = [decay] * num_heads if isinstance(decay, (int, float)) else decay
        options = ops._kernel_options(type(self).__name__, None, feature_map, decay, normalize, algorithm)
        super().__init__(num_heads, head_dim, options)
        self._check()


class ShawAttention(Attention):
    """`longspan.ops.shaw_attention` as a module; it learns ``rel``, ``[num_heads, 2 * radius + 1, head_dim]``.

    ``shared`` makes it ``[2 * radius + 1, head_dim]`` for all heads. Its rows start at random with a standard deviation
    of 0.5.
    """

    mechanism = "shaw"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        radius: int = 16,
        shared: bool = False,
        kernelized: bool = True,
        feature_map: str = "elu+1",
        rel_feature_map: str = "same",
        decay: float | Sequence[float] | None = None,
        normalize: bool = True,
        algorithm: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        if not isinstance(radius, int) or radius < 0:
            raise ValueError(f"{name}: radius: expected an integer from 0 on, got {radius!r}")
        decay = [decay] * num_heads if isinstance(decay, (int, float)) else decay
        shape = (2 * radius + 1, head_dim) if shared else (num_heads, 2 * radius + 1, head_dim)
        rel = torch.empty(shape, device=device, dtype=dtype)
        options = ops._shaw_options(
            name, None, rel, kernelized, feature_map, rel_feature_map, decay, normalize, algorithm
        )  # fmt: skip
        super().__init__(num_heads, head_dim, options)
        self.rel = nn.Parameter(rel)
        self.reset_parameters()
        self._check()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.rel, std=0.5)

    def _learned(self) -> tuple[Tensor, ...]:
        return (self.rel,)


class FourierAttention(Attention):
    """`longspan.ops.fourier_attention` with counted positions as a module.

    It learns ``a``, ``[num_heads, head_dim, 1]``, which starts as geometric wavelengths from 2 pi to ``longest``, ``b``,
    which starts at 0, and where the ``normalizer`` leaves them free ``c`` and ``beta``. ``wave="pairs"`` is rotary positions.
    """

    mechanism = "fourier"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        normalizer: str = "one_plus",
        wave: str = "each",
        longest: float = 1e4,
        feature_map: str = "elu+1",
        decay: float | Sequence[float] | None = None,
        algorithm: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        place = {"device": device, "dtype": dtype}
        names = () if wave == "pairs" else ("b", *ops._FREE.get(normalizer, ()))
        angles = head_dim // 2 if wave == "pairs" else head_dim
        each = {name: torch.empty((num_heads, head_dim), **place) for name in names}
        decay = [decay] * num_heads if isinstance(decay, (int, float)) else decay
        options, _ = ops._fourier(
            type(self).__name__, None, torch.empty((num_heads, angles, 1)), each.get("b"), each.get("c"),
            each.get("beta"), None, None, normalizer, wave, feature_map, decay, algorithm,
        )  # fmt: skip
        super().__init__(num_heads, head_dim, options)
        self.longest = longest
        self.a = nn.Parameter(torch.empty((num_heads, angles, 1), **place))
        for name, value in each.items():
            self.register_parameter(name, nn.Parameter(value))
        self._each = tuple(names)
        self.reset_parameters()
        self._check()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            steps = torch.arange(self.a.shape[1], device=self.a.device) / max(self.a.shape[1], 1)
            self.a.copy_((self.longest**-steps)[None, :, None].to(self.a.dtype))
            for name in self._each:
                getattr(self, name).fill_(1.0 if name == "c" else 0.0)

    def _learned(self) -> tuple[Tensor, ...]:
        return (self.a, *(getattr(self, name) for name in self._each))


class AftSimple(Attention):
    """`longspan.ops.aft_simple` as a module; it learns nothing."""

    mechanism = "aft-simple"

    def __init__(self, num_heads: int, head_dim: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(num_heads, head_dim, "{}")
        self._check()


#: What ``attention="..."`` of `MultiheadAttention` may be.
MODULES: dict[str, type[Attention]] = {
    module.mechanism: module for module in (KernelizedAttention, ShawAttention, FourierAttention, AftSimple)
}


def build(attention: str | Callable[..., nn.Module], num_heads: int, head_dim: int, **options: Any) -> nn.Module:
    """The module that ``attention`` names, or makes."""
    if callable(attention):
        return attention(num_heads, head_dim, **options)
    if attention not in MODULES:
        raise ValueError(f"unknown attention {attention!r}; known are {', '.join(MODULES)}")
    return MODULES[attention](num_heads, head_dim, **options)
