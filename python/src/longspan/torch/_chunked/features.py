"""Feature maps in torch's own operations."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import _native

MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    # The slope at 0 is 1, which that of a clamp is not.
    "elu+1": lambda x: torch.where(x > 0, x + 1, torch.exp(torch.where(x > 0, 0, x))),
    "relu": torch.relu,
    "softplus": F.softplus,
    "exp": torch.exp,
    "identity": lambda x: x,
}


def elementwise(name: str) -> str:
    """The elementwise map to apply after `lift`."""
    kind, *options = name.split(":")
    if kind in MAPS:
        return kind
    return "exp" if kind == "prf" or (kind == "hedgehog" and "exp" in options) else "identity"


@functools.lru_cache(maxsize=64)
def _drawn(name: str, head_dim: int) -> Any:
    return _native.random_rows(name, head_dim)


@functools.lru_cache(maxsize=64)
def _kept(name: str, head_dim: int) -> Tensor:
    return torch.from_numpy(_drawn(name, head_dim))


def _random_rows(name: str, head_dim: int) -> Tensor:
    rows = torch.from_numpy(_drawn(name, head_dim))
    # Torch 2.11 takes two tensors of one function for one. While a program is exported they are fake ones, which must not be kept.
    return _kept(name, head_dim) if type(rows) is Tensor else rows


# See `longspan._calls.settings`.
_random_rows._dynamo_marked_constant = True  # type: ignore[attr-defined]


def lift(name: str, x: Tensor, matrix: Tensor | None) -> Tensor:
    """``[batch, heads, tokens, d]`` to the exponents or features of a map of whole rows; ``x`` itself for others.

    ``matrix`` is what "hedgehog" learns, ``[heads, width, d]``.
    """
    kind, *options = name.split(":")
    width = x.shape[-1]
    scale = max(width, 1) ** -0.25
    if kind in ("prf", "nprf"):
        rows = _random_rows(name, width).to(x)
        features = max(rows.shape[0], 1)
        if kind == "prf":
            exponents: Tensor = x @ rows.T - 0.5 * (x * scale).square().sum(-1, keepdim=True) - 0.5 * math.log(features)
            return exponents
        # A row of zeros has no direction: it stays zero, with gradient 0. Squares of others are at least 1.
        largest = x.detach().abs().amax(-1, keepdim=True)
        none = largest == 0
        x = x / torch.where(none, 1, largest)
        direction = (x / torch.where(none, 1, x.square().sum(-1, keepdim=True)).sqrt()).masked_fill(none, 0)
        bounded: Tensor = (direction @ rows.T - 0.5).exp() * features**-0.5
        return bounded
    if kind == "dpfp":
        parts = torch.cat([torch.relu(x), torch.relu(-x)], -1)
        order = int(options[0]) if options else 1
        return torch.cat([parts * parts.roll(-n, -1) for n in range(1, order + 1)], -1)
    if kind == "taylor2":
        x = x * scale
        first, second = torch.triu_indices(width, width, device=x.device)
        products = x[..., first] * x[..., second] * torch.where(first == second, x.new_tensor(0.5**0.5), x.new_ones(()))
        return torch.cat([torch.ones_like(x[..., :1]), x, products], -1)
    if kind == "hedgehog" and matrix is not None:
        exponents = x @ matrix.transpose(-1, -2)
        exponents = torch.cat([exponents, -exponents], -1)
        return exponents if "exp" in options else exponents.softmax(-1)
    if kind in MAPS:
        return x
    raise ValueError(f"unknown feature map {name!r}; known on {x.device} are {', '.join(MAPS)}, prf, nprf, dpfp, "
                     "taylor2, hedgehog")  # fmt: skip
