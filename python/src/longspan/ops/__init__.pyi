"""Types of `longspan.ops`; what the functions compute stands there. The functions below are written by `python stubs.py`.

Arrays of a call are all NumPy arrays or all torch tensors, and so is what comes back. ``state`` and ``initial_state`` also
take a `longspan.torch.TensorState`, which is what comes back where a tensor requires a gradient.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray

from .._native import State
from ..torch import TensorState

__all__ = [
    "State", "aft_conv", "aft_conv_step", "aft_full", "aft_full_step", "aft_local", "aft_local_step", "aft_simple",
    "aft_simple_step", "delta_attention", "delta_attention_step", "depthwise_convolution", "depthwise_convolution_step",
    "fourier_attention", "fourier_attention_step", "gated_attention", "gated_attention_step", "kernelized_attention",
    "kernelized_attention_step", "shaw_attention", "shaw_attention_step", "short_convolution", "short_convolution_step",
    "softmax_attention", "softmax_attention_step", "toeplitz_attention", "toeplitz_attention_step",
]  # fmt: skip

_Array = TypeVar("_Array", NDArray[Any], torch.Tensor)
_State = State | TensorState
_Boundaries = Sequence[int] | NDArray[np.integer[Any]] | torch.Tensor
_Packed = _Boundaries | tuple[_Boundaries, _Boundaries]

@overload
def aft_conv(
    q: _Array, k: _Array, v: _Array, w: _Array, *, gamma: _Array | None = None, beta: _Array | None = None,
    image: tuple[int, int] | None = None, is_causal: bool = False, offset: int = 0, key_padding_mask: _Array | None = None,
    cu_seqlens: _Packed | None = None, initial_state: _State | None = None, output_final_state: Literal[False] = False,
) -> _Array: ...  # fmt: skip
@overload
def aft_conv(
    q: _Array, k: _Array, v: _Array, w: _Array, *, gamma: _Array | None = None, beta: _Array | None = None,
    image: tuple[int, int] | None = None, is_causal: bool = False, offset: int = 0, key_padding_mask: _Array | None = None,
    cu_seqlens: _Packed | None = None, initial_state: _State | None = None, output_final_state: Literal[True],
) -> tuple[_Array, State]: ...  # fmt: skip
def aft_conv_step(
    q: _Array, k: _Array, v: _Array, w: _Array, state: _State | None = None, *, gamma: _Array | None = None, beta: _Array | None = None,
) -> tuple[_Array, State]: ...  # fmt: skip

@overload
def aft_full(
    q: _Array, k: _Array, v: _Array, w: _Array | None = None, u: _Array | None = None, z: _Array | None = None, *, is_causal: bool = False,
    offset: int = 0, key_padding_mask: _Array | None = None, initial_state: _State | None = None,
    output_final_state: Literal[False] = False,
) -> _Array: ...  # fmt: skip
@overload
def aft_full(
    q: _Array, k: _Array, v: _Array, w: _Array | None = None, u: _Array | None = None, z: _Array | None = None, *, is_causal: bool = False,
    offset: int = 0, key_padding_mask: _Array | None = None, initial_state: _State | None = None, output_final_state: Literal[True],
) -> tuple[_Array, State]: ...  # fmt: skip
def aft_full_step(
    q: _Array, k: _Array, v: _Array, w: _Array | None = None, u: _Array | None = None, z: _Array | None = None, state: _State | None = None,
) -> tuple[_Array, State]: ...  # fmt: skip

@overload
def aft_local(
    q: _Array, k: _Array, v: _Array, w: _Array, *, is_causal: bool = False, offset: int = 0, key_padding_mask: _Array | None = None,
    cu_seqlens: _Packed | None = None, initial_state: _State | None = None, output_final_state: Literal[False] = False,
) -> _Array: ...  # fmt: skip
@overload
def aft_local(
    q: _Array, k: _Array, v: _Array, w: _Array, *, is_causal: bool = False, offset: int = 0, key_padding_mask: _Array | None = None,
    cu_seqlens: _Packed | None = None, initial_state: _State | None = None, output_final_state: Literal[True],
) -> tuple[_Array, State]: ...  # fmt: skip
def aft_local_step(q: _Array, k: _Array, v: _Array, w: _Array, state: _State | None = None) -> tuple[_Array, State]: ...

@overload
def aft_simple(
    q: _Array, k: _Array, v: _Array, *, is_causal: bool = False, offset: int = 0, key_padding_mask: _Array | None = None,
    cu_seqlens: _Packed | None = None, initial_state: _State | None = None, output_final_state: Literal[False] = False,
) -> _Array: ...  # fmt: skip
@overload
def aft_simple(
    q: _Array, k: _Array, v: _Array, *, is_causal: bool = False, offset: int = 0, key_padding_mask: _Array | None = None,
    cu_seqlens: _Packed | None = None, initial_state: _State | None = None, output_final_state: Literal[True],
) -> tuple[_Array, State]: ...  # fmt: skip
def aft_simple_step(q: _Array, k: _Array, v: _Array, state: _State | None = None) -> tuple[_Array, State]: ...

@overload
def delta_attention(
    q: _Array, k: _Array, v: _Array, beta: _Array, log_decay: _Array | None = None, *, l2_norm: bool = True, scale: float | None = None,
    is_causal: bool = True, offset: int = 0, key_padding_mask: _Array | None = None, cu_seqlens: _Packed | None = None,
    initial_state: _State | None = None, output_final_state: Literal[False] = False,
) -> _Array: ...  # fmt: skip
@overload
def delta_attention(
    q: _Array, k: _Array, v: _Array, beta: _Array, log_decay: _Array | None = None, *, l2_norm: bool = True, scale: float | None = None,
    is_causal: bool = True, offset: int = 0, key_padding_mask: _Array | None = None, cu_seqlens: _Packed | None = None,
    initial_state: _State | None = None, output_final_state: Literal[True],
) -> tuple[_Array, State]: ...  # fmt: skip
def delta_attention_step(
    q: _Array, k: _Array, v: _Array, beta: _Array, log_decay: _Array | None = None, state: _State | None = None, *, l2_norm: bool = True,
    scale: float | None = None,
) -> tuple[_Array, State]: ...  # fmt: skip

@overload
def depthwise_convolution(
    x: _Array, taps: _Array, bias: _Array | None = None, *, silu: bool = False, key_padding_mask: _Array | None = None,
    cu_seqlens: _Packed | None = None, initial_state: _State | None = None, output_final_state: Literal[False] = False,
) -> _Array: ...  # fmt: skip
@overload
def depthwise_convolution(
    x: _Array, taps: _Array, bias: _Array | None = None, *, silu: bool = False, key_padding_mask: _Array | None = None,
    cu_seqlens: _Packed | None = None, initial_state: _State | None = None, output_final_state: Literal[True],
) -> tuple[_Array, State]: ...  # fmt: skip
def depthwise_convolution_step(
    x: _Array, taps: _Array, bias: _Array | None = None, state: _State | None = None, *, silu: bool = False,
) -> tuple[_Array, State]: ...  # fmt: skip

@overload
def fourier_attention(
    q: _Array, k: _Array, v: _Array, a: _Array, b: _Array | None = None, c: _Array | None = None, beta: _Array | None = None, *,
    q_positions: _Array | None = None, k_positions: _Array | None = None, normalizer: str = "one_plus", wave: str = "each",
    feature_map: str = "elu+1", maps: tuple[_Array, _Array] | None = None, is_causal: bool = False, offset: int = 0,
    key_padding_mask: _Array | None = None, cu_seqlens: _Packed | None = None, decay: float | Sequence[float] | None = None,
    log_decay: _Array | None = None, initial_state: _State | None = None, output_final_state: Literal[False] = False,
    algorithm: str = "auto",
) -> _Array: ...  # fmt: skip
@overload
def fourier_attention(
    q: _Array, k: _Array, v: _Array, a: _Array, b: _Array | None = None, c: _Array | None = None, beta: _Array | None = None, *,
    q_positions: _Array | None = None, k_positions: _Array | None = None, normalizer: str = "one_plus", wave: str = "each",
    feature_map: str = "elu+1", maps: tuple[_Array, _Array] | None = None, is_causal: bool = False, offset: int = 0,
    key_padding_mask: _Array | None = None, cu_seqlens: _Packed | None = None, decay: float | Sequence[float] | None = None,
    log_decay: _Array | None = None, initial_state: _State | None = None, output_final_state: Literal[True], algorithm: str = "auto",
) -> tuple[_Array, State]: ...  # fmt: skip
def fourier_attention_step(
    q: _Array, k: _Array, v: _Array, a: _Array, b: _Array | None = None, c: _Array | None = None, beta: _Array | None = None,
    state: _State | None = None, *, q_positions: _Array | None = None, k_positions: _Array | None = None, normalizer: str = "one_plus",
    wave: str = "each", feature_map: str = "elu+1", maps: tuple[_Array, _Array] | None = None, decay: float | Sequence[float] | None = None,
    log_decay: _Array | None = None,
) -> tuple[_Array, State]: ...  # fmt: skip

@overload
def gated_attention(
    q: _Array, k: _Array, v: _Array, log_decay: _Array | None = None, *, l2_norm: bool = False, scale: float | None = None,
    is_causal: bool = True, offset: int = 0, key_padding_mask: _Array | None = None, cu_seqlens: _Packed | None = None,
    initial_state: _State | None = None, output_final_state: Literal[False] = False,
) -> _Array: ...  # fmt: skip
@overload
def gated_attention(
    q: _Array, k: _Array, v: _Array, log_decay: _Array | None = None, *, l2_norm: bool = False, scale: float | None = None,
    is_causal: bool = True, offset: int = 0, key_padding_mask: _Array | None = None, cu_seqlens: _Packed | None = None,
    initial_state: _State | None = None, output_final_state: Literal[True],
) -> tuple[_Array, State]: ...  # fmt: skip
def gated_attention_step(
    q: _Array, k: _Array, v: _Array, log_decay: _Array | None = None, state: _State | None = None, *, l2_norm: bool = False,
    scale: float | None = None,
) -> tuple[_Array, State]: ...  # fmt: skip

@overload
def kernelized_attention(
    q: _Array, k: _Array, v: _Array, *, feature_map: str = "elu+1", maps: tuple[_Array, _Array] | None = None, is_causal: bool = False,
    offset: int = 0, key_padding_mask: _Array | None = None, cu_seqlens: _Packed | None = None,
    decay: float | Sequence[float] | None = None, log_decay: _Array | None = None, normalize: bool = True,
    initial_state: _State | None = None, output_final_state: Literal[False] = False, algorithm: str = "auto",
) -> _Array: ...  # fmt: skip
@overload
def kernelized_attention(
    q: _Array, k: _Array, v: _Array, *, feature_map: str = "elu+1", maps: tuple[_Array, _Array] | None = None, is_causal: bool = False,
    offset: int = 0, key_padding_mask: _Array | None = None, cu_seqlens: _Packed | None = None,
    decay: float | Sequence[float] | None = None, log_decay: _Array | None = None, normalize: bool = True,
    initial_state: _State | None = None, output_final_state: Literal[True], algorithm: str = "auto",
) -> tuple[_Array, State]: ...  # fmt: skip
def kernelized_attention_step(
    q: _Array, k: _Array, v: _Array, state: _State | None = None, *, feature_map: str = "elu+1", maps: tuple[_Array, _Array] | None = None,
    decay: float | Sequence[float] | None = None, log_decay: _Array | None = None, normalize: bool = True,
) -> tuple[_Array, State]: ...  # fmt: skip

@overload
def shaw_attention(
    q: _Array, k: _Array, v: _Array, rel: _Array, *, kernelized: bool = True, feature_map: str = "elu+1",
    maps: tuple[_Array, _Array] | None = None, rel_feature_map: str = "same", is_causal: bool = False, offset: int = 0,
    key_padding_mask: _Array | None = None, cu_seqlens: _Packed | None = None, decay: float | Sequence[float] | None = None,
    log_decay: _Array | None = None, normalize: bool = True, initial_state: _State | None = None,
    output_final_state: Literal[False] = False, algorithm: str = "auto",
) -> _Array: ...  # fmt: skip
@overload
def shaw_attention(
    q: _Array, k: _Array, v: _Array, rel: _Array, *, kernelized: bool = True, feature_map: str = "elu+1",
    maps: tuple[_Array, _Array] | None = None, rel_feature_map: str = "same", is_causal: bool = False, offset: int = 0,
    key_padding_mask: _Array | None = None, cu_seqlens: _Packed | None = None, decay: float | Sequence[float] | None = None,
    log_decay: _Array | None = None, normalize: bool = True, initial_state: _State | None = None, output_final_state: Literal[True],
    algorithm: str = "auto",
) -> tuple[_Array, State]: ...  # fmt: skip
def shaw_attention_step(
    q: _Array, k: _Array, v: _Array, rel: _Array, state: _State | None = None, *, kernelized: bool = True, feature_map: str = "elu+1",
    maps: tuple[_Array, _Array] | None = None, rel_feature_map: str = "same", decay: float | Sequence[float] | None = None,
    log_decay: _Array | None = None, normalize: bool = True,
) -> tuple[_Array, State]: ...  # fmt: skip

@overload
def short_convolution(
    q: _Array, k: _Array, v: _Array, taps: _Array, *, silu: bool = True, is_causal: bool = False, offset: int = 0,
    key_padding_mask: _Array | None = None, cu_seqlens: _Packed | None = None, initial_state: _State | None = None,
    output_final_state: Literal[False] = False,
) -> _Array: ...  # fmt: skip
@overload
def short_convolution(
    q: _Array, k: _Array, v: _Array, taps: _Array, *, silu: bool = True, is_causal: bool = False, offset: int = 0,
    key_padding_mask: _Array | None = None, cu_seqlens: _Packed | None = None, initial_state: _State | None = None,
    output_final_state: Literal[True],
) -> tuple[_Array, State]: ...  # fmt: skip
def short_convolution_step(
    q: _Array, k: _Array, v: _Array, taps: _Array, state: _State | None = None, *, silu: bool = True,
) -> tuple[_Array, State]: ...  # fmt: skip

@overload
def softmax_attention(
    q: _Array, k: _Array, v: _Array, *, scale: float | None = None, capacity: int = 4096, window: int | None = None,
    is_causal: bool = False, offset: int = 0, key_padding_mask: _Array | None = None, cu_seqlens: _Packed | None = None,
    initial_state: _State | None = None, output_final_state: Literal[False] = False,
) -> _Array: ...  # fmt: skip
@overload
def softmax_attention(
    q: _Array, k: _Array, v: _Array, *, scale: float | None = None, capacity: int = 4096, window: int | None = None,
    is_causal: bool = False, offset: int = 0, key_padding_mask: _Array | None = None, cu_seqlens: _Packed | None = None,
    initial_state: _State | None = None, output_final_state: Literal[True],
) -> tuple[_Array, State]: ...  # fmt: skip
def softmax_attention_step(
    q: _Array, k: _Array, v: _Array, state: _State | None = None, *, scale: float | None = None, capacity: int = 4096,
    window: int | None = None,
) -> tuple[_Array, State]: ...  # fmt: skip

@overload
def toeplitz_attention(
    q: _Array, k: _Array, v: _Array, bias: _Array, *, kind: str = "table", max_distance: int = 128, bidirectional: bool = True,
    feature_map: str = "elu+1", maps: tuple[_Array, _Array] | None = None, is_causal: bool = False, offset: int = 0,
    key_padding_mask: _Array | None = None, cu_seqlens: _Packed | None = None, normalize: bool = True, initial_state: _State | None = None,
    output_final_state: Literal[False] = False, algorithm: str = "auto",
) -> _Array: ...  # fmt: skip
@overload
def toeplitz_attention(
    q: _Array, k: _Array, v: _Array, bias: _Array, *, kind: str = "table", max_distance: int = 128, bidirectional: bool = True,
    feature_map: str = "elu+1", maps: tuple[_Array, _Array] | None = None, is_causal: bool = False, offset: int = 0,
    key_padding_mask: _Array | None = None, cu_seqlens: _Packed | None = None, normalize: bool = True, initial_state: _State | None = None,
    output_final_state: Literal[True], algorithm: str = "auto",
) -> tuple[_Array, State]: ...  # fmt: skip
def toeplitz_attention_step(
    q: _Array, k: _Array, v: _Array, bias: _Array, state: _State | None = None, *, kind: str = "table", max_distance: int = 128,
    bidirectional: bool = True, feature_map: str = "elu+1", maps: tuple[_Array, _Array] | None = None, normalize: bool = True,
) -> tuple[_Array, State]: ...  # fmt: skip
