"""One token after a state: numbers of the state one by one, without the products of `scan`, whose rows are many."""

import triton
import triton.language as tl

from .features import of_keys, of_queries
from .scan import store_marks
from .tiles import NOTHING, exp, inverse, load_rows, store_rows


@triton.jit(do_not_specialize=["kv_heads", "record"])
def step(
    q, k, v, to, denominators, initial, end, log_decay, kv_heads, record,
    q_b, q_h, k_b, k_h, v_b, v_h, to_b, to_h,
    MAP: tl.constexpr, NORMALIZE: tl.constexpr, DECAY: tl.constexpr, INITIAL: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Output, denominators and the state after the token, for a tile of the values' columns."""
    EXPONENTIAL: tl.constexpr = MAP == "exp"
    EACH: tl.constexpr = 2 if EXPONENTIAL else 1
    TILES: tl.constexpr = (DV + BX - 1) // BX
    place = tl.program_id(0)
    low = place % TILES * BX
    head = (place // TILES % kv_heads).to(tl.int64)
    batch = (place // TILES // kv_heads).to(tl.int64)
    whose = batch * kv_heads + head
    feature, value = tl.arange(0, BD), low + tl.arange(0, BX)
    there, none = tl.full([1], 1, tl.int1), tl.zeros([], tl.int32)
    at = feature[None, :] * DV + value[:, None]
    inside = (value < DV)[:, None] & (feature < D)[None, :]
    state = tl.zeros([BX, BD], tl.float32)
    z = tl.zeros([BD], tl.float32)
    reference = tl.full([], NOTHING, tl.float32)
    if INITIAL:
        before = initial + whose * record
        state = tl.load(before + at, mask=inside, other=0.0)
        z = tl.load(before + D * DV + feature, mask=feature < D, other=0.0)
        if EXPONENTIAL:
            reference = tl.maximum(tl.load(before + D * DV + D), NOTHING)

    phi_k, u = of_keys(load_rows(k + batch * k_b + head * k_h, none, D, there, 0, D, 1, BD).to(tl.float32), MAP, D, BD)
    if EXPONENTIAL:
        highest = tl.maximum(reference, tl.max(u, 0))
        kept = exp(reference - highest)
        state, z, reference = state * kept, z * kept, highest
        phi_k *= exp(u - highest)[:, None]
    v_row = load_rows(v + batch * v_b + head * v_h, none, DV, there, low, DV, 1, BX).to(tl.float32)
    state += tl.trans(v_row) * phi_k
    z += tl.sum(phi_k, 0)
    for g in range(GROUP):
        q_head = head * GROUP + g
        phi_q = load_rows(q + batch * q_b + q_head * q_h, none, D, there, 0, D, 1, BD).to(tl.float32)
        phi_q = of_queries(phi_q, MAP, NORMALIZE, D, BD)
        y = tl.sum(state * phi_q, 1)
        total = tl.sum(phi_q * z[None, :], 1)
        if NORMALIZE:
            y = y * tl.sum(inverse(total), 0)
        else:
            total = tl.full([1], 1.0, tl.float32)
            if EXPONENTIAL:
                y = y * exp(reference)
                total = total * exp(-reference)
        store_rows(y[None, :], to + batch * to_b + q_head * to_h, none, DV, there, low, DV, 1, BX)
        if low == 0:
            row = denominators + (batch * kv_heads * GROUP + q_head) * EACH + tl.arange(0, 1)
            tl.store(row, total)
            if EXPONENTIAL:
                tl.store(row + 1, tl.zeros([1], tl.float32) + reference)
    if DECAY:
        gamma = tl.exp2(tl.load(log_decay + head))
        state, z = state * gamma, z * gamma
    after = end + whose * record
    tl.store(after + at, state, mask=inside)
    if low == 0:
        tl.store(after + D * DV + feature, z, mask=feature < D)
        store_marks(after + D * DV + D, initial + whose * record + D * DV + D if INITIAL else initial, 1, reference, record - D * DV - D,
                    EXPONENTIAL, INITIAL)  # fmt: skip
