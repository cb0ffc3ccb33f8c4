"""Longspan in PyTorch: operators with gradients."""

from ._chunked import chunked_attention

__all__ = ["chunked_attention"]
