"""AFT-simple, AFT-local and AFT-conv on tensors of a device: sizes and launches of their kernels."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import _calls
from ..._calls import Request
from .._chunked import aft, check_parameters
from .._chunked.call import Call
from .kernelized import INTERPRETED, Launch, laid_out, padded
from .means import collect, scan_blocks, sum_blocks, weigh_back
from .tiles import NOTHING

#: Tokens of a program, and how many of those that they see it takes at a time; an interpreter takes as long for any number.
BLOCK, NEAR = (32, 16) if INTERPRETED else (16, 8)
COLUMNS, WARPS = 32, 4
#: Biases, and how far they reach.
_KINDS: dict[str, Any] = {"aft-local": (aft.local_biases, aft.local_reach), "aft-conv": (aft.conv_biases, aft.conv_reach)}


class _Aft:
    """The launches of one call."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], call: Request, key_padding_mask: Tensor | None,
        packed: tuple[list[int], list[int]] | None, initial: Tensor | None, with_state: bool,
    ) -> None:  # fmt: skip
        settings = _calls.settings(call.options)
        self.call = Call(q, k, v, parameters, (None, None), settings, call.is_causal, call.offset, key_padding_mask)
        check_parameters(call, self.call)
        self.of, self.width, self.with_state = Launch(q, v, v, (), call, None, packed, None), q.shape[3], with_state
        self.one_key = call.mechanism == "aft-conv"
        self.biases, reach = _KINDS.get(call.mechanism, (None, None))
        # Without biases none is near, and in both directions all are far.
        near: tuple[int, int] = reach(self.call) if reach else (-1, 0) if call.is_causal else (-(1 << 30), -(1 << 30))
        self.back, self.ahead = near
        # Keys that later rows reach, which stand before the call's own.
        self.ring = self.back if reach and (with_state or initial is not None) else 0
        #: Rows of each sequence.
        self.rows = [b - a for a, b in zip(packed[0], packed[0][1:])] if packed else [self.of.queries]
        keys = [b - a for a, b in zip(packed[1], packed[1][1:])] if packed else [self.of.keys + self.ring]
        self.queries, self.keys = max(self.rows, default=0), max(keys, default=0)
        # Farther away nothing changes.
        self.offset = max(-self.queries - max(self.ahead, 0), min(call.offset + self.ring, self.keys + max(self.back, 0) + 1))
        # Rows that come after a table's last position.
        self.late = aft.late(replace(self.call, initial=self.parts(initial))) if initial is not None and settings.get("by_position") else None
        self.given = [k, v, *parameters, *([] if initial is None else [initial])]
        self.columns = min(COLUMNS, padded(self.width))
        self.tiles = -(-self.width // self.columns)
        self.constants = {
            "ONE_KEY": self.one_key, "PACKED": packed is not None, "GROUP": self.of.heads // max(self.of.kv_heads, 1), "D": self.width, "R": BLOCK,
            "C": NEAR, "BX": self.columns,
        }  # fmt: skip

    def parts(self, initial: Tensor) -> list[Tensor]:
        """Of a state: sums of values and of weights, their exponent, keys and values of the ring, marks."""
        key = 1 if self.one_key else self.width
        sizes = [self.width, key, key, self.ring * key, self.ring * self.width]
        return list(initial.split([*sizes, initial.shape[-1] - sum(sizes)], -1))

    def around(self, k: Tensor, v: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """What the kernels take, by torch's operations, whose gradients are autograd's: keys, minus infinity where one is ignored, and values, behind
        those of the ring; the biases of each row; sums of the state before; the ring after the call."""
        count, mask = len(self.call.parameters), self.call.key_padding_mask
        before = self.parts(others[count]) if len(others) > count else None
        call = replace(self.call, k=k, v=v, parameters=[x.float().contiguous() for x in others[:count]], initial=before)
        keys, values = (k, v) if mask is None else (k.masked_fill(mask[:, None, :, None], -torch.inf), v)
        if self.ring:
            values = values if mask is None else values.masked_fill(mask[:, None, :, None], 0)
            keys, values = (torch.cat([x, y.float()], 2) for x, y in zip(aft.older(call, self.ring), (keys, values)))
        found = [keys, values]
        if self.biases is not None:
            # Rows of the state come first.
            behind = replace(call, offset=call.offset + (0 if before is None else 1 + self.ring))
            rows = [self.of.queries] if self.one_key else self.rows or [0]
            each = [self.biases(behind, slice(0, n), slice(0, 0)).expand(-1, -1, n, -1) for n in rows]
            found.append(torch.cat(each, 2) if len(each) > 1 else each[0])
        if before is not None:
            found += before[:2]
        if self.with_state:
            *ring, self.marks = aft.rows_after(call, keys, values, self.ring, others[0].shape[0] if call.settings.get("by_position") else 0)
            found += ring
        return tuple(found)

    def take(self, found: Sequence[Tensor]) -> None:
        """What `around` has found."""
        keys, values, *others = found
        self.k, self.v = keys if self.one_key else laid_out(keys), laid_out(values)
        self.w = None if self.biases is None else others[0].expand(self.of.batch, self.of.heads, -1, -1)
        self.first = None
        if len(self.given) > 2 + len(self.call.parameters):
            n, d, x = self.parts(self.given[-1])[:3]
            self.first = self.mean(torch.where(d == 0, NOTHING.value, x), n, d)
        self.before = self.ends(self.k, self.v, initial=self.first)
        self.after = None if self.call.is_causal or self.w is None else self.ends(self.k, self.v, reverse=True)

    def mean(self, x: Tensor, n: Tensor, d: Tensor) -> Tensor:
        """One of the kernels', ``[batch, kv_heads, 3, width]``: its exponent, sums of values and of weights."""
        return torch.stack([y.expand_as(n) for y in (x, n, d)], 2)

    def launch(self, kernel: Any, programs: int, *given: Any, strided: Sequence[Tensor | None], **constants: Any) -> None:
        strides = [n for x in strided for n in ((0, 0, 0) if x is None else x.stride()[:3])]
        of_kernel = {name: value for name, value in {**self.constants, **constants}.items() if name in kernel.arg_names}
        if programs:
            kernel[(programs * self.tiles,)](*given, *strides, **of_kernel, num_warps=WARPS)

    def ends(self, x: Tensor, v: Tensor, reverse: bool = False, initial: Tensor | None = None, of_rows: bool = False) -> Tensor:
        """Means of all blocks before each and of all, or in ``reverse`` of each and all after it, ``[sequences, kv_heads, blocks + 1, 3, width]``."""
        whose, blocks = self.of.sequences * self.of.kv_heads, -(-(self.queries if of_rows else self.keys) // BLOCK)
        sums, ends = (x.new_empty((self.of.sequences, self.of.kv_heads, n, 3, self.width), dtype=torch.float32) for n in (blocks, blocks + 1))
        self.launch(sum_blocks, whose * blocks, x, v, sums, self.of.bounds, self.queries, self.keys, self.of.kv_heads, blocks, strided=(x, v), OF_ROWS=of_rows)  # fmt: skip
        self.launch(scan_blocks, whose, sums, initial, ends, blocks, strided=(), REVERSE=reverse)
        return ends

    def collect(self, role: str, x: Tensor, own: Tensor, to: Tensor, before: Tensor | None, after: Tensor | None, d_out: Tensor | None = None,
                beside: Tensor | None = None, final: Tensor | None = None) -> None:  # fmt: skip
        """What `collect` does of a role. Its tiles begin so that a block ends where the first of a tile's rows no longer has biases."""
        of_rows = role == "dk"
        shift = (-self.offset + (self.back if self.call.is_causal else -self.ahead) if of_rows else self.offset - self.back) % BLOCK
        tokens, others, heads = (self.keys, self.queries, self.of.kv_heads) if of_rows else (self.queries, self.keys, self.of.heads)
        count, blocks = -(-(tokens + shift) // BLOCK), -(-others // BLOCK)
        lengths = self.call.lengths[:, 0].contiguous() if final is not None else None
        self.launch(collect, self.of.sequences * heads * count, x, self.v, before, after, self.w, own, d_out, to, beside, final, lengths, self.of.bounds,
                    self.queries, self.keys, self.offset, self.of.kv_heads, count, blocks, self.back, self.ahead, shift,
                    strided=(x, self.v, self.w, own, d_out, to, beside), ROLE=role, CAUSAL=self.call.is_causal)  # fmt: skip

    def last(self) -> Tensor:
        """The mean of what no bias reaches after the last key."""
        if not self.ring:
            return self.before[:, :, -1]
        near = torch.arange(self.keys, device=self.k.device) >= self.call.lengths
        return self.ends(self.k.masked_fill(near[:, None, :, None], -torch.inf), self.v, initial=self.first)[:, :, -1]

    def weigh_back(self, items: Tensor) -> Tensor:
        """The gradient of biases, of each row that has its own."""
        assert self.w is not None
        count, taps = -(-self.queries // BLOCK), self.w.shape[3]
        parts = items.new_zeros((self.tiles, self.of.batch * self.of.heads, self.w.shape[2], taps))
        self.launch(weigh_back, self.of.sequences * self.of.heads * count, items, self.k, self.v, self.w, parts, self.of.bounds, self.queries, self.keys, self.offset,
                    self.of.kv_heads, count, self.back, self.ahead, strided=(items, self.k, self.v, self.w, parts))  # fmt: skip
        found: Tensor = parts.sum(0).unflatten(0, (self.of.batch, self.of.heads))
        return found


def forward(
    q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], call: Request, key_padding_mask: Tensor | None = None,
    packed: tuple[list[int], list[int]] | None = None, initial: Tensor | None = None, with_state: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Output, what stands for denominators, and the numbers of the final state."""
    a = _Aft(q, k, v, parameters, call, key_padding_mask, packed, initial, with_state)
    found = a.around(*a.given)
    a.take(found)
    out = v.new_empty((a.of.batch, q.shape[2], a.of.heads, a.width)).transpose(1, 2)
    a.collect("out", a.k, a.of.q, out, a.before, a.after)
    if a.late is not None:
        out = out.masked_fill(a.late, torch.nan)
    denominators = q.new_ones((*q.shape[:3], 1), dtype=torch.float32)
    if not with_state:
        return out, denominators, None
    x, n, d = a.last().unbind(2)
    key = 1 if a.one_key else a.width
    numbers = torch.cat([n, d[..., :key], x[..., :key], *found[-2:], a.marks], -1)
    return out, denominators, F.pad(numbers, (0, -numbers.shape[-1] % 16))


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], out: Tensor, denominators: Tensor, call: Request,
    key_padding_mask: Tensor | None = None, packed: tuple[list[int], list[int]] | None = None, initial: Tensor | None = None,
    d_final: Tensor | None = None,
) -> tuple[list[Tensor], Tensor | None]:  # fmt: skip
    """Gradients of q, k, v, the biases, and of the initial state's numbers if there were any."""
    a = _Aft(q, k, v, parameters, call, key_padding_mask, packed, initial, d_final is not None)
    vjp: Any = torch.func.vjp
    found, back = vjp(a.around, *a.given)
    a.take(found)
    if a.late is not None:
        d_out = d_out.masked_fill(a.late, 0)
    d_out, causal = laid_out(d_out), call.is_causal
    dq, dk, dv = (x.new_empty((x.shape[0], x.shape[2], x.shape[1], a.width)).transpose(1, 2) for x in (q, a.k.float() if a.one_key else a.k, a.v))
    items = q.new_empty((a.of.batch, a.of.heads, q.shape[2], 3, a.width), dtype=torch.float32)
    a.collect("dq", a.k, a.of.q, dq, a.before, a.after, d_out, items)
    before = None if causal else a.ends(items, items, of_rows=True)
    after = a.ends(items, items, True, of_rows=True) if causal or a.w is not None else None
    gradients, final = [dk, dv], None
    if d_final is not None:
        dn, dd, _, *d_ring = a.parts(d_final)[:5]
        # One more row, for the keys that no bias reaches any longer.
        final = a.mean(-a.last()[:, :, 0], dn, F.pad(-dd, (0, a.width - dd.shape[-1])))
    a.collect("dk", items, a.k, dv, before, after, beside=dk, final=final)
    if a.one_key:
        gradients[0] = dk.sum(-1, keepdim=True).to(a.k.dtype)
    if a.w is not None:
        gradients.append(a.weigh_back(items).sum_to_size(found[2].shape))
    if a.first is not None:
        # A key without a value, which all rows see.
        assert after is not None
        x, n, d = torch.stack([after[:, :, 0], *([] if final is None else [final])]).unbind(3)
        factor = (a.first[:, :, 0] + x).exp()
        dn, dd = (n * factor).sum(0), (-d * factor).sum(0)
        gradients += [dn, dd.sum(-1, keepdim=True) if a.one_key else dd]
    if d_final is not None:
        gradients += d_ring
    back_of = back(tuple(gradients))
    return [dq, *back_of[: 2 + len(parameters)]], back_of[-1] if initial is not None else None
