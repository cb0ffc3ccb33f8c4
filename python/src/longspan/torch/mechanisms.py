"""One module for each mechanism: attention over heads, with what it learns.

All are made from ``(num_heads, head_dim)`` and options by name, and called with ``q``, ``k``, ``v`` as
``[batch, head, token, feature]``; see `longspan.ops` for formulas and arguments, and their base class `Attention` for examples of calls
and steps. Projections are `MultiheadAttention`'s.
"""

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import _options
from ..ops._convolution import short_convolution_options
from ..ops._fourier import FREE, fourier_options
from ..ops._shaw import shaw_options
from ..ops._softmax import softmax_options
from ..ops._toeplitz import toeplitz_options
from .aft import AftConv, AftFull, AftLocal, AftSimple
from .attention import Attention
from .gated import DeltaAttention, GatedAttention, GatedDeltaAttention


def _of_heads(decay: float | Sequence[float] | None, heads: int) -> Sequence[float] | None:
    # NumPy's numbers are Real, too, which a type checker does not know of.
    return [float(decay)] * heads if isinstance(decay, Real) else cast("Sequence[float] | None", decay)


class KernelizedAttention(Attention):
    """`longspan.ops.kernelized_attention` as a module.

    It learns nothing, but for the ``"hedgehog"`` feature map, whose ``map_queries`` and ``map_keys``, ``[heads, width, head_dim]``,
    start as the identity where they are square.

    Parameters
    ----------
    feature_map, decay, normalize, algorithm
        As in `longspan.ops.kernelized_attention`.
    gate : bool
        Each token brings a decay: a key is ``[k | x]`` with ``log_decay = -exp(rate) softplus(x + bias)``, of ``key_dim`` numbers. Then
        ``rate``, ``[num_kv_heads]``, and ``bias``, ``[num_kv_heads, 1]``, are learned, too, and start as Mamba-2's. Causal calls only.
    num_heads, head_dim, num_kv_heads, device, dtype
        As in `Attention`.
    """

    mechanism = "kernelized"

    def __init__(
        self, num_heads: int, head_dim: int, *, feature_map: str = "elu+1", decay: float | Sequence[float] | None = None,
        gate: bool = False, normalize: bool = True, algorithm: str = "auto", num_kv_heads: int | None = None, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        name, decay = type(self).__name__, _of_heads(decay, num_kv_heads or num_heads)
        more = _options.gate(name, gate, decay)
        options = _options.kernel(name, None, feature_map, decay, normalize, algorithm, **more)
        super().__init__(num_heads, head_dim, options, num_kv_heads)
        self._learn({"device": device, "dtype": dtype})


class ShawAttention(Attention):
    """`longspan.ops.shaw_attention` as a module.

    It learns ``rel``, ``[num_heads, 2 * radius + 1, head_dim]``, whose numbers start at random with a standard deviation of
    0.5, and the matrices of a ``"hedgehog"`` feature map.

    Parameters
    ----------
    radius : int
        The largest distance with a vector of its own; farther tokens share the one at that end.
    shared : bool
        ``rel`` is ``[2 * radius + 1, head_dim]`` for all heads.
    kernelized, feature_map, rel_feature_map, decay, normalize, algorithm
        As in `longspan.ops.shaw_attention`. With ``rel_feature_map="identity"`` rows are as wide as the feature map's.
    gate : bool
        As in `KernelizedAttention`.
    num_heads, head_dim, num_kv_heads, device, dtype
        As in `Attention`.
    """

    mechanism = "shaw"
    rel: nn.Parameter

    def __init__(
        self, num_heads: int, head_dim: int, *, radius: int = 16, shared: bool = False, kernelized: bool = True,
        feature_map: str = "elu+1", rel_feature_map: str = "same", decay: float | Sequence[float] | None = None,
        gate: bool = False, normalize: bool = True, algorithm: str = "auto", num_kv_heads: int | None = None, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        _options.expect_integer(name, "radius", radius, 0, _options.MOST)
        decay = _of_heads(decay, num_kv_heads or num_heads)
        options = shaw_options(
            name, None, torch.empty(1, 0), kernelized, feature_map, rel_feature_map, decay, normalize, algorithm,
            **_options.gate(name, gate, decay),
        )  # fmt: skip
        super().__init__(num_heads, head_dim, options, num_kv_heads)
        self._learn({"device": device, "dtype": dtype}, radius=radius, shared=shared)

    def _draw(self) -> None:
        nn.init.normal_(self.rel, std=0.5)


class FourierAttention(Attention):
    """`longspan.ops.fourier_attention` as a module.

    It learns ``a``, ``[num_kv_heads, head_dim, n]``, which starts as a geometric series of angular frequencies from 1 down to
    about ``1 / longest``, those of several axes by turns; ``b``, which starts at 0; and where ``normalizer`` leaves them free
    ``c``, which starts at 1, and ``beta``, at 0.

    Parameters
    ----------
    normalizer, wave, feature_map, decay, algorithm
        As in `longspan.ops.fourier_attention`; ``wave="pairs"`` with ``normalizer="unrotated"`` is rotary positions.
    gate : bool
        As in `KernelizedAttention`.
    longest : float
        In units of positions: waves at the start are from ``2 pi`` to about ``2 pi longest`` long.
    axes : int, optional
        Axes of the positions that each call gives as ``q_positions`` and ``k_positions``. Without it tokens are counted.
    num_heads, head_dim, num_kv_heads, device, dtype
        As in `Attention`.

    Examples
    --------
    >>> import torch
    >>> from longspan.torch import FourierAttention
    >>> attention = FourierAttention(4, 8)
    >>> q, k, v = torch.randn(3, 2, 4, 100, 8)
    >>> attention(q, k, v, is_causal=True).shape
    torch.Size([2, 4, 100, 8])
    >>> in_the_plane = FourierAttention(4, 8, axes=2)
    >>> at = torch.rand(2, 100, 2)
    >>> in_the_plane(q, k, v, q_positions=at, k_positions=at).shape
    torch.Size([2, 4, 100, 8])
    """

    mechanism = "fourier"
    a: nn.Parameter

    def __init__(
        self, num_heads: int, head_dim: int, *, normalizer: str = "one_plus", wave: str = "each", longest: float = 1e4,
        axes: int | None = None, feature_map: str = "elu+1", decay: float | Sequence[float] | None = None, gate: bool = False,
        algorithm: str = "auto", num_kv_heads: int | None = None, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if axes is not None:
            _options.expect_integer(type(self).__name__, "axes", axes, 1, _options.MOST)
        # Any numbers: what they are does not matter to the options.
        a = torch.empty(1, 0, axes or 1)
        each = dict.fromkeys(() if wave == "pairs" else ("b", *FREE.get(normalizer, ())), a)
        at = None if axes is None else a
        options, _ = fourier_options(
            type(self).__name__, None, a, each.get("b"), each.get("c"), each.get("beta"), at, at, normalizer, wave,
            feature_map, _of_heads(decay, num_kv_heads or num_heads), algorithm, **_options.gate(type(self).__name__, gate, decay),
        )  # fmt: skip
        super().__init__(num_heads, head_dim, options, num_kv_heads)
        self.longest = longest
        self.axes = axes
        self._learn({"device": device, "dtype": dtype})

    def _draw(self) -> None:
        with torch.no_grad():
            _, angles, axes = self.a.shape
            angle = torch.arange(angles, device=self.a.device)
            # Every axis has its own share of the angles, and the others turn nothing along it.
            own = angle[:, None] % axes == torch.arange(axes, device=self.a.device)
            waves = self.longest ** -(angle // axes * axes / max(angles, 1))
            self.a.copy_((own * waves[:, None]).to(self.a.dtype))
            for name in self._own[1:]:
                getattr(self, name).fill_(1.0 if name == "c" else 0.0)

    def _parameters_at(self, q_positions: Tensor | None, k_positions: Tensor | None) -> tuple[Tensor, ...]:
        given = (q_positions is not None, k_positions is not None)
        if given != (self.axes is not None,) * 2:
            wanted = "None" if self.axes is None else f"positions of {self.axes} axes"
            name, value = ("k_positions", k_positions) if given[0] == (self.axes is not None) else ("q_positions", q_positions)
            got = "None" if value is None else "a tensor"
            raise ValueError(f"FourierAttention: {name}: expected {wanted} with axes={self.axes}, got {got}")
        positions = () if q_positions is None or k_positions is None else (q_positions, k_positions)
        return (*self._named(self._own), *positions, *self._named(self._maps))


class ToeplitzAttention(Attention):
    """`longspan.ops.toeplitz_attention` as a module.

    It learns ``bias``, which starts close to 0, every distance alike, and the matrices of a ``"hedgehog"`` feature map.

    Parameters
    ----------
    kind : str
        Which distances have a bias of their own: ``"clipped"``, ``"table"``, ``"buckets"`` or ``"grid"``.
    radius : int
        Of ``"clipped"``: the largest such distance.
    reach : int
        Of ``"table"``: distances below it; calls with farther ones are refused.
    buckets, max_distance, bidirectional : int, int, bool
        Of ``"buckets"``: how many there are, and `longspan.ops.toeplitz_attention`'s options.
    height, width : int
        Of ``"grid"``: the image's pixels.
    feature_map, normalize, algorithm
        As in `longspan.ops.toeplitz_attention`.
    num_heads, head_dim, num_kv_heads, device, dtype
        As in `Attention`.
    """

    mechanism = "toeplitz"
    bias: nn.Parameter

    def __init__(
        self, num_heads: int, head_dim: int, *, kind: str = "clipped", radius: int = 64, reach: int = 1024, buckets: int = 32,
        max_distance: int = 128, bidirectional: bool = True, height: int = 32, width: int = 32, feature_map: str = "elu+1",
        normalize: bool = True, algorithm: str = "auto", num_kv_heads: int | None = None, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        for argument, size in (("radius", radius + 1), ("reach", reach), ("buckets", buckets), ("height", height),
                               ("width", width)):  # fmt: skip
            _options.expect_integer(name, argument, size, 1, _options.MOST)
        shapes = {"clipped": (2 * radius + 1,), "table": (2 * reach - 1,), "buckets": (buckets,),
                  "grid": (2 * height - 1, 2 * width - 1)}  # fmt: skip
        shape = shapes.get(kind, (1,))
        bias = torch.empty((1, *shape), device="meta")
        options = toeplitz_options(name, bias, kind, max_distance, bidirectional, feature_map, normalize, algorithm, True)
        super().__init__(num_heads, head_dim, options, num_kv_heads)
        self._learn({"device": device, "dtype": dtype}, shape=shape)

    def _draw(self) -> None:
        nn.init.normal_(self.bias, std=0.02)


class ShortConvolution(Attention):
    """`longspan.ops.short_convolution` as a module. It learns ``taps``, ``[num_kv_heads, width, head_dim]``.

    Parameters
    ----------
    width : int
        Taps: how many tokens a query sees, its own place among them, and no later one.
    silu : bool
        Whether the sum of the taps goes through SiLU before the query gates it.
    num_heads, head_dim, num_kv_heads, device, dtype
        As in `Attention`.
    """

    mechanism = "short-convolution"
    taps: nn.Parameter

    def __init__(
        self, num_heads: int, head_dim: int, *, width: int = 4, silu: bool = True, num_kv_heads: int | None = None,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        _options.expect_integer("ShortConvolution", "width", width, 1, 64)
        options = short_convolution_options("ShortConvolution", torch.empty(1, 1, 0), silu)
        super().__init__(num_heads, head_dim, options, num_kv_heads)
        self._learn({"device": device, "dtype": dtype}, width=width)

    def _draw(self) -> None:
        most = self.taps.shape[1] ** -0.5
        nn.init.uniform_(self.taps, -most, most)


class SoftmaxAttention(Attention):
    """`longspan.ops.softmax_attention`, the baseline, as a module; it learns nothing.

    Parameters
    ----------
    scale, capacity, window
        As in `longspan.ops.softmax_attention`.
    num_heads, head_dim, num_kv_heads, device, dtype
        As in `Attention`.
    """

    mechanism = "softmax"

    def __init__(
        self, num_heads: int, head_dim: int, *, scale: float | None = None, capacity: int = 4096, window: int | None = None,
        num_kv_heads: int | None = None, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        options = softmax_options("SoftmaxAttention", scale, capacity, window)
        super().__init__(num_heads, head_dim, options, num_kv_heads)
        self._learn({})


#: What ``attention="..."`` of `MultiheadAttention` may be.
MODULES: dict[str, type[Attention]] = {
    module.mechanism: module
    for module in (
        KernelizedAttention, ShawAttention, FourierAttention, ToeplitzAttention, AftFull, AftLocal, AftSimple, AftConv,
        ShortConvolution, GatedAttention, DeltaAttention, SoftmaxAttention,
    )
} | {"gated-delta": GatedDeltaAttention}  # fmt: skip


def build(attention: str | Callable[..., nn.Module], num_heads: int, head_dim: int, **options: Any) -> nn.Module:
    """The module that ``attention`` names, or makes."""
    if callable(attention):
        return attention(num_heads, head_dim, **options)
    if attention not in MODULES:
        raise ValueError(f"unknown attention {attention!r}; known are {', '.join(MODULES)}")
    make: Callable[..., Attention] = MODULES[attention]
    return make(num_heads, head_dim, **options)
