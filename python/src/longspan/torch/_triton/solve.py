"""The kernels of the delta rule: what each token corrects the state by, from a triangular system for each chunk (see README.md)."""

import triton
import triton.language as tl

from .channels import by_channel, channel_sums
from .scan import between_pairs, gate_sums
from .tiles import is_key, load_rows, sequence_of, store_rows, within

_SIZES = ["keys", "kv_heads", "chunks"]


@triton.jit(do_not_specialize=_SIZES)
def invert(
    k, beta, inverses, log_decay, ignored, bounds, keys, kv_heads, chunks, k_b, k_h, k_t,
    REVERSE: tl.constexpr, GATED: tl.constexpr, CHANNEL: tl.constexpr, IGNORED: tl.constexpr, PACKED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The inverse of ``I + M diag(beta)``, or in ``REVERSE`` of ``I + diag(beta) M``, of a chunk, where ``M_ij`` is what the key of an earlier token
    ``j`` and that of ``i`` have in common, decayed. Row by row: a series of powers has no digits where keys repeat."""
    program = tl.program_id(0)
    first = program % chunks * C
    kv_head = (program // chunks % kv_heads).to(tl.int64)
    sequence = (program // chunks // kv_heads).to(tl.int64)
    batch, _, k_start, _, n_keys = sequence_of(bounds, sequence, keys, keys, PACKED)
    if IGNORED:
        ignored += batch * keys
    r = tl.arange(0, C)
    token = first + r
    there = is_key(ignored, token, n_keys, IGNORED)
    of_head = (batch * kv_heads + kv_head) * keys + k_start
    k += batch * k_b + kv_head * k_h + k_start * k_t
    pairs = tl.zeros([C, C], tl.float32)
    for low in range(0, D, BD):
        rows = load_rows(k, first, k_t, there, low, D, C, BD).to(tl.float32)
        if CHANNEL:
            pairs += by_channel(rows, None, k, k_t, log_decay + of_head * D, first, n_keys, low, False, D, C, BD)
        else:
            pairs = tl.dot(rows, tl.trans(rows), acc=pairs, input_precision=PRECISION)
    if GATED and not CHANNEL:
        _, _, _, gates = gate_sums(log_decay + of_head, token, there, C)
        pairs *= tl.exp2(between_pairs(gates, C, False))
    weights = tl.load(beta + of_head + token, mask=there, other=0.0)
    pairs = tl.where(r[:, None] > r[None, :], pairs * (weights[:, None] if REVERSE else weights[None, :]), 0.0)
    found = (r[:, None] == r[None, :]).to(tl.float32)
    for i in range(1, C):
        own = r[:, None] == i
        row = tl.sum(tl.where(own, pairs, 0.0), 0)
        found = tl.where(own & (r[None, :] < i), -tl.sum(tl.where((r < i)[:, None], row[:, None] * found, 0.0), 0)[None, :], found)
    store_rows(found, inverses + of_head * C, first, C, within(token, n_keys), 0, C, C, C)


@triton.jit(do_not_specialize=_SIZES)
def solve(
    k, x, beta, inverses, to, initial, log_decay, ignored, bounds, keys, kv_heads, record, k_b, k_h, k_t, x_b, x_h, x_t,
    REVERSE: tl.constexpr, GATED: tl.constexpr, CHANNEL: tl.constexpr, IGNORED: tl.constexpr, PACKED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    BX: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``y_i = x_i - sum_j e^(g_(j+1) + ... + g_i) (k_i k_j) beta_j y_j`` over the earlier tokens ``j``, and ``- e^(g_0 + ... + g_i) S^T k_i``, with a state ``S``
    before the call; in ``REVERSE`` over the later ones, which is the transposed system. For a tile of the columns of ``x``."""
    TILES: tl.constexpr = (DV + BX - 1) // BX
    program = tl.program_id(0)
    low = program % TILES * BX
    kv_head = (program // TILES % kv_heads).to(tl.int64)
    sequence = (program // TILES // kv_heads).to(tl.int64)
    whose = sequence * kv_heads + kv_head
    batch, _, k_start, _, n_keys = sequence_of(bounds, sequence, keys, keys, PACKED)
    if IGNORED:
        ignored += batch * keys
    r, column, feature = tl.arange(0, C), low + tl.arange(0, BX), tl.arange(0, BD)
    of_head = (batch * kv_heads + kv_head) * keys + k_start
    k += batch * k_b + kv_head * k_h + k_start * k_t
    x += batch * x_b + kv_head * x_h + k_start * x_t
    beta, inverses, to = beta + of_head, inverses + of_head * C, to + of_head * DV
    if GATED:
        log_decay += of_head * (D if CHANNEL else 1)
    state = tl.zeros([BD, BX], tl.float32)
    if initial is not None:
        inside = (feature < D)[:, None] & (column < DV)[None, :]
        state = tl.load(initial + whose * record + feature[:, None] * DV + column[None, :], mask=inside, other=0.0)
    chunks = tl.cdiv(n_keys, C)
    for n in range(chunks):
        first = (chunks - 1 - n if REVERSE else n) * C
        token = first + r
        there = is_key(ignored, token, n_keys, IGNORED)
        keys_of = load_rows(k, first, k_t, there, 0, D, C, BD).to(tl.float32)
        weights = tl.load(beta + token, mask=there, other=0.0)
        y = load_rows(x, first, x_t, there, low, DV, C, BX).to(tl.float32)
        left = tl.full([BD, 1] if CHANNEL else [], 1.0, tl.float32)
        if CHANNEL:
            sums, whole = channel_sums(log_decay, first, n_keys, 0, REVERSE, D, C, BD)
            keys_of *= tl.exp2(sums)
            left = tl.exp2(whole)[:, None]
        of_state = tl.dot(keys_of, state, input_precision=PRECISION)
        if GATED and not CHANNEL:
            up_to, after, whole, gates = gate_sums(log_decay, token, there, C)
            if REVERSE:
                up_to, after = after, up_to
            of_state *= tl.exp2(up_to)[:, None]
            weights *= tl.exp2(after)
            left = tl.exp2(whole)
        y -= of_state
        # 0 times what a row does not see, where that is not finite, is NaN.
        finite = tl.sum(y * 0.0, 1) == 0.0
        earlier = r[None, :] >= r[:, None] if REVERSE else r[None, :] <= r[:, None]
        lost = tl.max((earlier & (finite == 0)[None, :]).to(tl.int32), 1) > 0
        system = load_rows(inverses, first, C, within(token, n_keys), 0, C, C, C)
        if REVERSE:
            system = tl.trans(system)
        y = tl.dot(system, tl.where(finite[:, None], y, 0.0), input_precision=PRECISION)
        y = tl.where(lost[:, None], float("nan"), y)
        store_rows(y, to, first, DV, within(token, n_keys), low, DV, C, BX)
        if CHANNEL:
            sums, whole = channel_sums(log_decay, first, n_keys, 0, not REVERSE, D, C, BD)
            keys_of = load_rows(k, first, k_t, there, 0, D, C, BD).to(tl.float32) * tl.exp2(sums)
        state = tl.dot(tl.trans(keys_of), y * weights[:, None], acc=state * left, input_precision=PRECISION)
