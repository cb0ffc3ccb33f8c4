"""Export to ONNX, with its own operator for linear attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._chunked import RECURRENCE

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["export"]

#: The operator, under a name that no converter of versions knows and so leaves alone.
_DOMAIN, _OPERATOR, _OPSET = "longspan", "LinearAttention", 27
#: The newest that torch writes, from which onnx converts to 27.
_WRITTEN = 25
#: The newest that ONNX Runtime reads beside operators of its own.
_READ = 23


def export(
    model: torch.nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, domain: str = "",
    **options: Any,
) -> ModelProto:  # fmt: skip
    """Exports a model whose attention is kernelized to ONNX.

    A causal call becomes the operator ``LinearAttention``, with the feature map and the division by the sum of weights around
    it in other operators; without a mask it is products of matrices. Any number of tokens may be left open.

    Parameters
    ----------
    model, args, kwargs
        A module, and what it is called with, as in `torch.onnx.export`. Exported without gradients, so call ``eval()`` first.
    domain : {"", "com.microsoft"}, optional
        Whose ``LinearAttention``: ONNX's of opset 27, or ONNX Runtime's own, which releases of it run that do not read opset 27
        yet.
    **options
        Of `torch.onnx.export`, such as ``dynamic_shapes``, ``input_names`` and ``output_names``.

    Returns
    -------
    onnx.ModelProto
        For `onnx.save`.

    Raises
    ------
    ImportError
        Without the packages ``onnx`` (of opset 27) and ``onnxscript``.
    ValueError
        For another domain, or an option that is settled here.
    RuntimeError
        For another mechanism, a state, and all that `torch.onnx.export` refuses.

    Notes
    -----
    Protocol buffers hold 2 GB; a larger model does not pass through the conversion to opset 27.

    References
    ----------
    ONNX operators, ``LinearAttention``: https://onnx.ai/onnx/operators/onnx__LinearAttention.html

    Examples
    --------
    >>> import torch
    >>> from longspan.torch import KernelizedAttention
    >>> from longspan.torch.onnx import export
    >>> class Causal(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.attention = KernelizedAttention(2, 8)
    ...     def forward(self, q, k, v):
    ...         return self.attention(q, k, v, is_causal=True)
    >>> exported = export(Causal().eval(), torch.randn(3, 1, 2, 16, 8).unbind())
    >>> [node.op_type for node in exported.graph.node].count("LinearAttention")
    1
    """
    if domain not in ("", "com.microsoft"):
        raise ValueError(f"export: domain: expected '' or 'com.microsoft', got {domain!r}")
    settled = sorted({"dynamo", "opset_version", "f"} & set(options))
    if settled:
        raise ValueError(f"export: {settled[0]}: expected to be left out, because it is settled here, got {options[settled[0]]!r}")
    import onnx
    import onnx.version_converter

    if not domain and onnx.defs.onnx_opset_version() < _OPSET:
        raise ImportError(f"export: onnx: expected a release that has opset {_OPSET}, got {onnx.__version__}; upgrade it, or export "
                          "with domain='com.microsoft'")  # fmt: skip
    token = RECURRENCE.set(_linear_attention)
    try:
        program = torch.onnx.export(
            model, tuple(args), kwargs=None if kwargs is None else dict(kwargs), dynamo=True, verbose=False,
            opset_version=_READ if domain else _WRITTEN, **options,
        )  # fmt: skip
    finally:
        RECURRENCE.reset(token)
    assert program is not None
    proto: ModelProto = program.model_proto
    if not domain:
        proto = onnx.version_converter.convert_version(proto, _OPSET)
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        for node in nodes:
            if (node.domain, node.op_type) == (_DOMAIN, _OPERATOR):
                node.domain = domain
    kept = [entry for entry in proto.opset_import if entry.domain != _DOMAIN]
    if domain:
        kept.append(onnx.helper.make_opsetid(domain, 1))
    del proto.opset_import[:]
    proto.opset_import.extend(kept)
    onnx.checker.check_model(proto)
    return proto


def _linear_attention(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None) -> Tensor:
    """``sum_j gamma^(i-j) (q_i . k_j) v_j`` over ``j <= i``, for ``[batch, heads, tokens, ...]``, as the operator."""
    batch, heads, tokens, width = q.shape

    def packed(x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    inputs: list[Tensor | None] = [packed(q), packed(k), packed(v)]
    if gamma is not None:
        # The third input is a state to begin with.
        decay = gamma.log().reshape(1, 1, heads).expand(batch, tokens, heads)
        inputs += [None, decay]
    out, _ = torch.onnx.ops.symbolic_multi_out(
        f"{_DOMAIN}::{_OPERATOR}",
        inputs,
        {"q_num_heads": heads, "kv_num_heads": heads, "scale": 1.0, "update_rule": "linear" if gamma is None else "gated"},
        dtypes=(v.dtype, v.dtype),
        shapes=((batch, tokens, heads * v.shape[3]), (batch, heads, width, v.shape[3])),
        version=1,
    )
    rows: Tensor = out.unflatten(2, (heads, v.shape[3])).transpose(1, 2)
    return rows
