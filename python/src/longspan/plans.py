"""What mechanisms there are, which algorithm a call would run, and states taken together."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, overload

import numpy as np

from . import _calls, _native, _options, _route
from ._native import State

if TYPE_CHECKING:
    from .torch import TensorState

__all__ = ["Estimate", "MechanismInfo", "Plan", "combine", "explain", "mechanisms"]


@dataclass(frozen=True)
class MechanismInfo:
    """One mechanism, as `mechanisms` describes it.

    Parameters
    ----------
    name : str
        What ``attention="..."`` and `explain` call it.
    summary : str
        One line on it.
    function : str
        The function of `longspan.ops` that calls it.
    algorithms : tuple of str
        What its ``algorithm`` may be beside ``"auto"``.
    options : tuple of str
        Keyword arguments of the function.

    Examples
    --------
    >>> import longspan
    >>> info = longspan.mechanisms()["shaw"]
    >>> info.function, info.algorithms
    ('shaw_attention', ('chunked', 'naive'))
    """

    name: str
    summary: str
    function: str
    algorithms: tuple[str, ...]
    options: tuple[str, ...]


def mechanisms() -> dict[str, MechanismInfo]:
    """Every mechanism by its name.

    Returns
    -------
    dict of str to `MechanismInfo`
        With the function that calls it, its options and the algorithms that can be forced.

    Examples
    --------
    >>> import longspan
    >>> sorted(longspan.mechanisms())
    ['aft-conv', 'aft-full', 'aft-local', 'aft-simple', 'delta', 'fourier', 'gated', 'kernelized', 'shaw', 'short-convolution', 'softmax', 'toeplitz']
    """
    found = {}
    for name, summary, algorithms in _native.mechanisms():
        function = _calls.DECLARED[name].function
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
    """Which algorithm a call runs, and why: what `explain` returns. Print it.

    Parameters
    ----------
    algorithm : str
        The one that runs.
    reason : str
        Why it does.
    estimates : tuple of dict
        For each algorithm its name ``algorithm``, its ``flops``, ``published_elements`` (numbers that the published form of it
        keeps for each head), ``scratch_bytes`` (working memory for one head) and ``seconds`` on one thread, with the backward
        where that was asked for.

    Examples
    --------
    >>> import longspan
    >>> plan = longspan.explain("kernelized", queries=4096)
    >>> plan.algorithm, [estimate["algorithm"] for estimate in plan.estimates]
    ('chunked', ['naive', 'chunked'])
    """

    algorithm: str
    reason: str
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
    mechanism: str = "kernelized", *, batch: int = 1, heads: int = 8, kv_heads: int | None = None, queries: int = 1024,
    keys: int | None = None, head_dim: int = 64, value_dim: int | None = None, is_causal: bool = False, offset: int = 0,
    with_backward: bool = False, **options: Any,
) -> Plan:  # fmt: skip
    """Which algorithm a call of these sizes would run, and why.

    Parameters
    ----------
    mechanism : str
        A name of `mechanisms`.
    batch, heads, kv_heads : int
        Sequences; query heads; key/value heads, by default as many.
    queries, keys : int
        Tokens; by default as many keys as queries.
    head_dim, value_dim : int
        Numbers in a query, and in a value, by default as many.
    is_causal, offset : bool, int
        As in `longspan.ops`.
    with_backward : bool
        Choose by the time of forward and backward, as a call does whose gradients are wanted: a backward runs the algorithm of its
        forward.
    **options
        Those of the mechanism (``feature_map``, ``algorithm`` ...), and ``radius`` of ``"shaw"``, ``window`` of ``"aft-local"``,
        ``taps`` of ``"aft-conv"``, ``length`` and ``rank`` of ``"aft-full"``.

    Returns
    -------
    Plan
        The algorithm, the reason, and what each algorithm would cost.

    Raises
    ------
    TypeError, ValueError
        For sizes and options that a call would refuse.

    Examples
    --------
    >>> import longspan
    >>> longspan.explain("shaw", queries=16, radius=64).algorithm
    'naive'
    >>> longspan.explain("shaw", queries=4096, radius=64, is_causal=True).algorithm
    'chunked'
    """
    sizes = {"batch": batch, "heads": heads, "kv_heads": heads if kv_heads is None else kv_heads, "queries": queries,
             "keys": queries if keys is None else keys, "head_dim": head_dim,
             "value_dim": head_dim if value_dim is None else value_dim}  # fmt: skip
    for name, size in sizes.items():
        _options.expect_integer("explain", name, size, 0, (1 << 40) - 1)
    _options.expect_type("explain", "mechanism", mechanism, str)
    _options.expect_integer("explain", "offset", offset, -(1 << 62), 1 << 62)
    is_causal = _calls.flag("explain", "is_causal", is_causal)
    with_backward = _calls.flag("explain", "with_backward", with_backward)
    declared = _calls.DECLARED.get(mechanism)
    options = {**(declared.explained if declared else {}), **options}
    if mechanism == "toeplitz":
        entries = [max(sizes["queries"] + sizes["keys"] - 1, 1)]
        options = {"first": 1 - sizes["queries"] - offset, "shape": entries, **options}
    if mechanism == "aft-full":
        options = {"length": max(sizes["queries"], sizes["keys"], 1), **options}
    native = _named("explain", mechanism, sizes["kv_heads"], options)
    algorithm, reason, estimates = native.plan(tuple(sizes.values()), is_causal, offset, with_backward)
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
    """The state after two segments of tokens, from the state of each.

    So a long document can be taken in by several machines at once; the operation is associative, to rounding.

    Parameters
    ----------
    mechanism : str
        A name of `mechanisms`.
    earlier, later : State or `longspan.torch.TensorState`
        States of the first segment and of the second, which was computed on its own, from no state.
    parameters : sequence of array
        ``[a]`` of Fourier positions that are counted.
    **options
        Those that the states were computed with, named as for `explain`; ``gate=True`` where tokens brought a ``log_decay``.

    Returns
    -------
    State, or `longspan.torch.TensorState` where one of both is, or ``a`` requires a gradient
        The latter with gradients, for every mechanism but softmax attention in a window.

    Raises
    ------
    ValueError
        For mechanisms whose states have no sum (there, give the earlier state as ``initial_state``), and for states that were
        computed with other options.

    Examples
    --------
    >>> import numpy as np
    >>> import longspan
    >>> from longspan import ops
    >>> x = np.random.default_rng(0).standard_normal((1, 2, 100, 8), np.float32)
    >>> rel = np.random.default_rng(1).standard_normal((2, 33, 8), np.float32)
    >>> def state(x):
    ...     return ops.shaw_attention(x, x, x, rel, is_causal=True, output_final_state=True)[1]
    >>> both = longspan.combine("shaw", state(x[:, :, :50]), state(x[:, :, 50:]), radius=16)
    >>> token = x[:, :, 0]
    >>> one, _ = ops.shaw_attention_step(token, token, token, rel, both)
    >>> other, _ = ops.shaw_attention_step(token, token, token, rel, state(x))
    >>> np.allclose(one, other, atol=1e-5)
    True
    """
    _options.expect_type("combine", "mechanism", mechanism, str)
    native = _named("combine", mechanism, getattr(earlier, "kv_heads", 1), options)
    return _route.combine("combine", native, _options.as_object(**options), earlier, later, parameters)


def _named(operation: str, mechanism: str, kv_heads: int, options: dict[str, Any]) -> _native.Mechanism:
    if "decay" in options:
        options = {**options, "decay": _options.decays(operation, np.empty((1, kv_heads)), options["decay"])}
    return _calls.cached(mechanism, _options.as_object(**options), operation)
