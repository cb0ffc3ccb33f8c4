"""Tiles of rows, and what stands for "no key yet" among exponents."""

import triton
import triton.language as tl

#: An exponent below all others. Not minus infinity: the difference of two would be NaN.
NOTHING = tl.constexpr(-1e30)


@triton.jit
def exp(x):
    """By the device's base of 2, without what `tl.exp` spends on results below the least normal number."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def within(place, count):
    """Whether ``0 <= place < count``, by one comparison."""
    return place.to(tl.uint32, bitcast=True) < count.to(tl.uint32, bitcast=True)


@triton.jit
def load_rows(start, first, stride, valid, low, WIDTH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Columns ``low ..`` of the rows ``first ..``; 0 beyond ``WIDTH`` and where a row is not valid."""
    column = low + tl.arange(0, BLOCK)
    at = start + first.to(tl.int64) * stride
    mask = valid[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (column < WIDTH)[None, :]
    return tl.load(at + tl.arange(0, C)[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(tile, start, first, stride, valid, low, WIDTH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    column = low + tl.arange(0, BLOCK)
    at = start + first.to(tl.int64) * stride
    mask = valid[:, None] & (column < WIDTH)[None, :]
    tl.store(at + tl.arange(0, C)[:, None] * stride + column[None, :], tile.to(start.dtype.element_ty), mask=mask)


@triton.jit
def sequence_of(bounds, sequence, queries, keys, PACKED: tl.constexpr):
    """The batch entry of a sequence, where its queries and keys begin, and how many there are."""
    batch, q_start, k_start = sequence, sequence * 0, sequence * 0
    if PACKED:
        batch = sequence * 0
        q_start, k_start = tl.load(bounds + 2 * sequence), tl.load(bounds + 2 * sequence + 1)
        queries = (tl.load(bounds + 2 * sequence + 2) - q_start).to(tl.int32)
        keys = (tl.load(bounds + 2 * sequence + 3) - k_start).to(tl.int32)
    return batch, q_start, k_start, queries, keys


@triton.jit
def is_key(ignored, token, keys, IGNORED: tl.constexpr):
    there = within(token, keys)
    if IGNORED:
        there = there & (tl.load(ignored + token, mask=there, other=1) == 0)
    return there


@triton.jit
def inverse(denominator):
    """1 over it; 0 where there is nothing to divide by: below the least normal number."""
    nothing = tl.abs(denominator) < 1.1754943508222875e-38
    return tl.where(nothing, 0.0, 1.0 / tl.where(nothing, 1.0, denominator))
