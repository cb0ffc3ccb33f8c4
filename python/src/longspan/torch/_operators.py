"""The kernels as torch operators: with shapes for the compiler, gradients, and autocast to float32.

One operator serves every mechanism: its name and its options (JSON) are text, its parameters a list of tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from .. import _calls, _native
from .._calls import Request
from .._native import State
from . import _triton
from ._chunked import in_torch, in_torch_with_states
from ._states import TensorState

#: Mechanism, options and parts of a state.
Shape = tuple[str, str, tuple[int, ...]]
#: Boundaries of packed sequences on the query and the key axis.
Packed = Optional[tuple[list[int], list[int]]]

_HALF = (torch.float16, torch.bfloat16)


_profiling = getattr(torch.autograd, "_profiler_enabled", lambda: False)


def named(mechanism: str, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, with a name for it where a profiler is at work."""
    if not _profiling():
        return call

    def recorded(*arguments: Any, **options: Any) -> Any:
        with torch.profiler.record_function(f"longspan::{mechanism} {part}"):
            return call(*arguments, **options)

    return recorded


class _Exported:
    """A tensor for `numpy.from_dlpack`. `Tensor.numpy` would make its storage one that can never be resized, and FSDP frees and
    restores those of parameters by that."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return to_dlpack(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor on the CPU as an array on the same memory, to be read."""
    if tensor.is_neg():
        # A view that stands for its negative, as the imaginary part of a conjugate does.
        tensor = tensor.resolve_neg()
    if tensor.dtype is torch.bfloat16:
        return as_array(tensor.detach().view(torch.int16)).view(_calls.BFLOAT16)
    array: np.ndarray[Any, Any] = np.from_dlpack(_Exported(tensor))
    # Torch's zeros that have no memory: NumPy takes some, and what stands there.
    return np.zeros_like(array) if array.flags.owndata else array


def as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """An array as a tensor on the same memory."""
    if array.dtype == _calls.BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _tensor(array: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    # NumPy and torch give empty arrays different strides.
    return as_tensor(array) if array.size else torch.empty(array.shape, dtype=dtype)


def _token_major(like: Tensor, batch: int, heads: int, tokens: int, width: int) -> Tensor:
    return like.new_empty((batch, tokens, heads, width)).transpose(1, 2)


def _lies_token_major(tensor: Tensor) -> bool:
    """Whether heads lie closer together than tokens."""
    _, heads, tokens, _ = tensor.shape
    return heads > 1 and tokens > 1 and tensor.stride(1) < tensor.stride(2)


def _dtype_of_denominators(q: Tensor) -> torch.dtype:
    return torch.float32 if q.dtype in _HALF else q.dtype


def _given(
    tensors: Sequence[Tensor], key_padding_mask: Tensor | None, packed: Packed, call: Request
) -> tuple[_native.Mechanism, Any]:
    """The compiled mechanism of a call on the CPU, and what it is given."""
    q, k, v, *parameters = [as_array(tensor) for tensor in tensors]
    mask = None if key_padding_mask is None else key_padding_mask.numpy()
    return call.native(parameters, q), (q, k, v, tuple(parameters), call.is_causal, call.offset, mask, packed)


def forward(
    tensors: Sequence[Tensor], key_padding_mask: Tensor | None, packed: Packed, call: Request, initial_state: Any = None,
    output_final_state: bool = False, denominators: bool = True, token_major: bool = True,
) -> tuple[Tensor, Any, Any]:  # fmt: skip
    """Of the kernels output, denominators where they are wanted, and final state, a `State`, as is the initial one."""
    native, given = _given(tensors, key_padding_mask, packed, call)
    out, sums, state = named(call.mechanism, "forward", native.forward)(
        given, initial_state, output_final_state, denominators, token_major
    )
    out_tensor = as_tensor(out) if out.size or not denominators else _output_of(*tensors[:3])
    return out_tensor, None if sums is None else _tensor(sums, _dtype_of_denominators(tensors[0])), state


def _plain(shape: Shape | None, numbers: Tensor | None) -> State | None:
    """A state of ``shape``, its mechanism, options and parts, without a gradient, as the kernels take it."""
    return None if shape is None or numbers is None else TensorState(*shape, numbers).detach()


def _forward(
    call: Request, tensors: Sequence[Tensor], key_padding_mask: Tensor | None, packed: Packed, shape: Shape | None,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Output, denominators, and with a shape the numbers of the final state."""
    q, k, v, *parameters = tensors
    if _triton.serves(q):
        return _triton.forward(q, k, v, parameters, call, key_padding_mask, packed, initial, shape is not None)
    out, denominators, after = forward(tensors, key_padding_mask, packed, call, _plain(shape, initial), shape is not None)
    return out, denominators, None if after is None else TensorState.of(after).numbers


def _backward(
    call: Request, tensors: Sequence[Tensor], key_padding_mask: Tensor | None, packed: Packed, shape: Shape | None,
    initial: Tensor | None, d_out: Tensor, d_final: Tensor | None, out: Tensor, denominators: Tensor, as_the_tensors: bool = True,
) -> list[Tensor]:  # fmt: skip
    """Gradients of tensors, and of the initial state's numbers if there were any, in the layout of their tensors, because autograd copies
    others; for a compiler, which has to know the layout before the call, all with tokens before heads."""
    q, k, v, *parameters = tensors
    if _triton.serves(q):
        gradients, d_initial = _triton.backward(
            d_out, q, k, v, parameters, out, denominators, call, key_padding_mask, packed, initial, None if shape is None else d_final
        )  # fmt: skip
        return gradients if d_initial is None else [*gradients, d_initial]
    token_major = [_lies_token_major(x) if as_the_tensors else True for x in (q, k, v)]
    native, given = _given(tensors, key_padding_mask, packed, call)
    dq, dk, dv, d_parameters, d_initial = named(call.mechanism, "backward", native.backward)(
        given, as_array(out), as_array(denominators), as_array(d_out), _plain(shape, initial), _plain(shape, d_final),
        token_major=token_major,
    )  # fmt: skip
    gradients = []
    for like, gradient, transposed in zip((q, k, v), (dq, dk, dv), token_major):
        if gradient.size == 0:
            gradients.append(_token_major(like, *like.shape) if transposed else like.new_empty(like.shape))
        else:
            gradients.append(_of_shared_heads(as_tensor(gradient), like, transposed))
    gradients += [_tensor(gradient, like.dtype) for like, gradient in zip(parameters, d_parameters)]
    return gradients if d_initial is None else [*gradients, TensorState.of(d_initial).numbers]


def _of_shared_heads(gradient: Tensor, like: Tensor, transposed: bool) -> Tensor:
    """The sum over heads of values that share one of queries or keys, in the same layout."""
    if gradient.shape == like.shape:
        return gradient
    heads = (like.shape[1], gradient.shape[1] // like.shape[1])
    if transposed:
        gradient = gradient.transpose(1, 2).unflatten(2, heads).sum(3).transpose(1, 2)
    else:
        gradient = gradient.unflatten(1, heads).sum(2)
    return gradient


def _gradients_in_torch(
    call: Request, tensors: Sequence[Tensor], key_padding_mask: Tensor | None, packed: Packed, shape: Shape | None,
    initial: Tensor | None, d_out: Tensor, d_final: Tensor | None,
) -> list[Any]:  # fmt: skip
    """Gradients of tensors, and of the initial state's numbers if there were any, in torch's own operations, which torch can
    differentiate again and batch; the kernels' it cannot."""
    given = tensors if initial is None else (*tensors, initial)
    with torch.enable_grad():
        # Views, so that tensors that are given twice have a gradient each.
        seen = [tensor.view_as(tensor) for tensor in given]
        own, before = seen[: len(tensors)], None if initial is None else seen[-1]
        if shape is None:
            outputs: Sequence[Tensor] = [in_torch(call, own, key_padding_mask, packed)]
        else:
            outputs = in_torch_with_states(call, own, key_padding_mask, shape[2], before)
        reached = [(out, d) for out, d in zip(outputs, (d_out, d_final)) if d is not None and out.requires_grad]
        wanted = [tensor for tensor in seen if tensor.requires_grad]
        found = iter(torch.autograd.grad(
            [out for out, _ in reached], wanted, [d for _, d in reached], create_graph=torch.is_grad_enabled(), allow_unused=True
        ))  # fmt: skip
        return [next(found) if tensor.requires_grad else None for tensor in seen]


#: Whether a tensor is of ``is_grads_batched=True``; a torch that lacks it has no such tensors.
_is_batched = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False)


def _differentiated_again(*gradients: Tensor | None) -> bool:
    """Whether gradients of these may be taken, or one is that of a batch."""
    return torch.is_grad_enabled() or any([gradient is not None and _is_batched(gradient) for gradient in gradients])


def _packed(operation: str, cu_queries: Tensor | None, cu_keys: Tensor | None) -> Packed:
    return None if cu_queries is None or cu_keys is None else _calls.boundaries(operation, (cu_queries, cu_keys))


def as_boundaries(operation: str, cu_seqlens: Any) -> tuple[Tensor | None, Tensor | None]:
    """Boundaries for the operator: tensors, whose numbers a compiler need not know."""
    if cu_seqlens is None:
        return None, None
    pair = cu_seqlens if isinstance(cu_seqlens, tuple) and len(cu_seqlens) == 2 else (cu_seqlens, cu_seqlens)
    if all(isinstance(bounds, Tensor) for bounds in pair):
        for bounds in pair:
            if bounds.dim() != 1 or bounds.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{operation}: cu_seqlens: expected integers, or a pair of such lists, got a tensor of "
                                f"{bounds.dtype} and {bounds.dim()} axes")  # fmt: skip
        return pair
    # Not on the default device: they are read here.
    first, second = (torch.tensor(bounds, dtype=torch.int64, device="cpu") for bounds in _calls.boundaries(operation, cu_seqlens))
    return first, second


def _refuse_onnx(operation: str, mechanism: str) -> None:
    """Says why a call is not exported to ONNX, and what is. Asked here, because nothing else runs both ways that torch traces."""
    if torch.onnx.is_in_onnx_export():
        if mechanism == "kernelized":
            raise RuntimeError(f"{operation}: torch.onnx.export: expected longspan.torch.onnx.export, which writes the operator "
                               "LinearAttention of opset 27 without states and packed sequences, got another export to ONNX")  # fmt: skip
        raise RuntimeError(f"{operation}: torch.onnx.export: expected torch.export.export, because ONNX has no operator for {mechanism}, "
                           "got an export to ONNX; for ONNX call longspan.torch.chunked_attention, which computes the same in "
                           "operators that ONNX has")  # fmt: skip


# Arguments of both operators, as torch writes them. Without states there are no ``parts``.
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor[] parameters, Tensor? key_padding_mask, Tensor? cu_queries, Tensor? cu_keys, Tensor? initial"
_CALL = "str state_of, str state_options, SymInt[]? parts, str mechanism, str options, str operation, bool is_causal, SymInt offset"


def _operator(name: str, schema: str) -> Any:
    return torch.library.custom_op(f"longspan::{name}", mutates_args=(), device_types=("cpu", "cuda"), schema=schema)


@_operator("attention", f"({_TENSORS}, {_CALL}) -> (Tensor, Tensor, Tensor)")  # type: ignore[untyped-decorator]
def attention(
    q: Tensor, k: Tensor, v: Tensor, parameters: list[Tensor], key_padding_mask: Tensor | None, cu_queries: Tensor | None,
    cu_keys: Tensor | None, initial: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, denominators, and the numbers of the final state, from those of an ``initial`` one of the same kind. The output lies as
    ``[batch, token, head, feature]`` and is seen transposed, which the projection after it reads without a copy."""
    shape, call = _asked(rest)
    _refuse_onnx(call.operation, call.mechanism)
    packed = _packed(call.operation, cu_queries, cu_keys)
    out, denominators, after = _forward(call, (q, k, v, *parameters), key_padding_mask, packed, shape, initial)
    return out, denominators, _empty_state(v, denominators, None) if after is None else after


def _asked(rest: Sequence[Any]) -> tuple[Shape | None, Request]:
    """What an operator was asked for beside its tensors."""
    mechanism, options, parts, *call = rest
    return (mechanism, options, tuple(parts)) if parts else None, Request(*call)


def _empty_state(v: Tensor, denominators: Tensor, parts: Sequence[int] | None) -> Tensor:
    return denominators.new_empty((v.shape[0], v.shape[1], sum(parts or ())))


def _output_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, heads, queries, _ = q.shape
    return _token_major(q, batch, heads * sharing(k, v), queries, v.shape[3])


def sharing(k: Tensor, v: Tensor) -> int:
    """Heads of values that share one of queries and keys."""
    return v.shape[1] // k.shape[1] if k.shape[1] else 1


#: Numbers a channel, or a row, in what mechanisms keep of denominators for the backward; one a row for the others
#: (`Mechanism::denominators` in the kernels).
_PER_CHANNEL = {"aft-full": 3}
_PER_ROW = {"softmax": 2, "softmax-window": 2}


def _shapes(q: Tensor, k: Tensor, v: Tensor, call: Request) -> tuple[Tensor, Tensor]:
    """What a compiler has to know of an output and its denominators."""
    _refuse_onnx(call.operation, call.mechanism)
    each = _PER_CHANNEL.get(call.mechanism, 0) * q.shape[3] or _PER_ROW.get(call.mechanism, 1)
    if _triton.serves(q) and _triton.is_exponential(call.options):
        each = 2
    out = _output_of(q, k, v)
    return out, q.new_empty((*out.shape[:3], each), dtype=_dtype_of_denominators(q))


@attention.register_fake  # type: ignore[untyped-decorator]
def _attention_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, denominators = _shapes(q, k, v, Request(*rest[-5:]))
    return out, denominators, _empty_state(v, denominators, rest[-6])


@_operator("attention_backward", f"(Tensor d_out, Tensor d_final, {_TENSORS}, Tensor out, Tensor denominators, {_CALL}) -> Tensor[]")  # type: ignore[untyped-decorator]
def attention_backward(
    d_out: Tensor, d_final: Tensor, q: Tensor, k: Tensor, v: Tensor, parameters: list[Tensor], key_padding_mask: Tensor | None,
    cu_queries: Tensor | None, cu_keys: Tensor | None, initial: Tensor | None, out: Tensor, denominators: Tensor, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, the parameters, and the initial state's numbers if there were any."""
    shape, call = _asked(rest)
    packed = _packed(call.operation, cu_queries, cu_keys)
    tensors = (q, k, v, *parameters)
    return _backward(call, tensors, key_padding_mask, packed, shape, initial, d_out, d_final, out, denominators, as_the_tensors=False)


@attention_backward.register_fake  # type: ignore[untyped-decorator]
def _gradient_shapes(
    d_out: Tensor, d_final: Tensor, q: Tensor, k: Tensor, v: Tensor, parameters: list[Tensor], key_padding_mask: Tensor | None,
    cu_queries: Tensor | None, cu_keys: Tensor | None, initial: Tensor | None, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    others = parameters if initial is None else [*parameters, initial]
    return [_token_major(x, *x.shape) for x in (q, k, v)] + [x.new_empty(x.shape) for x in others]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, parameters, key_padding_mask, cu_queries, cu_keys, initial, *ctx.rest = inputs
    out, denominators, _ = output
    ctx.mark_non_differentiable(denominators)
    ctx.save_for_backward(q, k, v, key_padding_mask, cu_queries, cu_keys, initial, out, denominators, *parameters)


def _gradient(ctx: Any, d_out: Tensor, _d_denominators: Tensor, d_final: Tensor) -> tuple[Any, ...]:
    q, k, v, key_padding_mask, cu_queries, cu_keys, initial, out, denominators, *parameters = ctx.saved_tensors
    gradients: list[Any]
    if _differentiated_again(d_out, d_final):
        shape, call = _asked(ctx.rest)
        packed = _packed(call.operation, cu_queries, cu_keys)
        gradients = _gradients_in_torch(call, (q, k, v, *parameters), key_padding_mask, packed, shape, initial, d_out, d_final)
    else:
        gradients = attention_backward(
            d_out, d_final, q, k, v, parameters, key_padding_mask, cu_queries, cu_keys, initial, out, denominators, *ctx.rest
        )  # fmt: skip
    d_initial = None if initial is None else gradients.pop()
    dq, dk, dv, *d_parameters = gradients
    return dq, dk, dv, d_parameters, None, None, None, d_initial, *(None,) * 8


attention.register_autograd(_gradient, setup_context=_save)
# As norms and softmax: half precision comes in from the projections, sums are taken in float32.
attention.register_autocast("cpu", torch.float32)


class Eager(torch.autograd.Function):
    """The same without the operators' overhead, a tenth of a millisecond a call: where no compiler and no transform intercepts calls.

    ``initial`` holds the numbers of a state of ``shape``, its mechanism, options and parts, or is ``None``. Returns the output, and with a
    shape the numbers of the final state.
    """

    @staticmethod
    def forward(
        ctx: Any, key_padding_mask: Tensor | None, packed: Packed, call: Request, shape: Shape | None, initial: Tensor | None,
        *tensors: Tensor,
    ) -> Any:  # fmt: skip
        out, denominators, after = _forward(call, tensors, key_padding_mask, packed, shape, initial)
        ctx.save_for_backward(initial, key_padding_mask, out, denominators, *tensors)
        ctx.packed, ctx.call, ctx.shape = packed, call, shape
        ctx.set_materialize_grads(False)
        return out if shape is None else (out, after)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None = None) -> tuple[Any, ...]:
        initial, key_padding_mask, out, denominators, *tensors = ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out
        asked = ctx.call, tensors, key_padding_mask, ctx.packed, ctx.shape, initial, d_out, d_final
        again = _differentiated_again(d_out, d_final)
        gradients: list[Any] = _gradients_in_torch(*asked) if again else _backward(*asked, out, denominators)
        d_initial = None if initial is None else gradients.pop()
        return None, None, None, None, d_initial, *gradients
