"""`longspan.fla` beside what others wrote: transformers' torch functions and models, ONNX's reference evaluator."""

import logging
import sys
import types
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
import transformers

pytest.importorskip("transformers", minversion="5.17")

from transformers.models.kimi_linear import modeling_kimi_linear as kimi  # noqa: E402
from transformers.models.mamba2 import modeling_mamba2 as mamba2  # noqa: E402
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next  # noqa: E402

from longspan import fla, ops  # noqa: E402
from longspan.transformers import accelerate  # noqa: E402
from longspan.transformers._accelerate import _replace  # noqa: E402

logging.getLogger("transformers").setLevel(logging.ERROR)

# As they are before anything is accelerated.
GATED_DELTA_RULE = qwen3_next.torch_recurrent_gated_delta_rule
KIMI_DELTA_ATTENTION = kimi.recurrent_kimi_delta_attention
MAMBA2_SCAN = mamba2.mamba2_chunk_scan


def near(got, expected, tolerance=5e-6, what=""):
    error = (got - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    assert error <= tolerance, f"{what}: {error:.1e}"


def inputs(tokens, heads, value_heads, width=16, columns=12, batch=2):
    torch.manual_seed(tokens)
    q, k = torch.randn(2, batch, tokens, heads, width)
    v = torch.randn(batch, tokens, value_heads, columns)
    beta = torch.rand(batch, tokens, value_heads) * 2
    return q, k, v, beta, torch.randn(batch, value_heads, width, columns)


def with_gradients(function, tensors, **options):
    tensors = [tensor.clone().requires_grad_() for tensor in tensors]
    q, k, v, g, beta, state = tensors
    out, after = function(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True, **options)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    loss = (out * weights).sum() + (after * torch.linspace(1, -2, after.numel()).view_as(after)).sum()
    return [out, after, *torch.autograd.grad(loss, tensors)]


@pytest.mark.parametrize("tokens", [1, 5, 63, 64, 65, 150])
@pytest.mark.parametrize("decay", [0.01, 1.0, 9.0])
def test_gated_delta_rule_is_transformers(tokens, decay):
    q, k, v, beta, state = inputs(tokens, 2, 4)
    g = -decay * torch.rand(v.shape[:3])
    got = with_gradients(fla.chunk_gated_delta_rule, (q, k, v, g, beta, state))
    expected = with_gradients(GATED_DELTA_RULE, [x.double() for x in (q, k, v, g, beta, state)])
    for name, a, b in zip(("out", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate"), got, expected):
        near(a, b.float(), what=name)


@pytest.mark.parametrize("tokens", [1, 17, 64, 150])
@pytest.mark.parametrize("decay", [0.01, 9.0])
def test_kda_is_transformers(tokens, decay):
    q, k, v, beta, state = inputs(tokens, 3, 3)
    g = -decay * torch.rand(*v.shape[:3], q.shape[3])
    got = with_gradients(fla.chunk_kda, (q, k, v, g, beta, state))
    expected = with_gradients(KIMI_DELTA_ATTENTION, (q, k, v, g, beta, state))
    for name, a, b in zip(("out", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate"), got, expected):
        near(a, b, 1e-5, name)


def test_mamba2_scan_is_transformers():
    torch.manual_seed(0)
    x = torch.randn(2, 100, 8, 16, requires_grad=True)
    dt, a, bias, d = torch.randn(2, 100, 8), -torch.rand(8) * 4, torch.randn(8), torch.randn(8)
    b, c = torch.randn(2, 2, 100, 2, 12).bfloat16()
    before = torch.randn(2, 8, 16, 12)
    options = {"D": d, "dt_bias": bias, "dt_softplus": True, "initial_states": before, "return_final_states": True}
    got, expected = (scan(x, dt, a, b, c, 32, **options) for scan in (fla.mamba_chunk_scan_combined, MAMBA2_SCAN))
    for one, other in zip(got, expected):
        near(one, other)
    near(*(torch.autograd.grad(out[0].square().sum(), x)[0] for out in (got, expected)))
    ends = [[0, 30, 30, 100], [0, 1, 99, 100]]
    index = torch.stack([torch.arange(3).repeat_interleave(torch.tensor(one).diff()) for one in ends])
    z, options = torch.randn_like(x), {"D": d, "dt_bias": bias, "dt_softplus": True}
    packed = fla.mamba_chunk_scan_combined(x, dt, a, b, c, z=z, seq_idx=index, **options)
    for n, one in enumerate(ends):
        for start, end in zip(one, one[1:]):
            alone = [tensor[n : n + 1, start:end] for tensor in (x, dt, b, c, z)]
            right = fla.mamba_chunk_scan_combined(*alone[:2], a, *alone[2:4], z=alone[4], **options)
            torch.testing.assert_close(packed[n : n + 1, start:end], right)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_rules_are_onnx(rule):
    onnx = pytest.importorskip("onnx", minversion="1.23")
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    if onnx.defs.onnx_opset_version() < 27:
        pytest.skip("an onnx without LinearAttention")
    tokens, heads, width = 20, 2, 8
    q, k, v, beta, _ = inputs(tokens, heads, heads, width, width, 1)
    k = torch.nn.functional.normalize(k, dim=-1)
    g = -torch.rand(1, tokens, heads)
    gates = {"linear": [], "gated": ["decay"], "delta": ["beta"], "gated_delta": ["decay", "beta"]}[rule]
    given = ["", *(name if name in gates else "" for name in ("decay", "beta"))]
    while given and not given[-1]:
        given.pop()
    node = helper.make_node("LinearAttention", ["q", "k", "v", *given], ["out", "state"], update_rule=rule, q_num_heads=heads,
                            kv_num_heads=heads, scale=0.5)  # fmt: skip
    packed = {"q": q.flatten(2), "k": k.flatten(2), "v": v.flatten(2), "decay": g, "beta": beta}
    feeds = {name: packed[name].numpy() for name in ["q", "k", "v", *gates]}
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, list(array.shape)) for name, array in feeds.items()]
    outs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("out", "state")]
    graph = helper.make_graph([node], "one", values, outs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 27)])
    expected, state = ReferenceEvaluator(model).run(None, feeds)
    if "delta" in rule:
        got, after = fla.chunk_gated_delta_rule(q, k, v, g if "decay" in gates else None, beta, 0.5, output_final_state=True)
    else:
        got, after = fla.chunk_simple_gla(q, k, v, g if gates else None, scale=0.5, output_final_state=True)
    near(got.flatten(2), torch.from_numpy(np.array(expected)))
    near(after, torch.from_numpy(np.array(state)))


def test_packed_sequences_are_apart():
    q, k, v, beta, _ = inputs(100, 2, 4, batch=1)
    g = -torch.rand(v.shape[:3])
    bounds = torch.tensor([0, 30, 31, 100])
    states = torch.randn(3, 4, 16, 12)
    alone = [fla.chunk_gated_delta_rule(*(x[:, a:b] for x in (q, k, v, g, beta)), initial_state=states[n : n + 1], output_final_state=True)
             for n, (a, b) in enumerate(zip(bounds, bounds[1:]))]  # fmt: skip
    out, after = fla.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=states, output_final_state=True, cu_seqlens=bounds)
    near(out, torch.cat([one[0] for one in alone], dim=1))
    near(after, torch.cat([one[1] for one in alone]))
    none = fla.chunk_gated_delta_rule(*(x[:, :0].bfloat16() for x in (q, k, v)), output_final_state=True, cu_seqlens=bounds[:1])
    assert [(x.shape, x.dtype) for x in none] == [((1, 0, 4, 12), torch.bfloat16), ((0, 4, 16, 12), torch.float32)]
    fresh = fla.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=bounds)[0]
    near(fresh[:, 31:], fla.chunk_gated_delta_rule(*(x[:, 31:] for x in (q, k, v, g, beta)))[0])


def test_token_by_token_is_the_whole():
    q, k, v, beta, state = inputs(20, 2, 2)
    g = -torch.rand(*v.shape[:3], 16)
    whole, last = fla.chunk_kda(q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
    outs = []
    for t in range(20):
        token = [x[:, t : t + 1] for x in (q, k, v, g, beta)]
        out, state = fla.fused_recurrent_kda(*token, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
        outs.append(out)
    near(torch.cat(outs, dim=1), whole)
    near(state, last)


def test_half_precision_and_compile():
    q, k, v, beta, _ = inputs(70, 2, 2)
    g = -torch.rand(v.shape[:3])
    narrow = [x.bfloat16() for x in (q, k, v)]
    out, state = fla.chunk_gated_delta_rule(*narrow, g, beta.bfloat16(), output_final_state=True, use_qk_l2norm_in_kernel=True)
    expected = fla.chunk_gated_delta_rule(*(x.float() for x in narrow), g, beta.bfloat16().float(), use_qk_l2norm_in_kernel=True)[0]
    assert out.dtype is torch.bfloat16 and state.dtype is torch.float32
    near(out.float(), expected, 4e-3)
    compiled = torch.compile(fla.chunk_simple_gla, backend="aot_eager", fullgraph=True)
    x = q.clone().requires_grad_()
    near(*(torch.autograd.grad(f(x, k, v, g)[0].square().sum(), x)[0] for f in (compiled, fla.chunk_simple_gla)))


def test_heads_of_values_may_share_those_of_queries_and_keys():
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 2, 9, 4, dtype=torch.float64)
    v, g, beta = torch.randn(2, 4, 9, 3, dtype=torch.float64), -torch.rand(2, 4, 9).double(), torch.rand(2, 4, 9).double()
    tensors = [tensor.requires_grad_() for tensor in (q, k, v, g, beta)]
    attend = partial(ops.delta_attention, l2_norm=True)

    def apart(q, k, v, g, beta):
        return attend(q.repeat_interleave(2, 1), k.repeat_interleave(2, 1), v, beta, g)

    def shared(q, k, v, g, beta):
        return attend(q, k, v, beta, g)

    weights = torch.randn(2, 4, 9, 3, dtype=torch.float64)
    expected = torch.autograd.grad((apart(*tensors) * weights).sum(), tensors)
    for function in (shared, torch.compile(shared, backend="aot_eager", fullgraph=True)):
        out = function(*tensors)
        torch.testing.assert_close(out, apart(*tensors), rtol=0, atol=0)
        for found, right in zip(torch.autograd.grad((out * weights).sum(), tensors), expected):
            torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradgradcheck(shared, tensors)
    q, k, v, g, beta = (tensor.detach().numpy() for tensor in tensors)
    state, rows = None, []
    for t in range(9):
        row, state = ops.delta_attention_step(*(x[:, :, t : t + 1] for x in (q, k, v, beta, g)), state, l2_norm=True)
        rows.append(torch.from_numpy(row))
    torch.testing.assert_close(torch.cat(rows, 2), out.detach(), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="v: expected shape"):
        attend(q, k, v[:, :3], beta[:, :3], g[:, :3])


@pytest.mark.parametrize("taps", [1, 3, 4, 7])
def test_short_convolution(taps):
    torch.manual_seed(taps)
    x, weight, bias = torch.randn(2, 6, 20), torch.randn(6, taps), torch.randn(6)

    def theirs(x, weight, bias, **_):
        sums = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=taps - 1, groups=6)[..., :20]
        return torch.nn.functional.silu(sums)

    learned = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    outs = [function(*learned, activation="silu") for function in (fla.causal_conv1d_fn, theirs)]
    for found, right in zip(*(torch.autograd.grad((out * torch.linspace(-1, 1, 20)).sum(), learned) for out in outs)):
        near(found, right)
    expected = outs[1].detach()
    out, last = fla.causal_conv1d_fn(x, weight, bias, return_final_states=True, activation="silu")
    near(out, expected)
    assert torch.equal(last, torch.nn.functional.pad(x, (taps, 0))[..., 21:] if taps > 1 else last)
    narrow = fla.causal_conv1d_fn(x, weight.bfloat16(), bias.bfloat16(), activation="silu")
    near(narrow, theirs(x, weight.bfloat16().float(), bias.bfloat16().float()))
    first, state = fla.causal_conv1d_fn(x[..., :8], weight, bias, return_final_states=True, activation="silu")
    rest = [fla.causal_conv1d_update(x[..., t], state, weight, bias, "silu")[..., None] for t in range(8, 14)]
    rest.append(fla.causal_conv1d_update(x[..., 14:], state, weight, bias, "silu"))
    near(torch.cat([first, *rest], dim=2), expected)
    index = torch.tensor([[0] * 9 + [1] * 11, [0] * 4 + [1] * 16])
    apart = fla.causal_conv1d_fn(x, weight, bias, seq_idx=index, activation="silu")
    for batch, end in enumerate((9, 4)):
        one = slice(batch, batch + 1)
        near(apart[one, :, end:], fla.causal_conv1d_fn(x[one, :, end:].contiguous(), weight, bias, activation="silu"))
        near(apart[one, :, :end], expected[one, :, :end])


def test_outputs_under_transforms_lie_as_callers_expect():
    # Models take views of them, with the last axes in one.
    q, k, v, beta, state = inputs(5, 2, 4)
    calls = [
        (lambda q: fla.chunk_gated_delta_rule(q, k, v, -beta, beta)[0], q),
        (lambda q: fla.chunk_gla(q, k, v[:, :, :2], -q.square(), initial_state=state[:, :2], output_final_state=True)[0], q),
        (lambda x: fla.mamba_chunk_scan_combined(x, beta, -torch.ones(4), q[:, :, :1], k[:, :, :1], D=torch.ones(4)), v),
    ]
    for call, x in calls:
        several = torch.func.vmap(lambda x, call=call: call(x).view(2, 5, -1))(torch.stack([x, 2 * x]))
        for out, given in zip(several, (x, 2 * x)):
            near(out, call(given).flatten(2))


def test_what_is_wrong_is_named():
    q, k, v, beta, state = inputs(5, 2, 4)
    g, one, x = -torch.rand(v.shape[:3]), torch.ones(1), torch.ones(1, 5, 2, 3)
    rule, scan, convolve, update = fla.chunk_gated_delta_rule, fla.mamba_chunk_scan_combined, fla.causal_conv1d_fn, fla.causal_conv1d_update
    given = {"x": x, "dt": x[..., 0], "A": -torch.ones(2), "B": x, "C": x}
    wrong = [
        (rule, (q, k, v, -g, beta), {}, "chunk_gated_delta_rule: g: expected numbers that are at most 0"),
        (rule, (q[:1], k[:1], v[:1], -g[:1], beta[:1]), {"cu_seqlens": [0, 2, 5], "output_final_state": True}, "rule: g: expected numbers that"),
        (fla.chunk_simple_gla, (q, k, v), {"g_gamma": torch.ones(4)}, "chunk_simple_gla: g_gamma: expected numbers that are at most 0"),
        (rule, (q, k, v, g, beta + 2), {}, "beta: expected numbers from 0 to 2"),
        (rule, (q, k, v[:, :, :3], g[:, :, :3], beta[:, :, :3]), {}, "v: expected a multiple of the 2 heads of keys, got 3"),
        (rule, (q, k, v, g[:, :4], beta), {}, "g: expected shape"),
        (rule, (q, k, v, g, beta, None, state[:, :2]), {}, "initial_state: expected shape"),
        (rule, (q, k, v[0], g, beta), {}, "v: expected a tensor of 4 axes"),
        (rule, (q, k, v, g, beta, torch.ones((), requires_grad=True)), {}, "scale: expected a number or None"),
        (rule, (q, k, v, g, beta, None, 1.0), {}, r"initial_state: expected shape \(2, 4, 16, 12\), got float"),
        (rule, (q, k, v, g, 0.5), {}, r"beta: expected shape \(2, 5, 4\), got float"),
        (rule, (q, k, v, g, beta, None, state, False, False, 5), {}, "cu_seqlens: expected integers, or a pair of such lists, got 5"),
        # Outputs have the type of queries, which would cut fractions off, or one part.
        (rule, (q.long(), k, v, g, beta), {}, "q: expected floating-point numbers, got torch.int64"),
        (rule, (q, k.to(torch.complex64), v, g, beta), {}, "k: expected floating-point numbers, got torch.complex64"),
        (convolve, (torch.ones(1, 2, 3).long(), torch.ones(2, 2)), {}, "causal_conv1d_fn: x: expected floating-point numbers"),
        (convolve, (torch.ones(1, 2, 3), torch.ones(2, 2), None, [[0, 0, 1]]), {}, r"seq_idx: expected a tensor of shape \(1, 3\), got list"),
        (convolve, (torch.ones(1, 2, 3), torch.ones(2, 0)), {}, "causal_conv1d_fn: weight: expected 1 to 64 taps, got 0"),
        (convolve, (torch.ones(1, 2, 3), torch.ones(2, 2)), {"activation": "relu"}, "activation: expected None, 'silu' or 'swish'"),
        (fla.chunk_kda, (q, k, v[:, :, :2], torch.zeros(2, 5, 2, 16), None), {}, "beta: expected a tensor of 3 axes, got NoneType"),
        (fla.chunk_gla, (q, k, v, None), {}, "chunk_gla: g: expected a tensor of 4 axes, got NoneType"),
        (fla.chunk_gla, [t.to("meta") for t in (q, k, v[:, :, :2], torch.zeros(2, 5, 2, 16))], {},
         "expected tensors on the cpu, got meta.*flash-linear-attention"),
        (fla.chunk_simple_gla, (q, k, v), {"g_gamma": torch.zeros(1)}, r"chunk_simple_gla: g_gamma: expected shape \(4,\), got \(1,\)"),
        (update, (torch.ones(1, 2, 5), torch.zeros(1, 2, 1), torch.ones(2, 4)), {}, "conv_state: expected 3 tokens or more.*, got 1"),
        (update, (torch.ones(2, 3), torch.zeros(2, 3, 3), torch.ones(6, 4)), {}, "weight: expected shape"),
        (update, (torch.ones(2), torch.zeros(2, 3, 3), torch.ones(3, 4)), {}, "x: expected a tensor"),
        (update, (torch.ones(1, 3), torch.zeros(2, 3, 3), torch.ones(3, 4)), {}, "conv_state: expected shape"),
        *((scan, (), {**given, name: wrong}, f"scan_combined: {name}: expected shape") for name, wrong in (
            ("dt", x[..., :1, 0]), ("A", -one), ("C", x[:, :, :1]), ("D", one), ("D", torch.ones(2, 1)), ("dt_bias", one), ("D", 3.0),
            ("z", x.expand(3, -1, -1, -1)), ("z", [1.0]), ("initial_states", torch.ones(1, 2, 2, 3)))),
        (scan, (), {**given, "A": torch.ones(2)}, r"scan_combined: dt \* A: expected numbers that are at most 0, got 1"),
        (scan, (), {**given, "B": x.repeat(1, 1, 2, 1)[:, :, :3], "C": x.repeat(1, 1, 2, 1)[:, :, :3]}, "scan_combined: B: expected groups"),
        (scan, (), {**given, "dt_limit": (0.1,)}, "scan_combined: dt_limit: expected two numbers"),
        (scan, (), {**given, "A": -1.0}, "scan_combined: A: expected a tensor of 1 axes, got float"),
        (scan, (), {**given, "seq_idx": torch.zeros(1, 5), "return_final_states": True}, "seq_idx: expected None with states or cu_seqlens"),
    ]  # fmt: skip
    for function, tensors, options, message in wrong:
        with pytest.raises((ValueError, TypeError), match=message):
            function(*tensors, **options)
    for empty in (torch.ones(0, 2, 3), torch.ones(1, 2, 0)):
        assert convolve(empty, torch.ones(2, 2)).shape == empty.shape
    assert convolve(torch.ones(1, 0, 3), torch.ones(0, 2)).shape == (1, 0, 3)
    assert rule(*(x[:, :0] for x in (q, k, v, g, beta)))[0].shape == (2, 0, 4, 12)


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
SSD = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16}
MODELS = {
    "Qwen3Next": {**SIZES, **DELTA, **EXPERTS, "head_dim": 8},
    "Qwen3_5Text": {**SIZES, **DELTA, "head_dim": 8},
    "OlmoHybrid": {**SIZES, "pad_token_id": 0},
    "KimiLinear": {**SIZES, "num_key_value_heads": 4, "linear_num_heads": 2, "linear_head_dim": 8, "pad_token_id": 0,
                   "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "kv_lora_rank": 16,
                   "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
                   "layer_types": [*["linear_attention"] * 3, "full_attention"]},
    "Mamba2": {"vocab_size": 64, "hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "num_hidden_layers": 2,
               "hidden_act": "gelu"},
    "Lfm2": {**SIZES, "layer_types": ["conv", "full_attention", "conv", "conv"], "pad_token_id": 0},
    "FalconH1": {**SIZES, **SSD, "mamba_d_ssm": 64, "mamba_n_groups": 2, "head_dim": 8},
    "GraniteMoeHybrid": {**SIZES, **SSD, "mamba_n_groups": 1, "num_local_experts": 2, "num_experts_per_tok": 1,
                         "shared_intermediate_size": 16, "layer_types": ["mamba", "attention", "mamba", "mamba"]},
}  # fmt: skip


HALVES = [(torch.bfloat16, False), (torch.float32, True)]


def rounded(layer, dtype, autocast):
    """Errors of a layer's output and of the gradient of what goes in, relative to those of its own in doubles: means over some draws."""
    errors = []
    for seed in range(6):
        torch.manual_seed(seed)
        x, d = torch.randn(2, 2, 75, 32).to(dtype)
        found = []
        for kind in (dtype, torch.double):
            given = x.to(kind).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast and kind is dtype):
                out = deepcopy(layer).to(dtype).to(kind)(given)
            found.append([out.detach().double(), *torch.autograd.grad(out, given, d.to(out))])
        errors.append([(a - b).norm() / b.norm() for a, b in zip(*found)])
    return torch.tensor(errors).mean(0)


@pytest.mark.parametrize("name", MODELS)
def test_accelerated_models_are_the_same(name):
    config = getattr(transformers, f"{name}Config", None)
    if config is None:
        pytest.skip(f"a transformers without {name}")
    torch.manual_seed(1)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config(**MODELS[name])).eval()
    ids = torch.randint(1, 64, (2, 75))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0

    def run():
        model.zero_grad()
        found = model(ids, attention_mask=mask, labels=ids)
        found.loss.backward()
        gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        tokens = model.generate(ids[:, :20], attention_mask=mask[:, :20], max_new_tokens=32, do_sample=False, pad_token_id=0)
        return found.logits.detach(), gradients, tokens

    plain = run()
    # None of ours rounds more than theirs, in half precision and under autocast.
    layer = next(layer for layer in model.modules() if hasattr(layer, "conv1d") or hasattr(layer, "conv"))
    theirs = [rounded(layer, *kind) for kind in HALVES]
    layers = accelerate(model)
    for found, right in zip((rounded(layer, *kind) for kind in HALVES), theirs):
        assert (found <= 1.04 * right).all(), (found, right)
    assert layers and accelerate(model) == layers
    logits, gradients, tokens = run()
    near(logits, plain[0])
    assert torch.equal(tokens, plain[2])
    whole = torch.cat([x.flatten() for x in plain[1].values()]).abs().max()
    for name, gradient in gradients.items():
        assert (gradient - plain[1][name]).abs().max() <= 1e-5 * whole, name


def test_functions_are_replaced_by_the_first_tensors_device():
    """Also where all arguments have names."""
    theirs, called = (lambda x=None, unknown=None, y=None: "theirs"), []
    module = types.ModuleType("somebodys")
    module.function = theirs
    sys.modules["somebodys"] = module
    try:
        _replace(theirs, lambda x, y=None: called.append((x, y)) or "ours")
    finally:
        del sys.modules["somebodys"]
    near, far = torch.ones(1), torch.ones(1, device="meta")
    assert module.function(near) == module.function(x=near) == module.function(y=None, x=near) == "ours"
    assert module.function(far) == module.function(x=far) == module.function(None, far) == module.function() == "theirs"
    assert module.function(near, None, 3) == "ours" and called[-1] == (near, 3)
    assert len(called) == 4


@pytest.mark.parametrize("said", [("cu_seq_lens_q", "seq_idx"), ("cu_seq_lens_q",), ("seq_idx",)], ids=str)
@pytest.mark.parametrize("name", ["Qwen3Next", "KimiLinear", "Mamba2", "Lfm2", "FalconH1"])
def test_accelerated_layers_keep_packed_sequences_apart(name, said):
    torch.manual_seed(2)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**MODELS[name]))
    layer = model.get_submodule(accelerate(model)[0])
    x = torch.randn(1, 60, 32)
    packed = {"cu_seq_lens_q": torch.tensor([0, 25, 26, 60], dtype=torch.int32),
              "seq_idx": torch.tensor([[0] * 25 + [1] + [2] * 34], dtype=torch.int32)}  # fmt: skip
    found = layer(x, **{name: packed[name] for name in said})
    near(found, torch.cat([layer(part) for part in x.split([25, 1, 34], 1)], 1))
    if said == ("seq_idx",):
        two = layer(torch.cat([x, x.flip(1)]), seq_idx=torch.cat([packed["seq_idx"], torch.zeros(1, 60, dtype=torch.int32)]))
        near(two, torch.cat([found, layer(x.flip(1))]))


@pytest.mark.parametrize("name", ["Qwen3Next", "Mamba2"])
@torch.no_grad()
def test_what_a_cache_puts_before_packed_sequences_belongs_to_the_first(name):
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**MODELS[name]))
    layer = model.get_submodule(accelerate(model)[0])
    x, y = torch.randn(1, 3, 32), torch.randn(1, 5, 32)
    # Fewer tokens than a convolution's state: zeros come before.
    found = layer(x, cache=transformers.DynamicCache(config=model.config), cu_seq_lens_q=torch.tensor([0, 1, 3]))
    near(found, torch.cat([layer(x[:, :1]), layer(x[:, 1:])], 1))
    cache = transformers.DynamicCache(config=model.config)
    layer(x, cache=cache)
    near(layer(y, cache=cache, cu_seq_lens_q=torch.tensor([0, 5])), layer(torch.cat([x, y], 1))[:, 3:])
    with pytest.raises(ValueError, match="accelerate: cache: expected none beside packed sequences that go on"):
        layer(y, cache=cache, cu_seq_lens_q=torch.tensor([0, 2, 5]))


def test_a_layer_that_inherits_its_methods_is_accelerated():
    class Own(mamba2.Mamba2Mixer):
        pass

    assert accelerate(torch.nn.ModuleList([Own(transformers.Mamba2Config(**MODELS["Mamba2"]), 0), torch.nn.Linear(2, 2)])) == ["0"]


def test_a_state_that_comes_without_its_name_is_taken():
    q, k, v, beta, state = inputs(6, 2, 4)
    g = -torch.rand(v.shape[:3])
    accelerate(qwen3_next.Qwen3NextGatedDeltaNet(transformers.Qwen3NextConfig(**MODELS["Qwen3Next"]), 0))
    out, after = qwen3_next.torch_recurrent_gated_delta_rule(q, k, v, g, beta, state, True)
    right = GATED_DELTA_RULE(q, k, v, g, beta, state, True)
    near(out, right[0])
    near(after, right[1])
