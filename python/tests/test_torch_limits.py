"""What callers bring at the edges: views, integers of NumPy, axes too many, masks beside offsets."""

import json

import longspan
import numpy as np
import pytest
import torch
from longspan import ops
from longspan.torch import (
    KernelizedAttention,
    MultiheadAttention,
    ShawAttention,
    TensorState,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    chunked_attention,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_tensors_that_stand_for_other_numbers_than_their_memory_holds(place: int, dtype: torch.dtype) -> None:
    negative = torch.randn(1, 1, 4, 2, dtype=torch.complex64).conj().imag
    nowhere = torch._efficientzerotensor((1, 1, 4, 2), dtype=dtype)
    assert negative.is_neg() and nowhere._is_zerotensor()
    for view in (negative.to(dtype) if dtype is torch.bfloat16 else negative, nowhere):
        tensors = [torch.randn(1, 1, 4, 2, dtype=dtype) for _ in range(3)]
        tensors[place] = view
        plain = [tensor.clone() for tensor in tensors]
        assert torch.equal(ops.kernelized_attention(*tensors), ops.kernelized_attention(*plain))
        q = torch.randn(1, 1, 4, 2, dtype=dtype, requires_grad=True)
        gradients = [torch.autograd.grad(ops.kernelized_attention(q, q, q), q, d)[0] for d in (view, view.clone())]
        assert torch.equal(*gradients)


@pytest.mark.parametrize("is_causal", [False, True])
def test_values_of_no_columns_have_gradients(is_causal: bool) -> None:
    q, k, v, rel = (torch.randn(shape, requires_grad=True) for shape in ((1, 2, 5, 4), (1, 2, 5, 4), (1, 2, 5, 0), (2, 7, 4)))
    for out in (ops.kernelized_attention(q, k, v, is_causal=is_causal), ops.shaw_attention(q, k, v, rel, is_causal=is_causal)):
        assert not any(gradient.any() for gradient in torch.autograd.grad(out.sum(), (q, k)))


@pytest.mark.parametrize("offset", [-3, 2])
def test_offsets_may_be_integers_of_numpy_or_torch(offset: int) -> None:
    random = np.random.default_rng(0)
    q, k, v = random.standard_normal((3, 1, 2, 20, 8)).astype("f4")
    bias = random.standard_normal((2, 39)).astype("f4")
    expected = ops.toeplitz_attention(q, k, v, bias, is_causal=True, offset=offset)
    for other in (np.int64(offset), torch.tensor(offset)):
        np.testing.assert_array_equal(ops.toeplitz_attention(q, k, v, bias, is_causal=True, offset=other), expected)


def test_integers_and_truth_values_may_be_numpys() -> None:
    x = np.random.default_rng(0).standard_normal((1, 2, 4, 4)).astype("f4")
    t = torch.from_numpy(x)
    for a, b in (
        (longspan.explain("shaw", radius=np.int64(16)), longspan.explain("shaw", radius=16)),
        (longspan.explain(queries=np.int32(64), decay=np.float32(0.5), offset=np.int8(3)), longspan.explain(queries=64, decay=0.5, offset=3)),
    ):
        assert a == b
    for a, b in (
        (ops.kernelized_attention(x, x, x, normalize=np.bool_(False)), ops.kernelized_attention(x, x, x, normalize=False)),
        (ops.kernelized_attention(x, x, x, cu_seqlens=[np.int64(0), np.int32(3), 4]), ops.kernelized_attention(x, x, x, cu_seqlens=[0, 3, 4])),
        (ops.softmax_attention(x, x, x, window=np.int64(2), scale=np.float32(0.5)), ops.softmax_attention(x, x, x, window=2, scale=0.5)),
        (ops.aft_full(x, x, x, np.eye(4, dtype="f4"), is_causal=True, offset=np.int64(0)), ops.aft_full(x, x, x, np.eye(4, dtype="f4"), is_causal=True)),
    ):
        np.testing.assert_array_equal(a, b)
    attention, other = (KernelizedAttention(2, 4, decay=decay) for decay in (np.float32(0.5), 0.5))
    assert torch.equal(attention(t, t, t, is_causal=True), other(t, t, t, is_causal=True))
    assert ShawAttention(np.int64(2), 4, radius=np.int64(3)).rel.shape == (2, 7, 4)
    for wrong in (True, 2.0, "2"):
        with pytest.raises(TypeError, match="window: expected an integer from 1 to 4194304, got"):
            ops.softmax_attention(x, x, x, window=wrong)
        with pytest.raises(TypeError, match="cu_seqlens: expected integers"):
            ops.kernelized_attention(x, x, x, cu_seqlens=[0, wrong, 4])


def test_a_step_takes_no_axis_of_tokens() -> None:
    encoder = TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    decoder = TransformerDecoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(3, 5, 16)
    with pytest.raises(ValueError, match=r"token: expected shape \(batch, d_model\), got shape \(3, 1, 16\)"):
        encoder.step(x[:, :1])
    with pytest.raises(ValueError, match=r"token: expected shape \(batch, d_model\)"):
        decoder.step(x[:, :1], x)
    assert encoder.step(x[:, 0])[0].shape == (3, 16)
    for wrong in (x[0, 0], x[:1, :3], x[:, 0, :8]):
        with pytest.raises(ValueError, match=r"MultiheadAttention.step: token: expected shape \(batch, 16\), got shape"):
            encoder.self_attn.step(wrong)


def test_a_mask_beside_an_offset_is_refused() -> None:
    attention = MultiheadAttention(16, 2, batch_first=True)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 7, 16)
    mask = torch.tensor([[False, True, True, True, True, True, True]])
    attention(q, k, k, attn_mask=mask)
    with pytest.raises(ValueError, match="attn_mask: expected None beside an offset"):
        attention(q, k, k, attn_mask=mask, offset=6)


FORMULATED = {
    "kernelized": {"feature_map": "exp"}, "shaw": {}, "fourier": {}, "toeplitz": {"kind": "clipped"}, "softmax": {},
    "aft-simple": {}, "aft-full": {}, "aft-local": {},
}  # fmt: skip


@pytest.mark.parametrize("mechanism", FORMULATED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_in_torch_what_is_no_number_reaches_the_rows_that_see_it(mechanism: str, bad: float) -> None:
    torch.manual_seed(0)
    q, k, v = torch.rand(3, 1, 2, 8, 4)
    parameters = {"shaw": [torch.rand(2, 5, 4)], "fourier": [torch.rand(2, 4, 1), torch.rand(2, 4), torch.rand(2, 4)],
                  "toeplitz": [torch.rand(2, 5)], "aft-full": [torch.rand(8, 8)], "aft-local": [torch.rand(8, 3)]}  # fmt: skip
    options = json.dumps(FORMULATED[mechanism])
    for which in (k, v):
        whole = chunked_attention(q, k, v, parameters.get(mechanism, ()), mechanism=mechanism, options=options, is_causal=True)
        kept, which[0, 1, 5] = which[0, 1, 5].clone(), bad
        out = chunked_attention(q, k, v, parameters.get(mechanism, ()), mechanism=mechanism, options=options, is_causal=True)
        which[0, 1, 5] = kept
        assert out[0, 0].equal(whole[0, 0])
        torch.testing.assert_close(out[0, 1, :5], whole[0, 1, :5])
        assert out[0, 1, 5:].isnan().all()
    window = dict(mechanism="softmax", options='{"window": 2}')
    v[0, 0, 3] = bad
    assert chunked_attention(q, k, v, **window)[0, 0].isnan().any(-1).tolist() == [False, False, True, True, True, False, False, False]


def test_a_negative_sum_under_the_literal_normaliser_is_no_number() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 30, 4)
    a, b, c = torch.randn(1, 4, 1), torch.randn(1, 4), torch.ones(1, 4)
    with pytest.raises(ValueError, match="negative"):
        ops.fourier_attention(q, k, v, a, b, c, normalizer="literal")
    out = torch.func.vmap(lambda v: ops.fourier_attention(q, k, v, a, b, c, normalizer="literal"))(v[None])
    assert 0 < out.isnan().all(-1).sum() < 30 and not (out == 0).all(-1).any()


def test_nested_and_sparse_tensors_are_refused() -> None:
    x = torch.randn(1, 2, 4, 3)
    for other in (x.to_sparse(), torch.nested.nested_tensor([x[0], x[0, :, :2]])):
        for tensors in ((other, x, x), (x, x, other)):
            with pytest.raises(TypeError, match="[qv]: expected a dense tensor, got"):
                ops.kernelized_attention(*tensors)


def test_masked_arrays_are_refused() -> None:
    x = np.ones((1, 1, 8, 4), "f4")
    masked = np.ma.masked_array(x, mask=x > 0)
    for tensors in ((masked, x, x), (x, x, masked)):
        with pytest.raises(TypeError, match="masked array"):
            ops.kernelized_attention(*tensors)
    with pytest.raises(TypeError, match="masked array"):
        ops.kernelized_attention(x, x, x, key_padding_mask=np.ma.masked_array(np.zeros((1, 8), bool), mask=True))


def test_the_default_device_does_not_matter() -> None:
    q = torch.randn(1, 2, 8, 4)
    expected = ops.kernelized_attention(q, q, q, cu_seqlens=[0, 4, 8])
    rel = torch.randn(2, 5, 4)
    halves = [ops.shaw_attention(x, x, x, rel, is_causal=True, output_final_state=True)[1] for x in q.split(4, 2)]
    states = [TensorState.of(half) for half in halves]
    states[0].numbers.requires_grad_()
    together = longspan.combine("shaw", *states, radius=2)
    with torch.device("meta"):
        with torch.autocast("cpu"):
            got = ops.kernelized_attention(q, q, q, cu_seqlens=[0, 4, 8])
        assert states[0].select([0, 0]).batch == 2
        torch.testing.assert_close(longspan.combine("shaw", *states, radius=2).numbers, together.numbers)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_autocast_gives_one_type() -> None:
    b = torch.randn(1, 1, 8, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        alone = ops.kernelized_attention(b, b, b, is_causal=True)
        with_state, state = ops.kernelized_attention(b, b, b, is_causal=True, output_final_state=True)
        token, _ = ops.kernelized_attention_step(b[:, :, 0], b[:, :, 0], b[:, :, 0])
    assert alone.dtype == with_state.dtype == token.dtype == torch.float32
    torch.testing.assert_close(with_state, alone)
    torch.testing.assert_close(token, alone[:, :, 0])
    assert isinstance(state, longspan.State)


def test_states_of_fake_tensors_are_fake() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode(), torch.no_grad():
        x = torch.randn(1, 1, 4, 2)
        out, state = ops.kernelized_attention(x, x, x, is_causal=True, output_final_state=True)
        assert isinstance(out, FakeTensor) and isinstance(state.numbers, FakeTensor)
        layer = TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        out, state = layer.step(torch.randn(2, 16))
        assert out.shape == (2, 16) and isinstance(state.numbers, FakeTensor)


def test_dropout_that_is_switched_on_in_evaluation_drops() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 16)
    layer = TransformerEncoderLayer(16, 2, 32, dropout=0.5, batch_first=True).eval()
    assert torch.equal(layer(x), layer(x))
    seen = []
    handle = layer.dropout1.register_forward_hook(lambda *_: seen.append(1))
    layer(x)
    assert seen == [1]
    handle.remove()
    for module in layer.modules():
        if isinstance(module, torch.nn.Dropout):
            module.train()
    assert (layer(x) - layer(x)).abs().max() > 0.1
    with torch.no_grad():
        assert (layer.step(x[:, 0])[0] - layer.step(x[:, 0])[0]).abs().max() > 0.1


def test_a_step_refuses_hooks_that_it_would_pass_over() -> None:
    layer = TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    token = torch.randn(1, 16)
    for module in (layer.self_attn, layer.self_attn.attention):
        handle = module.register_forward_hook(lambda module, inputs, out: out)
        with torch.no_grad(), pytest.raises(RuntimeError, match="step: forward hooks: expected none"):
            layer.step(token)
        handle.remove()
    with torch.no_grad():
        layer.step(token)


def test_sums_of_gated_states_have_gradients() -> None:
    torch.manual_seed(0)
    for gates in ((), (1,), (8,)):
        q, k, v = torch.randn(3, 2, 3, 20, 8, dtype=torch.float64)
        g = None if not gates else -torch.rand(2, 3, 20, *([8] if gates == (8,) else []), dtype=torch.float64)

        def state(part: slice, v: torch.Tensor, g: "torch.Tensor | None" = g) -> TensorState:
            own = None if g is None else g[:, :, part]
            tensors = q[:, :, part], k[:, :, part], v[:, :, part]
            return ops.gated_attention(*tensors, own, output_final_state=True)[1]

        learned = v.clone().requires_grad_()
        gate = {(): "none", (1,): "head", (8,): "channel"}[gates]
        both = longspan.combine("gated", state(slice(0, 9), learned), state(slice(9, 20), learned), gate=gate)
        whole = state(slice(0, 20), learned)
        torch.testing.assert_close(both.numbers, whole.numbers)
        weights = torch.randn_like(both.numbers)
        used = 64 + (0 if g is None else g[0, 0, 0].numel())
        weights[..., used:] = 0
        torch.testing.assert_close(*(torch.autograd.grad((one.numbers * weights).sum(), learned)[0] for one in (both, whole)))


def test_a_nan_in_a_short_convolution_reaches_the_rows_within_its_width_alone() -> None:
    q, k, v = (torch.ones(1, 1, 8, 2) for _ in range(3))
    v[0, 0, 2] = torch.nan
    out = chunked_attention(q, k, v, [torch.ones(1, 3, 2)], mechanism="short-convolution", options='{"silu": false}', is_causal=True)
    assert out[0, 0].isnan().any(-1).tolist() == [row in (2, 3, 4) for row in range(8)]


def test_in_torch_an_image_has_no_more_places_than_pixels() -> None:
    q = torch.randn(1, 1, 7, 2)
    for is_causal in (False, True):
        with pytest.raises(ValueError, match="bias: expected"):
            ops.toeplitz_attention(q, q, q, torch.zeros(1, 3, 5), kind="grid", is_causal=is_causal)
        with pytest.raises(ValueError, match="bias: expected"):
            chunked_attention(q, q, q, [torch.zeros(1, 3, 5)], mechanism="toeplitz", options='{"kind": "grid"}', is_causal=is_causal)


@pytest.mark.parametrize("gate", ["none", "head", "channel"])
def test_in_torch_no_tokens_have_gradients(gate: str) -> None:
    q, k, v = (torch.randn(2, 1, 0, 3, requires_grad=True) for _ in range(3))
    beta = torch.rand(2, 1, 0, requires_grad=True)
    gates = {"none": [], "head": [torch.rand(2, 1, 0, requires_grad=True)], "channel": [torch.rand(2, 1, 0, 3, requires_grad=True)]}[gate]
    for mechanism, given in (("gated", gates), ("delta", [*gates, beta])):
        out = chunked_attention(q, k, v, given, mechanism=mechanism, options=json.dumps({"gate": gate}), is_causal=True)
        assert out.shape == (2, 1, 0, 3) and all(x.shape for x in torch.autograd.grad(out.sum(), (q, k, v, *given)))


def test_rows_of_shaws_table_for_later_tokens_do_not_matter():
    """One exponent of all rows would let those that no token sees erase all that are seen."""
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 1, 2, 20, 4)
    rel = torch.randn(2, 7, 4)
    raised = rel.clone()
    raised[:, 4:] = 150
    kernels = [ops.shaw_attention(q, k, v, x, feature_map="exp", is_causal=True) for x in (rel, raised)]
    # Under a transform torch's own operations run.
    one = lambda q, k, v, x: ops.shaw_attention(q[None], k[None], v[None], x, feature_map="exp", is_causal=True)[0]  # noqa: E731
    own = [torch.func.vmap(one, (0, 0, 0, None))(q, k, v, x) for x in (rel, raised)]
    assert torch.equal(*kernels) and torch.equal(*own)
    torch.testing.assert_close(own[0], kernels[0])
