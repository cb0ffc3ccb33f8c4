"""Longspan in PyTorch: modules, layers, and what `longspan.ops` does with tensors.

`longspan.ops` takes tensors and gives gradients by itself; here are the modules around it. `MultiheadAttention` is a drop-in
for torch's, `TransformerEncoderLayer` and `TransformerDecoderLayer` fit torch's stacks, `KernelizedAttention`,
`ShawAttention` ... are single mechanisms, and `chunked_attention` is the formulation that tensors on other devices get.
"""

from ._chunked import chunked_attention
from .layers import TransformerDecoderLayer, TransformerEncoderLayer
from .mechanisms import AftSimple, FourierAttention, KernelizedAttention, ShawAttention
from .multi_head import MultiheadAttention

__all__ = [
    "AftSimple",
    "FourierAttention",
    "KernelizedAttention",
    "MultiheadAttention",
    "ShawAttention",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "chunked_attention",
]
