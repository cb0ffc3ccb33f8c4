"""Longspan in PyTorch: modules, layers, and what `longspan.ops` does with tensors.

`longspan.ops` takes tensors and gives gradients by itself; here are the modules around it. `MultiheadAttention` is a drop-in
for torch's, `TransformerEncoderLayer` and `TransformerDecoderLayer` fit torch's stacks, `KernelizedAttention`,
`ShawAttention` ... are single mechanisms, and `chunked_attention` is the formulation that tensors on other devices get.
"""

from ._chunked import chunked_attention
from ._states import TensorState
from .layers import TransformerDecoderLayer, TransformerEncoderLayer
from .mechanisms import (
    AftConv,
    AftFull,
    AftLocal,
    AftSimple,
    FourierAttention,
    KernelizedAttention,
    ShawAttention,
    SoftmaxAttention,
    ToeplitzAttention,
)
from .multi_head import MultiheadAttention

__all__ = [
    "AftConv",
    "AftFull",
    "AftLocal",
    "AftSimple",
    "FourierAttention",
    "KernelizedAttention",
    "MultiheadAttention",
    "ShawAttention",
    "SoftmaxAttention",
    "TensorState",
    "ToeplitzAttention",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "chunked_attention",
]
