"""Gradients, compilation and other devices of Fourier and Toeplitz positions and AFT."""

import pytest

torch = pytest.importorskip("torch")

from longspan import ops  # noqa: E402
from longspan.torch import MultiheadAttention, _dispatch, chunked_attention  # noqa: E402

LENGTH = 9


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def inputs(batch=2, queries=LENGTH, keys=LENGTH):
    return draw(batch, 4, queries, 4, seed=1), draw(batch, 4, keys, 4, seed=2), draw(batch, 4, keys, 4, seed=3)


ANGLES, EACH = draw(4, 4, 1), [draw(4, 4, seed=s) for s in (5, 6, 7)]
CASES = {
    "fourier": (lambda q, k, v, a, b, **o: ops.fourier_attention(q, k, v, a, b, **o), [ANGLES, EACH[0]]),
    "fourier dominant": (
        lambda q, k, v, a, b, c, beta, **o: ops.fourier_attention(q, k, v, a, b, c, beta, normalizer="dominant", **o),
        [ANGLES, *EACH],
    ),
    "fourier unrotated": (
        lambda q, k, v, a, b, c, **o: ops.fourier_attention(q, k, v, a, b, c, normalizer="unrotated", **o),
        [ANGLES, *EACH[:2]],
    ),
    "rotary": (
        lambda q, k, v, a, **o: ops.fourier_attention(q, k, v, a, wave="pairs", normalizer="unrotated", **o),
        [draw(4, 2, 1)],
    ),
    "fourier in the plane": (
        lambda q, k, v, a, b, p, r, **o: ops.fourier_attention(q, k, v, a, b, q_positions=p, k_positions=r, **o),
        [draw(4, 4, 2), EACH[0], draw(2, LENGTH, 2), draw(2, LENGTH, 2, seed=4)],
    ),
    "toeplitz": (lambda q, k, v, bias, **o: ops.toeplitz_attention(q, k, v, bias, **o), [draw(4, 2 * LENGTH - 1)]),
    "toeplitz clipped": (
        lambda q, k, v, bias, **o: ops.toeplitz_attention(q, k, v, bias, kind="clipped", **o), [draw(4, 5)],
    ),
    "toeplitz buckets": (
        lambda q, k, v, bias, **o: ops.toeplitz_attention(q, k, v, bias, kind="buckets", max_distance=7, **o),
        [draw(4, 8)],
    ),
    "short convolution": (lambda q, k, v, c, **o: ops.short_convolution(q, k, v, c, **o), [draw(4, 3, 4)]),
    "aft simple": (lambda q, k, v, **o: ops.aft_simple(q, k, v, **o), []),
    "aft local": (lambda q, k, v, w, **o: ops.aft_local(q, k, v, w, **o), [draw(LENGTH, 5)]),
    "aft full": (lambda q, k, v, w, **o: ops.aft_full(q, k, v, w, **o), [draw(LENGTH, LENGTH)]),
    "aft full of two factors": (
        lambda q, k, v, u, z, **o: ops.aft_full(q, k, v, u=u, z=z, **o), [draw(LENGTH, 2), draw(LENGTH, 2, seed=1)],
    ),
    "softmax": (lambda q, k, v, **o: ops.softmax_attention(q, k, v, **o), []),
    "softmax in a window": (lambda q, k, v, **o: ops.softmax_attention(q, k, v, window=4, **o), []),
    "aft conv": (lambda q, k, v, w, **o: ops.aft_conv(q, k[..., 0], v, w, **o), [draw(4, 5)]),
    "aft conv as published": (
        lambda q, k, v, w, g, b, **o: ops.aft_conv(q, k[..., 0], v, w, gamma=g, beta=b, **o),
        [draw(4, 5), draw(4), draw(4, seed=1)],
    ),
}
#: Cases that only look both ways.
IMAGES = {
    "aft conv over an image": (lambda q, k, v, w, **o: ops.aft_conv(q, k[..., 0], v, w, image=(3, 3), **o), [draw(4, 2, 3)]),
    "aft conv over an image, as published": (
        lambda q, k, v, w, g, b, **o: ops.aft_conv(q, k[..., 0], v, w, gamma=g, beta=b, image=(3, 3), **o),
        [draw(4, 2, 3), draw(4), draw(4, seed=1)],
    ),
}
PADDING = torch.zeros(2, LENGTH, dtype=torch.bool)
PADDING[0, 5:] = True
PADDING[1] = True
OPTIONS = [{}, {"is_causal": True}, {"is_causal": True, "offset": -2}, {"key_padding_mask": PADDING}]
EVERY = pytest.mark.parametrize("name", CASES)


@EVERY
@pytest.mark.parametrize("options", OPTIONS, ids=["all", "causal", "late", "padded"])
def test_gradients(name, options):
    function, parameters = CASES[name]
    arguments = [t.clone().requires_grad_() for t in (*inputs(), *parameters)]
    assert torch.autograd.gradcheck(lambda *t: function(*t, **options), arguments)


@EVERY
@pytest.mark.parametrize("options", OPTIONS, ids=["all", "causal", "late", "padded"])
def test_chunked_formulation_is_the_operator(name, options, monkeypatch):
    function, parameters = CASES[name]
    arguments = [t.clone().requires_grad_() for t in (*inputs(), *parameters)]
    expected = function(*arguments, **options)
    taken = []

    def elsewhere(operation, mechanism, options, tensors, is_causal, offset, key_padding_mask, cu_seqlens, with_state):
        taken.append(mechanism)
        q, k, v, *rest = tensors
        return chunked_attention(q, k, v, rest, mechanism=mechanism, options=options, is_causal=is_causal, offset=offset,
                                 key_padding_mask=key_padding_mask)  # fmt: skip

    monkeypatch.setattr(_dispatch, "_attend_watched", elsewhere)
    got = function(*arguments, **options)
    assert taken
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    weights = draw(*got.shape)
    ours = torch.autograd.grad((got * weights).sum(), arguments, allow_unused=True)
    theirs = torch.autograd.grad((expected * weights).sum(), arguments, allow_unused=True)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", IMAGES)
def test_images(name, monkeypatch):
    function, parameters = IMAGES[name]
    for options in ({}, {"key_padding_mask": PADDING}):
        arguments = [t.clone().requires_grad_() for t in (*inputs(), *parameters)]
        assert torch.autograd.gradcheck(lambda *t: function(*t, **options), arguments)
        expected = function(*arguments, **options)
        with monkeypatch.context() as patch:
            patch.setattr(_dispatch, "_attend_watched", elsewhere)
            got = function(*arguments, **options)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
        for a, b in zip(torch.autograd.grad(got.square().sum(), arguments),
                        torch.autograd.grad(expected.square().sum(), arguments)):  # fmt: skip
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    module = MultiheadAttention(16, 4, batch_first=True, attention="aft-conv", image=(3, 3), taps=3)
    x = torch.randn(2, 9, 16)
    module(x, x, x)[0].sum().backward()
    assert module.attention.w.grad.shape == (4, 3, 3)


@EVERY
def test_compile_without_a_break(name):
    function, parameters = CASES[name]
    arguments = [*inputs(), *parameters]
    torch.compiler.reset()
    compiled = torch.compile(lambda *t: function(*t, is_causal=True), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), function(*arguments, is_causal=True))


@EVERY
def test_another_device(name):
    function, parameters = CASES[name]
    out = function(*(t.to("meta") for t in (*inputs(), *parameters)), is_causal=True)
    assert out.device.type == "meta" and out.shape == (2, 4, LENGTH, 4)


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
def test_modules(options, monkeypatch):
    """Whole = token by token = compiled = in chunks with a state = in torch's own operations, and everything learns."""
    torch.manual_seed(0)
    module = MultiheadAttention(8, 2, batch_first=True, **options)
    for parameter in module.attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 7, 8)
    out, _ = module(x, x, x, is_causal=True)
    (out**2).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
    state = None
    for t in range(7):
        one, state = module.step(x[:, t], state)
        torch.testing.assert_close(one, out[:, t], rtol=1e-4, atol=1e-5)
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
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[1, 4:] = True
    memory = torch.randn(2, 7, 8)
    for call in (dict(is_causal=True), dict(key_padding_mask=mask)):
        expected, _ = module(x, memory, memory, **call)
        with monkeypatch.context() as patch:
            patch.setattr(_dispatch, "_attend_watched", elsewhere)
            torch.testing.assert_close(module(x, memory, memory, **call)[0], expected, rtol=1e-4, atol=1e-5)


def elsewhere(operation, mechanism, options, tensors, is_causal, offset, key_padding_mask, cu_seqlens, with_state):
    """As if the tensors were on another device."""
    q, k, v, *rest = tensors
    return chunked_attention(q, k, v, rest, mechanism=mechanism, options=options, is_causal=is_causal, offset=offset,
                             key_padding_mask=key_padding_mask)  # fmt: skip
