"""How tests hold one way of computing with tensors to another: by its gradients, token after token, as on another device."""

from contextlib import contextmanager

import pytest
import torch

from longspan.torch import _dispatch


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def leaves(*tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


def padding(batch, tokens, entry, ignored):
    """A mask that ignores some keys of one entry alone."""
    mask = torch.zeros(batch, tokens, dtype=torch.bool)
    mask[entry, ignored] = True
    return mask


def same_gradients(got, expected, tensors, *, of_expected=None, weights=None, allow_unused=False, **tolerance):
    """A weighted sum of ``got`` has the gradients of one of ``expected``, with respect to the same tensors or others."""
    weights = torch.ones_like(got) if weights is None else weights
    ours, theirs = (
        torch.autograd.grad((out * weights).sum(), of, allow_unused=allow_unused)
        for out, of in ((got, tensors), (expected, tensors if of_expected is None else of_expected))
    )
    torch.testing.assert_close(ours, theirs, **tolerance)


def steps(step, tokens, *more, **options):
    """What a layer's ``step`` gives for tokens one after the other, ``[batch, token, width]``, and the last state."""
    state, outputs = None, []
    for token in tokens.unbind(1):
        out, state = step(token, *more, state, **options)
        outputs.append(out)
    return torch.stack(outputs, 1), state


def learned(parameters, loss, count, rate=1e-2):
    """The losses of so many steps of Adam."""
    optimizer, losses = torch.optim.Adam(parameters, rate), []
    for _ in range(count):
        now = loss()
        optimizer.zero_grad()
        now.backward()
        optimizer.step()
        losses.append(now.item())
    return losses


@contextmanager
def elsewhere():
    """Takes tensors as if they were on another device, and tells the calls of them."""
    calls = []

    def elsewhere(call, *_):
        calls.append(call)
        return _dispatch.Route.TORCH

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_dispatch, "route", elsewhere)
        yield calls
