"""The mechanisms in torch's own operations, for tensors of any device, for torch.func and for derivatives that the kernels do not give.

Everything runs on the device of ``q``, in O(L) time and memory but for softmax without a window, Toeplitz tables and images, AFT-full and
AFT over images, which take O(L^2) time in bounded memory; states and tokens one by one included. torch's autograd differentiates it, in
the same memory once, in O(L^2) twice. Sums are taken in float32 for half precision. `longspan.torch._check` holds it to the kernels.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import _calls
from ..._calls import Request
from . import aft, convolution, gated, kernelized, pairs
from .call import Call, autocasts
from .kernelized import RECURRENCE, recurrence

__all__ = ["RECURRENCE", "check_packed", "check_parameters", "check_shapes", "chunked_attention", "in_torch", "recurrence"]

_FULL = aft.Aft(aft.full_biases, by_position=True)
_LOCAL, _CONV = aft.Aft(aft.local_biases, aft.local_reach, by_position=True), aft.Aft(aft.conv_biases, aft.conv_reach)
_SIMPLE = aft.Aft()

#: Output, and parts of the state after the last key, which gates and the delta rule give with it.
_FORMULATIONS: dict[str, tuple[Callable[[Call], Any], Callable[[Call], list[Tensor]] | None]] = {
    "softmax": (pairs.softmax, pairs.softmax_state),
    "kernelized": (kernelized.kernelized, kernelized.state_after),
    "shaw": (kernelized.kernelized, kernelized.state_after),
    "fourier": (kernelized.fourier, functools.partial(kernelized.state_after, positions=True)),
    "toeplitz": (pairs.toeplitz, pairs.toeplitz_state),
    "short-convolution": (convolution.short_convolution, convolution.state_after),
    "gated": (gated.gated, None),
    "delta": (gated.gated, None),
    "aft-full": (_FULL, _FULL.state_after),
    "aft-local": (_LOCAL, _LOCAL.state_after),
    "aft-simple": (_SIMPLE, _SIMPLE.state_after),
    "aft-conv": (_CONV, _CONV.state_after),
}
#: What comes before: keys that take a part beside those of the call, or that stand for what is no number.
_PREPARED = {
    "softmax": pairs.with_cache, "gated": gated.whole, "delta": gated.whole,
    **dict.fromkeys(("kernelized", "shaw", "fourier"), kernelized.whole),
}  # fmt: skip


def chunked_attention(
    q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor] = (), *, mechanism: str = "kernelized", options: str = "{}",
    is_causal: bool = False, offset: int = 0, key_padding_mask: Tensor | None = None,
    cu_seqlens: tuple[list[int], list[int]] | None = None,
) -> Tensor:  # fmt: skip
    """A mechanism in torch's own operations, for any device: what `longspan.ops` computes where there are no kernels for a device, and where
    derivatives are wanted that the kernels do not give. `longspan.ops` has states, too.

    Parameters
    ----------
    q : Tensor ``[B, H, Lq, d]``
        Queries.
    k, v : Tensor ``[B, Hkv, Lk, d]``, ``[B, Hkv, Lk, dv]``
        Keys and values.
    parameters : sequence of Tensor
        What the mechanism learns, in the order of the arguments of its function.
    mechanism : str
        A name of `longspan.mechanisms`.
    options : str
        Its options as JSON, as the functions of `longspan.ops` write them.
    is_causal, offset : bool, int
        Query ``i`` sees the keys ``j <= i + offset``; without a mask, all.
    key_padding_mask : bool Tensor ``[B, Lk]``, optional
        True is ignored.
    cu_seqlens : pair of lists of int, optional
        Boundaries of packed sequences on the query and the key axis; ``B = 1``.

    Returns
    -------
    Tensor ``[B, H, Lq, dv]``
        In the type of ``q``; half precision is computed in float32.

    Raises
    ------
    NotImplementedError
        For a mechanism without such a formulation.
    ValueError
        For shapes that do not fit.

    Notes
    -----
    O(L) time but for softmax without a window, Toeplitz tables and images, AFT-full and AFT over images, which take O(L**2) here.

    Examples
    --------
    >>> import torch
    >>> from longspan import ops
    >>> from longspan.torch import chunked_attention
    >>> q, k, v = torch.randn(3, 1, 2, 100, 8)
    >>> out = chunked_attention(q, k, v, is_causal=True)
    >>> torch.testing.assert_close(out, ops.kernelized_attention(q, k, v, is_causal=True), rtol=1e-4, atol=1e-4)
    """
    asked = Request(mechanism, options, "chunked_attention", is_causal, offset)
    return in_torch(asked, (q, k, v, *parameters), key_padding_mask, cu_seqlens)


def _run(
    asked: Request, tensors: Sequence[Tensor], key_padding_mask: Tensor | None, cu_seqlens: tuple[list[int], list[int]] | None,
    initial: Sequence[Tensor] | None = None, with_state: bool = False,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The output and, where it is wanted, the parts of the final state."""
    mechanism, options, operation, is_causal, offset = asked
    q, k, v, *parameters = tensors
    if mechanism not in _FORMULATIONS:
        raise NotImplementedError(f"{operation}: no formulation of {mechanism} for {q.device}; move the tensors to the cpu")
    settings = _calls.settings(options)
    q, k = of_every_head(mechanism, q, k, v)
    check_shapes(asked, q, k, v, key_padding_mask)
    dtype = q.dtype
    # Without autocast, which would compute sums in half precision.
    with torch.autocast(q.device.type if autocasts(q.device.type) else "cpu", enabled=False):
        wide = torch.promote_types(torch.float32, dtype)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
        call = _call(q, k, v, [parameter.to(wide) for parameter in parameters], settings, is_causal, offset, key_padding_mask, initial)
        check_parameters(asked, call)
        if mechanism == "toeplitz":
            # Of the whole call, because packed sequences share its table.
            settings["first"] = 1 - q.shape[2] - offset
        if cu_seqlens is None:
            out, parts = _attend(mechanism, call, with_state)
            return out.to(dtype), parts
        check_packed(operation, cu_seqlens, q, k, key_padding_mask)
        queries, keys = cu_seqlens
        pieces = [
            _attend(mechanism, replace(_slices(mechanism, call, a, b, c, d), q=q[:, :, a:b], k=k[:, :, c:d], v=v[:, :, c:d]))[0]
            for a, b, c, d in zip(queries, queries[1:], keys, keys[1:])
        ]
        return torch.cat(pieces or [q.new_zeros((*q.shape[:3], v.shape[3]))], dim=2).to(dtype), []


def _attend(mechanism: str, call: Call, with_state: bool = False) -> tuple[Tensor, list[Tensor]]:
    """What is no number reaches the rows that see it, and no others."""
    formulation, state_after = _FORMULATIONS[mechanism]
    parts = state_after(call) if with_state and state_after is not None else []
    call = _PREPARED[mechanism](call) if mechanism in _PREPARED else call
    # A short convolution weighs only the rows within its width.
    call, rows = (call, None) if mechanism == "short-convolution" else call.apart()
    out = formulation(call)
    if state_after is None:
        out, parts = out
        if rows is not None and with_state:
            # The last row sees all keys.
            lost = rows.unflatten(1, (call.k.shape[1], call.group))[:, :, 0, -1]
            parts = [part.masked_fill(lost, torch.nan) for part in parts]
    return (out if rows is None else out.masked_fill(rows, torch.nan)), parts


def in_torch(
    call: Request, tensors: Sequence[Tensor], key_padding_mask: Tensor | None, packed: tuple[list[int], list[int]] | None
) -> Tensor:
    """`chunked_attention` of queries, keys, values and what the mechanism learns."""
    return _run(call, tensors, key_padding_mask, packed)[0]


def in_torch_with_states(
    call: Request, tensors: Sequence[Tensor], key_padding_mask: Tensor | None, sizes: Sequence[int], initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same, from the numbers of a state with parts of these sizes, or from none, and those of the state after the last key."""
    parts = None if initial is None else list(initial.split(list(sizes), -1))
    out, after = _run(call, tensors, key_padding_mask, None, parts, True)
    # Parts end in numbers that fill cache lines.
    filled = [F.pad(part, (0, size - part.shape[-1])) for part, size in zip(after, sizes)]
    return out, torch.cat(filled, -1)


def of_every_head(mechanism: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, once for each head of values that shares them."""
    heads = k.shape[1] if k.ndim == v.ndim == 4 and mechanism in ("gated", "delta") else 0
    if heads == 0 or v.shape[1] == heads or v.shape[1] % heads:
        return q, k
    return q.repeat_interleave(v.shape[1] // heads, 1), k.repeat_interleave(v.shape[1] // heads, 1)


def _call(
    q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], settings: dict[str, Any], *others: Any
) -> Call:
    """The parameters of positions apart from what the feature map of queries and of keys learns, and from gates."""
    if settings.get("gate") is True:
        *parameters, log_decay = parameters
        call = _call(q, k, v, parameters, {name: value for name, value in settings.items() if name != "gate"}, *others)
        if call.key_padding_mask is not None:
            log_decay = log_decay.masked_fill(call.key_padding_mask[:, None], 0)
        return replace(call, log_decay=log_decay)
    if settings.get("feature_map", "").startswith("hedgehog"):
        *parameters, of_queries, of_keys = parameters
        return Call(q, k, v, parameters, (of_queries, of_keys), settings, *others)
    return Call(q, k, v, parameters, (None, None), settings, *others)


def check_shapes(call: Request, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> None:
    mechanism, operation = call.mechanism, call.operation
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise ValueError(f"{operation}: {name}: expected four axes [batch, head, token, feature], "
                             f"got shape {tuple(tensor.shape)}")  # fmt: skip
    batch, heads, _, head_dim = q.shape
    _, kv_heads, keys, _ = k.shape
    if mechanism != "short-convolution" and head_dim == 0 and v.shape[3] > 0:
        raise ValueError(f"{operation}: q: expected heads of 1 feature or more, got 0")
    key_dim, value_dim = 1 if mechanism == "aft-conv" else head_dim, head_dim if mechanism.startswith("aft") else v.shape[3]
    for name, tensor, shape in (("k", k, (batch, kv_heads, keys, key_dim)),
                                ("v", v, (batch, kv_heads, keys, value_dim))):  # fmt: skip
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{operation}: {name}: expected shape {shape}, got shape {tuple(tensor.shape)}")
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"{operation}: q: expected a number of query heads that is a multiple of the {kv_heads} "
                         f"key/value heads, got {heads} heads")  # fmt: skip
    if key_padding_mask is not None and tuple(key_padding_mask.shape) != (batch, keys):
        raise ValueError(f"{operation}: key_padding_mask: expected shape {(batch, keys)}, "
                         f"got shape {tuple(key_padding_mask.shape)}")  # fmt: skip


def check_packed(
    operation: str, cu_seqlens: tuple[list[int], list[int]], q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None
) -> None:
    """Checks boundaries of packed sequences."""
    if key_padding_mask is not None:
        raise ValueError(f"{operation}: cu_seqlens: expected None beside a key_padding_mask (packed sequences have no padding), got both")
    if q.shape[0] != 1:
        raise ValueError(f"{operation}: batch: expected 1 for packed sequences, got {q.shape[0]}")
    queries, keys = cu_seqlens
    if len(queries) != len(keys):
        raise ValueError(f"{operation}: cu_seqlens: expected as many boundaries on the key axis as on the query axis, "
                         f"got {len(keys)} and {len(queries)}")  # fmt: skip
    for bounds, tokens in ((queries, q.shape[2]), (keys, k.shape[2])):
        if not bounds or bounds[0] != 0 or bounds[-1] != tokens or bounds != sorted(bounds):
            raise ValueError(f"{operation}: cu_seqlens: expected ascending from 0 to {tokens}, got {bounds}")


def check_parameters(asked: Request, call: Call) -> None:
    """Checks shapes that broadcasting would accept silently."""
    mechanism, operation, parameters, settings = asked.mechanism, asked.operation, call.parameters, call.settings
    _, heads, queries, head_dim = call.q.shape
    kv_heads, keys = call.k.shape[1], call.k.shape[2]
    wanted: list[tuple[int, ...]]
    token, decay = (call.k.shape[0], kv_heads, keys), settings.get("decay")
    gated = call.log_decay is not None or mechanism in ("gated", "delta")
    if gated and (not call.is_causal or call.offset or queries != keys):
        raise ValueError(f"{operation}: is_causal: expected a causal mask, an offset of 0 and as many queries as keys, got others")
    if call.log_decay is not None and tuple(call.log_decay.shape) != token:
        raise ValueError(f"{operation}: log_decay: expected shape {token}, got shape {tuple(call.log_decay.shape)}")
    if decay is not None and len(decay) != kv_heads:
        raise ValueError(f"{operation}: decay: expected one for each of the {kv_heads} key/value heads, got {len(decay)}")
    for matrix, of in zip(call.maps, (heads, kv_heads)):
        if matrix is not None and (matrix.shape[0], matrix.shape[-1]) != (of, head_dim):
            raise ValueError(f"{operation}: maps: expected shape ({of}, width, {head_dim}), got shape {tuple(matrix.shape)}")
    features = _calls.features(settings.get("feature_map", "elu+1"), head_dim)
    if mechanism == "shaw":
        rows = parameters[0].shape[-2]
        width = head_dim if settings.get("rel_feature_map", "same") == "same" else features
        wanted = [(heads, rows, width) if parameters[0].ndim == 3 else (rows, width)]
    elif mechanism == "toeplitz":
        table = settings.get("kind", "table") == "table" and not settings.get("centred")
        wanted = [(heads, queries + keys - 1) if table else (heads, *parameters[0].shape[1:])]
    elif mechanism == "short-convolution":
        wanted = [(kv_heads, parameters[0].shape[1], call.v.shape[3]), (kv_heads, call.v.shape[3])]
    elif mechanism in ("gated", "delta"):
        wanted = [(*token, head_dim) if parameter.ndim == 4 else token for parameter in parameters]
    elif mechanism == "aft-full":
        length = parameters[0].shape[0]
        wanted = [(length, length)] if len(parameters) == 1 else [(length, parameters[0].shape[1])] * 2
    elif mechanism == "aft-local":
        # A window is odd.
        wanted = [(parameters[0].shape[0] if settings.get("by_position") else queries, parameters[0].shape[1] | 1)]
    elif mechanism == "aft-conv":
        wanted = [(heads, *parameters[0].shape[1:]), (heads,), (heads,)]
        if settings.get("image") and (call.is_causal or call.offset or queries != keys or queries != math.prod(settings["image"])):
            raise ValueError(f"{operation}: image: expected as many queries and keys as the image has places, "
                             f"{math.prod(settings['image'])}, no mask of order and no offset")  # fmt: skip
    elif mechanism == "fourier":
        axes = settings.get("axes") or 1
        angles = features // 2 if settings.get("wave") == "pairs" else features
        wanted = [(kv_heads, angles, axes), *[(heads, features)] * len(parameters)]
        if settings.get("axes"):
            wanted[len(parameters) - 2 :] = [(call.q.shape[0], queries, axes), (call.q.shape[0], keys, axes)]
    else:
        wanted = []
    for parameter, shape in zip(parameters, wanted):
        if tuple(parameter.shape) != shape:
            raise ValueError(f"{operation}: parameters: expected shape {shape}, got shape {tuple(parameter.shape)}")


def _slices(mechanism: str, call: Call, a: int, b: int, c: int, d: int) -> Call:
    """The parameters of one packed sequence, queries ``a .. b`` and keys ``c .. d``."""
    if mechanism in ("gated", "delta"):
        return replace(call, parameters=[gates[:, :, c:d] for gates in call.parameters])
    if call.log_decay is not None:
        call = replace(call, log_decay=call.log_decay[:, :, c:d])
    if mechanism == "fourier" and call.settings.get("axes"):
        *others, queries, keys = call.parameters
        return replace(call, parameters=[*others, queries[:, a:b], keys[:, c:d]])
    if mechanism == "aft-local" and not call.settings.get("by_position"):
        return replace(call, parameters=[call.parameters[0][: b - a]])
    return call
