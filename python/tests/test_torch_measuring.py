"""Torch's profiler knows the kernels by name, and its flop counter counts them."""

import subprocess
import sys

import longspan
import longspan.torch.flops
import pytest
import torch
from longspan import ops
from longspan.torch import MultiheadAttention, TransformerEncoderLayer
from torch.utils.flop_counter import FlopCounterMode


def qkv(tokens, requires_grad=False):
    return [torch.randn(1, 2, tokens, 8, requires_grad=requires_grad) for _ in range(3)]


def names_of(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key for event in profile.key_averages() if event.key.startswith("longspan::")}


def test_names_in_the_profiler():
    q, k, v = qkv(9)
    assert names_of(lambda: ops.kernelized_attention(q, k, v)) == {"longspan::kernelized forward"}
    q.requires_grad_()
    learned = names_of(lambda: ops.softmax_attention(q, k, v).sum().backward())
    assert learned == {"longspan::softmax forward", "longspan::softmax backward"}
    layer, attention = TransformerEncoderLayer(12, 3, 16).eval(), MultiheadAttention(12, 3).eval()
    token = torch.randn(2, 12)
    with torch.no_grad():
        assert names_of(lambda: layer.step(token)) == {"longspan::kernelized step"}
        assert names_of(lambda: attention.step(token)) == {"longspan::kernelized step"}
        one = token[:, None]
        assert names_of(lambda: ops.aft_simple_step(one, one, one)) == {"longspan::aft-simple step"}


def counted(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("name, function", [("kernelized", ops.kernelized_attention), ("softmax", ops.softmax_attention)])
def test_flops(name, function):
    sizes = {"batch": 1, "heads": 2, "queries": 300, "head_dim": 8, "with_backward": True}
    plan = longspan.explain(name, is_causal=True, **sizes)
    expected = next(estimate["flops"] for estimate in plan.estimates if estimate["algorithm"] == plan.algorithm)
    assert counted(lambda: function(*qkv(300), is_causal=True)) == round(expected) > 0
    assert counted(lambda: function(*qkv(300, True), is_causal=True).sum().backward()) == 3 * round(expected)
    with_state = lambda *tensors: function(*tensors, is_causal=True, output_final_state=True)[0].sum()  # noqa: E731
    assert counted(lambda: with_state(*qkv(300, True)).backward()) == 3 * round(expected)
    rel = torch.randn(2, 9, 8)
    assert counted(lambda: ops.shaw_attention(*qkv(300), rel)) > counted(lambda: ops.kernelized_attention(*qkv(300)))


def test_an_import_is_light():
    """Neither torch's compiler nor its counter comes with the package."""
    heavy = "{'torch._dynamo', 'torch.utils.flop_counter', 'transformers'}"
    code = f"import sys, torch; before = set(sys.modules); import longspan.torch; print({heavy} & set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
