"""What mechanisms there are, which algorithm a call would run, and states taken together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, overload

import numpy as np

from . import _calls, _native, _options, _route, ops
from ._native import State

if TYPE_CHECKING:
    from .torch import TensorState

__all__ = ["Estimate", "MechanismInfo", "Plan", "combine", "explain", "mechanisms"]


@dataclass(frozen=True)
class MechanismInfo:
    """One mechanism."""

    name: str
    summary: str
    #: The function of `longspan.ops` that calls it.
    function: str
    algorithms: tuple[str, ...]
    #: Keyword arguments of the function.
    options: tuple[str, ...]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "kernelized": ops.kernelized_attention,
    "shaw": ops.shaw_attention,
    "fourier": ops.fourier_attention,
    "toeplitz": ops.toeplitz_attention,
    "aft-full": ops.aft_full,
    "aft-local": ops.aft_local,
    "aft-simple": ops.aft_simple,
    "aft-conv": ops.aft_conv,
    "softmax": ops.softmax_attention,
}

#: Options without which a mechanism cannot be explained, and what stands for them.
_EXPLAINED: dict[str, dict[str, Any]] = {"shaw": {"radius": 16}, "aft-local": {"window": 32}, "aft-conv": {"taps": 33}}


def mechanisms() -> dict[str, MechanismInfo]:
    """Every mechanism by its name, with the function that calls it, its options and the algorithms that can be forced."""
    found = {}
    for name, summary, algorithms in _native.mechanisms():
        function = _FUNCTIONS[name]
        options = tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY)
        found[name] = MechanismInfo(name, summary, function.__name__, tuple(algorithms), options)
    return found


class Estimate(TypedDict):
    """What one algorithm would cost."""

    algorithm: str
    flops: float
    #: Numbers that the published form of it keeps for each head.
    published_elements: float
    #: Working memory for one head.
    scratch_bytes: float
    #: On one thread; with the backward where that was asked for.
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Which algorithm a call runs, and why."""

    algorithm: str
    reason: str
    #: One for each algorithm.
    estimates: tuple[Estimate, ...]

    def __str__(self) -> str:
        lines = [f"{self.algorithm}: {self.reason}"]
        lines += [
            f"  {e['algorithm']:<10} {e['flops']:10.3g} flops  {e['scratch_bytes']:10.3g} B scratch a head  "
            f"{e['seconds'] * 1e3:10.4g} ms on one thread"
            for e in self.estimates
        ]
        return "\n".join(lines)


def explain(
    mechanism: str = "kernelized",
    *,
    batch: int = 1,
    heads: int = 8,
    kv_heads: int | None = None,
    queries: int = 1024,
    keys: int | None = None,
    head_dim: int = 64,
    value_dim: int | None = None,
    is_causal: bool = False,
    offset: int = 0,
    with_backward: bool = False,
    **options: Any,
) -> Plan:
    """Which algorithm a call of these sizes would run, and why: ``print(longspan.explain("shaw", queries=4096, radius=64))``.

    A backward runs the algorithm of its forward. So a call whose gradients are wanted is chosen for by the time of both:
    ``with_backward`` shows that.

    ``options`` are those of the mechanism (``feature_map``, ``algorithm`` ...), and ``radius`` of ``"shaw"``, ``window``
    of ``"aft-local"``, ``taps`` of ``"aft-conv"``, ``length`` and ``rank`` of ``"aft-full"``.
    """
    sizes = {"batch": batch, "heads": heads, "kv_heads": heads if kv_heads is None else kv_heads, "queries": queries,
             "keys": queries if keys is None else keys, "head_dim": head_dim,
             "value_dim": head_dim if value_dim is None else value_dim}  # fmt: skip
    for name, size in sizes.items():
        if not isinstance(size, int):
            raise TypeError(f"explain: {name}: expected an integer, got {type(size).__name__}")
        if not 0 <= size < 1 << 40:
            raise ValueError(f"explain: {name}: expected a size from 0 on, got {size}")
    _options.expect_type("explain", "mechanism", mechanism, str)
    _options.expect_type("explain", "offset", offset, int)
    if not -(1 << 62) < offset < 1 << 62:
        raise ValueError(f"explain: offset: expected an integer between -2**62 and 2**62, got {offset}")
    is_causal = _calls.flag("explain", "is_causal", is_causal)
    with_backward = _calls.flag("explain", "with_backward", with_backward)
    options = {**_EXPLAINED.get(mechanism, {}), **options}
    if mechanism == "toeplitz":
        entries = [max(sizes["queries"] + sizes["keys"] - 1, 1)]
        options = {"first": 1 - sizes["queries"] - offset, "shape": entries, **options}
    if mechanism == "aft-full":
        options = {"length": max(sizes["queries"], sizes["keys"], 1), **options}
    native = _named("explain", mechanism, sizes["kv_heads"], options)
    algorithm, reason, estimates = native.plan(
        **sizes, is_causal=is_causal, offset=offset, with_backward=with_backward
    )
    return Plan(algorithm, reason, tuple(estimates))


@overload
def combine(
    mechanism: str, earlier: State, later: State, *, parameters: Sequence[Any] = (), **options: Any
) -> State: ...
@overload
def combine(
    mechanism: str, earlier: TensorState, later: State | TensorState, *, parameters: Sequence[Any] = (), **options: Any
) -> TensorState: ...
@overload
def combine(
    mechanism: str, earlier: State, later: TensorState, *, parameters: Sequence[Any] = (), **options: Any
) -> TensorState: ...
def combine(
    mechanism: str, earlier: Any, later: Any, *, parameters: Sequence[Any] = (), **options: Any
) -> Any:
    """The state after two segments of tokens, ``earlier`` before ``later``, from the state of each.

    ``later`` was computed on its own, from no state. So a long document can be taken in by several machines at once; the
    operation is associative, to rounding. ``options`` are those that the states were computed with, named as for
    `explain`: ``longspan.combine("shaw", first, second, radius=16)``. Fourier positions that are counted also want their
    ``a``: ``longspan.combine("fourier", first, second, parameters=[a])``.

    Where one of them is a `longspan.torch.TensorState`, or ``a`` requires a gradient, so is the sum, with gradients.

    Raises ``ValueError`` for mechanisms whose states have no sum (there, give the earlier state as ``initial_state``).
    """
    _options.expect_type("combine", "mechanism", mechanism, str)
    if _calls.learns(earlier, later, parameters):
        from .torch._combine import combine as combine_tensors

        native = _named("combine", mechanism, earlier.kv_heads, options)
        return combine_tensors("combine", native, _options.as_object(**options), earlier, later, parameters)
    _calls.expect_plain("combine", earlier, later)
    native = _named("combine", mechanism, earlier.kv_heads, options)
    return native.combine(earlier, later, _route.plain_arrays(parameters))


def _named(operation: str, mechanism: str, kv_heads: int, options: dict[str, Any]) -> _native.Mechanism:
    if "decay" in options:
        options = {**options, "decay": _options.decays(operation, np.empty((1, kv_heads)), options["decay"])}
    return _calls.cached(mechanism, _options.as_object(**options), operation)
