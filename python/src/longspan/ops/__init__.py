"""Attention on NumPy arrays and torch tensors.

Shapes are ``[batch, head, token, feature]``: ``q`` is ``[B, H, Lq, d]``, ``k`` ``[B, Hkv, Lk, d]``, ``v`` ``[B, Hkv, Lk, dv]``
and the output ``[B, H, Lq, dv]``; ``H`` is a multiple of ``Hkv`` (grouped queries). All arrays of a call are of one kind
(NumPy, or torch on one device) and one type: float32, float64, or float16 and bfloat16, which are computed in float32.

**Copies.** Arrays and CPU tensors of float32 and float64 whose last axis is contiguous are read where they lie, whatever
the other strides (so a transposed projection is no copy), and results are returned without one. Copied first are half
precision, negative strides, a last axis with gaps, misaligned or byte-swapped memory.

**Torch.** Tensors that require a gradient, and whatever happens under ``torch.compile`` or ``torch.export``, go through the
operators of `longspan.torch`; tensors on another device through its chunked formulation, on that device.

**Errors.** A wrong argument is a ``TypeError`` or ``ValueError`` that names the function, the argument, what was expected and
what came; too little memory a ``MemoryError``. Nothing is lost: arrays and states stay as they were.

**Arguments that mean the same everywhere.**

``is_causal``
    Query ``i`` sees the keys ``j <= i + offset``. Otherwise every query sees every key.
``offset``
    Query ``i`` stands at key ``i + offset``. 0 aligns the starts, ``Lk - Lq`` the ends; also what relative distances
    ``j - (i + offset)`` refer to.
``key_padding_mask``
    ``[B, Lk]`` of bool, **True is ignored**, as in torch. A row that sees no key gives 0.
``cu_seqlens``
    Several sequences end to end on the token axis, ``B = 1``: ``[0, end of the first, ..., L]``, or a pair of such lists
    for the query and the key axis.
``decay``
    A number in (0, 1], or one for each key/value head: the weight of a key falls by it with every token. Causal only.
``log_decay``
    In its place a number that each token brings, at most 0, ``[B, Hkv, L]``: the weight of key ``j`` for row ``i`` is multiplied by
    ``exp(log_decay[j + 1] + ... + log_decay[i])``, without those of ignored keys. Has a gradient. Causal only, without ``offset``.
``normalize``
    Divide by the sum of the weights.
``initial_state``, ``output_final_state``
    The `State` of the tokens before, and whether to return ``(output, state)``. Causal. Where a tensor requires a
    gradient the state is a `longspan.torch.TensorState`, through which gradients flow.
``algorithm``
    ``"auto"`` or one of `longspan.mechanisms`' names for the mechanism. All are exact; see `longspan.explain`.

**Steps.** The functions in ``_step`` take one token of causal attention, ``q [B, H, d]``, ``k [B, Hkv, d]``, ``v [B, Hkv, dv]``, or
each with a token axis of length 1, which the output then has, too, and the ``state`` that a call or the last step returned;
``None`` starts a sequence. They return the output ``[B, H, dv]`` and the state with the token taken in, a `State` changed in place.
What else they take is as in the call, and options are the same for all tokens of a state. But for softmax and AFT-full neither time
nor memory depends on how many tokens came before.

A sequence cut in two is the same sequence, but for ignored tokens at the end of a piece: they are not part of it, so what comes after
them moves up (cut before them, or ignore none there).

>>> import numpy as np
>>> from longspan import ops
>>> x = np.random.default_rng(0).standard_normal((1, 2, 100, 8), np.float32)
>>> whole = ops.kernelized_attention(x, x, x, is_causal=True)
>>> first, second = x[:, :, :60], x[:, :, 60:]
>>> _, state = ops.kernelized_attention(first, first, first, is_causal=True, output_final_state=True)
>>> rest = ops.kernelized_attention(second, second, second, is_causal=True, initial_state=state)
>>> np.allclose(rest, whole[:, :, 60:], atol=1e-5)
True

Token by token:

>>> state = None
>>> for t in range(100):
...     out, state = ops.kernelized_attention_step(x[:, :, t], x[:, :, t], x[:, :, t], state)
>>> np.allclose(out, whole[:, :, -1], atol=1e-4)
True
"""

from .._native import State
from ._aft import aft_conv, aft_conv_step, aft_full, aft_full_step, aft_local, aft_local_step, aft_simple, aft_simple_step
from ._convolution import depthwise_convolution, depthwise_convolution_step, short_convolution, short_convolution_step
from ._fourier import fourier_attention, fourier_attention_step
from ._gated import delta_attention, delta_attention_step, gated_attention, gated_attention_step
from ._kernelized import kernelized_attention, kernelized_attention_step
from ._shaw import shaw_attention, shaw_attention_step
from ._softmax import softmax_attention, softmax_attention_step
from ._toeplitz import toeplitz_attention, toeplitz_attention_step

__all__ = sorted(name for name in globals() if not name.startswith("_"))
