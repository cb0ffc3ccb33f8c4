"""The short convolution, with gates and without, on tensors of a device: sizes and launches of its kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _calls
from ..._calls import Request
from .kernelized import Launch, padded
from .taps import convolve, convolve_back

#: Rows and columns of a program.
_ROWS, _COLUMNS = 64, 64


class _Convolution:
    """The launches of one call."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], call: Request, key_padding_mask: Tensor | None,
        packed: tuple[list[int], list[int]] | None, initial: Tensor | None, with_end: bool,
    ) -> None:  # fmt: skip
        settings = _calls.settings(call.options)
        self.of, self.gated = Launch(q, k, v, (), call, key_padding_mask, packed, None), settings.get("gated", True)
        self.taps, *bias = (x.contiguous() for x in parameters)
        self.bias, self.width = bias[0] if bias else None, self.taps.shape[1]
        # It looks back under every mask; farther away nothing changes.
        self.offset = max(-self.of.queries, min(call.offset, self.of.keys + self.width))
        self.queries = max((b - a for a, b in zip(packed[0], packed[0][1:])), default=0) if packed else self.of.queries
        self.keys = max((b - a for a, b in zip(packed[1], packed[1][1:])), default=0) if packed else self.of.keys
        self.columns = min(_COLUMNS, padded(self.of.dv))
        self.constants = {
            "GATED": self.gated, "INITIAL": initial is not None, "END": with_end, "IGNORED": self.of.ignored is not None,
            "PACKED": packed is not None, "TAPS": self.width, "D": self.of.dv, "R": _ROWS, "BX": self.columns,
        }  # fmt: skip
        self.silu = {"SILU": settings["silu"], "GROUP": self.of.heads // max(self.of.kv_heads, 1)}
        self.record = (self.width - 1) * self.of.dv + 1

    def grid(self, rows: int) -> tuple[int, int]:
        """Programs, and how many of them a head has one after the other: at least one, which leaves a state."""
        count = max(1, -(-rows // _ROWS))
        return self.of.sequences * self.of.kv_heads * count * -(-self.of.dv // self.columns), count

    def launch(self, kernel: Any, rows: int, tensors: Sequence[Tensor | None], strided: Sequence[Tensor | None], **constants: Any) -> None:
        of = self.of
        programs, count = self.grid(rows)
        strides = [n for x in strided for n in ((0, 0, 0) if x is None else x.stride()[:3])]
        if programs:
            kernel[(programs,)](*tensors, of.ignored, of.lengths, of.bounds, of.queries, of.keys, self.offset, of.kv_heads, count, *strides,
                                **constants, **self.constants, num_warps=4)  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], call: Request, key_padding_mask: Tensor | None = None,
    packed: tuple[list[int], list[int]] | None = None, initial: Tensor | None = None, with_state: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Output, what stands for denominators, and the numbers of the final state."""
    c = _Convolution(q, k, v, parameters, call, key_padding_mask, packed, initial, with_state)
    of = c.of
    out = v.new_empty((of.batch, of.queries, of.heads, of.dv)).transpose(1, 2)
    end = q.new_empty((of.batch, of.kv_heads, c.record), dtype=torch.float32) if with_state else None
    initial = None if initial is None else initial.contiguous()
    c.launch(convolve, c.queries, (of.q, of.k, of.v, c.taps, c.bias, out, None, None, None, None, initial, end),
             (of.q, of.k, of.v, out, None, None), BACKWARD=False, **c.silu)  # fmt: skip
    return out, q.new_ones((*out.shape[:3], 1), dtype=torch.float32), end


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], out: Tensor, denominators: Tensor, call: Request,
    key_padding_mask: Tensor | None = None, packed: tuple[list[int], list[int]] | None = None, initial: Tensor | None = None,
    d_final: Tensor | None = None,
) -> tuple[list[Tensor], Tensor | None]:  # fmt: skip
    """Gradients of q, k, v, the taps and the bias, and of the initial state's numbers if there were any."""
    c = _Convolution(q, k, v, parameters, call, key_padding_mask, packed, initial, d_final is not None)
    of = c.of
    d_out = d_out if d_out.stride(3) == 1 else d_out.contiguous()
    dq, dk, dv = (x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2) for x in (q, k, v))
    d_sums = q.new_empty((of.batch, of.kv_heads, of.queries, of.dv), dtype=torch.float32)
    _, count = c.grid(c.queries)
    d_learned = q.new_empty((of.sequences * count, of.kv_heads, c.width + 1, of.dv), dtype=torch.float32)
    initial = None if initial is None else initial.contiguous()
    d_initial = None if initial is None else torch.zeros_like(initial)
    c.launch(convolve, c.queries, (of.q, of.k, of.v, c.taps, c.bias, None, d_out, dq, d_sums, d_learned, initial, None),
             (of.q, of.k, of.v, None, d_out, dq), BACKWARD=True, **c.silu)  # fmt: skip
    d_final = None if d_final is None else d_final.contiguous()
    before = 0 if initial is None else c.width - 1
    c.launch(convolve_back, c.keys + before, (of.k, of.v, c.taps, d_sums, dk, dv, d_initial, d_final), (of.k, of.v, dk, dv))
    learned = d_learned.sum(0)
    gradients = [learned[:, :-1], learned[:, -1]][: len(parameters)]
    # Laid out as a compiler expects.
    return [dq, dk, dv, *(x.to(p.dtype).contiguous() for x, p in zip(gradients, parameters))], d_initial
