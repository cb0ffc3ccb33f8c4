"""Arguments on their way to the kernels, and results on their way back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import _native, _options
from ._native import State


def first_distance(q: Any, offset: Any) -> int | None:
    """Distance of a Toeplitz table's first entry; what is no call is refused later, by name."""
    return 1 - q.shape[2] - offset if len(getattr(q, "shape", ())) == 4 and isinstance(offset, int) else None


#: What a mechanism learns from the shapes of its parameters. Not among the options that an operator is given: under
#: torch.compile a size may be a symbol, which no text can hold.
_SHAPED: dict[str, Callable[..., dict[str, Any]]] = {
    "shaw": lambda q, offset, rel, *_: {"radius": rel.shape[-2] // 2, "shared": rel.ndim == 2},
    "toeplitz": lambda q, offset, bias, *_: {"first": first_distance(q, offset), "shape": tuple(bias.shape[1:])},
    "aft-full": lambda q, offset, w, z=None: {"length": w.shape[0], "rank": None if z is None else w.shape[1]},
    "aft-local": lambda q, offset, w: {"window": (w.shape[-1] + 1) // 2, "length": w.shape[0]},
    "aft-conv": lambda q, offset, w, *_: {"taps": w.shape[-1], "tap_rows": w.shape[1] if w.ndim == 3 else None},
}


def mechanism(
    name: str, options: str, operation: str, parameters: Sequence[Any], q: Any = None, offset: int = 0
) -> _native.Mechanism:
    """The compiled mechanism for a call with these parameters."""
    if name in _SHAPED:
        shaped = _SHAPED[name](q, offset, *parameters)
        return cached(name, options, operation, tuple(shaped.items()))
    return cached(name, options, operation)


@functools.lru_cache(maxsize=1024)
def cached(name: str, options: str, operation: str, shaped: tuple[tuple[str, Any], ...] = ()) -> _native.Mechanism:
    if shaped:
        both = (options.strip()[1:-1], _options.as_object(**dict(shaped))[1:-1])
        options = "{" + ", ".join([part for part in both if part.strip()]) + "}"
    return _native.Mechanism(name, options, operation)


@functools.lru_cache(maxsize=256)
def features(feature_map: str, head_dim: int) -> int:
    """Features that a map makes of rows of ``head_dim`` numbers: as many as Fourier positions have angles."""
    native = cached("fourier", _options.as_object(feature_map=feature_map), "feature_map")
    ((_, shape), *_) = native.parameter_shapes(1, 1, 1, 1, 1, head_dim, head_dim)
    return shape[1]


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


@functools.cache
def _in_torch() -> Any:
    """What is done with tensors. Kept, because an import statement takes its time even where nothing is imported."""
    from .torch import _dispatch

    return _dispatch


def boundaries(operation: str, cu_seqlens: Any) -> tuple[list[int], list[int]] | None:
    """Boundaries of packed sequences on the query and the key axis."""
    if cu_seqlens is None:
        return None
    pair = isinstance(cu_seqlens, tuple) and len(cu_seqlens) == 2 and all(hasattr(c, "__len__") for c in cu_seqlens)
    lists: list[list[int]] = []
    for bounds in cu_seqlens if pair else (cu_seqlens,):
        try:
            numbers = bounds.tolist() if hasattr(bounds, "tolist") else list(bounds)
        except TypeError:
            numbers = [None]
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            raise TypeError(f"{operation}: cu_seqlens: expected integers, or a pair of such lists, got {cu_seqlens!r}")
        if any(number < 0 for number in numbers):
            raise ValueError(f"{operation}: cu_seqlens: expected numbers from 0 on, got {numbers}")
        lists.append(numbers)
    return lists[0], lists[-1]


_NATIVE_DTYPES = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16))

#: What the compiled half takes for bfloat16, a type that NumPy itself has not: two bytes.
BFLOAT16 = np.dtype("V2")


def _numpy_arrays(
    operation: str, name: str, q: Any, k: Any, v: Any, parameters: tuple[Any, ...]
) -> tuple[Any, Any, Any, tuple[Any, ...], Any]:
    """NumPy arrays as the kernels take them, and the bfloat16 of another package that they came in, if any."""
    if type(q) is np.ndarray and q.dtype in _NATIVE_DTYPES:
        return q, k, v, parameters, None
    (q, k, v, *rest), other = _as_two_bytes(operation, (q, k, v, *parameters), names(name, parameters))
    return q, k, v, tuple(rest), other


def _as_two_bytes(operation: str, arrays: Sequence[Any], names: Sequence[str]) -> tuple[list[Any], Any]:
    """NumPy arrays in a type that the kernels take, and the bfloat16 of another package that they came in, if any."""
    first = arrays[0]
    for name, array in zip(names, arrays):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{operation}: {name}: expected a numpy.ndarray or a torch.Tensor, all of one kind, "
                            f"got {type(array).__module__}.{type(array).__qualname__}")  # fmt: skip
        if array.dtype == BFLOAT16:
            raise TypeError(f"{operation}: {name}: expected float32, float64, float16 or bfloat16, got {array.dtype}")
    if first.dtype.name != "bfloat16":
        return list(arrays), None
    for name, array in zip(names, arrays):
        if array.dtype != first.dtype:
            raise TypeError(f"{operation}: {name}: expected {first.dtype} like q, got {array.dtype}")
    return [array.view(BFLOAT16) for array in arrays], first.dtype


_PARAMETERS = {"shaw": ("rel",), "toeplitz": ("bias",), "aft-local": ("w",), "aft-conv": ("w", "gamma", "beta")}


def names(mechanism: str, parameters: Sequence[Any]) -> list[str]:
    """Names of a call's arrays. More names than arrays do no harm: zip stops at the shorter."""
    if mechanism == "fourier":
        return ["q", "k", "v", "a", "b", *(["c, beta, positions or maps"] * len(parameters))]
    if mechanism == "aft-full":
        return ["q", "k", "v", *(["w"] if len(parameters) == 1 else ["u", "z"])]
    return ["q", "k", "v", *_PARAMETERS.get(mechanism, ()), "maps", "maps"]


def plain_arrays(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Arrays, or tensors on the CPU, as arrays."""
    if not any(is_tensor(array) for array in arrays):
        return tuple(arrays)
    from .torch import _operators

    return tuple([_operators.as_array(array) if is_tensor(array) else array for array in arrays])


def plain_state(operation: str, name: str, state: Any) -> State | None:
    """A state as the kernels take it, without what torch knows of its gradient."""
    if state is None or isinstance(state, State):
        return state
    states = sys.modules.get("longspan.torch._states")
    if states is not None and isinstance(state, states.TensorState):
        plain: State = state.detach()
        return plain
    raise TypeError(f"{operation}: {name}: expected a longspan.State, got {type(state).__name__}")


def attend(
    operation: str,
    name: str,
    options: str,
    q: Any,
    k: Any,
    v: Any,
    parameters: tuple[Any, ...],
    is_causal: Any,
    offset: Any,
    key_padding_mask: Any,
    cu_seqlens: Any,
    initial_state: Any,
    output_final_state: Any,
) -> Any:
    """A whole call of `longspan.ops`: the output, or ``(output, state)``."""
    if is_tensor(q):
        from .torch import _dispatch

        return _dispatch.attend(
            operation, name, options, q, k, v, parameters,
            is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
        )  # fmt: skip
    q, k, v, parameters, other = _numpy_arrays(operation, name, q, k, v, parameters)
    if initial_state is not None:
        initial_state = plain_state(operation, "initial_state", initial_state)
    packed = None if cu_seqlens is None else boundaries(operation, cu_seqlens)
    out, _, state = mechanism(name, options, operation, parameters, q, offset).forward(
        q, k, v, parameters, is_causal, offset, key_padding_mask, packed, initial_state, output_final_state
    )
    if other is not None:
        out = out.view(other)
    return (out, state) if output_final_state else out


def step(
    operation: str, name: str, options: str, q: Any, k: Any, v: Any, parameters: tuple[Any, ...], state: Any
) -> Any:
    """One token: ``(output, state)``."""
    state = plain_state(operation, "state", state)
    torch = _in_torch() if is_tensor(q) else None
    other = None
    if torch is not None:
        q, k, v, *rest = torch.as_arrays(operation, (q, k, v, *parameters), names(name, parameters))
        parameters = tuple(rest)
    else:
        q, k, v, parameters, other = _numpy_arrays(operation, name, q, k, v, parameters)
    with_token = q.ndim == 4
    if with_token:
        for argument, array in (("q", q), ("k", k), ("v", v)):
            if array.ndim != 4 or array.shape[2] != 1:
                raise ValueError(f"{operation}: {argument}: expected one token, shape (batch, heads, 1, features), "
                                 f"got shape {array.shape}")  # fmt: skip
        q, k, v = q[:, :, 0], k[:, :, 0], v[:, :, 0]
    out, state = mechanism(name, options, operation, parameters).step(q, k, v, parameters, state)
    if with_token:
        out = out[:, :, None]
    if torch is not None:
        return torch._operators.as_tensor(out), state
    return (out if other is None else out.view(other)), state
