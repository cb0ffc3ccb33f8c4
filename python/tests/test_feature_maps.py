"""Feature maps of whole rows: the definition, streams, gradients, modules, and the formulation for other devices."""

from functools import partial

import definition
import numpy as np
import pytest
import torch
from agreement import elsewhere, padding, same_gradients, steps
from longspan import _calls, _native, ops
from longspan.torch import MultiheadAttention
from test_ops import close, inputs, streamed

NAMES = ["prf", "prf:7:seed=3", "nprf:6", "dpfp", "dpfp:2", "taylor2", "hedgehog", "hedgehog:3", "hedgehog:exp"]
EVERY = pytest.mark.parametrize("name", NAMES)


def draw(*shape):
    return 0.5 * np.random.default_rng(sum(shape)).standard_normal(shape)


def maps(name, heads=4, kv_heads=2, d=5):
    if not name.startswith("hedgehog"):
        return None
    width = _calls.features(name, d) // 2
    return draw(heads, width, d), draw(kv_heads, width, d)


@pytest.mark.parametrize("is_causal", [False, True])
def test_where_single_precision_ends(is_causal):
    v = np.arange(12, dtype=np.float32).reshape(1, 1, 3, 4)
    whole = np.cumsum(v, 2) / np.arange(1, 4)[:, None] if is_causal else np.broadcast_to(v.mean(2, keepdims=True), v.shape)

    def out(x, feature_map, dtype=np.float32):
        q = np.full((1, 1, 3, 4), x, dtype)
        return ops.kernelized_attention(q, q, v.astype(dtype), feature_map=feature_map, is_causal=is_causal)

    for feature_map in ("elu+1", "softplus"):
        np.testing.assert_allclose(out(-43, feature_map), whole, rtol=1e-5)
        np.testing.assert_array_equal(out(-45, feature_map), 0)
        np.testing.assert_allclose(out(-300, feature_map, np.float64), whole, rtol=1e-5)
    np.testing.assert_allclose(out(-1000, "exp"), whole, rtol=1e-5)


@EVERY
@pytest.mark.parametrize("is_causal", [False, True])
def test_kernelized_is_the_definition(name, is_causal):
    q, k, v = inputs(queries=70, keys=70)
    learned = maps(name)
    rows = _native.random_rows(name, 5)
    assert (rows is not None) == (name.startswith(("prf", "nprf")))
    fq = definition.lifted(name, q, None if learned is None else learned[0], rows)
    fk = definition.lifted(name, k, None if learned is None else learned[1], rows).repeat(2, 1)
    if not name.startswith("taylor2"):
        assert fq.shape[-1] == _calls.features(name, 5)
    weights = fq @ fk.swapaxes(-1, -2)
    weights = np.where(definition.visible(70, 70, is_causal, 0, None, 2), weights, 0)
    got = ops.kernelized_attention(q, k, v, feature_map=name, maps=learned, is_causal=is_causal)
    close(got, definition.weighted(weights, v.repeat(2, 1)), terms=1e4)


@EVERY
def test_token_by_token(name):
    q, k, v = inputs(queries=20, keys=20)
    options = {"feature_map": name, "maps": maps(name)}
    expected, end = ops.kernelized_attention(q, k, v, is_causal=True, output_final_state=True, **options)
    got, state = streamed(partial(ops.kernelized_attention_step, **options), q, k, v)
    close(got, expected, terms=1e4)
    assert state.parts == end.parts


@EVERY
def test_toeplitz_token_by_token(name):
    q, k, v = inputs(queries=20, keys=20)
    options = {"feature_map": name, "maps": maps(name), "kind": "clipped"}
    bias = draw(4, 7)
    expected = ops.toeplitz_attention(q, k, v, bias, is_causal=True, **options)
    close(streamed(partial(ops.toeplitz_attention_step, bias=bias, **options), q, k, v)[0], expected, terms=1e4)


def test_random_rows_are_drawn_from_the_seed():
    q, k, v = inputs()
    one, same, other = (ops.kernelized_attention(q, k, v, feature_map=f"prf:9:seed={seed}") for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 1e-3
    # They stand for softmax attention: the more of them, the closer.
    softmax = ops.softmax_attention(q, k.repeat(2, 1), v.repeat(2, 1))
    errors = [np.abs(ops.kernelized_attention(q, k, v, feature_map=f"prf:{n}") - softmax).mean() for n in (8, 4096)]
    assert errors[1] < 0.3 * errors[0]


Q, K, V = inputs()
WRONG = [
    (ValueError, "unknown feature map", lambda: ops.kernelized_attention(Q, K, V, feature_map="prf:x")),
    (ValueError, "feature map", lambda: ops.kernelized_attention(Q, K, V, feature_map="dpfp:0")),
    (TypeError, "maps: expected \\(map of queries", lambda: ops.kernelized_attention(Q, K, V, feature_map="hedgehog")),
    (ValueError, "maps: expected None", lambda: ops.kernelized_attention(Q, K, V, maps=maps("hedgehog"))),
    (ValueError, "map_keys: expected shape", lambda: ops.kernelized_attention(
        Q, K, V, feature_map="hedgehog", maps=(maps("hedgehog")[0],) * 2)),
    (ValueError, "map of queries: expected shape", lambda: ops.kernelized_attention(
        Q, K, V, feature_map="hedgehog", maps=(draw(3), draw(3)))),
]  # fmt: skip


@pytest.mark.parametrize("kind, message, call", WRONG, ids=[message for _, message, _ in WRONG])
def test_wrong_calls(kind, message, call):
    with pytest.raises(kind, match=message):
        call()


def tensors(name, mechanism):
    """A call of the mechanism under the map, and its tensors."""
    q, k, v = (torch.from_numpy(x) for x in inputs(queries=9, keys=9))
    learned = () if maps(name) is None else tuple(torch.from_numpy(x) for x in maps(name))
    features = _calls.features(name, 5)
    how, own = {"feature_map": name}, []
    if mechanism == "shaw":
        raw = name == "hedgehog:3"
        own = [np.abs(draw(4, 5, features if raw else 5))]
        how["rel_feature_map"] = "identity" if raw else "same"
    elif mechanism == "toeplitz":
        own, how["kind"] = [draw(4, 7)], "clipped"
    elif mechanism == "fourier":
        own = [draw(2, features, 1), draw(4, features)]
    function = getattr(ops, f"{mechanism}_attention")
    count = 3 + len(own)
    arguments = [q, k, v, *map(torch.from_numpy, own), *learned]
    return lambda *t, **o: function(*t[:count], maps=t[count:] or None, **how, **o), arguments


@EVERY
@pytest.mark.parametrize("mechanism", ["kernelized", "shaw", "fourier", "toeplitz"])
def test_gradients_and_other_devices(name, mechanism):
    if mechanism == "fourier" and name == "taylor2":
        pytest.skip("its features have signs, and Fourier positions weigh them apart")
    call, arguments = tensors(name, mechanism)
    arguments = [tensor.requires_grad_() for tensor in arguments]
    for options in ({"is_causal": True}, {"key_padding_mask": padding(2, 9, 0, slice(6, None))}):
        assert torch.autograd.gradcheck(lambda *t: call(*t, **options), arguments)
        expected = call(*arguments, **options)
        with elsewhere():
            got = call(*arguments, **options)
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)
        same_gradients(got, expected, arguments, weights=torch.from_numpy(draw(*got.shape)), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", ["elu+1", "relu", "softplus", "exp", "prf", "nprf", "dpfp:2", "taylor2"])
def test_slopes_at_zero_on_other_devices(name):
    """Where projections start at 0, or a text is padded with zeros; of rows as short as they can be, a direction counts."""
    q, k, v = (torch.from_numpy(x).float() for x in inputs(queries=9, keys=9))
    q[:, :, ::2, 1] = k[:, :, 1::2, :2] = k[:, :, 4] = q[:, :, 6] = 0
    q[:, :, 3] *= 1e-30
    tensors = [x.requires_grad_() for x in (q, k, v)]
    expected = ops.kernelized_attention(*tensors, feature_map=name, is_causal=True)
    with elsewhere():
        got = ops.kernelized_attention(*tensors, feature_map=name, is_causal=True)
    torch.testing.assert_close(got, expected)
    weights = torch.ones_like(got)
    weights[:, :, 3] = 0
    same_gradients(got, expected, tensors, weights=weights, rtol=1e-4, atol=1e-5)


@EVERY
@pytest.mark.parametrize(
    "options", [{}, {"attention": "shaw", "radius": 2}, {"attention": "fourier"}, {"attention": "toeplitz"}], ids=str
)
def test_modules(name, options):
    options = dict(options, feature_map=name)
    if options.get("attention") == "shaw" and name == "hedgehog:3":
        options["rel_feature_map"] = "identity"
    if options.get("attention") == "fourier" and name == "taylor2":
        pytest.skip("its features have signs, and Fourier positions weigh them apart")
    module = MultiheadAttention(8, 2, batch_first=True, **options)
    for parameter in module.attention.parameters():
        torch.nn.init.uniform_(parameter, 0.1, 0.5)
    x = torch.randn(2, 7, 8)
    out, _ = module(x, x, x, is_causal=True)
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
    torch.testing.assert_close(steps(module.step, x)[0], out, rtol=1e-4, atol=1e-4)
