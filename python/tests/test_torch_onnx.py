"""Export to ONNX: what is refused, and what is not, in ONNX Runtime."""

import io

import pytest
import torch
from longspan import ops
from longspan.torch import MultiheadAttention, chunked_attention
from longspan.torch._chunked import RECURRENCE
from longspan.torch.onnx import export as linear_export

pytest.importorskip("onnxscript")


class Call(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, q, k, v):
        return self.function(q, k, v)


def inputs():
    torch.manual_seed(0)
    return torch.randn(3, 1, 2, 90, 8).unbind()


def export(function, *arguments, **options):
    return torch.onnx.export(Call(function).eval(), arguments, verbose=False, **{"dynamo": True, **options})


@pytest.mark.parametrize("function, message", [
    (lambda q, k, v: ops.kernelized_attention(q, k, v, is_causal=True),
     "kernelized_attention: torch.onnx.export: expected longspan.torch.onnx.export, which writes the operator LinearAttention"),
    (lambda q, k, v: ops.aft_simple(q, k, v), "aft_simple: .* ONNX has no operator for aft-simple"),
    (lambda q, k, v: ops.softmax_attention_step(q[:, :, 0], k[:, :, 0], v[:, :, 0])[0],
     "softmax_attention_step: .* ONNX has no operator for softmax"),
    (lambda q, k, v: MultiheadAttention(8, 2)(q[0], k[0], v[0])[0], "KernelizedAttention: .* longspan.torch.onnx.export"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_the_operators_are_refused(function, message):
    for exporter in ({}, {"dynamo": False, "f": io.BytesIO()}):
        with pytest.raises(Exception, match="(?s)" + message):
            export(function, *inputs(), **exporter)


@pytest.mark.parametrize("mechanism, options", [
    ("kernelized", '{"feature_map": "elu+1", "decay": [0.5, 0.9]}'),
    ("kernelized", '{"feature_map": "softplus", "normalize": false}'),
    ("aft-simple", "{}"), ("softmax", "{}"),
])  # fmt: skip
def test_the_formulation_in_torch_agrees_in_onnx_runtime(mechanism, options, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    attend = lambda q, k, v: chunked_attention(q, k, v, (), mechanism=mechanism, options=options, is_causal=True)  # noqa: E731
    tensors = inputs()
    export(attend, *tensors).save(tmp_path / "call.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "call.onnx")
    (got,) = session.run(None, {name: tensor.numpy() for name, tensor in zip("qkv", tensors)})
    torch.testing.assert_close(torch.from_numpy(got), attend(*tensors), rtol=1e-4, atol=1e-5)


class Model(torch.nn.Module):
    """A layer of attention between others."""

    def __init__(self, is_causal, **options):
        super().__init__()
        self.norm, self.is_causal = torch.nn.LayerNorm(16), is_causal
        self.attention = MultiheadAttention(16, 2, batch_first=True, **options)

    def forward(self, x):
        x = self.norm(x)
        return x + torch.nn.functional.gelu(self.attention(x, x, x, is_causal=self.is_causal, need_weights=False)[0])


@pytest.mark.parametrize("is_causal, options", [
    (True, {}), (True, {"feature_map": "taylor2"}), (True, {"feature_map": "prf:16:seed=1"}), (True, {"decay": [0.5, 0.9]}),
    (True, {"feature_map": "softplus", "normalize": False}), (True, {"num_kv_heads": 1}), (False, {}),
])  # fmt: skip
@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_kernelized_attention_becomes_the_operator_of_onnx(domain, is_causal, options):
    reference = pytest.importorskip("onnx.reference")
    torch.manual_seed(1)
    model, x = Model(is_causal, **options).eval(), torch.randn(2, 40, 16)
    tokens = torch.export.Dim("tokens", min=2)
    exported = linear_export(model, (x,), domain=domain, dynamic_shapes=({1: tokens},))
    assert [node.domain for node in exported.graph.node if node.op_type == "LinearAttention"] == [domain] * is_causal
    if domain:
        runtime = pytest.importorskip("onnxruntime")
        session = runtime.InferenceSession(exported.SerializeToString())
    else:
        session = reference.ReferenceEvaluator(exported)
    for tensor in (x, torch.randn(2, 57, 16)):
        (got,) = session.run(None, {exported.graph.input[0].name: tensor.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), model(tensor).detach(), rtol=2e-5, atol=2e-5)


def test_exports_that_cannot_be_are_refused():
    model, x = Model(True).eval(), torch.randn(2, 9, 16)
    with_state = Call(lambda q, k, v: ops.kernelized_attention(q, k, v, is_causal=True, output_final_state=True)[0]).eval()
    with pytest.raises(ValueError, match="export: domain: expected '' or 'com.microsoft', got 'ai.onnx'"):
        linear_export(model, (x,), domain="ai.onnx")
    with pytest.raises(ValueError, match="export: opset_version: expected to be left out, .* got 18"):
        linear_export(model, (x,), opset_version=18)
    with pytest.raises(Exception, match="(?s)aft_simple: .* ONNX has no operator for aft-simple"):
        linear_export(Call(ops.aft_simple).eval(), inputs())
    with pytest.raises(Exception, match="(?s)expected longspan.torch.onnx.export, .* without states"):
        linear_export(with_state, inputs())
    # Nothing is left behind: calls run by the kernels again.
    assert RECURRENCE.get() is None
