"""Elementwise feature maps and their slopes, on tiles of float32. Columns beyond the head's width are 0."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import NOTHING, exp


@triton.jit
def _within(x, D: tl.constexpr, BLOCK: tl.constexpr, other: tl.constexpr):
    if D != BLOCK:
        x = tl.where((tl.arange(0, BLOCK) < D)[None, :], x, other)
    return x


@triton.jit
def _mapped(x, MAP: tl.constexpr):
    if MAP == "elu+1":
        # Infinite where x is large, which is not taken.
        x = tl.where(x > 0, x + 1, exp(x))
    elif MAP == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif MAP == "softplus":
        # log(1 + u) with all digits where u is small: u / ((1 + u) - 1) undoes the rounding of the sum.
        u = exp(-tl.abs(x))
        log = tl.where(1.0 + u == 1.0, u, tl.log(1.0 + u) * (u / tl.where(1.0 + u == 1.0, 1.0, (1.0 + u) - 1.0)))
        x = tl.where(x > 0, x, 0.0) + tl.where(x == x, log, x)
    elif MAP == "exp":
        x = exp(x)
    return x


@triton.jit
def slope(x, phi, MAP: tl.constexpr):
    """The derivative at ``x``, where the map is ``phi``."""
    if MAP == "elu+1":
        x = tl.where(x > 0, 1.0, phi)
    elif MAP == "relu":
        x = tl.where(x > 0, 1.0, tl.where(x == x, 0.0, x))
    elif MAP == "softplus":
        x = 1.0 / (1.0 + exp(-x))
    elif MAP == "exp":
        x = phi
    else:
        x = tl.full(x.shape, 1.0, tl.float32)
    return x


@triton.jit
def of_keys(x, MAP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Features of keys and, for ``exp``, the exponent that each row is relative to: its largest number."""
    exponent = tl.zeros([x.shape[0]], tl.float32)
    if MAP == "exp":
        exponent = tl.maximum(tl.max(_within(x, D, BLOCK, float("-inf")), 1), NOTHING)
        x = x - exponent[:, None]
    return _within(_mapped(x, MAP), D, BLOCK, 0.0), exponent


@triton.jit
def of_queries(x, MAP: tl.constexpr, NORMALIZE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Features of queries; those of ``exp`` relative to the row's largest, which cancels in the division."""
    if MAP == "exp" and NORMALIZE:
        largest = tl.max(_within(x, D, BLOCK, float("-inf")), 1)
        x = x - tl.where(largest == float("-inf"), 0.0, largest)[:, None]
    return _within(_mapped(x, MAP), D, BLOCK, 0.0)
