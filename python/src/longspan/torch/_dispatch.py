"""The path of a call on torch tensors: straight to the kernels, through an operator, or through torch's own operations."""

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from enum import Enum
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _calls
from .._calls import Request
from .._native import State
from . import _operators, _triton
from ._chunked import check_packed, check_shapes, in_torch, in_torch_with_states, of_every_head, recurrence
from ._chunked.call import autocasts
from ._chunked.call import interpreter as _interpreter
from ._operators import as_array, named
from ._states import TensorState

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, torch.float64, *_HALVES)
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
# What torch's own fast paths ask; where a version of torch lacks them every call goes through the operator.
_dispatch_mode = getattr(torch.utils._python_dispatch, "_get_current_dispatch_mode", None)
# Its types do not name it.
_is_tracing: Callable[[], bool] = getattr(torch.jit, "is_tracing")


#: Told by which back end each call runs, while `longspan.check` does.
LISTENER: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


class Route(Enum):
    """Where a call goes."""

    #: To the kernels, and nobody else sees it.
    KERNELS = 0
    #: To the kernels, as a function of torch's autograd.
    AUTOGRAD = 1
    #: To the kernels, as an operator that compilers, modes and classes of tensors see.
    OPERATOR = 2
    #: Through torch's own operations, which any device has and torch.func differentiates.
    TORCH = 3


def route(call: Request, tensors: Sequence[Tensor], state: Any, with_state: bool) -> Route:
    """Where a call goes: the one place that decides it."""
    compiling, q = torch.compiler.is_compiling(), tensors[0]
    in_onnx = call.mechanism == "kernelized" and not with_state and recurrence() is not None
    if in_onnx or (not compiling and _transformed(tensors, state)):
        return Route.TORCH
    on_device = _triton.serves(q)
    if _triton.unsupported(call, tensors) is not None if on_device else not q.is_cpu:
        return Route.TORCH
    if compiling or _interpreter is None or _dispatch_mode is None or _dispatch_mode() is not None or _is_tracing():
        return Route.OPERATOR
    grad = torch.is_grad_enabled()
    learns = on_device or (grad and isinstance(state, TensorState) and state.numbers.requires_grad)
    for tensor in tensors:
        kind = type(tensor)
        # A state of tensors of a class that only says how they look is plain.
        if kind not in _PLAIN_TYPES and (not with_state or _dispatches(kind)):
            return Route.OPERATOR
        learns = learns or (grad and tensor.requires_grad)
    return Route.AUTOGRAD if learns else Route.KERNELS


def _back_end(where: Route, call: Request, tensors: Sequence[Tensor]) -> str:
    """Of a call, in words."""
    on_device = _triton.serves(tensors[0])
    if where is not Route.TORCH:
        return "Triton" if on_device else "the CPU's kernels"
    lacking = _triton.unsupported(call, tensors) if on_device else None
    return "torch's operations" + (f", as Triton lacks {lacking}" if lacking else "")


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
    call = Request(mechanism, options, operation, is_causal, offset)
    if with_state and hasattr(initial_state, "attend"):
        # Of the stretches that other processes hold: see `longspan.torch.distributed`.
        return initial_state.attend(call, tensors, key_padding_mask, cu_seqlens, output_final_state)
    check(call, tensors, key_padding_mask)
    tensors = _as_autocast_wants(tensors)
    where = route(call, tensors, initial_state, with_state)
    if where is not Route.KERNELS and not torch.compiler.is_compiling() and (listener := LISTENER.get()) is not None:
        listener(_back_end(where, call, tensors))
    if where is Route.TORCH or (where is not Route.KERNELS and _triton.serves(tensors[0])):
        q, k = of_every_head(mechanism, *tensors[:3])
        v = tensors[2]
        tensors = (q, k, *tensors[2:])
        check_shapes(call, q, k, v, key_padding_mask)
        if cu_seqlens is not None:
            check_packed(operation, _calls.boundaries(operation, cu_seqlens), q, k, key_padding_mask)
    if with_state and where is not Route.KERNELS:
        return _attend_with_states(where, call, tensors, key_padding_mask, cu_seqlens, initial_state, output_final_state)
    if where is Route.OPERATOR:
        queries, keys = _operators.as_boundaries(operation, cu_seqlens)
        return _operators.attention(*tensors[:3], tensors[3:], key_padding_mask, queries, keys, None, "", "", None, *call)[0]
    packed = None if cu_seqlens is None else _calls.boundaries(operation, cu_seqlens)
    if where is Route.TORCH:
        return in_torch(call, tensors, key_padding_mask, packed)
    if where is Route.AUTOGRAD:
        return _operators.Eager.apply(key_padding_mask, packed, call, None, None, *tensors)
    if initial_state is not None:
        initial_state = _calls.plain_state(operation, "initial_state", initial_state)
    out, _, state = _operators.forward(
        tensors, key_padding_mask, packed, call, initial_state, output_final_state, False, token_major
    )
    return (out, state) if output_final_state else out


def step(
    operation: str, mechanism: str, options: str, q: Any, k: Any, v: Any, parameters: tuple[Any, ...], state: Any
) -> Any:
    """One token of `mechanism` on tensors: ``(output, state)``, with gradients where one of them requires some."""
    call = Request(mechanism, options, operation, True, 0)
    with_token = q.ndim == 4
    if with_token:
        q, k, v = _calls.without_token_axis(operation, q, k, v)
    check(call, (q, k, v, *parameters), None)
    tensors = _as_autocast_wants((q, k, v, *parameters))
    where = route(call, tensors, state, True)
    if where is not Route.KERNELS and (not q.is_cpu or all(x.ndim == 3 for x in (q, k, v))):
        out, state = attend(
            operation, mechanism, options, q[:, :, None], k[:, :, None], v[:, :, None], parameters, is_causal=True,
            initial_state=state, output_final_state=True,
        )  # fmt: skip
        return out if with_token else out[:, :, 0], state
    state = _calls.plain_state(operation, "state", state)
    arrays = [as_array(tensor) for tensor in tensors]
    parameters = tuple(arrays[3:])
    native = _calls.mechanism(mechanism, options, operation, parameters)
    out, state = named(mechanism, "step", native.step)(arrays[0], arrays[1], arrays[2], parameters, state)
    return _operators.as_tensor(out[:, :, None] if with_token else out), state


def _attend_with_states(
    where: Route, call: Request, tensors: Sequence[Any], key_padding_mask: Any, cu_seqlens: Any, initial_state: Any,
    output_final_state: bool,
) -> Any:  # fmt: skip
    """A call whose states' numbers are tensors like all others."""
    if cu_seqlens is not None:
        raise ValueError(f"{call.operation}: cu_seqlens: expected None with a state, because each sequence has its own; give "
                         "each its own batch entry")  # fmt: skip
    q, k, v, *parameters = tensors
    initial_state = None if initial_state is None else as_tensors(call.operation, initial_state)
    if where is Route.TORCH or _triton.serves(q):
        shape, numbers = _on_a_device(call, tensors, initial_state)
    elif initial_state is None:
        shape, numbers = shape_of_states(call, tensors), None
    else:
        # What does not fit is refused by the kernel, as everywhere.
        shape = (initial_state.mechanism, initial_state.options, tuple(initial_state.parts))
        numbers = initial_state.numbers
    if where is Route.TORCH:
        out, numbers = in_torch_with_states(call, tensors, key_padding_mask, shape[2], numbers)
    elif where is Route.OPERATOR:
        held, options, parts = shape
        out, _, numbers = _operators.attention(
            q, k, v, parameters, key_padding_mask, None, None, numbers, held, options, list(parts), *call
        )  # fmt: skip
    else:
        out, numbers = _operators.Eager.apply(key_padding_mask, None, call, shape, numbers, *tensors)
    return (out, TensorState(*shape, numbers)) if output_final_state else out


def as_tensors(operation: str, state: Any) -> TensorState:
    if isinstance(state, TensorState):
        return state
    if torch.compiler.is_compiling():
        raise TypeError(f"{operation}: state: expected a longspan.torch.TensorState in a compiled function, got another; give "
                        "TensorState.of(state)")  # fmt: skip
    plain = _calls.plain_state(operation, "initial_state", state)
    assert plain is not None
    return TensorState.of(plain)


def _on_a_device(
    call: Request, tensors: Sequence[Any], initial_state: TensorState | None
) -> tuple[_operators.Shape, Tensor | None]:
    """What a call's states are like, and the numbers of the initial one, where no kernel of the CPU's checks it."""
    q, k = tensors[:2]
    # A short convolution looks back under every mask.
    causal = call.is_causal or call.mechanism == "short-convolution"
    if not causal or (initial_state is not None and call.offset < 0):
        raise ValueError(f"{call.operation}: states: expected a causal mask and an offset from 0 on, got others")
    shape = shape_of_states(call, tensors)
    if initial_state is None:
        return shape, None
    return shape, initial_numbers(call.operation, shape, (q, k), initial_state)


def initial_numbers(operation: str, shape: _operators.Shape, tensors: Sequence[Any], state: State | TensorState) -> Tensor:
    """The numbers of the initial state of a call with these queries and keys, which has to be of this shape."""
    (q, k), initial = tensors, as_tensors(operation, state)
    given = (initial.mechanism, initial.options, tuple(initial.parts))
    # Torch 2.11 can't trace a comparison of tuples that hold one.
    same = all([a == b for a, b in zip(given, shape)])
    if not same or tuple(initial.numbers.shape[:2]) != (q.shape[0], k.shape[1]):
        raise ValueError(f"{operation}: initial_state: expected a state of {shape[0]} with the call's options, batch "
                         f"{q.shape[0]}, key/value heads {k.shape[1]}, parts {shape[2]}, got one of {given[0]}, batch "
                         f"{initial.batch}, key/value heads {initial.kv_heads}, parts {given[2]}, or one that was "
                         "made with other options: another feature map, decay or table of positions")  # fmt: skip
    # From the CPU, too: the layout is the same.
    return initial.numbers.to(device=q.device, dtype=torch.promote_types(torch.float32, q.dtype))


@functools.lru_cache(maxsize=1024)
def _cached_shape(
    mechanism: str, options: str, operation: str, shaped: tuple[tuple[str, Any], ...], sizes: tuple[int, int, int, int]
) -> tuple[str, str, tuple[int, ...]]:
    state = _calls.cached(mechanism, options, operation, shaped).empty_state((1, *sizes[:2], 1, 1, *sizes[2:]))
    return state.mechanism, state.options, tuple(state.parts)


def _state_shape(*call: Any) -> tuple[str, str, tuple[int, ...]]:
    # What a compiler takes for a constant; it traces no cache.
    return _cached_shape(*call)


# What `torch.compiler.assume_constant_result` does, which takes more than a second to import the compiler.
_state_shape._dynamo_marked_constant = True  # type: ignore[attr-defined]


def shape_of_states(call: Request, tensors: Sequence[Any]) -> tuple[str, str, tuple[int, ...]]:
    """Mechanism, options and parts of a call's states."""
    q, k, v, *parameters = tensors
    # States have fixed sizes: a compiled function is one of these heads and widths, even if they are symbols there, and of any number of
    # tokens.
    sharing = _operators.sharing(k, v)
    sizes = tuple([index(size) for size in (q.shape[1] * sharing, k.shape[1] * sharing, q.shape[3], v.shape[3])])
    shaped = tuple([(name, _fixed(value)) for name, value in _calls.shaped(call.mechanism, parameters)])
    return _state_shape(call.mechanism, call.options, call.operation, shaped, sizes)


def _fixed(size: Any) -> Any:
    if isinstance(size, tuple):
        return tuple([index(one) for one in size])
    return size if size is None or isinstance(size, bool) else index(size)


def _transformed(tensors: Sequence[Tensor], state: Any = None) -> bool:
    """Whether torch.func or forward-mode differentiation has to see operations, which the kernels do not consist of."""
    if _interpreter is not None and _interpreter() is not None:
        return True
    # A torch that lacks it may be inside of a level.
    if getattr(forward_ad, "_current_level", 0) < 0:
        return False
    seen = (*tensors, state.numbers) if isinstance(state, TensorState) else tensors
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in seen)


def _dispatches(kind: type) -> bool:
    own = getattr(kind, "__torch_dispatch__", None)
    return issubclass(kind, Tensor) and own is not Tensor.__torch_dispatch__


def _autocast(device: torch.device) -> bool:
    return autocasts(device.type) and torch.is_autocast_enabled(device.type)


def _as_autocast_wants(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Under autocast kernels compute in float32, as norms and softmax do. Triton's take queries, keys and values in its type, as torch's own
    attention, and what is learned or brought beside them as it is: frequencies of 8 bits are others far from the first token. Sums are float32."""
    if tensors[0].is_cpu and not torch.is_autocast_enabled("cpu"):
        return tensors
    device = tensors[0].device
    if not _autocast(device):
        return tensors
    if _triton.serves(tensors[0]) and device.type != "cpu":
        dtype = torch.get_autocast_dtype(device.type)
        return (*(tensor if tensor.dtype is torch.float64 else tensor.to(dtype) for tensor in tensors[:3]), *tensors[3:])
    if device.type == "cpu":
        return tuple([tensor.float() if tensor.dtype in _HALVES else tensor for tensor in tensors])
    return tensors


def _where(call: Request, tensors: Sequence[Any], place: int) -> str:
    """The call and the name of a tensor in it, for errors: those of parameters are asked of the compiled mechanism."""
    name = _calls.names(call.mechanism, call.options, tensors[3:])[place] if place > 2 else "qkv"[place]
    return f"{call.operation}: {name}"


def check(call: Request, tensors: Sequence[Any], key_padding_mask: Any) -> None:
    """Checks kinds, dtypes and devices; the kernels check shapes."""
    q, operation = tensors[0], call.operation
    dtype = getattr(q, "dtype", None)
    for place, tensor in enumerate(tensors):
        # What most are, in as few questions as it takes.
        if type(tensor) in _PLAIN_TYPES and tensor.is_cpu and tensor.dtype is dtype and dtype in _FLOATS and q.is_cpu:
            if tensor.layout is torch.strided and not tensor.is_nested:
                continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{_where(call, tensors, place)}: expected a torch.Tensor like q, got {type(tensor).__name__}")
        if tensor.device != q.device:
            raise ValueError(f"{_where(call, tensors, place)}: expected a tensor on {q.device} like q, got {tensor.device}")
        if tensor.dtype not in _FLOATS:
            raise TypeError(f"{_where(call, tensors, place)}: expected float32, float64, float16 or bfloat16, got {tensor.dtype}")
        if tensor.dtype != q.dtype and not _autocast(q.device):
            where = _where(call, tensors, place)
            # Positions may be finer than half precision.
            if not (q.dtype in _HALVES and tensor.dtype is torch.float32 and where.endswith("_positions")):
                raise TypeError(f"{where}: expected {q.dtype} like q, got {tensor.dtype}")
        if tensor.layout != torch.strided or tensor.is_nested:
            got = "a nested one" if tensor.is_nested else tensor.layout
            raise TypeError(f"{_where(call, tensors, place)}: expected a dense tensor, got {got}")
    if key_padding_mask is not None:
        if not isinstance(key_padding_mask, Tensor) or key_padding_mask.dtype != torch.bool:
            got = getattr(key_padding_mask, "dtype", type(key_padding_mask).__name__)
            raise TypeError(f"{operation}: key_padding_mask: expected a torch.Tensor of bool, True where a key is "
                            f"ignored, got {got}")  # fmt: skip
        if key_padding_mask.device != q.device:
            raise ValueError(f"{operation}: key_padding_mask: expected a tensor on {q.device} like q, "
                             f"got {key_padding_mask.device}")  # fmt: skip
