"""Torch tensors: the operators, their gradients, the compiler, and the formulation for other devices."""

import longspan
import numpy as np
import pytest
import torch
from agreement import padding as ignoring
from agreement import same_gradients
from definition import shaw as definition
from longspan import ops
from longspan.torch import TensorState


def draw(*shape, dtype=torch.float64, seed=0, requires_grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_(requires_grad)


def inputs(batch=2, heads=4, kv_heads=2, queries=9, keys=9, head_dim=5, value_dim=3, **more):
    return (
        draw(batch, heads, queries, head_dim, seed=1, **more),
        draw(batch, kv_heads, keys, head_dim, seed=2, **more),
        draw(batch, kv_heads, keys, value_dim, seed=3, **more),
    )


def table(radius=2, **more):
    return draw(4, 2 * radius + 1, 5, seed=4, **more)


def attend(q, k, v, rel=None, **options):
    return ops.kernelized_attention(q, k, v, **options) if rel is None else ops.shaw_attention(q, k, v, rel, **options)


def padding(keys=9):
    return ignoring(2, keys, 0, slice(keys // 2, None)) | ignoring(2, keys, 1, 0)


OPTIONS = [
    {},
    {"is_causal": True},
    {"is_causal": True, "offset": 3},
    {"is_causal": True, "offset": -2},
    {"key_padding_mask": padding()},
    {"is_causal": True, "key_padding_mask": padding()},
    {"is_causal": True, "decay": [0.8, 1.0]},
    {"feature_map": "softplus"},
    {"feature_map": "exp", "is_causal": True},
    {"normalize": False},
]


@pytest.mark.parametrize("with_table", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients(options, with_table):
    q, k, v = inputs(requires_grad=True)
    rel = (table(requires_grad=True),) if with_table else ()
    expected = definition(*(t.detach().numpy() for t in (q, k, v, *rel)), **{
        name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in options.items()
    })  # fmt: skip
    out = attend(q, k, v, *rel, **options)
    assert out.requires_grad
    np.testing.assert_allclose(out.detach().numpy(), expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        np.testing.assert_allclose(attend(q, k, v, *rel, **options).numpy(), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda *t: attend(*t, **options), (q, k, v, *rel))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_opcheck(dtype, requires_grad):
    q, k, v = inputs(dtype=dtype, requires_grad=requires_grad)
    without = (None, "", "", None)
    shaw = '{"feature_map": "softplus"}'
    biases, values = (draw(*shape, seed=5, dtype=dtype, requires_grad=requires_grad) for shape in ((9, 9), k.shape))
    for arguments in (
        (q, k, v, [], None, None, None, *without, "kernelized", "{}", "test", True, 0),
        (q, k, v, [table(dtype=dtype, requires_grad=requires_grad)], padding(), None, None, *without, "shaw", shaw, "test", False, 1),
        (q.detach()[:1], k[:1], v[:1], [], None, torch.tensor([0, 4, 9]), torch.tensor([0, 3, 9]), *without, "kernelized", "{}", "test", True, 0),
        (q[:, :, :0], k, v, [], None, None, None, *without, "kernelized", "{}", "test", True, 0),
        (q, k, values, [biases], padding(), None, None, *without, "aft-full", "{}", "test", False, 0),
    ):
        torch.library.opcheck(torch.ops.longspan.attention.default, arguments)


@pytest.mark.parametrize("with_state", [False, True])
def test_opcheck_of_the_backward_and_of_states(with_state):
    q, k, v = inputs()
    options = '{"feature_map": "elu+1", "normalize": true, "algorithm": "auto"}'
    call = ("kernelized", options, "test", True, 0)
    state, numbers = ("", "", None), None
    if with_state:
        _, before = ops.kernelized_attention(q, k, v, is_causal=True, output_final_state=True)
        state, numbers = (before.mechanism, before.options, list(before.parts)), TensorState.of(before).numbers
    out, denominators, final = torch.ops.longspan.attention(q, k, v, [], None, None, None, numbers, *state, *call)
    assert final.shape == (2, 2, sum(state[2] or ()))
    arguments = (draw(*out.shape), torch.ones_like(final), q, k, v, [], None, None, None, numbers, out, denominators, *state, *call)
    torch.library.opcheck(torch.ops.longspan.attention_backward.default, arguments)
    if with_state:
        q, k, v, numbers = (x.requires_grad_() for x in (q, k, v, numbers))
        checks = ["test_schema", "test_faketensor", "test_autograd_registration"]
        arguments = (q, k, v, [], None, None, None, numbers, *state, *call)
        torch.library.opcheck(torch.ops.longspan.attention.default, arguments, test_utils=checks)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_a_break(dynamic):
    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def model(q, k, v, rel, mask):
        first = ops.kernelized_attention(q, k, v, is_causal=True, key_padding_mask=mask, decay=0.9)
        second = ops.shaw_attention(q * 2, k, v, rel, is_causal=True)
        return (first * second).sin()

    for length in (9, 11, 14):
        arguments = [*inputs(queries=length, keys=length, requires_grad=True), table(requires_grad=True)]
        mask = padding(length)
        q, k, v, rel = arguments
        got = model(*arguments, mask)
        expected = (
            ops.kernelized_attention(q, k, v, is_causal=True, key_padding_mask=mask, decay=0.9)
            * ops.shaw_attention(q * 2, k, v, rel, is_causal=True)
        ).sin()
        torch.testing.assert_close(got, expected)
        same_gradients(got, expected, arguments)


def test_inductor():
    """The default backend, which wants a C++ compiler; once, because it takes long."""
    from torch._inductor import exc

    compiled = torch.compile(lambda q, k, v: ops.kernelized_attention(q.sin(), k, v, is_causal=True).cos(), fullgraph=True)
    arguments = inputs(dtype=torch.float32, requires_grad=True)
    try:
        got = compiled(*arguments)
    except exc.InductorError as error:
        if "No working C++ compiler" in str(error):
            pytest.skip("no C++ compiler")
        raise
    expected = ops.kernelized_attention(arguments[0].sin(), *arguments[1:], is_causal=True).cos()
    torch.testing.assert_close(got, expected)
    same_gradients(got, expected, arguments)


def test_autocast_computes_in_float32():
    q, k, v = inputs(queries=70, keys=70, dtype=torch.bfloat16)
    rel = table(dtype=torch.float32, requires_grad=True)
    expected = ops.shaw_attention(q.float(), k.float(), v.float(), rel)
    with torch.autocast("cpu", torch.bfloat16):
        got = ops.shaw_attention(q, k, v, rel)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected)
    got.sum().backward()
    assert rel.grad.dtype == torch.float32 and rel.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_once_and_rounded_once(dtype):
    heads_first = inputs(queries=70, keys=70, dtype=dtype)
    tokens_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in heads_first]
    rel = table(dtype=dtype)
    for tensors in (heads_first, tokens_first):
        arguments = [t.detach().requires_grad_() for t in (*tensors, rel)]
        wide = [t.detach().float().requires_grad_() for t in arguments]
        got, expected = (ops.shaw_attention(*all_of_them, is_causal=True) for all_of_them in (arguments, wide))
        assert got.dtype == dtype
        assert torch.equal(got, expected.to(dtype))
        with torch.no_grad():
            assert torch.equal(ops.shaw_attention(*arguments, is_causal=True), got)
        # The backward finds the rounded output: its denominators and row sums differ by that rounding and no more.
        weights = draw(*got.shape, dtype=dtype)
        for a, b in zip(torch.autograd.grad((got * weights).sum(), arguments),
                        torch.autograd.grad((expected * weights.float()).sum(), wide)):  # fmt: skip
            assert a.dtype == dtype
            torch.testing.assert_close(a, b.to(dtype), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_two_byte_numbers_reach_the_kernels(dtype):
    # One key a row, of weight 1: the output is its value.
    v = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    v = v[v.isfinite()].reshape(1, 1, -1, 256)
    q = k = torch.zeros(1, 1, v.shape[2], 1, dtype=dtype)
    ends = list(range(v.shape[2] + 1))
    assert torch.equal(ops.kernelized_attention(q, k, v, cu_seqlens=ends), v)


def test_no_copy_in_either_direction():
    q, k, v = inputs(dtype=torch.float32)
    for tensor in (q, q.transpose(1, 2).contiguous().transpose(1, 2), q[:, 1:]):
        assert longspan._native.seen_by_kernels(tensor.numpy()) == (tensor.data_ptr(), False)
    out = ops.kernelized_attention(q, k, v)
    assert out.data_ptr() == out.numpy().__array_interface__["data"][0]
    assert out.is_contiguous()


def test_gradients_lie_as_their_tensors():
    # Autograd would copy others into that layout.
    tensors = inputs(queries=9, keys=9, dtype=torch.float32)
    for transposed in range(8):
        leaves = [
            t.transpose(1, 2).contiguous().transpose(1, 2) if transposed >> n & 1 else t for n, t in enumerate(tensors)
        ]
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        out = ops.kernelized_attention(*leaves)
        gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert [g.stride() for g in gradients] == [leaf.stride() for leaf in leaves]


WRONG = [
    (TypeError, "k: expected a torch.Tensor like q, got ndarray", lambda q, k, v: attend(q, k.numpy(), v)),
    (TypeError, "q: expected a numpy.ndarray or a torch.Tensor", lambda q, k, v: attend([0], k, v)),
    (TypeError, "v: expected torch.float64 like q, got torch.float32", lambda q, k, v: attend(q, k, v.float())),
    (TypeError, "q: expected float32.*got torch.int64", lambda q, k, v: attend(q.long(), k, v)),
    (ValueError, "k: expected a tensor on cpu like q, got meta", lambda q, k, v: attend(q, k.to("meta"), v)),
    (TypeError, "key_padding_mask: expected a torch.Tensor of bool", lambda q, k, v: attend(q, k, v, key_padding_mask=
     torch.zeros(2, 9))),
    (ValueError, r"key_padding_mask: expected shape \(2, 9\)", lambda q, k, v: attend(q, k, v, key_padding_mask=
     torch.zeros(2, 8, dtype=torch.bool))),
    (ValueError, r"v: expected shape", lambda q, k, v: attend(q, k, v[:, :, 1:])),
    (ValueError, r"v: expected shape", lambda q, k, v: attend(q.requires_grad_(), k, v[:, :, 1:])),
]  # fmt: skip


@pytest.mark.parametrize("kind, message, call", WRONG, ids=[message[:40] for _, message, _ in WRONG])
def test_wrong_calls(kind, message, call):
    with pytest.raises(kind, match=message):
        call(*inputs())
