"""Longspan in PyTorch: modules, layers, and what `longspan.ops` does with tensors.

`longspan.ops` takes tensors and gives gradients by itself; here are the modules around it. `MultiheadAttention` is a drop-in
for torch's, `TransformerEncoderLayer` and `TransformerDecoderLayer` fit torch's stacks, `KernelizedAttention`,
`ShawAttention` ... are single mechanisms, and `chunked_attention` is the formulation that tensors on other devices get.
"""

import sys as _sys
from pathlib import Path as _Path

import torch as _torch

from .._native import State as _State
from .._native import use_openmp_of as _use_openmp_of
from ._check import check
from ._chunked import chunked_attention
from ._states import TensorState
from .aft import AftConv, AftFull, AftLocal, AftSimple
from .gated import DeltaAttention, GatedAttention, GatedDeltaAttention
from .gated_norm import GatedRMSNorm
from .layers import TransformerDecoderLayer, TransformerEncoderLayer
from .mechanisms import (
    FourierAttention,
    KernelizedAttention,
    ShawAttention,
    ShortConvolution,
    SoftmaxAttention,
    ToeplitzAttention,
)
from .multi_head import MultiheadAttention

# Torch's threads spin for a while after each of its operations: kernels on threads of their own would get half of each core.
_library = "libtorch_cpu.dylib" if _sys.platform == "darwin" else "libtorch_cpu.so"
_use_openmp_of(str(_Path(_torch.__file__).with_name("lib") / _library), _torch.get_num_threads)

# Plain values: `torch.load` reads them with ``weights_only``.
_torch.serialization.add_safe_globals([_State, TensorState])

__all__ = [
    "AftConv",
    "AftFull",
    "AftLocal",
    "AftSimple",
    "DeltaAttention",
    "FourierAttention",
    "GatedAttention",
    "GatedDeltaAttention",
    "GatedRMSNorm",
    "KernelizedAttention",
    "MultiheadAttention",
    "ShawAttention",
    "ShortConvolution",
    "SoftmaxAttention",
    "TensorState",
    "ToeplitzAttention",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "check",
    "chunked_attention",
]
