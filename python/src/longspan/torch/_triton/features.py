"""Elementwise feature maps and their slopes, on tiles of float32. Columns beyond the head's width are 0."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import NOTHING, inverse, load_rows, store_rows


@triton.jit
def _within(x, D: tl.constexpr, BLOCK: tl.constexpr, other: tl.constexpr):  # type: ignore[no-untyped-def]
    if D != BLOCK:
        x = tl.where((tl.arange(0, BLOCK) < D)[None, :], x, other)
    return x


@triton.jit
def _mapped(x, MAP: tl.constexpr):  # type: ignore[no-untyped-def]
    if MAP == "elu+1":
        x = tl.where(x > 0, x + 1, tl.exp(tl.where(x > 0, 0.0, x)))
    elif MAP == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif MAP == "softplus":
        # log(1 + u) with all digits where u is small: u / ((1 + u) - 1) undoes the rounding of the sum.
        u = tl.exp(-tl.abs(x))
        log = tl.where(1.0 + u == 1.0, u, tl.log(1.0 + u) * (u / tl.where(1.0 + u == 1.0, 1.0, (1.0 + u) - 1.0)))
        x = tl.where(x > 0, x, 0.0) + tl.where(x == x, log, x)
    elif MAP == "exp":
        x = tl.exp(x)
    return x


@triton.jit
def slope(x, phi, MAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The derivative at ``x``, where the map is ``phi``."""
    if MAP == "elu+1":
        x = tl.where(x > 0, 1.0, phi)
    elif MAP == "relu":
        x = tl.where(x > 0, 1.0, tl.where(x == x, 0.0, x))
    elif MAP == "softplus":
        x = 1.0 / (1.0 + tl.exp(-x))
    elif MAP == "exp":
        x = phi
    else:
        x = tl.full(x.shape, 1.0, tl.float32)
    return x


@triton.jit
def mapped(x, MAP: tl.constexpr, RELATIVE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Features and, of ``exp``, the exponent that each row is relative to: its largest number."""
    exponent = tl.zeros([x.shape[0]], tl.float32)
    if MAP == "exp" and RELATIVE:
        exponent = tl.maximum(tl.max(_within(x, D, BLOCK, float("-inf")), 1), NOTHING)
        x = x - exponent[:, None]
    return _mapped(x, MAP), exponent


@triton.jit
def _map_rows(  # type: ignore[no-untyped-def]
    place, x, phi, exponents, out, d_out, denominators, delta, heads, tokens,
    x_b, x_h, x_t, o_b, o_h, o_t, g_b, g_h, g_t,
    MAP: tl.constexpr, RELATIVE: tl.constexpr, BACKWARD: tl.constexpr, NORMALIZE: tl.constexpr, EXPONENTS: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    pieces = tl.cdiv(tokens, C)
    first = (place % pieces) * C
    place = (place // pieces).to(tl.int64)
    batch, head = place // heads, place % heads
    row = first + tl.arange(0, C)
    there = row < tokens
    own = load_rows(x + batch * x_b + head * x_h, first, x_t, there, 0, D, C, BD).to(tl.float32)
    features, exponent = mapped(own, MAP, RELATIVE, D, BD)
    start = (batch * heads + head) * tokens
    if EXPONENTS:
        tl.store(exponents + start + row, exponent, mask=there)
    if BACKWARD:
        EACH: tl.constexpr = 2 if MAP == "exp" else 1
        features *= inverse(tl.load(denominators + (start + row) * EACH, mask=there, other=1.0))[:, None]
        if NORMALIZE:
            y = load_rows(out + batch * o_b + head * o_h, first, o_t, there, 0, DV, C, BV).to(tl.float32)
            dy = load_rows(d_out + batch * g_b + head * g_h, first, g_t, there, 0, DV, C, BV).to(tl.float32)
            tl.store(delta + start + row, tl.sum(y * dy, 1), mask=there)
    store_rows(features, phi + start * D, first, D, there, 0, D, C, BD)


@triton.jit
def features(  # type: ignore[no-untyped-def]
    q, k, phi_q, phi_k, exponents, out, d_out, denominators, delta, heads, kv_heads, queries, keys, of_queries,
    q_b, q_h, q_t, k_b, k_h, k_t, o_b, o_h, o_t, g_b, g_h, g_t,
    MAP: tl.constexpr, BACKWARD: tl.constexpr, NORMALIZE: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Features of queries, by the first ``of_queries`` programs, and of keys, ``[batch, head, token, D]``, with the exponents that
    those of ``exp`` are relative to. For a backward those of queries over their denominators, and ``delta``, out times its gradient."""
    place = tl.program_id(0)
    if place < of_queries:
        # What a query is relative to cancels in the division.
        _map_rows(place, q, phi_q, exponents, out, d_out, denominators, delta, heads, queries, q_b, q_h, q_t, o_b, o_h, o_t, g_b, g_h, g_t,
                  MAP, NORMALIZE, BACKWARD, NORMALIZE, False, D, BD, DV, BV, C)  # fmt: skip
    else:
        _map_rows(place - of_queries, k, phi_k, exponents, out, d_out, denominators, delta, kv_heads, keys, k_b, k_h, k_t, 0, 0, 0, 0, 0, 0,
                  MAP, True, False, False, MAP == "exp", D, BD, DV, BV, C)  # fmt: skip
