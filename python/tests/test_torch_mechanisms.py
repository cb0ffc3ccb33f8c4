"""Gradients, compilation and other devices of Fourier and Toeplitz positions and AFT."""

import json
from contextlib import nullcontext
from functools import partial

import definition
import numpy as np
import pytest
import torch
from agreement import draw, elsewhere, leaves, same_gradients, steps
from longspan import ops
from longspan.torch import MultiheadAttention, TensorState, chunked_attention
from longspan.torch._check import FUNCTIONS
from test_torch_states import CASES as STREAMED
from test_torch_states import LENGTH, inputs, step_of

EACH = [draw(4, 4, seed=s) for s in (5, 6, 7)]


def in_the_plane(q, k, v, a, b, p, r, **options):
    return ops.fourier_attention(q, k, v, a, b, q_positions=p, k_positions=r, **options)


#: AFT-conv, of whose keys each is one number.
of_keys = FUNCTIONS["aft-conv"]
CASES = STREAMED | {
    "fourier, unrotated": (partial(ops.fourier_attention, normalizer="unrotated"), [draw(2, 4, 1), draw(2, 4), draw(2, 4, seed=7)]),
    "fourier, in the plane": (in_the_plane, [draw(2, 4, 2), draw(2, 4), draw(2, LENGTH, 2), draw(2, LENGTH, 2, seed=4)]),
    "aft-full, two factors": (lambda q, k, v, *uz, **o: ops.aft_full(q, k, v, None, *uz, **o), [draw(LENGTH, 2), draw(LENGTH, 2, seed=1)]),
    "aft-conv, as published": (of_keys, [draw(2, 5), draw(2), draw(2, seed=1)]),
}  # fmt: skip
#: Cases that only look both ways.
IMAGES = {
    "aft-conv over an image": (partial(of_keys, image=(3, 4)), [draw(2, 2, 3)]),
    "aft-conv over an image, as published": (partial(of_keys, image=(3, 4)), [draw(2, 2, 3), draw(2), draw(2, seed=1)]),
}
PADDING = torch.zeros(2, LENGTH, dtype=torch.bool)
PADDING[0, 5:] = True
PADDING[1] = True
EVERY = pytest.mark.parametrize("name", CASES)


@pytest.mark.parametrize("entries, max_distance, two_sided", [
    (2, 3, False), (3, 5, False), (4, 2, True), (8, 128, True), (32, 128, True), (32, 128, False), (6, 7, True), (32, 1000, True),
])  # fmt: skip
def test_buckets_are_the_kernels(entries, max_distance, two_sided):
    q, k, v = draw(1, 1, 300, 4, seed=1), draw(1, 1, 300, 4, seed=2), draw(1, 1, 300, 4, seed=3)
    for is_causal in (False, True):
        options = dict(kind="buckets", max_distance=max_distance, bidirectional=two_sided, is_causal=is_causal)
        expected = ops.toeplitz_attention(q, k, v, draw(1, entries), **options)
        with elsewhere():
            torch.testing.assert_close(ops.toeplitz_attention(q, k, v, draw(1, entries), **options), expected)
    options["max_distance"] = 1
    for path in (nullcontext, elsewhere):
        with path(), pytest.raises(ValueError, match="bias buckets: expected at least . buckets, even in number if bidirectional"):
            ops.toeplitz_attention(q, k, v, draw(1, entries), **options)


@pytest.mark.parametrize("name", IMAGES)
def test_images(name):
    function, parameters = IMAGES[name]
    for options in ({}, {"key_padding_mask": PADDING}):
        arguments = leaves(*inputs(), *parameters)
        assert torch.autograd.gradcheck(lambda *t: function(*t, **options), arguments)
        expected = function(*arguments, **options)
        with elsewhere():
            got = function(*arguments, **options)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
        same_gradients(got.square(), expected.square(), arguments, rtol=1e-8, atol=1e-8)
    module = MultiheadAttention(16, 4, batch_first=True, attention="aft-conv", image=(3, 3), taps=3)
    x = torch.randn(2, 9, 16)
    module(x, x, x)[0].sum().backward()
    assert module.attention.w.grad.shape == (4, 3, 3)


@pytest.mark.parametrize("taps", [1, 15])
def test_equal_taps_have_no_deviation(taps):
    """Their mean is rounded, and a deviation of rounding is none."""
    q, k, v, w = draw(2, 4, 20, 4).float(), draw(2, 4, 20).float(), draw(2, 4, 20, 4, seed=1).float(), torch.full((4, taps), 0.1)
    learned = leaves(w, draw(4).float(), draw(4, seed=1).float())
    expected = ops.aft_conv(q, k, v, learned[0], gamma=learned[1], beta=learned[2], is_causal=True)
    with elsewhere():
        got = ops.aft_conv(q, k, v, learned[0], gamma=learned[1], beta=learned[2], is_causal=True)
    torch.testing.assert_close(got, expected)
    same_gradients(got, expected, learned)


@pytest.mark.parametrize("path", ["kernels", "compiled", "formulation"])
@pytest.mark.parametrize("packed", [False, True])
def test_positions_far_from_zero_cost_no_digits(path, packed):
    """Whole numbers, so that single precision holds every shift exactly: only differences matter."""
    q, k, v, weights = torch.randn(4, 1, 1, 60, 4)
    a, b, at = torch.rand(1, 4, 2) * 3, torch.zeros(1, 4), torch.arange(120.0).view(1, 60, 2)
    mask, far = torch.zeros(1, 60, dtype=torch.bool), at.clone()
    if not packed:
        # An ignored key may stand anywhere.
        mask[0, 7], far[0, 7] = True, float("nan") if path == "formulation" else 3e20
    torch.compiler.reset()
    compiled = torch.compile(in_the_plane, fullgraph=True, backend="aot_eager")

    def gradients(q, k, v, a, b, p, r, weights):
        options = {"cu_seqlens": ([0, 25, 60],) * 2} if packed else {"key_padding_mask": mask}
        a, p = a.clone().requires_grad_(), p.clone().requires_grad_()
        if path == "formulation":
            out = chunked_attention(q, k, v, [a, b, p, r], mechanism="fourier", options='{"axes": 2}', is_causal=True, **options)
        else:
            out = (compiled if path == "compiled" else in_the_plane)(q, k, v, a, b, p, r, is_causal=True, **options)
        return torch.autograd.grad((out * weights).sum(), (a, p))

    expected = gradients(*(x.double() for x in (q, k, v, a, b, at, at, weights)))
    for shift in (0.0, 1e3, 1e6, -4e6):
        # Each sequence of a packed call has an origin of its own.
        origin = torch.where(torch.arange(60) < 25, shift, 2 * shift if packed else shift)[None, :, None]
        got = gradients(q, k, v, a, b, at + origin, far + origin, weights)
        for ours, theirs in zip(got, expected):
            assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_positions_of_a_half_precision_call_may_be_finer(half):
    at = torch.arange(64.0).view(1, 64, 1) * 0.5 + 1000
    module = MultiheadAttention(16, 2, batch_first=True, attention="fourier", axes=1).to(half)
    x = torch.randn(1, 64, 16, dtype=half, requires_grad=True)

    def called(at, x=x, module=module):
        return module(x, x, x, is_causal=True, q_positions=at, k_positions=at)[0]

    near, far = called(at - 1000), called(at)
    assert near.dtype is half and torch.equal(near, far)
    assert not torch.equal(called(at.to(half)), far)
    wide = MultiheadAttention(16, 2, batch_first=True, attention="fourier", axes=1)
    wide.load_state_dict(module.state_dict())
    exact = called(at, x.float(), wide)
    assert (far - exact).abs().max() < 0.02 * exact.abs().max()
    at.requires_grad_()
    q, parameters = torch.randn(1, 2, 64, 8, dtype=half), [torch.rand(2, 8, 1, dtype=half), torch.rand(2, 8, dtype=half)]
    out = ops.fourier_attention(q, q, q, *parameters, q_positions=at, k_positions=at)
    d_at = torch.autograd.grad(out.float().square().sum(), at)[0]
    assert out.dtype is half and d_at.dtype is torch.float32 and d_at.abs().max() > 0
    array = [tensor.float().numpy().astype("f2") for tensor in (q, *parameters)]
    positions = at.detach().numpy()
    numpy = ops.fourier_attention(array[0], array[0], array[0], *array[1:], q_positions=positions, k_positions=positions)
    assert numpy.dtype == "f2"
    step = [x[:, :, 0] for x in (q, q, q)]
    assert ops.fourier_attention_step(*step, *parameters, q_positions=at[:, :1], k_positions=at[:, :1])[0].dtype is half
    with pytest.raises(TypeError, match="k_positions: expected torch.*16 like q, got torch.float64"):
        ops.fourier_attention(q, q, q, *parameters, q_positions=at, k_positions=at.double())


@EVERY
def test_another_device(name):
    """It is never the CPU."""
    function, parameters = CASES[name]
    q, k, v, *learned = (t.to("meta") for t in (*inputs(), *parameters))
    found = [function(q, k, v, *learned, is_causal=True)]
    if name in STREAMED:
        out, state = function(q, k, v, *learned, is_causal=True, output_final_state=True)
        last, after = step_of(function)(q[:, :, :1], k[:, :, :1], v[:, :, :1], *learned, state=state)
        assert state.numbers.device.type == after.numbers.device.type == "meta" and last.shape == (2, 2, 1, 4)
        found += [out, last]
    assert all(out.device.type == "meta" for out in found) and found[0].shape == (2, 2, LENGTH, 4)


MODULES = pytest.mark.parametrize(
    "options",
    [
        {"attention": "kernelized"}, {"attention": "shaw", "radius": 3}, {"attention": "fourier"},
        {"attention": "fourier", "normalizer": "dominant"},
        {"attention": "fourier", "wave": "pairs", "normalizer": "unrotated"}, {"attention": "toeplitz", "radius": 3},
        {"attention": "toeplitz", "kind": "table", "reach": 9}, {"attention": "toeplitz", "kind": "buckets", "buckets": 8},
        {"attention": "toeplitz", "kind": "grid", "height": 3, "width": 3}, {"attention": "aft-full", "length": 9},
        {"attention": "aft-full", "length": 9, "rank": None}, {"attention": "aft-local", "length": 9, "window": 3},
        {"attention": "aft-simple"}, {"attention": "short-convolution"}, {"attention": "aft-conv", "taps": 3},
        {"attention": "aft-conv", "taps": 3, "normalized": False}, {"attention": "softmax"},
    ],
    ids=str,
)  # fmt: skip


@MODULES
def test_modules(options):
    """Whole = token by token = compiled = in chunks with a state = in torch's own operations, and everything learns."""
    module = MultiheadAttention(8, 2, batch_first=True, **options)
    for parameter in module.attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 7, 8)
    out, _ = module(x, x, x, is_causal=True)
    (out**2).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
    torch.testing.assert_close(steps(module.step, x)[0], out, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, x, x, is_causal=True)[0], out)
    key = [t.unflatten(-1, (2, -1)).transpose(1, 2) for t in module._project(x, x, x)]
    with torch.no_grad():
        _, first = module.attention(*(t[:, :, :4] for t in key), is_causal=True, output_final_state=True)
        rest = module.attention(*(t[:, :, 4:] for t in key), is_causal=True, initial_state=first)
        torch.testing.assert_close(rest, module.attention(*key, is_causal=True)[:, :, 4:], rtol=1e-4, atol=1e-5)
        if options["attention"] not in ("aft-full", "aft-local") and options.get("kind") not in ("table", "grid"):
            # Stretches that are computed apart; tables by position have none.
            _, second = module.attention(*(t[:, :, 4:] for t in key), is_causal=True, output_final_state=True)
            _, end = module.attention(*key, is_causal=True, output_final_state=True)
            again = [t[:, :, :1] for t in key]
            got, expected = (module.attention(*again, is_causal=True, initial_state=state)
                             for state in (module.attention.combine(first, second), end))  # fmt: skip
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    with elsewhere(), torch.no_grad():
        found, state = steps(module.step, x)
        assert isinstance(state, TensorState)
        torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)
        # A state of the CPU's goes on there.
        rest = module.attention(*(t[:, :, 4:] for t in key), is_causal=True, initial_state=first)
        torch.testing.assert_close(rest, module.attention(*key, is_causal=True)[:, :, 4:], rtol=1e-4, atol=1e-5)
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[1, 4:] = True
    memory = torch.randn(2, 7, 8)
    for call in (dict(is_causal=True), dict(key_padding_mask=mask)):
        expected, _ = module(x, memory, memory, **call)
        with elsewhere():
            torch.testing.assert_close(module(x, memory, memory, **call)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mechanism, parameters", [
    ("kernelized", []), ("fourier", [torch.randn(1, 2, 1), torch.zeros(1, 2)]), ("toeplitz", [torch.randn(1, 7)]),
])  # fmt: skip
def test_large_keys_of_one_sequence_do_not_erase_another_in_the_formulation(mechanism, parameters):
    q, k, v = torch.randn(3, 2, 1, 4, 2)
    k[1] += 120
    options = '{"feature_map": "exp"}'
    both = chunked_attention(q, k, v, parameters, mechanism=mechanism, options=options)
    for entry in range(2):
        alone = chunked_attention(*(x[entry : entry + 1] for x in (q, k, v)), parameters, mechanism=mechanism, options=options)
        torch.testing.assert_close(both[entry : entry + 1], alone)
    # Nor does what is not finite reach it.
    k[1, 0, 0, 0] = float("nan")
    torch.testing.assert_close(chunked_attention(q, k, v, parameters, mechanism=mechanism, options=options)[0], both[0])


FAR_APART = {
    "kernelized": ([], {}), "kernelized that decays": ([], {"decay": [0.1, 0.9]}), "raw": ([draw(4, 5, 8)], {"rel_feature_map": "identity"}),
    "shaw": ([draw(4, 5, 4)], {}), "shaw that decays": ([draw(4, 5, 4)], {"decay": [0.1, 0.9]}), "fourier": ([draw(2, 4, 1), EACH[0]], {}),
    "fourier unrotated": ([draw(2, 4, 1), *EACH[:2]], {"normalizer": "unrotated"}), "toeplitz": ([draw(4, 5)], {"kind": "clipped"}),
    "hedgehog": ([draw(4, 4, 4), draw(2, 4, 4)], {"feature_map": "hedgehog:exp"}),
}  # fmt: skip


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", FAR_APART)
def test_keys_far_apart_under_exp_in_the_formulation(name, is_causal):
    """A row is a mean of what it sees: neither a later key, nor one that has decayed, nor an ignored one makes it vanish."""
    parameters, options = FAR_APART[name]
    mechanism = "kernelized" if name == "hedgehog" else "shaw" if name == "raw" else name.split()[0]
    if "decay" in options and not is_causal:
        pytest.skip("a decay has an order")
    options = {"feature_map": "exp", **options}
    queries = 300
    q, k, v = draw(1, 4, queries, 4), draw(1, 2, queries, 4, seed=1), draw(1, 2, queries, 4, seed=2)
    if name == "raw":
        parameters = [parameters[0][..., :4].exp()]
    scale = 20 if name == "hedgehog" else 1
    k[:, :, :100], k[:, :, 100:200], k[:, :, 250] = k[:, :, :100] - 150 / scale, k[:, :, 100:200] + 200 / scale, 400 / scale
    ignored = torch.zeros(1, queries, dtype=torch.bool)
    ignored[:, 250] = ignored[:, :3] = True

    def formulated(q, k, v, *parameters):
        return chunked_attention(q, k, v, parameters, mechanism=mechanism, options=json.dumps(options), is_causal=is_causal,
                                 key_padding_mask=ignored)  # fmt: skip

    wide, single = [leaves(*(x.to(dtype) for x in (q, k, v, *parameters))) for dtype in (torch.float64, torch.float32)]
    # Exponents up to 400 fit doubles, so that a formula needs no shift.
    expected, got = definition_under_exp(wide, mechanism, options, is_causal, ignored), formulated(*single)
    torch.testing.assert_close(got.double(), expected, rtol=2e-3, atol=2e-4)
    weights = draw(*expected.shape)
    first, second = torch.autograd.grad((expected * weights).sum(), wide[2]), torch.autograd.grad((got * weights).sum(), single[2])
    torch.testing.assert_close(second[0].double(), first[0], rtol=2e-3, atol=2e-3)


def definition_under_exp(tensors, mechanism, options, is_causal, ignored):
    """Pair by pair: weights, and what rows are divided by."""
    q, k, _, *parameters = (x.detach().numpy() for x in tensors)
    mask = {"is_causal": is_causal, "key_padding_mask": ignored.numpy(), "feature_map": "exp"}
    each = np.broadcast_to(np.eye(q.shape[2]), (*k.shape[:2], q.shape[2], q.shape[2]))
    if options["feature_map"].startswith("hedgehog"):
        q, k = (x @ matrix.swapaxes(-1, -2) for x, matrix in zip((q, k), parameters))
        q, k, parameters = np.concatenate([q, -q], -1), np.concatenate([k, -k], -1), []
    if mechanism == "fourier":
        a, b, *scale = parameters
        c, beta = (scale[0], np.zeros_like(b)) if scale else (np.ones_like(b), np.ones_like(b))
        weights = definition.fourier(q, k, each, a, b, c, beta, normalizer="none", **mask)
    elif mechanism == "toeplitz":
        distance = np.arange(1 - q.shape[2], q.shape[2])
        weights = definition.toeplitz(q, k, each, parameters[0][:, distance.clip(-2, 2) + 2], normalize=False, **mask)
    else:
        more = {name: value for name, value in options.items() if name != "feature_map"}
        weights = definition.shaw(q, k, each, *parameters, normalize=False, **more, **mask)
    plain = options.get("normalizer") == "unrotated"
    divisors = (definition.shaw(q, k, each, normalize=False, **mask) if plain else weights).sum(-1, keepdims=True)
    weights, divisors = torch.from_numpy(weights), torch.from_numpy(divisors)
    return torch.where(divisors == 0, 0, weights @ tensors[2].repeat_interleave(2, 1) / torch.where(divisors == 0, 1, divisors))


def test_packed_sequences_beside_a_padding_mask_are_refused_by_the_formulation():
    q, k, v = torch.randn(3, 1, 1, 4, 2)
    with pytest.raises(ValueError, match="expected None beside a key_padding_mask"):
        chunked_attention(q, k, v, cu_seqlens=([0, 4], [0, 4]), key_padding_mask=torch.zeros(1, 4, dtype=torch.bool))


def test_the_formulation_broadcasts_no_parameters():
    x, taps = torch.randn(1, 2, 4, 3), torch.randn(2, 2, 3)
    for call in (
        lambda: ops.kernelized_attention(x, x, x, decay=[0.5], is_causal=True), lambda: ops.short_convolution(x, x, x, taps[:1]),
        lambda: ops.short_convolution(x, x, x, taps[..., :1]), lambda: ops.depthwise_convolution(x, taps, torch.zeros(2, 1)),
    ):  # fmt: skip
        with elsewhere(), pytest.raises(ValueError, match="expected (one for each of the 2|shape)"):
            call()
