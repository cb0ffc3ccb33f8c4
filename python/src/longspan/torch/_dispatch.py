"""The path of a call on torch tensors: straight to the kernels, through an operator, or through torch's own operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _calls
from .._calls import Request
from .._native import State
from . import _operators, _triton
from ._chunked import RECURRENCE, check_packed, check_shapes, in_torch
from ._operators import as_array
from ._profile import named
from ._states import TensorState

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, torch.float64, *_HALVES)


def attend(
    operation: str, mechanism: str, options: str, q: Any, k: Any, v: Any, parameters: tuple[Any, ...],
    is_causal: bool = False, offset: int = 0, key_padding_mask: Any = None, cu_seqlens: Any = None, initial_state: Any = None,
    output_final_state: bool = False, token_major: bool = False,
) -> Any:  # fmt: skip
    """Runs `mechanism` on tensors; what `longspan.ops` calls when it is given some.

    With ``token_major`` the output lies as ``[batch, token, head, feature]`` and is seen transposed.
    """
    tensors = (q, k, v, *parameters)
    if not torch.compiler.is_compiling():
        is_causal = _calls.flag(operation, "is_causal", is_causal)
        output_final_state = _calls.flag(operation, "output_final_state", output_final_state)
    with_state = initial_state is not None or output_final_state
    over = with_state and hasattr(initial_state, "attend")
    in_onnx = mechanism == "kernelized" and not with_state and RECURRENCE.get() is not None
    transformed = not over and (in_onnx or _transformed(tensors, initial_state))
    simple = not over and not transformed and _simple(tensors)
    if not simple:
        call = Request(mechanism, options, operation, is_causal, offset)
        if over:
            # Of the stretches that other processes hold: see `longspan.torch.distributed`.
            return initial_state.attend(call, tensors, key_padding_mask, cu_seqlens, output_final_state)
        if transformed and with_state:
            raise _states_in_transform(operation)
    if not simple or key_padding_mask is not None:
        check(operation, tensors, _calls.names(mechanism, options, parameters), key_padding_mask)
    if transformed:
        return in_torch(call, tensors, key_padding_mask, _calls.boundaries(operation, cu_seqlens))
    if not simple and _triton.serves(q):
        return _attend_by_triton(call, tensors, key_padding_mask, cu_seqlens, initial_state, output_final_state, with_state)
    if not simple and (not q.is_cpu or (not with_state and _watched(tensors))):
        return _attend_watched(call, tensors, key_padding_mask, cu_seqlens, with_state)
    if with_state and not simple and _autocast(q.device):
        # As the operator does, whatever else is asked for.
        tensors = tuple([tensor.float() if tensor.dtype in _HALVES else tensor for tensor in tensors])
        q, k, v, *_ = tensors
        parameters = tensors[3:]
    if with_state and (_unreal(tensors) or _learning(tensors, initial_state)):
        call = Request(mechanism, options, operation, is_causal, offset)
        return _attend_with_states(call, tensors, key_padding_mask, cu_seqlens, initial_state, output_final_state)
    if with_state:
        initial_state = _calls.plain_state(operation, "initial_state", initial_state)
    packed = None if cu_seqlens is None else _calls.boundaries(operation, cu_seqlens)
    if simple:
        arrays = [as_array(tensor) for tensor in tensors]
    else:
        arrays = as_arrays(operation, tensors, _calls.names(mechanism, options, parameters))
    parameters = tuple(arrays[3:])
    ignored = None if key_padding_mask is None else key_padding_mask.numpy()
    native = _calls.mechanism(mechanism, options, operation, parameters, q, offset)
    array, _, state = named(mechanism, "forward", native.forward)(
        arrays[0], arrays[1], arrays[2], parameters, is_causal, offset, ignored, packed,
        initial_state, output_final_state, False, token_major,
    )  # fmt: skip
    out = _operators.as_tensor(array)
    return (out, state) if output_final_state else out


def step(
    operation: str, mechanism: str, options: str, q: Any, k: Any, v: Any, parameters: tuple[Any, ...], state: Any
) -> Any:
    """One token of `mechanism` on tensors: ``(output, state)``, with gradients where one of them requires some."""
    if _transformed((q, k, v, *parameters), state):
        raise _states_in_transform(operation)
    with_token = q.ndim == 4
    if with_token:
        q, k, v = _calls.without_token_axis(operation, q, k, v)
    on_device = isinstance(q, Tensor) and _triton.serves(q)
    watched = _unreal((q, k, v, *parameters)) or on_device or _learning((q, k, v, *parameters), state)
    if watched and all(getattr(x, "ndim", 0) == 3 for x in (q, k, v)):
        out, state = attend(
            operation, mechanism, options, q[:, :, None], k[:, :, None], v[:, :, None], parameters, is_causal=True,
            initial_state=state, output_final_state=True,
        )  # fmt: skip
        return out if with_token else out[:, :, 0], state
    state = _calls.plain_state(operation, "state", state)
    names = _calls.names(mechanism, options, parameters)
    q, k, v, *rest = as_arrays(operation, (q, k, v, *parameters), names)
    parameters = tuple(rest)
    native = _calls.mechanism(mechanism, options, operation, parameters)
    out, state = named(mechanism, "step", native.step)(q, k, v, parameters, state)
    return _operators.as_tensor(out[:, :, None] if with_token else out), state


def step_together(
    operation: str, mechanism: str, options: str, together: Tensor, heads: tuple[int, int, int], widths: tuple[int, int, int],
    parameters: tuple[Tensor, ...], state: Any,
) -> tuple[Tensor, State] | None:  # fmt: skip
    """One token whose queries, keys and values lie side by side, cut apart as an array: cutting a tensor and handing over three
    takes several times as long as the kernel. ``None`` where the step has to be one of tensors."""
    if not (state is None or type(state) is State) or not _simple((together, *parameters)) or forward_ad._current_level >= 0:
        return None
    # Nobody else holds it, so nobody resizes its storage; `as_array` is for those of others.
    array = as_array(together) if together.dtype is torch.bfloat16 else together.numpy()
    start, token = 0, []
    for count, width in zip(heads, widths):
        token.append(array[:, start : start + width].reshape(len(array), count, width // count))
        start += width
    arrays = tuple([as_array(parameter) for parameter in parameters])
    native = _calls.mechanism(mechanism, options, operation, arrays)
    out, state = named(mechanism, "step", native.step)(token[0], token[1], token[2], arrays, state)
    return _operators.as_tensor(out.reshape(len(array), heads[0] * out.shape[2])), state


def _learning(tensors: Sequence[Tensor], initial_state: Any) -> bool:
    """Whether a gradient is to flow through this call."""
    if not torch.is_grad_enabled():
        return False
    state = isinstance(initial_state, TensorState) and initial_state.numbers.requires_grad
    return state or any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)


def _attend_with_states(
    call: Request, tensors: Sequence[Any], key_padding_mask: Any, cu_seqlens: Any, initial_state: Any, output_final_state: bool
) -> Any:
    if cu_seqlens is not None:
        raise ValueError(f"{call.operation}: cu_seqlens: expected None with a state, because each sequence has its own; give "
                         "each its own batch entry")  # fmt: skip
    if _unreal(tensors):
        return _attend_compiled(call, tensors, key_padding_mask, initial_state, output_final_state)
    if initial_state is not None and not isinstance(initial_state, TensorState):
        plain = _calls.plain_state(call.operation, "initial_state", initial_state)
        initial_state = None if plain is None else TensorState.of(plain)
    shape = None if initial_state is None else (initial_state.mechanism, initial_state.options, initial_state.parts)
    initial = None if initial_state is None else initial_state.numbers
    found: list[Any] = []
    if _autocast(tensors[0].device) and any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        # As the operator does.
        tensors = [tensor.float() for tensor in tensors]
    out, numbers = _operators.EagerWithStates.apply(key_padding_mask, call, shape, found, initial, *tensors)
    return (out, TensorState(found[0], found[1], found[2], numbers)) if output_final_state else out


def _attend_compiled(
    call: Request, tensors: Sequence[Any], key_padding_mask: Any, initial_state: Any, output_final_state: bool
) -> Any:
    if isinstance(initial_state, State) and not torch.compiler.is_compiling():
        initial_state = TensorState.of(initial_state)
    if initial_state is not None and not isinstance(initial_state, TensorState):
        raise TypeError(f"{call.operation}: state: expected a longspan.torch.TensorState in a compiled function, got another; give "
                        "TensorState.of(state)")  # fmt: skip
    q, k, v, *parameters = tensors
    # States have fixed sizes: a compiled function is one of these heads and widths.
    sizes = (int(q.shape[1]), int(k.shape[1]), int(q.shape[3]), int(v.shape[3]))
    shapes = tuple([tuple([int(n) for n in parameter.shape]) for parameter in parameters])
    held, state, parts = _state_shape(
        call.mechanism, call.options, call.operation, call.offset, int(q.shape[2]), shapes, sizes
    )
    if initial_state is not None:
        # What does not fit is refused by the kernel, as everywhere.
        held, state, parts = initial_state.mechanism, initial_state.options, initial_state.parts
    numbers = None if initial_state is None else initial_state.numbers
    out, _, numbers = _operators.attention_with_state(
        q, k, v, parameters, key_padding_mask, numbers, held, state, list(parts), *call
    )
    return (out, TensorState(held, state, parts, numbers)) if output_final_state else out


def _state_shape(
    mechanism: str, options: str, operation: str, offset: int, queries: int, shapes: tuple[tuple[int, ...], ...],
    sizes: tuple[int, int, int, int],
) -> tuple[str, str, tuple[int, ...]]:  # fmt: skip
    """Mechanism, options and parts of a call's states: what a compiler takes for a constant."""
    parameters = [np.broadcast_to(np.float32(0), shape) for shape in shapes]
    q = np.broadcast_to(np.float32(0), (1, sizes[0], queries, sizes[2]))
    native = _calls.mechanism(mechanism, options, operation, parameters, q, offset)
    state = native.empty_state((1, *sizes[:2], 1, 1, *sizes[2:]))
    return state.mechanism, state.options, tuple(state.parts)


# What `torch.compiler.assume_constant_result` does, which takes more than a second to import the compiler.
_state_shape._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _attend_watched(
    call: Request, tensors: Sequence[Any], key_padding_mask: Any, cu_seqlens: Any, with_state: bool
) -> Any:
    """A call that is to be differentiated, compiled, or computed on another device."""
    q, k, v, *parameters = tensors
    on_cpu = q.device.type == "cpu"
    if on_cpu and _traced(tensors):
        queries, keys = _operators.as_boundaries(call.operation, cu_seqlens)
        return _operators.attention(q, k, v, parameters, key_padding_mask, queries, keys, *call)[0]
    if not on_cpu and with_state:
        raise ValueError(f"{call.operation}: states: expected tensors on the cpu, got {q.device}; "
                         "move them there, or run the whole sequence at once")  # fmt: skip
    packed = None if cu_seqlens is None else _calls.boundaries(call.operation, cu_seqlens)
    if on_cpu:
        return _operators.Eager.apply(key_padding_mask, packed, call, *tensors)
    return in_torch(call, tensors, key_padding_mask, packed)


def _attend_by_triton(
    call: Request, tensors: Sequence[Any], key_padding_mask: Any, cu_seqlens: Any, initial_state: Any, output_final_state: bool,
    with_state: bool,
) -> Any:  # fmt: skip
    """A call on a device that Triton serves; in torch's own operations where its kernels do not do what is asked for."""
    q, k, v, *parameters = tensors
    if _autocast(q.device):
        # As torch's own attention there. Sums are float32 all the same.
        dtype = torch.get_autocast_dtype(q.device.type)
        tensors = q, k, v, *parameters = [x if x.dtype is torch.float64 else x.to(dtype) for x in tensors]
    check_shapes(call.mechanism, q, k, v, key_padding_mask)
    lacking = _triton.unsupported(call, tensors)
    packed = None if cu_seqlens is None else _calls.boundaries(call.operation, cu_seqlens)
    if packed is not None:
        if key_padding_mask is not None:
            raise ValueError(f"{call.operation}: cu_seqlens: expected None beside a key_padding_mask (packed sequences have no "
                             "padding), got both")  # fmt: skip
        check_packed(call.mechanism, packed, q, k)
    if with_state:
        if lacking is not None:
            raise ValueError(f"{call.operation}: states: expected tensors on the cpu for {lacking}, got {q.device}; "
                             "move them there, or run the whole sequence at once")  # fmt: skip
        return _states_by_triton(call, tensors, key_padding_mask, packed, initial_state, output_final_state)
    if lacking is not None:
        return in_torch(call, tensors, key_padding_mask, packed)
    if _traced(tensors):
        queries, keys = _operators.as_boundaries(call.operation, cu_seqlens)
        return _operators.attention(q, k, v, parameters, key_padding_mask, queries, keys, *call)[0]
    return _operators.Eager.apply(key_padding_mask, packed, call, *tensors)


def _states_by_triton(
    call: Request, tensors: Sequence[Any], key_padding_mask: Any, packed: Any, initial_state: Any, output_final_state: bool
) -> Any:
    q, k, v, *parameters = tensors
    if packed is not None or not call.is_causal or (initial_state is not None and call.offset < 0):
        raise ValueError(f"{call.operation}: states: expected a causal mask, an offset from 0 on and no packed sequences, got others; "
                         "give each sequence its own batch entry")  # fmt: skip
    sizes = (int(q.shape[1]), int(k.shape[1]), int(q.shape[3]), int(v.shape[3]))
    shape = _state_shape(call.mechanism, call.options, call.operation, call.offset, int(q.shape[2]), (), sizes)
    numbers = None
    if initial_state is not None:
        if not isinstance(initial_state, TensorState):
            plain = _calls.plain_state(call.operation, "initial_state", initial_state)
            assert plain is not None
            initial_state = TensorState.of(plain)
        given = (initial_state.mechanism, initial_state.options, tuple(initial_state.parts))
        if given != shape or tuple(initial_state.numbers.shape[:2]) != (q.shape[0], k.shape[1]):
            raise ValueError(f"{call.operation}: initial_state: expected a state of {shape[0]} with the call's options, batch "
                             f"{q.shape[0]}, key/value heads {k.shape[1]}, parts {shape[2]}, got one of {given[0]}, batch "
                             f"{initial_state.batch}, key/value heads {initial_state.kv_heads}, parts {given[2]}, or one that was "
                             "made with another feature map or decay")  # fmt: skip
        # From the CPU, too: the layout is the same.
        numbers = initial_state.numbers.to(device=q.device, dtype=torch.float32)
    if _traced(tensors):
        out, _, numbers = _operators.attention_with_state(
            q, k, v, parameters, key_padding_mask, numbers, shape[0], shape[1], list(shape[2]), *call
        )
    else:
        out, numbers = _operators.EagerWithStates.apply(key_padding_mask, call, shape, [], numbers, *tensors)
    return (out, TensorState(*shape, numbers)) if output_final_state else out


_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
# What torch's own fast paths ask; where a version of torch lacks them every call goes through the operator.
_interpreter = getattr(torch._C._functorch, "peek_interpreter_stack", None)
_dispatch_mode = getattr(torch.utils._python_dispatch, "_get_current_dispatch_mode", None)


def _states_in_transform(operation: str) -> RuntimeError:
    return RuntimeError(f"{operation}: states: expected a call outside of torch.func and forward-mode differentiation, got one "
                        "inside; run the whole sequence in one call")  # fmt: skip


def _transformed(tensors: Sequence[Any], state: Any = None) -> bool:
    """Whether torch.func or forward-mode differentiation has to see operations, which the kernels do not consist of."""
    if torch.compiler.is_compiling():
        return False
    if _interpreter is not None and _interpreter() is not None:
        return True
    if forward_ad._current_level < 0:
        return False
    seen = (*tensors, state.numbers) if isinstance(state, TensorState) else tensors
    return any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in seen)


def _traced(tensors: Sequence[Tensor]) -> bool:
    """Whether a compiler, a transform, autocast or a tensor subclass has to see an operator."""
    return _intercepted(tensors[0].device.type) or any(type(t) not in _PLAIN_TYPES for t in tensors)


def _intercepted(device: str = "cpu") -> bool:
    # Elsewhere what autocast asks for has been done before.
    if torch.compiler.is_compiling() or (device == "cpu" and torch.is_autocast_enabled("cpu")) or _interpreter is None:
        return True
    return _interpreter() is not None or _dispatch_mode is None or _dispatch_mode() is not None


def _unreal(tensors: Sequence[Any]) -> bool:
    """Whether there may be no numbers to compute with: a compiler, or fake tensors."""
    if torch.compiler.is_compiling() or (_dispatch_mode is not None and _dispatch_mode() is not None):
        return True
    return any(type(tensor) not in _PLAIN_TYPES and _dispatches(type(tensor)) for tensor in tensors)


def _dispatches(kind: type) -> bool:
    own = getattr(kind, "__torch_dispatch__", None)
    return issubclass(kind, Tensor) and own is not Tensor.__torch_dispatch__


def _watched(tensors: Sequence[Tensor]) -> bool:
    """Whether autograd, a compiler or a transform has to see the call."""
    return (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)) or _traced(tensors)


def _simple(tensors: Sequence[Any]) -> bool:
    """Whether these are plain CPU tensors of one type that no autograd and no transform has to see: the fast path."""
    if _intercepted():
        return False
    grad = torch.is_grad_enabled()
    dtype = getattr(tensors[0], "dtype", None)
    if dtype not in _FLOATS:
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN_TYPES or tensor.dtype is not dtype or not tensor.is_cpu:
            return False
        if tensor.layout is not torch.strided or (grad and tensor.requires_grad):
            return False
    return True


def _autocast(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def check(operation: str, tensors: Sequence[Any], names: Sequence[str], key_padding_mask: Any) -> None:
    """Checks kinds, dtypes and devices; the kernels check shapes."""
    q = tensors[0]
    for name, tensor in zip(names, tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{operation}: {name}: expected a torch.Tensor like q, got {type(tensor).__name__}")
        if tensor.device != q.device:
            raise ValueError(f"{operation}: {name}: expected a tensor on {q.device} like q, got {tensor.device}")
        if tensor.dtype not in _FLOATS:
            raise TypeError(f"{operation}: {name}: expected float32, float64, float16 or bfloat16, got {tensor.dtype}")
        # Positions may be finer than half precision.
        fine = q.dtype in _HALVES and tensor.dtype is torch.float32 and name.endswith("_positions")
        if tensor.dtype != q.dtype and not fine and not _autocast(q.device):
            raise TypeError(f"{operation}: {name}: expected {q.dtype} like q, got {tensor.dtype}")
        if tensor.layout != torch.strided:
            raise TypeError(f"{operation}: {name}: expected a dense tensor, got {tensor.layout}")
    if key_padding_mask is not None:
        if not isinstance(key_padding_mask, Tensor) or key_padding_mask.dtype != torch.bool:
            got = getattr(key_padding_mask, "dtype", type(key_padding_mask).__name__)
            raise TypeError(f"{operation}: key_padding_mask: expected a torch.Tensor of bool, True where a key is "
                            f"ignored, got {got}")  # fmt: skip
        if key_padding_mask.device != q.device:
            raise ValueError(f"{operation}: key_padding_mask: expected a tensor on {q.device} like q, "
                             f"got {key_padding_mask.device}")  # fmt: skip


def as_arrays(operation: str, tensors: Sequence[Any], names: Sequence[str]) -> list[np.ndarray[Any, Any]]:
    """CPU tensors of one type as arrays on the same memory; as float32 where autocast mixes types."""
    q = tensors[0]
    for name, tensor in zip(names, tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{operation}: {name}: expected a torch.Tensor like q, got {type(tensor).__name__}")
        if not tensor.is_cpu:
            raise ValueError(f"{operation}: {name}: expected a tensor on the cpu, got {tensor.device}")
    if _autocast(q.device):
        # As the operator does.
        tensors = [tensor.float() if tensor.dtype in _HALVES else tensor for tensor in tensors]
    return [as_array(tensor) for tensor in tensors]
