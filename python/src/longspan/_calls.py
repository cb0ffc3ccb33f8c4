"""What a call on arrays and a call on tensors have in common: the compiled mechanism, names, states, boundaries."""

import functools
import json
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from . import _native, _options
from ._native import State


class Declared(NamedTuple):
    """What is to be known of a mechanism beside the options that its kernel reads."""

    #: The function of `longspan.ops` that calls it.
    function: Callable[..., Any]
    #: Options that follow from the shapes of its parameters. An operator's options, a text, cannot hold them: under torch.compile a
    #: size may be a symbol.
    shaped: Callable[..., dict[str, Any]] | None
    #: Options without which it cannot be explained, and what stands for them.
    explained: dict[str, Any]


#: Every mechanism by its name, as its file in ``ops`` declares it.
DECLARED: dict[str, Declared] = {}


def declare(
    name: str, function: Callable[..., Any], shaped: Callable[..., dict[str, Any]] | None = None, **explained: Any
) -> None:
    DECLARED[name] = Declared(function, shaped, explained)


def shaped(name: str, parameters: Sequence[Any], q: Any = None, offset: int = 0) -> tuple[tuple[str, Any], ...]:
    """The options of a call that follow from the shapes of these parameters; a state depends on none of the queries'."""
    own = DECLARED[name].shaped if name in DECLARED else None
    return () if own is None else tuple(own(q, offset, *parameters).items())


def mechanism(
    name: str, options: str, operation: str, parameters: Sequence[Any], q: Any = None, offset: int = 0
) -> _native.Mechanism:
    """The compiled mechanism for a call with these parameters."""
    declared = DECLARED.get(name)
    if declared is None or declared.shaped is None:
        return cached(name, options, operation)
    return cached(name, options, operation, shaped(name, parameters, q, offset))


class Request(NamedTuple):
    """What a call asks for beside its tensors: the mechanism, under the name of the function that was called, and the order of tokens.

    In the order of the operators' arguments.
    """

    mechanism: str
    options: str
    operation: str
    is_causal: bool
    offset: int

    def native(self, parameters: Sequence[Any], q: Any) -> _native.Mechanism:
        return mechanism(self.mechanism, self.options, self.operation, parameters, q, self.offset)


@functools.lru_cache(maxsize=1024)
def cached(name: str, options: str, operation: str, more: tuple[tuple[str, Any], ...] = ()) -> _native.Mechanism:
    if more:
        both = (options.strip()[1:-1], _options.as_object(**dict(more))[1:-1])
        options = "{" + ", ".join([part for part in both if part.strip()]) + "}"
    return _native.Mechanism(name, options, operation)


@functools.lru_cache(maxsize=1024)
def _parsed(options: str) -> tuple[tuple[str, Any], ...]:
    return tuple([(name, tuple(value) if isinstance(value, list) else value) for name, value in json.loads(options).items()])


def _settings(options: str) -> tuple[tuple[str, Any], ...]:
    return _parsed(options)


def settings(options: str) -> dict[str, Any]:
    """The options of a call by their names."""
    return dict(_settings(options))


def features(feature_map: str, head_dim: int) -> int:
    """Features that a map makes of rows of ``head_dim`` numbers: as many as Fourier positions have angles."""
    native = cached("fourier", _options.as_object(feature_map=feature_map), "feature_map")
    ((_, shape), *_) = native.parameter_shapes((1, 1, 1, 1, 1, head_dim, head_dim))
    return shape[1]


def boundaries(operation: str, cu_seqlens: Any) -> tuple[list[int], list[int]]:
    """Boundaries of packed sequences on the query and the key axis."""
    pair = isinstance(cu_seqlens, tuple) and len(cu_seqlens) == 2 and all(hasattr(c, "__len__") for c in cu_seqlens)
    lists: list[list[int]] = []
    for bounds in cu_seqlens if pair else (cu_seqlens,):
        try:
            given = bounds.tolist() if hasattr(bounds, "tolist") else list(bounds)
            numbers = [int(number) for number in given if isinstance(number, Integral) and not isinstance(number, bool)]
        except TypeError:
            given, numbers = [None], []
        if len(numbers) != len(given):
            raise TypeError(f"{operation}: cu_seqlens: expected integers, or a pair of such lists, got {cu_seqlens!r}")
        if any(not 0 <= number < 1 << 63 for number in numbers):
            raise ValueError(f"{operation}: cu_seqlens: expected numbers from 0 to 2**63 - 1, got {numbers}")
        lists.append(numbers)
    return lists[0], lists[-1]


#: bfloat16 as the compiled half takes it, because NumPy has no such type: two raw bytes.
BFLOAT16 = np.dtype("V2")


def _names(mechanism: str, options: str, more: tuple[tuple[str, Any], ...]) -> tuple[str, ...]:
    return ("q", "k", "v", *(name for name, _ in cached(mechanism, options, "names", more).parameter_shapes((1,) * 7)))


def names(mechanism: str, options: str, parameters: Sequence[Any]) -> tuple[str, ...]:
    """Names of a call's arrays."""
    return _names(mechanism, options, shaped(mechanism, parameters))


# What `torch.compiler.assume_constant_result` does, without torch: a compiler can trace neither json nor the compiled half.
_CONSTANT: tuple[Any, ...] = (_settings, features, _names)
for _function in _CONSTANT:
    _function._dynamo_marked_constant = True


def plain_state(operation: str, name: str, state: Any) -> State | None:
    """A state as the kernels take it, without the gradient that a `longspan.torch.TensorState` carries."""
    plain = state.detach() if hasattr(state, "detach") else state
    if plain is not None and not isinstance(plain, State):
        raise TypeError(f"{operation}: {name}: expected a longspan.State, got {type(state).__name__}")
    return plain


def flag(operation: str, name: str, value: Any) -> bool:
    """An argument that is true or false."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{operation}: {name}: expected bool, got {value!r}")
    return bool(value)


def without_token_axis(operation: str, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """One token ``[batch, heads, 1, features]`` as ``[batch, heads, features]``."""
    for argument, array in (("q", q), ("k", k), ("v", v)):
        shape = tuple(getattr(array, "shape", ()))
        if len(shape) != 4 or shape[2] != 1:
            raise ValueError(f"{operation}: {argument}: expected one token, shape (batch, heads, 1, features), "
                             f"got shape {shape}")  # fmt: skip
    return q[:, :, 0], k[:, :, 0], v[:, :, 0]
