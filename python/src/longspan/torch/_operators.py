"""The kernels as torch operators: with shapes for the compiler, gradients, and autocast to float32.

One operator serves every mechanism: its name and its options (JSON) are text, its parameters a list of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from .. import _calls
from .._calls import Request
from .._native import State
from . import _triton
from ._chunked import in_torch, in_torch_with_states
from ._profile import named
from ._states import TensorState

#: Mechanism, options and parts of a state.
Shape = tuple[str, str, tuple[int, ...]]
#: Boundaries of packed sequences on the query and the key axis.
Packed = Optional[tuple[list[int], list[int]]]

_HALF = (torch.float16, torch.bfloat16)


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
        raw: np.ndarray[Any, Any] = np.from_dlpack(_Exported(tensor.detach().view(torch.int16)))
        return raw.view(_calls.BFLOAT16)
    array: np.ndarray[Any, Any] = np.from_dlpack(_Exported(tensor))
    return array


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


def _forward(
    q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], key_padding_mask: Tensor | None, packed: Packed, call: Request,
    initial_state: Any = None, output_final_state: bool = False,
) -> tuple[Tensor, Tensor, Any]:  # fmt: skip
    """Output, denominators and final state: a `State` on the CPU, its numbers on other devices; so is the initial one."""
    if _triton.serves(q):
        return _triton.forward(q, k, v, parameters, call, key_padding_mask, packed, initial_state, output_final_state)
    out, denominators, state = named(call.mechanism, "forward", call.native(parameters, q).forward)(
        as_array(q), as_array(k), as_array(v), tuple([as_array(p) for p in parameters]), call.is_causal, call.offset,
        None if key_padding_mask is None else key_padding_mask.numpy(), packed, initial_state, output_final_state,
        True, True,
    )  # fmt: skip
    assert denominators is not None
    out_tensor = as_tensor(out) if out.size else _output_of(q, k, v)
    return out_tensor, _tensor(denominators, _dtype_of_denominators(q)), state


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], key_padding_mask: Tensor | None, packed: Packed,
    out: Tensor, denominators: Tensor, call: Request, initial_state: Any = None, d_final_state: Any = None,
    as_the_tensors: bool = True,
) -> tuple[list[Tensor], Any]:  # fmt: skip
    """Gradients in the layout of their tensors, because autograd copies others; for a compiler, which has to know the layout
    before the call, all with tokens before heads."""
    if _triton.serves(q):
        return _triton.backward(
            d_out, q, k, v, parameters, out, denominators, call, key_padding_mask, packed, initial_state, d_final_state
        )  # fmt: skip
    token_major = [_lies_token_major(x) if as_the_tensors else True for x in (q, k, v)]
    dq, dk, dv, d_parameters, d_initial = named(call.mechanism, "backward", call.native(parameters, q).backward)(
        as_array(q), as_array(k), as_array(v), tuple([as_array(p) for p in parameters]), call.is_causal, call.offset,
        None if key_padding_mask is None else key_padding_mask.numpy(), packed,
        as_array(out), as_array(denominators), as_array(d_out), initial_state, d_final_state, token_major=token_major,
    )  # fmt: skip
    gradients = []
    for like, gradient, transposed in zip((q, k, v), (dq, dk, dv), token_major):
        if gradient.size == 0:
            gradients.append(_token_major(like, *like.shape) if transposed else like.new_empty(like.shape))
        else:
            gradients.append(_of_shared_heads(as_tensor(gradient), like, transposed))
    for like, gradient in zip(parameters, d_parameters):
        gradients.append(_tensor(gradient, like.dtype))
    return gradients, d_initial


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


def _differentiable_gradients(
    function: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], d_out: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients in torch's own operations, which torch can differentiate again and batch; the kernels' it cannot."""
    with torch.enable_grad():
        # Views, so that tensors that are given twice have a gradient each.
        seen = [tensor.view_as(tensor) for tensor in tensors]
        out = [(ours, d) for ours, d in zip(function(*seen), d_out) if ours.requires_grad]
        wanted = [tensor for tensor in seen if tensor.requires_grad]
        ours, theirs = [ours for ours, _ in out], [d for _, d in out]
        found = iter(torch.autograd.grad(ours, wanted, theirs, create_graph=torch.is_grad_enabled(), allow_unused=True))
        return [next(found) if tensor.requires_grad else None for tensor in seen]


#: Whether a tensor is of ``is_grads_batched=True``; a torch that lacks it has no such tensors.
_is_batched = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False)


def _differentiated_again(d_out: Tensor) -> bool:
    """Whether gradients of this gradient may be taken, or it is that of a batch."""
    return torch.is_grad_enabled() or _is_batched(d_out)


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
    packed = _calls.boundaries(operation, cu_seqlens)
    assert packed is not None
    # Not on the default device: they are read here.
    first, second = (torch.tensor(bounds, dtype=torch.int64, device="cpu") for bounds in packed)
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


# Arguments of the operators, as torch writes them: those before and after what each of them has of its own.
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor[] parameters, Tensor? key_padding_mask"
_PACKED = "Tensor? cu_queries, Tensor? cu_keys"
_STATE = "str state_of, str state_options, SymInt[] parts"
_CALL = "str mechanism, str options, str operation, bool is_causal, SymInt offset"


def _operator(name: str, schema: str) -> Any:
    return torch.library.custom_op(f"longspan::{name}", mutates_args=(), device_types=("cpu", "cuda"), schema=schema)


@_operator("attention", f"({_TENSORS}, {_PACKED}, {_CALL}) -> (Tensor, Tensor)")  # type: ignore[untyped-decorator]
def attention(
    q: Tensor, k: Tensor, v: Tensor, parameters: list[Tensor], key_padding_mask: Tensor | None, cu_queries: Tensor | None,
    cu_keys: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and denominators. The output lies as ``[batch, token, head, feature]`` and is seen transposed, which the
    projection after it reads without a copy."""
    call = Request(*rest)
    return _forward(q, k, v, parameters, key_padding_mask, _packed(call.operation, cu_queries, cu_keys), call)[:2]


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
def _attention_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _shapes(q, k, v, Request(*rest[-5:]))


@_operator(
    "attention_backward", f"(Tensor d_out, {_TENSORS}, Tensor out, Tensor denominators, {_PACKED}, {_CALL}) -> Tensor[]"
)  # type: ignore[untyped-decorator]
def attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, parameters: list[Tensor], key_padding_mask: Tensor | None, out: Tensor,
    denominators: Tensor, cu_queries: Tensor | None, cu_keys: Tensor | None, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v and the parameters."""
    call = Request(*rest)
    packed = _packed(call.operation, cu_queries, cu_keys)
    return _backward(
        d_out, q, k, v, parameters, key_padding_mask, packed, out, denominators, call, as_the_tensors=False
    )[0]  # fmt: skip


@attention_backward.register_fake  # type: ignore[untyped-decorator]
def _gradient_shapes(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, parameters: list[Tensor], *rest: Any
) -> list[Tensor]:
    gradients = [_token_major(tensor, *tensor.shape) for tensor in (q, k, v)]
    return gradients + [parameter.new_empty(parameter.shape) for parameter in parameters]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, parameters, *rest = inputs
    # The mask, and boundaries or a state.
    others = [x for x in rest if x is None or isinstance(x, Tensor)]
    out, denominators = output[:2]
    ctx.mark_non_differentiable(denominators)
    ctx.save_for_backward(q, k, v, *others, out, denominators, *parameters)
    ctx.rest = rest[len(others) :]


def _gradient(ctx: Any, d_out: Tensor, _d_denominators: Tensor) -> tuple[Any, ...]:
    q, k, v, key_padding_mask, cu_queries, cu_keys, out, denominators, *parameters = ctx.saved_tensors
    if _differentiated_again(d_out):
        call = Request(*ctx.rest)
        packed = _packed(call.operation, cu_queries, cu_keys)
        gradients = _differentiable_gradients(
            lambda *tensors: [in_torch(call, tensors, key_padding_mask, packed)], (q, k, v, *parameters), [d_out]
        )  # fmt: skip
    else:
        gradients = attention_backward(
            d_out, q, k, v, parameters, key_padding_mask, out, denominators, cu_queries, cu_keys, *ctx.rest
        )  # fmt: skip
    dq, dk, dv, *d_parameters = gradients
    return dq, dk, dv, d_parameters, *(None,) * 8


attention.register_autograd(_gradient, setup_context=_save)
# As norms and softmax: half precision comes in from the projections, sums are taken in float32.
attention.register_autocast("cpu", torch.float32)


def _plain(shape: Shape | None, numbers: Tensor | None) -> Any:
    """A state of ``shape``, its mechanism, options and parts, without a gradient, as `_forward` takes it."""
    if numbers is not None and _triton.serves(numbers):
        return numbers.detach()
    return None if shape is None or numbers is None else TensorState(*shape, numbers).detach()


def _numbers(state: Any) -> Tensor:
    return state if isinstance(state, Tensor) else TensorState.of(state).numbers


class Eager(torch.autograd.Function):
    """The same, and from a state and to one, without the operators' overhead, a tenth of a millisecond a call: where no compiler and no
    transform intercepts calls.

    ``initial`` holds the numbers of a state of ``shape``, its mechanism, options and parts, or ``None``. Returns the output, and with
    ``with_state`` the numbers and the shape of the final state.
    """

    @staticmethod
    def forward(
        ctx: Any, key_padding_mask: Tensor | None, packed: Packed, call: Request, shape: Shape | None, initial: Tensor | None,
        with_state: bool, q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor,
    ) -> Any:  # fmt: skip
        before = _plain(shape, initial)
        out, denominators, state = _forward(q, k, v, parameters, key_padding_mask, packed, call, before, with_state)
        ctx.save_for_backward(initial, q, k, v, key_padding_mask, out, denominators, *parameters)
        ctx.packed, ctx.call, ctx.shape, ctx.with_state = packed, call, shape, with_state
        ctx.set_materialize_grads(False)
        if not with_state:
            return out
        if shape is None and isinstance(state, State):
            ctx.shape = (state.mechanism, state.options, tuple(state.parts))
        return out, _numbers(state), ctx.shape

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None = None, _shape: None = None) -> tuple[Any, ...]:
        initial, q, k, v, key_padding_mask, out, denominators, *parameters = ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out
        if _differentiated_again(d_out):
            begun = [] if initial is None else [initial]

            def attend(*tensors: Tensor) -> Sequence[Tensor]:
                own = tensors[len(begun) :]
                if not ctx.with_state:
                    return [in_torch(ctx.call, own, key_padding_mask, ctx.packed)]
                both = in_torch_with_states(ctx.call, own, key_padding_mask, ctx.shape[2], tensors[0] if begun else None)
                return both[: 1 if d_final is None else 2]

            found = _differentiable_gradients(attend, (*begun, q, k, v, *parameters), [d_out] if d_final is None else [d_out, d_final])
            return *(None,) * 4, found.pop(0) if begun else None, None, *found
        gradients, d_initial = _backward(
            d_out, q, k, v, parameters, key_padding_mask, ctx.packed, out, denominators, ctx.call,
            _plain(ctx.shape, initial), _plain(ctx.shape, d_final),
        )  # fmt: skip
        return *(None,) * 4, None if d_initial is None else _numbers(d_initial), None, *gradients


@_operator("attention_with_state", f"({_TENSORS}, Tensor? initial, {_STATE}, {_CALL}) -> (Tensor, Tensor, Tensor)")  # type: ignore[untyped-decorator]
def attention_with_state(
    q: Tensor, k: Tensor, v: Tensor, parameters: list[Tensor], key_padding_mask: Tensor | None, initial: Tensor | None,
    state_of: str, state_options: str, parts: list[int], *call: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, denominators and the numbers of the final state, from those of an ``initial`` one of the same kind."""
    before = _plain((state_of, state_options, tuple(parts)), initial)
    out, denominators, after = _forward(q, k, v, parameters, key_padding_mask, None, Request(*call), before, True)
    assert after is not None
    return out, denominators, _numbers(after)


@attention_with_state.register_fake  # type: ignore[untyped-decorator]
def _with_state_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, parts, mechanism, options, operation, is_causal, offset = rest
    out, denominators = _shapes(q, k, v, Request(mechanism, options, operation, is_causal, offset))
    return out, denominators, denominators.new_empty((q.shape[0], v.shape[1], sum(parts)))


@_operator(
    "attention_with_state_backward",
    f"(Tensor d_out, Tensor d_final, {_TENSORS}, Tensor? initial, Tensor out, Tensor denominators, {_STATE}, {_CALL}) -> Tensor[]",
)  # type: ignore[untyped-decorator]
def attention_with_state_backward(
    d_out: Tensor, d_final: Tensor, q: Tensor, k: Tensor, v: Tensor, parameters: list[Tensor], key_padding_mask: Tensor | None,
    initial: Tensor | None, out: Tensor, denominators: Tensor, state_of: str, state_options: str, parts: list[int], *call: Any,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, the parameters, and the initial state's numbers if there were any."""
    first, last = (_plain((state_of, state_options, tuple(parts)), numbers) for numbers in (initial, d_final))
    gradients, d_initial = _backward(
        d_out, q, k, v, parameters, key_padding_mask, None, out, denominators, Request(*call), first, last, as_the_tensors=False
    )
    return gradients if d_initial is None else [*gradients, _numbers(d_initial)]


@attention_with_state_backward.register_fake  # type: ignore[untyped-decorator]
def _gradient_with_state_shapes(
    d_out: Tensor, d_final: Tensor, q: Tensor, k: Tensor, v: Tensor, parameters: list[Tensor], key_padding_mask: Tensor | None,
    initial: Tensor | None, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    gradients = _gradient_shapes(d_out, q, k, v, parameters)
    return gradients if initial is None else [*gradients, initial.new_empty(initial.shape)]


def _gradient_with_state(ctx: Any, d_out: Tensor, _d_denominators: Tensor, d_final: Tensor) -> tuple[Any, ...]:
    q, k, v, key_padding_mask, initial, out, denominators, *parameters = ctx.saved_tensors
    gradients = attention_with_state_backward(
        d_out, d_final, q, k, v, parameters, key_padding_mask, initial, out, denominators, *ctx.rest
    )  # fmt: skip
    d_initial = None if initial is None else gradients.pop()
    dq, dk, dv, *d_parameters = gradients
    return dq, dk, dv, d_parameters, None, d_initial, *(None,) * 8


attention_with_state.register_autograd(_gradient_with_state, setup_context=_save)
attention_with_state.register_autocast("cpu", torch.float32)
