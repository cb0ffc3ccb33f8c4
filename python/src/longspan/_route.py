"""Whether a call goes to the kernels on NumPy arrays, from here, or on tensors, by `longspan.torch`."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _calls, _native


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _in_torch() -> Any:
    """`longspan.torch`'s side of a call, imported when the first tensor comes."""
    from .torch import _dispatch

    return _dispatch


_NATIVE_DTYPES = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16))


def _numpy_arrays(
    operation: str, name: str, options: str, q: Any, k: Any, v: Any, parameters: tuple[Any, ...]
) -> tuple[Any, Any, Any, tuple[Any, ...], Any]:
    """NumPy arrays as the kernels take them, and the bfloat16 of another package that they came in, if any."""
    arrays = (q, k, v, *parameters)
    # Names take as long as all else here, and few calls need them.
    if all([type(array) is np.ndarray for array in arrays]) and q.dtype in _NATIVE_DTYPES:
        return q, k, v, parameters, None
    (q, k, v, *rest), other = _as_two_bytes(operation, arrays, _calls.names(name, options, parameters))
    return q, k, v, tuple(rest), other


def _as_two_bytes(operation: str, arrays: Sequence[Any], names: Sequence[str]) -> tuple[list[Any], Any]:
    """NumPy arrays in a type that the kernels take, and the bfloat16 of another package that they came in, if any."""
    first = arrays[0]
    for name, array in zip(names, arrays):
        _expect_unmasked(operation, name, array)
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{operation}: {name}: expected a numpy.ndarray or a torch.Tensor, all of one kind, "
                            f"got {type(array).__module__}.{type(array).__qualname__}")  # fmt: skip
        if array.dtype == _calls.BFLOAT16:
            raise TypeError(f"{operation}: {name}: expected float32, float64, float16 or bfloat16, got {array.dtype}")
    if first.dtype.name != "bfloat16":
        return list(arrays), None
    finer = [name.endswith("_positions") and array.dtype == np.float32 for name, array in zip(names, arrays)]
    for name, array, fine in zip(names, arrays, finer):
        if array.dtype != first.dtype and not fine:
            raise TypeError(f"{operation}: {name}: expected {first.dtype} like q, got {array.dtype}")
    return [array if fine else array.view(_calls.BFLOAT16) for array, fine in zip(arrays, finer)], first.dtype


def _expect_unmasked(operation: str, name: str, array: Any) -> None:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{operation}: {name}: expected a numpy.ndarray, got a masked array, whose mask would be lost; fill it")


def combine(
    operation: str, native: _native.Mechanism, options: str, earlier: Any, later: Any, parameters: Sequence[Any]
) -> Any:
    """The sum of two states; with a gradient where one of them carries one, or the parameters that add them up."""
    for name, state in (("earlier", earlier), ("later", later)):
        if not hasattr(state, "kv_heads"):
            raise TypeError(f"{operation}: {name}: expected a longspan.State, got {type(state).__name__}")
    carried = any(hasattr(state, "requires_gradient") for state in (earlier, later))
    # Fourier's are the only ones that have a part in a sum.
    if not carried and earlier.mechanism == "fourier" and any(getattr(one, "requires_grad", False) for one in parameters):
        carried = sys.modules["torch"].is_grad_enabled()
    if carried:
        from .torch._combine import combine as combine_tensors

        return combine_tensors(operation, native, options, earlier, later, parameters)
    return native.combine(earlier, later, tuple([_in_torch().as_array(one) if is_tensor(one) else one for one in parameters]))


def attend(
    operation: str, name: str, options: str, q: Any, k: Any, v: Any, parameters: tuple[Any, ...], is_causal: Any, offset: Any,
    key_padding_mask: Any, cu_seqlens: Any, initial_state: Any, output_final_state: Any,
) -> Any:  # fmt: skip
    """A whole call of `longspan.ops`: the output, or ``(output, state)``."""
    if is_tensor(q):
        return _in_torch().attend(
            operation, name, options, q, k, v, parameters,
            is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
        )  # fmt: skip
    q, k, v, parameters, other = _numpy_arrays(operation, name, options, q, k, v, parameters)
    is_causal = _calls.flag(operation, "is_causal", is_causal)
    output_final_state = _calls.flag(operation, "output_final_state", output_final_state)
    if initial_state is not None:
        initial_state = _calls.plain_state(operation, "initial_state", initial_state)
    if key_padding_mask is not None:
        _expect_unmasked(operation, "key_padding_mask", key_padding_mask)
    packed = None if cu_seqlens is None else _calls.boundaries(operation, cu_seqlens)
    out, _, state = _calls.mechanism(name, options, operation, parameters, q, offset).forward(
        (q, k, v, parameters, is_causal, offset, key_padding_mask, packed), initial_state, output_final_state
    )
    if other is not None:
        out = out.view(other)
    return (out, state) if output_final_state else out


def step(
    operation: str, name: str, options: str, q: Any, k: Any, v: Any, parameters: tuple[Any, ...], state: Any
) -> Any:
    """One token: ``(output, state)``."""
    if is_tensor(q):
        return _in_torch().step(operation, name, options, q, k, v, parameters, state)
    state = _calls.plain_state(operation, "state", state)
    q, k, v, parameters, other = _numpy_arrays(operation, name, options, q, k, v, parameters)
    with_token = q.ndim == 4
    if with_token:
        q, k, v = _calls.without_token_axis(operation, q, k, v)
    out, state = _calls.mechanism(name, options, operation, parameters).step(q, k, v, parameters, state)
    if with_token:
        out = out[:, :, None]
    return (out if other is None else out.view(other)), state
