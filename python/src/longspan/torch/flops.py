"""Formulas for `torch.utils.flop_counter`: once this module is imported it counts calls and their backward.

Not part of ``import longspan.torch``, because torch's counter takes longer to import than all of that.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import _calls
from . import _operators as _operators


def _flops(
    tensors: Sequence[Tensor], mechanism: str, options: str, operation: str, is_causal: bool, offset: int
) -> int:
    """Operations of the forward by the cost model, for the algorithm that runs."""
    q, k, v, *parameters = tensors
    (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
    algorithm, _, estimates = _calls.mechanism(mechanism, options, operation, parameters, q, offset).plan(
        (batch, heads, kv_heads, queries, keys, head_dim, v.shape[3]), is_causal, offset, True
    )
    return round(next(estimate["flops"] for estimate in estimates if estimate["algorithm"] == algorithm))


@register_flop_formula(torch.ops.longspan.attention, get_raw=True)
def _forward(q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], *rest: Any, **others: Any) -> int:
    return _flops((q, k, v, *parameters), *rest[-5:])


@register_flop_formula(torch.ops.longspan.attention_backward, get_raw=True)
def _backward(
    d_out: Tensor, d_final: Tensor, q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], *rest: Any, **others: Any
) -> int:
    """As two forwards: as torch counts a linear layer's."""
    return 2 * _flops((q, k, v, *parameters), *rest[-5:])
