"""The kernels of the short convolution: a few taps over the latest products of keys and values (see README.md)."""

import triton
import triton.language as tl

from .tiles import is_key, load_rows, sequence_of, store_rows, within

_SIZES = ["queries", "keys", "offset", "kv_heads", "count"]


@triton.jit
def _products(
    k, v, k_t, v_t, before, ignored, first, low, keys,
    GATED: tl.constexpr, INITIAL: tl.constexpr, IGNORED: tl.constexpr, TAPS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Keys times values from ``first`` on, 0 where there is no key; those before the call's are in the state before it."""
    token = first + tl.arange(0, R)
    there = is_key(ignored, token, keys, IGNORED)
    u = load_rows(v, first, v_t, there, low, D, R, BX).to(tl.float32)
    if GATED:
        u *= load_rows(k, first, k_t, there, low, D, R, BX).to(tl.float32)
    if INITIAL:
        u += load_rows(before, first + TAPS - 1, D, (token < 0) & (token > -TAPS), low, D, R, BX)
    return u


@triton.jit(do_not_specialize=_SIZES)
def convolve(
    q, k, v, taps, bias, to, d_out, dq, d_sums, d_learned, initial, end, ignored, lengths, bounds,
    queries, keys, offset, kv_heads, count,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, to_b, to_h, to_t, g_b, g_h, g_t, dq_b, dq_h, dq_t,
    BACKWARD: tl.constexpr, SILU: tl.constexpr, GATED: tl.constexpr, INITIAL: tl.constexpr, END: tl.constexpr, IGNORED: tl.constexpr,
    PACKED: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Rows and channels of a head: outputs and the state after the last key; or gradients of queries and of the sums, and this program's
    part in those of taps and bias."""
    TILES: tl.constexpr = (D + BX - 1) // BX
    RECORD: tl.constexpr = (TAPS - 1) * D + 1
    program = tl.program_id(0)
    low = program % TILES * BX
    first = program // TILES % count * R
    kv_head = (program // TILES // count % kv_heads).to(tl.int64)
    sequence = (program // TILES // count // kv_heads).to(tl.int64)
    whose = sequence * kv_heads + kv_head
    batch, q_start, k_start, n_queries, n_keys = sequence_of(bounds, sequence, queries, keys, PACKED)
    column = low + tl.arange(0, BX)
    there = first + tl.arange(0, R) < n_queries
    k += batch * k_b + kv_head * k_h + k_start * k_t
    v += batch * v_b + kv_head * v_h + k_start * v_t
    if IGNORED:
        ignored += batch * keys
    before = initial
    if INITIAL:
        before += whose * RECORD
    sums = tl.zeros([R, BX], tl.float32)
    if bias is not None:
        sums += tl.load(bias + kv_head * D + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    for t in range(TAPS):
        tap = tl.load(taps + (kv_head * TAPS + t) * D + column, mask=column < D, other=0.0).to(tl.float32)
        sums += tap[None, :] * _products(k, v, k_t, v_t, before, ignored, first + offset - t, low, n_keys,
                                         GATED, INITIAL, IGNORED, TAPS, D, R, BX)  # fmt: skip
    sigma = 1.0 / (1.0 + tl.exp(-sums))
    activated = sums
    if SILU:
        activated = sums * sigma
    d = tl.zeros([R, BX], tl.float32)
    for g in range(GROUP):
        head = kv_head * GROUP + g
        gate = tl.full([R, BX], 1.0, tl.float32)
        if GATED:
            gate = load_rows(q + batch * q_b + head * q_h + q_start * q_t, first, q_t, there, low, D, R, BX).to(tl.float32)
        if BACKWARD:
            of_out = load_rows(d_out + batch * g_b + head * g_h + q_start * g_t, first, g_t, there, low, D, R, BX).to(tl.float32)
            d += of_out * gate
            if GATED:
                store_rows(of_out * activated, dq + batch * dq_b + head * dq_h + q_start * dq_t, first, dq_t, there, low, D, R, BX)
        else:
            store_rows(activated * gate, to + batch * to_b + head * to_h + q_start * to_t, first, to_t, there, low, D, R, BX)
    if BACKWARD:
        if SILU:
            d *= sigma + activated * (1.0 - sigma)
        d = tl.where(there[:, None], d, 0.0)
        store_rows(d, d_sums + (batch * kv_heads + kv_head) * queries * D + q_start * D, first, D, there, low, D, R, BX)
        part = d_learned + ((sequence * count + first // R) * kv_heads + kv_head) * (TAPS + 1) * D + column
        for t in range(TAPS):
            u = _products(k, v, k_t, v_t, before, ignored, first + offset - t, low, n_keys, GATED, INITIAL, IGNORED, TAPS, D, R, BX)
            tl.store(part + t * D, tl.sum(d * u, 0), mask=column < D)
        tl.store(part + TAPS * D, tl.sum(d, 0), mask=column < D)
    elif END:
        if first == 0:
            last = n_keys
            if IGNORED:
                last = tl.load(lengths + sequence).to(tl.int32)
            after = end + whose * RECORD
            for n in range(0, TAPS - 1, R):
                held = n + tl.arange(0, R) < TAPS - 1
                u = _products(k, v, k_t, v_t, before, ignored, last - TAPS + 1 + n, low, n_keys, GATED, INITIAL, IGNORED, TAPS, D, R, BX)
                store_rows(u, after, n + tl.zeros([], tl.int32), D, held, low, D, R, BX)
            if low == 0:
                seen = last.to(tl.float32)
                if INITIAL:
                    seen += tl.load(before + RECORD - 1)
                tl.store(after + RECORD - 1, tl.minimum(seen, TAPS - 1.0))


@triton.jit(do_not_specialize=_SIZES)
def convolve_back(
    k, v, taps, d_sums, dk, dv, d_initial, d_end, ignored, lengths, bounds,
    queries, keys, offset, kv_heads, count,
    k_b, k_h, k_t, v_b, v_h, v_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    GATED: tl.constexpr, INITIAL: tl.constexpr, END: tl.constexpr, IGNORED: tl.constexpr, PACKED: tl.constexpr, TAPS: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Gradients of keys, values and the state before them."""
    TILES: tl.constexpr = (D + BX - 1) // BX
    RECORD: tl.constexpr = (TAPS - 1) * D + 1
    program = tl.program_id(0)
    low = program % TILES * BX
    first = program // TILES % count * R
    if INITIAL:
        first -= TAPS - 1
    kv_head = (program // TILES // count % kv_heads).to(tl.int64)
    sequence = (program // TILES // count // kv_heads).to(tl.int64)
    whose = sequence * kv_heads + kv_head
    batch, q_start, k_start, n_queries, n_keys = sequence_of(bounds, sequence, queries, keys, PACKED)
    column, r = low + tl.arange(0, BX), tl.arange(0, R)
    d_sums += (batch * kv_heads + kv_head) * queries * D + q_start * D
    last = n_keys
    if IGNORED:
        ignored += batch * keys
        last = tl.load(lengths + sequence).to(tl.int32)
    d = tl.zeros([R, BX], tl.float32)
    for t in range(TAPS):
        tap = tl.load(taps + (kv_head * TAPS + t) * D + column, mask=column < D, other=0.0).to(tl.float32)
        row = first - offset + t
        d += tap[None, :] * load_rows(d_sums, row, D, within(row + r, n_queries), low, D, R, BX)
    if END:
        held = first - last + TAPS - 1
        d += load_rows(d_end + whose * RECORD, held, D, within(held + r, TAPS - 1 + tl.zeros([], tl.int32)), low, D, R, BX)
    there, stored = is_key(ignored, first + r, n_keys, IGNORED), within(first + r, n_keys)
    of_value = d
    if GATED:
        of_value = d * load_rows(k + batch * k_b + kv_head * k_h + k_start * k_t, first, k_t, there, low, D, R, BX).to(tl.float32)
        of_key = d * load_rows(v + batch * v_b + kv_head * v_h + k_start * v_t, first, v_t, there, low, D, R, BX).to(tl.float32)
        of_key = tl.where(there[:, None], of_key, 0.0)
        store_rows(of_key, dk + batch * dk_b + kv_head * dk_h + k_start * dk_t, first, dk_t, stored, low, D, R, BX)
    of_value = tl.where(there[:, None], of_value, 0.0)
    store_rows(of_value, dv + batch * dv_b + kv_head * dv_h + k_start * dv_t, first, dv_t, stored, low, D, R, BX)
    if INITIAL:
        store_rows(d, d_initial + whose * RECORD, first + TAPS - 1, D, first + r < 0, low, D, R, BX)
