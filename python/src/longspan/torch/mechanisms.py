"""One module for each mechanism: attention over heads, with what it learns.

All are made from ``(num_heads, head_dim)`` and options by name, and called with ``q``, ``k``, ``v`` as
``[batch, head, token, feature]``; see `longspan.ops` for formulas and arguments. Projections are `MultiheadAttention`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import _calls, _options
from .._native import State
from . import _combine, _dispatch, _operators
from ._states import TensorState


#: Mechanisms that do not see the order of tokens by themselves.
WITHOUT_ORDER = ("kernelized", "aft-simple", "softmax", "softmax-window")


class Attention(nn.Module):
    """A mechanism with its options and parameters."""

    #: Name in `longspan.mechanisms`.
    mechanism: ClassVar[str]

    def __init__(self, num_heads: int, head_dim: int, options: str, num_kv_heads: int | None = None) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, size in (("num_heads", num_heads), ("head_dim", head_dim), ("num_kv_heads", kv_heads)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{type(self).__name__}: {name}: expected an integer from 1 on, got {size!r}")
        if num_heads % kv_heads:
            raise ValueError(f"{type(self).__name__}: num_kv_heads: expected a divisor of num_heads = {num_heads}, "
                             f"got {kv_heads}")  # fmt: skip
        self.num_heads = num_heads
        self.num_kv_heads = kv_heads
        self.head_dim = head_dim
        self._options = options
        self._maps: tuple[str, ...] = ()
        #: Whether an output depends on where its query stands.
        self.sees_order = self.mechanism not in WITHOUT_ORDER or json.loads(options).get("decay") is not None

    @property
    def key_dim(self) -> int:
        """Numbers in a key of one head."""
        return self.head_dim

    def _learned(self) -> tuple[Tensor, ...]:
        """The mechanism's parameters in the kernels' order."""
        return ()

    def _parameters_at(self, q_positions: Tensor | None, k_positions: Tensor | None) -> tuple[Tensor, ...]:
        """The parameters of a call at these positions."""
        for name, positions in (("q_positions", q_positions), ("k_positions", k_positions)):
            if positions is not None:
                raise ValueError(f"{type(self).__name__}: {name}: expected None, because the mechanism counts tokens, "
                                 "got a tensor")  # fmt: skip
        return self._learned()

    def _learn_maps(self, feature_map: str, place: dict[str, Any]) -> None:
        """Makes the parameters of a feature map that learns: the identity where they are square."""
        self._maps = ("map_queries", "map_keys") if feature_map.startswith("hedgehog") else ()
        width = _calls.features(feature_map, self.head_dim) // 2
        for name, heads in zip(self._maps, (self.num_heads, self.num_kv_heads)):
            self.register_parameter(name, nn.Parameter(torch.empty((heads, width, self.head_dim), **place)))

    def _reset_maps(self) -> None:
        for name in self._maps:
            matrix = getattr(self, name)
            if matrix.shape[1] == matrix.shape[2]:
                with torch.no_grad():
                    matrix.copy_(torch.eye(self.head_dim, dtype=matrix.dtype, device=matrix.device).expand_as(matrix))
            else:
                nn.init.normal_(matrix, std=self.head_dim**-0.5)

    def _learned_maps(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self._maps)

    def _check(self) -> None:
        """Refuses wrong options when the module is made rather than when it is first called."""
        _calls.mechanism(self.mechanism, self._options, type(self).__name__, self._learned())

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
        initial_state: State | TensorState | None = None,
        output_final_state: bool = False,
        q_positions: Tensor | None = None,
        k_positions: Tensor | None = None,
    ) -> Any:
        """``[batch, head, query, feature]``, laid out token by token; with the state if it is wanted. Positions are those of
        a `FourierAttention` with axes."""
        return _dispatch.attend(
            type(self).__name__, self.mechanism, self._options, q, k, v, self._parameters_at(q_positions, k_positions),
            is_causal, offset,
            key_padding_mask, cu_seqlens, initial_state, output_final_state, token_major=True,
        )  # fmt: skip

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State | TensorState | None = None,
        *,
        q_positions: Tensor | None = None,
        k_positions: Tensor | None = None,
    ) -> tuple[Tensor, State | TensorState]:
        """One token of the causal attention, ``[batch, head, feature]``: its output, and the state with it taken in.

        A `State` is changed in place. Where gradients are recorded a new `TensorState` comes back, which holds on to all
        tokens before; generate under ``torch.no_grad()``."""
        name = type(self).__name__
        learned = self._parameters_at(q_positions, k_positions)
        out: tuple[Tensor, State | TensorState] = _dispatch.step(name, self.mechanism, self._options, q, k, v, learned, state)
        return out

    def step_together(
        self, together: Tensor, heads: tuple[int, int, int], widths: tuple[int, int, int], state: Any
    ) -> tuple[Tensor, State] | None:
        """`step` of queries, keys and values that lie side by side, ``[batch, sum(widths)]``: the output ``[batch, width]``
        and the state. ``None`` where somebody has to see the step itself: autograd, a compiler, a class or a hook of the
        user's own."""
        if type(self).step is not Attention.step or "step" in self.__dict__:
            return None
        learned = self._parameters_at(None, None)
        name = type(self).__name__
        return _dispatch.step_together(name, self.mechanism, self._options, together, heads, widths, learned, state)

    def encoder_layer_step(
        self,
        token: Tensor,
        weights: Sequence[Tensor | None],
        layer: tuple[tuple[int, int], tuple[float, float], str, bool],
        state: Any,
    ) -> tuple[Tensor, State] | None:
        """`step` with the encoder layer around it, or ``None`` as in `step_together`."""
        if type(self).step is not Attention.step or "step" in self.__dict__:
            return None
        learned = self._parameters_at(None, None)
        name = type(self).__name__
        return _dispatch.encoder_layer_step(name, self.mechanism, self._options, token, weights, learned, layer, state)

    def combine(self, earlier: Any, later: Any) -> Any:
        """The state after two segments of tokens from the state of each; see `longspan.combine`."""
        operation = f"{type(self).__name__}.combine"
        learned = self._learned()
        native = _calls.mechanism(self.mechanism, self._options, type(self).__name__, learned)
        if _calls.learns(earlier, later, learned):
            return _combine.combine(operation, native, self._options, earlier, later, learned)
        _calls.expect_plain(operation, earlier, later)
        return native.combine(earlier, later, tuple([_operators.as_array(tensor) for tensor in learned]))

    def extra_repr(self) -> str:
        return f"{self.num_heads}, {self.head_dim}, {self._options[1:-1]}"


class KernelizedAttention(Attention):
    """`longspan.ops.kernelized_attention` as a module; it learns nothing, but for the ``"hedgehog"`` feature map, whose
    ``map_queries`` and ``map_keys``, ``[num_heads, width, head_dim]``, start as the identity.

    ``decay`` may be ``None``, one number, or one for each key/value head.
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
        num_kv_heads: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        decay = [decay] * (num_kv_heads or num_heads) if isinstance(decay, (int, float)) else decay
        options = _options.kernel(type(self).__name__, None, feature_map, decay, normalize, algorithm)
        super().__init__(num_heads, head_dim, options, num_kv_heads)
        self._learn_maps(feature_map, {"device": device, "dtype": dtype})
        self.reset_parameters()
        self._check()

    def reset_parameters(self) -> None:
        self._reset_maps()

    def _learned(self) -> tuple[Tensor, ...]:
        return self._learned_maps()


class ShawAttention(Attention):
    """`longspan.ops.shaw_attention` as a module; it learns ``rel``, ``[num_heads, 2 * radius + 1, head_dim]``.

    ``shared`` makes it ``[2 * radius + 1, head_dim]`` for all heads; with ``rel_feature_map="identity"`` rows are as wide as
    the feature map's. Its rows start at random with a standard deviation
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
        num_kv_heads: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        if not isinstance(radius, int) or radius < 0:
            raise ValueError(f"{name}: radius: expected an integer from 0 on, got {radius!r}")
        decay = [decay] * (num_kv_heads or num_heads) if isinstance(decay, (int, float)) else decay
        width = head_dim if rel_feature_map == "same" else _calls.features(feature_map, head_dim)
        shape = (2 * radius + 1, width) if shared else (num_heads, 2 * radius + 1, width)
        rel = torch.empty(shape, device=device, dtype=dtype)
        options = _options.shaw(
            name, None, rel, kernelized, feature_map, rel_feature_map, decay, normalize, algorithm
        )  # fmt: skip
        super().__init__(num_heads, head_dim, options, num_kv_heads)
        self.rel = nn.Parameter(rel)
        self._learn_maps(feature_map, {"device": device, "dtype": dtype})
        self.reset_parameters()
        self._check()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.rel, std=0.5)
        self._reset_maps()

    def _learned(self) -> tuple[Tensor, ...]:
        return (self.rel, *self._learned_maps())


class FourierAttention(Attention):
    """`longspan.ops.fourier_attention` as a module, with counted positions, or with ``axes=n`` at the ``q_positions``
    ``[batch, queries, n]`` and ``k_positions`` ``[batch, keys, n]`` of each call.

    It learns ``a``, ``[num_kv_heads, head_dim, n]``, which starts as geometric wavelengths from 2 pi to ``longest``, those of
    several axes by turns, ``b``, which starts at 0, and where the ``normalizer`` leaves them free ``c`` and ``beta``.
    ``wave="pairs"`` is rotary positions.
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
        axes: int | None = None,
        feature_map: str = "elu+1",
        decay: float | Sequence[float] | None = None,
        algorithm: str = "auto",
        num_kv_heads: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        place = {"device": device, "dtype": dtype}
        names = () if wave == "pairs" else ("b", *_options.FREE.get(normalizer, ()))
        features = _calls.features(feature_map, head_dim)
        angles = features // 2 if wave == "pairs" else features
        each = {name: torch.empty((num_heads, features), **place) for name in names}
        decay = [decay] * (num_kv_heads or num_heads) if isinstance(decay, (int, float)) else decay
        if axes is not None:
            _expect_size(type(self).__name__, "axes", axes)
        a = torch.empty((num_kv_heads or num_heads, angles, axes or 1), **place)
        # Any positions: what they are does not matter to the options.
        at = None if axes is None else a
        options, _ = _options.fourier(
            type(self).__name__, None, a, each.get("b"), each.get("c"), each.get("beta"), at, at, normalizer, wave,
            feature_map, decay, algorithm,
        )  # fmt: skip
        super().__init__(num_heads, head_dim, options, num_kv_heads)
        self.longest = longest
        self.axes = axes
        self.a = nn.Parameter(a)
        for name, value in each.items():
            self.register_parameter(name, nn.Parameter(value))
        self._each = tuple(names)
        self._learn_maps(feature_map, place)
        self.reset_parameters()
        self._check()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            _, angles, axes = self.a.shape
            angle = torch.arange(angles, device=self.a.device)
            # Every axis has its own share of the angles, and the others turn nothing along it.
            own = angle[:, None] % axes == torch.arange(axes, device=self.a.device)
            waves = self.longest ** -(angle // axes * axes / max(angles, 1))
            self.a.copy_((own * waves[:, None]).to(self.a.dtype))
            for name in self._each:
                getattr(self, name).fill_(1.0 if name == "c" else 0.0)
        self._reset_maps()

    def _learned(self) -> tuple[Tensor, ...]:
        return (self.a, *(getattr(self, name) for name in self._each), *self._learned_maps())

    def _parameters_at(self, q_positions: Tensor | None, k_positions: Tensor | None) -> tuple[Tensor, ...]:
        given = (q_positions is not None, k_positions is not None)
        if given != (self.axes is not None,) * 2:
            wanted = "None" if self.axes is None else f"positions of {self.axes} axes"
            name, value = ("k_positions", k_positions) if given[0] == (self.axes is not None) else ("q_positions", q_positions)
            got = "None" if value is None else "a tensor"
            raise ValueError(f"FourierAttention: {name}: expected {wanted} with axes={self.axes}, got {got}")
        positions = () if q_positions is None or k_positions is None else (q_positions, k_positions)
        return (self.a, *(getattr(self, name) for name in self._each), *positions, *self._learned_maps())


class ToeplitzAttention(Attention):
    """`longspan.ops.toeplitz_attention` as a module; it learns ``bias``, which starts close to 0: every distance alike, and
    the matrices of a ``"hedgehog"`` feature map.

    ``kind`` says which distances have a bias of their own: ``"clipped"`` those up to ``radius``, ``"table"`` those below
    ``reach`` (calls with farther ones are refused), ``"buckets"`` T5's ``buckets`` up to ``max_distance``, ``"grid"``
    displacements in an image of ``height`` times ``width`` pixels.
    """

    mechanism = "toeplitz"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        kind: str = "clipped",
        radius: int = 64,
        reach: int = 1024,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        height: int = 32,
        width: int = 32,
        feature_map: str = "elu+1",
        normalize: bool = True,
        algorithm: str = "auto",
        num_kv_heads: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        for argument, size in (("radius", radius + 1), ("reach", reach), ("buckets", buckets), ("height", height),
                               ("width", width)):  # fmt: skip
            _expect_size(name, argument, size)
        shapes = {"clipped": (2 * radius + 1,), "table": (2 * reach - 1,), "buckets": (buckets,),
                  "grid": (2 * height - 1, 2 * width - 1)}  # fmt: skip
        bias = torch.empty((num_heads, *shapes.get(kind, (1,))), device=device, dtype=dtype)
        options = _options.toeplitz(
            name, bias, kind, max_distance, bidirectional, feature_map, normalize, algorithm, True
        )  # fmt: skip
        super().__init__(num_heads, head_dim, options, num_kv_heads)
        self.bias = nn.Parameter(bias)
        self._learn_maps(feature_map, {"device": device, "dtype": dtype})
        self.reset_parameters()
        self._check()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.bias, std=0.02)
        self._reset_maps()

    def _learned(self) -> tuple[Tensor, ...]:
        return (self.bias, *self._learned_maps())


def _expect_size(module: str, name: str, size: int) -> None:
    if not isinstance(size, int) or not 1 <= size < 1 << 24:
        raise ValueError(f"{module}: {name}: expected an integer from 1 to 2**24 - 1, got {size!r}")


class AftFull(Attention):
    """`longspan.ops.aft_full` for sequences of up to ``length`` tokens as a module.

    It learns ``u`` and ``z``, ``[length, rank]`` each, or with ``rank=None`` ``w``, ``[length, length]``; they start close
    to no bias.
    """

    mechanism = "aft-full"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        length: int = 1024,
        rank: int | None = 64,
        num_kv_heads: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, "{}", num_kv_heads)
        _expect_size("AftFull", "length", length)
        _expect_size("AftFull", "rank", 1 if rank is None else rank)
        for name in ("w",) if rank is None else ("u", "z"):
            table = torch.empty((length, length if rank is None else rank), device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(table))
        self.reset_parameters()
        self._check()

    def reset_parameters(self) -> None:
        for table in self._learned():
            nn.init.normal_(table, std=0.01 if len(self._learned()) == 1 else 0.1)

    def _learned(self) -> tuple[Tensor, ...]:
        return tuple(self.parameters())


class AftLocal(Attention):
    """`longspan.ops.aft_local` for sequences of up to ``length`` tokens as a module; it learns ``w``,
    ``[length, 2 * window - 1]``, which starts close to no bias."""

    mechanism = "aft-local"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        window: int = 8,
        length: int = 1024,
        num_kv_heads: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _expect_size("AftLocal", "window", window)
        _expect_size("AftLocal", "length", length)
        w = torch.empty((length, 2 * window - 1), device=device, dtype=dtype)
        super().__init__(num_heads, head_dim, _options.aft_local("AftLocal", w, True), num_kv_heads)
        self.w = nn.Parameter(w)
        self.reset_parameters()
        self._check()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.w, std=0.01)

    def _learned(self) -> tuple[Tensor, ...]:
        return (self.w,)


class AftSimple(Attention):
    """`longspan.ops.aft_simple` as a module; it learns nothing."""

    mechanism = "aft-simple"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, "{}", num_kv_heads)
        self._check()


class AftConv(Attention):
    """`longspan.ops.aft_conv` as a module, with keys ``[batch, head, token, 1]``: one number a head.

    It learns ``w``, ``[num_heads, taps]``, and unless ``normalized`` is false ``gamma`` and ``beta``, ``[num_heads]``,
    which start at 0, as published. With ``image=(height, width)`` tokens are an image's, row after row, and ``w`` is
    ``[num_heads, tap_rows, taps]``; ``tap_rows`` is ``taps`` by default.
    """

    mechanism = "aft-conv"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        taps: int = 15,
        normalized: bool = True,
        image: tuple[int, int] | None = None,
        tap_rows: int | None = None,
        num_kv_heads: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _expect_size("AftConv", "taps", taps)
        tap_rows = taps if tap_rows is None else tap_rows
        _expect_size("AftConv", "tap_rows", tap_rows)
        place = {"device": device, "dtype": dtype}
        w = torch.empty((num_heads, taps) if image is None else (num_heads, tap_rows, taps), **place)
        scale = torch.empty(num_heads) if normalized else None
        _, _, options = _options.aft_conv("AftConv", torch.empty(1, 1, 1), w, scale, scale, 3, image)
        super().__init__(num_heads, head_dim, options, num_kv_heads)
        self.w = nn.Parameter(w)
        self._scale = ("gamma", "beta") if normalized else ()
        for name in self._scale:
            self.register_parameter(name, nn.Parameter(torch.empty(num_heads, **place)))
        self.reset_parameters()
        self._check()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.w, std=1.0 if self._scale else 0.01)
        for name in self._scale:
            nn.init.zeros_(getattr(self, name))

    @property
    def key_dim(self) -> int:
        return 1

    def _learned(self) -> tuple[Tensor, ...]:
        return (self.w, *(getattr(self, name) for name in self._scale))


class SoftmaxAttention(Attention):
    """`longspan.ops.softmax_attention`, the baseline, as a module; it learns nothing."""

    mechanism = "softmax"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        capacity: int = 4096,
        window: int | None = None,
        num_kv_heads: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = _options.softmax("SoftmaxAttention", scale, capacity, window)
        super().__init__(num_heads, head_dim, options, num_kv_heads)
        self._check()


#: What ``attention="..."`` of `MultiheadAttention` may be.
MODULES: dict[str, type[Attention]] = {
    module.mechanism: module
    for module in (
        KernelizedAttention, ShawAttention, FourierAttention, ToeplitzAttention, AftFull, AftLocal, AftSimple, AftConv,
        SoftmaxAttention,
    )
}  # fmt: skip


def build(attention: str | Callable[..., nn.Module], num_heads: int, head_dim: int, **options: Any) -> nn.Module:
    """The module that ``attention`` names, or makes."""
    if callable(attention):
        return attention(num_heads, head_dim, **options)
    if attention not in MODULES:
        raise ValueError(f"unknown attention {attention!r}; known are {', '.join(MODULES)}")
    make: Callable[..., Attention] = MODULES[attention]
    return make(num_heads, head_dim, **options)
