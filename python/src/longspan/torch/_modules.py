"""Torch's own modules, called without what a call of a module asks before it computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _torch

# Where a version of torch lacks it every module is called as ever.
_hooks_of_all_modules = getattr(_torch, "_has_any_global_hook", lambda: True)


def call(module: Any, x: Tensor) -> Tensor:
    """``module(x)``. For a plain `nn.Linear` or `nn.LayerNorm` it takes half the time where ``x`` is one token: looking for
    hooks and attributes takes as long as the product. A hook, a subclass or a parametrization makes it the usual call."""
    kind = type(module)
    if (kind is nn.Linear or kind is nn.LayerNorm) and type(x) is Tensor and not _watched(module):
        learned = module._parameters
        if "weight" in learned and "bias" in learned:
            if kind is nn.Linear:
                return nn.functional.linear(x, learned["weight"], learned["bias"])
            return torch.layer_norm(x, module.normalized_shape, learned["weight"], learned["bias"], module.eps)
    out: Tensor = module(x)
    return out


def drop(module: Any, x: Tensor) -> Tensor:
    """``module(x)`` of a dropout, without the call where it does nothing: that takes as long as a product of one token."""
    idle = type(module) is nn.Dropout and not module.training and not _watched(module)
    out: Tensor = x if idle else module(x)
    return out


def refuse_hooks(module: nn.Module) -> None:
    """A step is no call of the module, so hooks of its calls would be passed over. Those of `longspan.torch.distributed` concern whole
    sequences."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if any(not getattr(hook, "__module__", "").startswith("longspan.") for hook in hooks):
        raise RuntimeError(f"{type(module).__name__}.step: forward hooks: expected none, because a step is no call of forward, got "
                           "some; remove them, or call the module on the whole sequence")  # fmt: skip


def _watched(module: nn.Module) -> bool:
    """Whether somebody sees a call of this module, or has changed what it does."""
    if "forward" in module.__dict__ or module._compiled_call_impl is not None or torch.compiler.is_compiling():
        return True
    before = module._forward_pre_hooks or module._backward_pre_hooks
    return bool(before or module._forward_hooks or module._backward_hooks or _hooks_of_all_modules())
