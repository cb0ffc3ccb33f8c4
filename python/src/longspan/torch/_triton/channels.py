"""Decays that each channel of the keys has of its own, within a chunk (see README.md)."""

import triton
import triton.language as tl

from .tiles import load_rows, sequence_of, store_rows, within

#: Rows of a chunk, in which decays are counted pair by pair.
CHUNK = 16


@triton.jit
def channel_sums(gates, first, count, low, AFTER: tl.constexpr, D: tl.constexpr, C: tl.constexpr, B: tl.constexpr):
    """Of a chunk, logarithms of what decays up to each row, or ``AFTER`` it, ``[C, B]``, and of all of it: sums of their own (see `gate_sums`)."""
    r = tl.arange(0, C)
    g = load_rows(gates, first, D, within(first + r, count), low, D, C, B)
    whole = tl.sum(g, 0)
    if AFTER:
        g = load_rows(gates, first + 1, D, within(first + 1 + r, count) & (r < C - 1), low, D, C, B)
    return tl.cumsum(g, 0, reverse=AFTER), whole


@triton.jit
def by_channel(
    a, pairs, b, b_t, gates, first, count, low, REVERSE: tl.constexpr, D: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Of a chunk's rows of ``b``, decayed on the way to each row: their products with those of ``a``, ``[C, C]``, or without ``a`` their sums, weighed
    by ``pairs``, ``[C, B]``. They come one after the other, the nearest of those before a row (in ``REVERSE`` after it) first, so that its decays add up."""
    OF_PAIRS: tl.constexpr = a is not None
    r, column = tl.arange(0, C), low + tl.arange(0, B)
    decays, found = tl.zeros([C, B], tl.float32), tl.zeros([C, C if OF_PAIRS else B], tl.float32)
    for n in range(C):
        s = n if REVERSE else C - 1 - n
        token = first + s
        gate = token if REVERSE else token + 1
        g = tl.load(gates + gate.to(tl.int64) * D + column, mask=column < tl.where(gate < count, D, 0), other=0.0)
        decays += tl.where((r < s if REVERSE else r > s)[:, None], g[None, :], 0.0)
        row = tl.load(b + token.to(tl.int64) * b_t + column, mask=column < tl.where(token < count, D, 0), other=0.0).to(tl.float32)
        weighed = tl.exp2(decays) * row[None, :]
        if OF_PAIRS:
            found = tl.where(r[None, :] == s, tl.sum(a * weighed, 1)[:, None], found)
        else:
            # 0 times what a row does not see, where that is not finite, is NaN.
            weights = tl.sum(tl.where(r[None, :] == s, pairs, 0.0), 1)
            found += tl.where((r <= s if REVERSE else r >= s)[:, None], weights[:, None] * weighed, 0.0)
    return found


@triton.jit(do_not_specialize=["tokens", "kv_heads", "chunks"])
def within_chunks(
    q, k, v, d_out, to, log_decay, ignored, bounds, tokens, kv_heads, chunks,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    ROLE: tl.constexpr, STRICT: tl.constexpr, IGNORED: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `scan` takes of pairs within its chunks, all of these side by side: with role ``out`` their products of queries and keys, ``[..., tokens, C]``,
    with ``dq`` and ``dk`` what they have in the sums of these roles, ``[..., tokens, D]``."""
    REVERSE: tl.constexpr = ROLE == "dk"
    ROW_GROUP: tl.constexpr = 1 if REVERSE else GROUP
    program = tl.program_id(0)
    first = program % chunks * C
    row_head = (program // chunks % (kv_heads * ROW_GROUP)).to(tl.int64)
    kv_head = row_head // ROW_GROUP
    batch, start, _, n_tokens, _ = sequence_of(bounds, (program // chunks // (kv_heads * ROW_GROUP)).to(tl.int64), tokens, tokens, PACKED)
    r = tl.arange(0, C)
    there = within(first + r, n_tokens)
    is_key = there
    if IGNORED:
        is_key = there & (tl.load(ignored + batch * tokens + first + r, mask=there, other=1) == 0)
    log_decay += ((batch * kv_heads + kv_head) * tokens + start) * D
    k += batch * k_b + kv_head * k_h + start * k_t
    v += batch * v_b + kv_head * v_h + start * v_t
    to += ((batch * kv_heads * ROW_GROUP + row_head) * tokens + start) * (C if ROLE == "out" else D)
    pairs = tl.zeros([C, C], tl.float32)
    if ROLE == "out":
        for low in range(0, D, BD):
            a = load_rows(q + batch * q_b + row_head * q_h + start * q_t, first, q_t, there, low, D, C, BD).to(tl.float32)
            pairs += by_channel(a, None, k, k_t, log_decay, first, n_tokens, low, False, D, C, BD)
        seen = (r[:, None] > r[None, :] if STRICT else r[:, None] >= r[None, :]) & is_key[None, :]
        store_rows(tl.where(seen, pairs, 0.0), to, first, C, there, 0, C, C, C)
    else:
        for low in range(0, D, BD):
            found = tl.zeros([C, BD], tl.float32)
            for g in range(GROUP if REVERSE else 1):
                q_head = row_head * GROUP + g if REVERSE else row_head
                pairs = tl.zeros([C, C], tl.float32)
                for column in range(0, DV, BV):
                    a = load_rows(d_out + batch * g_b + q_head * g_h + start * g_t, first, g_t, there, column, DV, C, BV).to(tl.float32)
                    b = load_rows(v, first, v_t, is_key, column, DV, C, BV).to(tl.float32)
                    if REVERSE:
                        pairs = tl.dot(b, tl.trans(a), acc=pairs, input_precision=PRECISION)
                    else:
                        pairs = tl.dot(a, tl.trans(b), acc=pairs, input_precision=PRECISION)
                if STRICT:
                    pairs = tl.where(r[:, None] == r[None, :], 0.0, pairs)
                if REVERSE:
                    found += by_channel(None, pairs, q + batch * q_b + q_head * q_h + start * q_t, q_t, log_decay, first, n_tokens, low, True, D, C, BD)
                else:
                    found += by_channel(None, pairs, k, k_t, log_decay, first, n_tokens, low, False, D, C, BD)
            store_rows(found, to, first, D, there, low, D, C, BD)
