"""The kernels as torch operators: with shapes for the compiler, gradients, and autocast to float32.

One operator serves every mechanism: its name and its options (JSON) are text, its parameters a list of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from .. import _calls
from .._native import State
from ._chunked import chunked_attention
from ._profile import named
from ._states import TensorState

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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Sequence[Tensor],
    key_padding_mask: Tensor | None,
    packed: Packed,
    mechanism: str,
    options: str,
    operation: str,
    is_causal: bool,
    offset: int,
    initial_state: State | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor, State | None]:
    native = _calls.mechanism(mechanism, options, operation, parameters, q, offset)
    out, denominators, state = named(mechanism, "forward", native.forward)(
        as_array(q), as_array(k), as_array(v), tuple([as_array(p) for p in parameters]), is_causal, offset,
        None if key_padding_mask is None else key_padding_mask.numpy(), packed, initial_state, output_final_state,
        True, True,
    )  # fmt: skip
    assert denominators is not None
    batch, heads, queries, _ = q.shape
    if out.size == 0:
        out_tensor = _token_major(q, batch, heads, queries, v.shape[3])
    else:
        out_tensor = as_tensor(out)
    return out_tensor, _tensor(denominators, _dtype_of_denominators(q)), state


def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Sequence[Tensor],
    key_padding_mask: Tensor | None,
    packed: Packed,
    out: Tensor,
    denominators: Tensor,
    mechanism: str,
    options: str,
    operation: str,
    is_causal: bool,
    offset: int,
    initial_state: State | None = None,
    d_final_state: State | None = None,
    as_the_tensors: bool = True,
) -> tuple[list[Tensor], State | None]:
    """Gradients in the layout of their tensors, because autograd copies others; for a compiler, which has to know the layout
    before the call, all with tokens before heads."""
    token_major = [_lies_token_major(x) if as_the_tensors else True for x in (q, k, v)]
    native = _calls.mechanism(mechanism, options, operation, parameters, q, offset)
    dq, dk, dv, d_parameters, d_initial = named(mechanism, "backward", native.backward)(
        as_array(q), as_array(k), as_array(v), tuple([as_array(p) for p in parameters]), is_causal, offset,
        None if key_padding_mask is None else key_padding_mask.numpy(), packed,
        as_array(out), as_array(denominators), as_array(d_out), initial_state, d_final_state, token_major=token_major,
    )  # fmt: skip
    gradients = []
    for like, gradient, transposed in zip((q, k, v), (dq, dk, dv), token_major):
        if gradient.size == 0:
            gradients.append(_token_major(like, *like.shape) if transposed else like.new_empty(like.shape))
        else:
            gradients.append(as_tensor(gradient))
    for like, gradient in zip(parameters, d_parameters):
        gradients.append(_tensor(gradient, like.dtype))
    return gradients, d_initial


def _differentiable_gradients(
    d_out: Tensor,
    tensors: Sequence[Tensor],
    key_padding_mask: Tensor | None,
    packed: Packed,
    mechanism: str,
    options: str,
    operation: str,
    is_causal: bool,
    offset: int,
) -> list[Tensor | None]:
    """Gradients in torch's own operations, which torch can differentiate again and batch; the kernels' it cannot."""
    with torch.enable_grad():
        # Views, so that tensors that are given twice have a gradient each.
        q, k, v, *parameters = seen = [
            tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_() for tensor in tensors
        ]
        out = chunked_attention(
            q, k, v, parameters, mechanism=mechanism, options=options, is_causal=is_causal, offset=offset,
            key_padding_mask=key_padding_mask, cu_seqlens=packed,
        )  # fmt: skip
        return list(torch.autograd.grad(out, seen, d_out, create_graph=torch.is_grad_enabled(), allow_unused=True))


#: Whether a tensor is of ``is_grads_batched=True``; a torch that lacks it has no such tensors.
_is_batched = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False)


def _differentiated_again(d_out: Tensor) -> bool:
    """Whether gradients of this gradient may be taken, or it is that of a batch."""
    return torch.is_grad_enabled() or _is_batched(d_out)


class _OnceDifferentiable(torch.autograd.Function):
    """Hands on the first ``count`` of ``tensors``, whose gradients with respect to the others are not known.

    Not `torch.autograd.function.once_differentiable`: that is silent, and the gradients 0, where the gradient that came in
    is a constant.
    """

    @staticmethod
    def forward(ctx: Any, message: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple([tensor.view_as(tensor) for tensor in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        raise RuntimeError(ctx.message)


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
    return torch.tensor(packed[0], dtype=torch.int64), torch.tensor(packed[1], dtype=torch.int64)


def _refuse_onnx(operation: str, mechanism: str) -> None:
    """Says why a call is not exported to ONNX, and what is. Asked here, because nothing else runs both ways that torch traces."""
    if torch.onnx.is_in_onnx_export():
        if mechanism == "kernelized":
            raise RuntimeError(f"{operation}: torch.onnx.export: expected longspan.torch.onnx.export, which writes the operator "
                               "LinearAttention of opset 27 without states and packed sequences, got another export to ONNX")  # fmt: skip
        raise RuntimeError(f"{operation}: torch.onnx.export: expected torch.export.export, because ONNX has no operator for {mechanism}, "
                           "got an export to ONNX; for ONNX call longspan.torch.chunked_attention, which computes the same in "
                           "operators that ONNX has")  # fmt: skip


@torch.library.custom_op("longspan::attention", mutates_args=(), device_types="cpu")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: list[Tensor],
    key_padding_mask: Optional[Tensor],
    cu_queries: Optional[Tensor],
    cu_keys: Optional[Tensor],
    mechanism: str,
    options: str,
    operation: str,
    is_causal: bool,
    offset: int,
) -> tuple[Tensor, Tensor]:
    """Output and denominators. The output lies as ``[batch, token, head, feature]`` and is seen transposed, which the
    projection after it reads without a copy."""
    packed = _packed(operation, cu_queries, cu_keys)
    rest = (mechanism, options, operation, is_causal, offset)
    return _forward(q, k, v, parameters, key_padding_mask, packed, *rest)[:2]


@attention.register_fake
def _attention_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: list[Tensor],
    key_padding_mask: Optional[Tensor],
    cu_queries: Optional[Tensor],
    cu_keys: Optional[Tensor],
    mechanism: str,
    options: str,
    operation: str,
    is_causal: bool,
    offset: int,
) -> tuple[Tensor, Tensor]:
    _refuse_onnx(operation, mechanism)
    batch, heads, queries, _ = q.shape
    out = _token_major(q, batch, heads, queries, v.shape[3])
    return out, q.new_empty((batch, heads, queries), dtype=_dtype_of_denominators(q))


@torch.library.custom_op("longspan::attention_backward", mutates_args=(), device_types="cpu")
def attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: list[Tensor],
    key_padding_mask: Optional[Tensor],
    out: Tensor,
    denominators: Tensor,
    cu_queries: Optional[Tensor],
    cu_keys: Optional[Tensor],
    mechanism: str,
    options: str,
    operation: str,
    is_causal: bool,
    offset: int,
) -> list[Tensor]:
    """Gradients of q, k, v and the parameters."""
    packed = _packed(operation, cu_queries, cu_keys)
    return _backward(
        d_out, q, k, v, parameters, key_padding_mask, packed, out, denominators,
        mechanism, options, operation, is_causal, offset, as_the_tensors=False,
    )[0]  # fmt: skip


@attention_backward.register_fake
def _gradient_shapes(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, parameters: list[Tensor], *rest: Any
) -> list[Tensor]:
    gradients = [_token_major(tensor, *tensor.shape) for tensor in (q, k, v)]
    return gradients + [parameter.new_empty(parameter.shape) for parameter in parameters]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, parameters, key_padding_mask, cu_queries, cu_keys, *rest = inputs
    out, denominators = output
    ctx.mark_non_differentiable(denominators)
    ctx.save_for_backward(q, k, v, key_padding_mask, cu_queries, cu_keys, out, denominators, *parameters)
    ctx.rest = rest


def _gradient(ctx: Any, d_out: Tensor, _d_denominators: Tensor) -> tuple[Any, ...]:
    q, k, v, key_padding_mask, cu_queries, cu_keys, out, denominators, *parameters = ctx.saved_tensors
    mechanism, options, operation, is_causal, offset = ctx.rest
    if _differentiated_again(d_out):
        packed = _packed(operation, cu_queries, cu_keys)
        dq, dk, dv, *d_learned = _differentiable_gradients(
            d_out, (q, k, v, *parameters), key_padding_mask, packed, mechanism, options, operation, is_causal, offset
        )
        return dq, dk, dv, d_learned, None, None, None, None, None, None, None, None
    dq, dk, dv, *d_parameters = attention_backward(
        d_out, q, k, v, parameters, key_padding_mask, out, denominators, cu_queries, cu_keys,
        mechanism, options, operation, is_causal, offset,
    )  # fmt: skip
    return dq, dk, dv, d_parameters, None, None, None, None, None, None, None, None


attention.register_autograd(_gradient, setup_context=_save)
# As norms and softmax: half precision comes in from the projections, sums are taken in float32.
attention.register_autocast("cpu", torch.float32)


class Eager(torch.autograd.Function):
    """The same without the operator's overhead, a tenth of a millisecond a call: where no compiler and no transform
    intercepts calls."""

    @staticmethod
    def forward(
        ctx: Any,
        key_padding_mask: Tensor | None,
        packed: Packed,
        mechanism: str,
        options: str,
        operation: str,
        is_causal: bool,
        offset: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        rest = (mechanism, options, operation, is_causal, offset)
        out, denominators, _ = _forward(q, k, v, parameters, key_padding_mask, packed, *rest)
        ctx.save_for_backward(q, k, v, key_padding_mask, out, denominators, *parameters)
        ctx.packed, ctx.rest = packed, rest
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        q, k, v, key_padding_mask, out, denominators, *parameters = ctx.saved_tensors
        if _differentiated_again(d_out):
            again = _differentiable_gradients(d_out, (q, k, v, *parameters), key_padding_mask, ctx.packed, *ctx.rest)
            return (None,) * 7 + tuple(again)
        gradients, _ = _backward(
            d_out, q, k, v, parameters, key_padding_mask, ctx.packed, out, denominators, *ctx.rest
        )  # fmt: skip
        return (None,) * 7 + tuple(gradients)


class EagerWithStates(torch.autograd.Function):
    """The same from a state and to one, with gradients through both.

    ``initial`` holds the numbers of a state of ``shape``, its mechanism, options and parts, or ``None``. Returns the output and
    the final state's numbers, and appends the same of the final state to ``found``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        key_padding_mask: Tensor | None,
        rest: tuple[str, str, str, bool, int],
        shape: tuple[str, str, tuple[int, ...]] | None,
        found: list[Any],
        initial: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        before = None if shape is None or initial is None else TensorState(*shape, initial).detach()
        out, denominators, state = _forward(q, k, v, parameters, key_padding_mask, None, *rest, before, True)
        assert state is not None
        ctx.save_for_backward(initial, q, k, v, key_padding_mask, out, denominators, *parameters)
        ctx.rest = rest
        ctx.set_materialize_grads(False)
        final = TensorState.of(state)
        ctx.shape = (final.mechanism, final.options, final.parts)
        found.extend(ctx.shape)
        return out, final.numbers

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Any, ...]:
        initial, q, k, v, key_padding_mask, out, denominators, *parameters = ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out
        mechanism, options, parts = ctx.shape
        states = [None if x is None else TensorState(mechanism, options, parts, x).detach() for x in (initial, d_final)]
        gradients, d_initial = _backward(
            d_out.detach(), q, k, v, parameters, key_padding_mask, None, out, denominators, *ctx.rest, *states
        )  # fmt: skip
        if d_initial is not None:
            gradients.append(TensorState.of(d_initial).numbers)
        if torch.is_grad_enabled():
            depends = [x for x in (d_out, d_final, initial, q, k, v, *parameters) if x is not None]
            message = (f"{ctx.rest[2]}: second derivatives: expected a call without states, got one with; "
                       "run the whole sequence in one call")  # fmt: skip
            gradients = list(_OnceDifferentiable.apply(message, len(gradients), *gradients, *depends))
        d_state = None if d_initial is None else gradients.pop()
        return None, None, None, None, d_state, *gradients


@torch.library.custom_op("longspan::attention_with_state", mutates_args=(), device_types="cpu")
def attention_with_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: list[Tensor],
    key_padding_mask: Optional[Tensor],
    initial: Optional[Tensor],
    state_of: str,
    state_options: str,
    parts: list[int],
    mechanism: str,
    options: str,
    operation: str,
    is_causal: bool,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, denominators and the numbers of the final state, from those of an ``initial`` one of the same kind."""
    before = None if initial is None else TensorState(state_of, state_options, tuple(parts), initial).detach()
    rest = (mechanism, options, operation, is_causal, offset)
    out, denominators, after = _forward(q, k, v, parameters, key_padding_mask, None, *rest, before, True)
    assert after is not None
    return out, denominators, TensorState.of(after).numbers


@attention_with_state.register_fake
def _with_state_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: list[Tensor],
    key_padding_mask: Optional[Tensor],
    initial: Optional[Tensor],
    state_of: str,
    state_options: str,
    parts: list[int],
    mechanism: str,
    options: str,
    operation: str,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse_onnx(operation, mechanism)
    batch, heads, queries, _ = q.shape
    dtype = _dtype_of_denominators(q)
    out = _token_major(q, batch, heads, queries, v.shape[3])
    return out, q.new_empty((batch, heads, queries), dtype=dtype), q.new_empty((batch, k.shape[1], sum(parts)), dtype=dtype)


@torch.library.custom_op("longspan::attention_with_state_backward", mutates_args=(), device_types="cpu")
def attention_with_state_backward(
    d_out: Tensor,
    d_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: list[Tensor],
    key_padding_mask: Optional[Tensor],
    initial: Optional[Tensor],
    out: Tensor,
    denominators: Tensor,
    state_of: str,
    state_options: str,
    parts: list[int],
    mechanism: str,
    options: str,
    operation: str,
    is_causal: bool,
    offset: int,
) -> list[Tensor]:
    """Gradients of q, k, v, the parameters, and the initial state's numbers if there were any."""
    held = (state_of, state_options, tuple(parts))
    first, last = (None if numbers is None else TensorState(*held, numbers).detach() for numbers in (initial, d_final))
    gradients, d_initial = _backward(
        d_out, q, k, v, parameters, key_padding_mask, None, out, denominators,
        mechanism, options, operation, is_causal, offset, first, last, as_the_tensors=False,
    )  # fmt: skip
    return gradients if d_initial is None else [*gradients, TensorState.of(d_initial).numbers]


@attention_with_state_backward.register_fake
def _gradient_with_state_shapes(
    d_out: Tensor,
    d_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: list[Tensor],
    key_padding_mask: Optional[Tensor],
    initial: Optional[Tensor],
    *rest: Any,
) -> list[Tensor]:
    gradients = _gradient_shapes(d_out, q, k, v, parameters)
    return gradients if initial is None else [*gradients, initial.new_empty(initial.shape)]


def _save_with_state(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, parameters, key_padding_mask, initial, *rest = inputs
    out, denominators, _ = output
    ctx.mark_non_differentiable(denominators)
    ctx.save_for_backward(q, k, v, key_padding_mask, initial, out, denominators, *parameters)
    ctx.rest = rest


def _gradient_with_state(ctx: Any, d_out: Tensor, _d_denominators: Tensor, d_final: Tensor) -> tuple[Any, ...]:
    q, k, v, key_padding_mask, initial, out, denominators, *parameters = ctx.saved_tensors
    gradients = attention_with_state_backward(
        d_out, d_final, q, k, v, parameters, key_padding_mask, initial, out, denominators, *ctx.rest
    )  # fmt: skip
    d_initial = None if initial is None else gradients.pop()
    dq, dk, dv, *d_parameters = gradients
    return dq, dk, dv, d_parameters, None, d_initial, *(None,) * 8


attention_with_state.register_autograd(_gradient_with_state, setup_context=_save_with_state)
attention_with_state.register_autocast("cpu", torch.float32)
