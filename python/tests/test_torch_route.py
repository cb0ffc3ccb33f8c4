"""Where a call on tensors goes: one table of what is asked for, and of who looks on."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from longspan import ops
from longspan._calls import Request
from longspan.torch import TensorState, _dispatch, _triton
from longspan.torch._chunked import RECURRENCE
from longspan.torch._dispatch import Route, route
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

KERNELS, AUTOGRAD, OPERATOR, TORCH = Route


class Looks(torch.Tensor):
    """A class that changes nothing."""


class Dispatches(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def plain():
    return torch.ones(1, 2, 4, 3)


def learning():
    return plain().requires_grad_()


def state(learns=False):
    x = learning() if learns else plain()
    found = ops.kernelized_attention(x, x, x, is_causal=True, output_final_state=True)[1]
    return found if learns else TensorState.of(found)


@contextmanager
def compiling():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        yield


@contextmanager
def on_device(lacking=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_triton, "serves", lambda tensor: True)
        patch.setattr(_triton, "unsupported", lambda call, tensors: lacking)
        yield


@contextmanager
def exporting():
    token = RECURRENCE.set(lambda *_: None)
    try:
        yield
    finally:
        RECURRENCE.reset(token)


#: What a call is given, who looks on, and where it goes without states and with them.
TABLE = {
    "plain tensors": (plain, nullcontext, KERNELS, KERNELS),
    "a gradient": (learning, nullcontext, AUTOGRAD, AUTOGRAD),
    "a gradient that nobody records": (learning, torch.no_grad, KERNELS, KERNELS),
    "autocast, whose types are made before": (plain, lambda: torch.autocast("cpu"), KERNELS, KERNELS),
    "a compiler": (plain, compiling, OPERATOR, OPERATOR),
    "a compiler of tensors elsewhere": (lambda: plain().to("meta"), compiling, TORCH, TORCH),
    "fake tensors": (plain, FakeTensorMode, OPERATOR, OPERATOR),
    "a counter of operations": (plain, lambda: FlopCounterMode(display=False), OPERATOR, OPERATOR),
    "a class that dispatches": (lambda: plain().as_subclass(Dispatches), nullcontext, OPERATOR, OPERATOR),
    "a class that looks": (lambda: plain().as_subclass(Looks), nullcontext, OPERATOR, KERNELS),
    "another device": (lambda: plain().to("meta"), nullcontext, TORCH, TORCH),
    "a device that Triton serves": (plain, on_device, AUTOGRAD, AUTOGRAD),
    "a compiler for it": (plain, lambda: stacked(on_device(), compiling()), OPERATOR, OPERATOR),
    "what Triton lacks": (plain, lambda: on_device("float64"), TORCH, TORCH),
    "an export to ONNX": (plain, exporting, TORCH, KERNELS),
}


@contextmanager
def stacked(first, second):
    with first, second:
        yield


@pytest.mark.parametrize("name", TABLE)
def test_where_a_call_goes(name):
    make, look, without, with_state = TABLE[name]
    x = make()
    call = Request("kernelized", "{}", "test", True, 0)
    with look():
        assert route(call, (x, x, x), None, False) is without
        assert route(call, (x, x, x), None, True) is with_state


def test_transforms_go_through_torchs_operations():
    call, seen = Request("kernelized", "{}", "test", True, 0), []

    def asked(x):
        seen.append(route(call, (x, x, x), None, False))
        return x.sum()

    torch.func.grad(asked)(plain())
    torch.func.vmap(asked)(plain()[None])
    with forward_ad.dual_level():
        assert route(call, (plain(),) * 3, None, False) is KERNELS
        asked(forward_ad.make_dual(plain(), plain()))
    assert seen == [TORCH] * 3


def test_a_state_may_carry_the_gradient():
    call, x = Request("kernelized", "{}", "test", True, 0), plain()
    assert route(call, (x, x, x), state(), True) is KERNELS
    assert route(call, (x, x, x), state(learns=True), True) is AUTOGRAD
    with torch.no_grad():
        assert route(call, (x, x, x), state(learns=True), True) is KERNELS
    with forward_ad.dual_level():
        dual = TensorState(*[getattr(state(), part) for part in ("mechanism", "options", "parts")],
                           forward_ad.make_dual(state().numbers, torch.ones_like(state().numbers)))  # fmt: skip
        assert route(call, (x, x, x), dual, True) is TORCH


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.filterwarnings("ignore:.*trace")
def test_what_is_traced_is_the_call(learns):
    """Not its output, as a constant."""
    one, other = torch.randn(2, 1, 2, 4, 3)

    def call(x):
        out, state = ops.kernelized_attention(x, x, x, is_causal=True, output_final_state=True)
        last, _ = ops.kernelized_attention_step(x[:, :, 0], x[:, :, 0], x[:, :, 0], state)
        return torch.cat([ops.kernelized_attention(x, x, x), out, last[:, :, None]], 2)

    traced = torch.jit.trace(call, one.requires_grad_(learns))
    torch.testing.assert_close(traced(other), call(other))


@pytest.mark.parametrize("missing", ["_interpreter", "_dispatch_mode"])
def test_a_torch_that_lacks_a_private_name_takes_the_operator(missing, monkeypatch):
    monkeypatch.setattr(_dispatch, missing, None)
    x = plain()
    assert route(Request("kernelized", "{}", "test", True, 0), (x, x, x), None, False) is OPERATOR
    assert torch.equal(ops.kernelized_attention(x, x, x), x)
