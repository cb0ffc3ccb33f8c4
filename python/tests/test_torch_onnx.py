"""Export to ONNX: what is refused, and what is not, in ONNX Runtime."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from longspan import ops  # noqa: E402
from longspan.torch import MultiheadAttention, chunked_attention  # noqa: E402


class Call(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, q, k, v):
        return self.function(q, k, v)


def inputs():
    torch.manual_seed(0)
    return torch.randn(3, 1, 2, 90, 8).unbind()


def export(function, *arguments):
    return torch.onnx.export(Call(function).eval(), arguments, dynamo=True, verbose=False)


@pytest.mark.parametrize("function, message", [
    (lambda q, k, v: ops.kernelized_attention(q, k, v, is_causal=True),
     "kernelized_attention: .* LinearAttention, is of opset 27, .*; for ONNX call longspan.torch.chunked_attention"),
    (lambda q, k, v: ops.aft_simple(q, k, v), "aft_simple: .* ONNX has no operator for aft-simple"),
    (lambda q, k, v: ops.softmax_attention_step(q[:, :, 0], k[:, :, 0], v[:, :, 0])[0],
     "softmax_attention_step: .* ONNX has no operator for softmax"),
    (lambda q, k, v: MultiheadAttention(8, 2)(q[0], k[0], v[0])[0], "KernelizedAttention: .* LinearAttention"),
])  # fmt: skip
def test_the_operators_are_refused(function, message):
    with pytest.raises(Exception, match="(?s)" + message):
        export(function, *inputs())


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
