"""Gated attention and the delta rule on tensors of a device: launches of the rule's kernels before the scans of gated attention."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _calls
from ..._calls import Request
from . import kernelized
from .channels import CHUNK
from .kernelized import Launch, arithmetic, laid_out, padded
from .solve import invert, solve

#: Warps of an inversion.
INVERTING = 2


def tiles(d: int, by_channel: bool) -> tuple[int, int, int]:
    """Tokens of a chunk's system, columns of a solution's tile, and warps: the most that spill no registers (docs/gpu.md)."""
    return (CHUNK if by_channel else 32, 32, 4) if d <= 64 else (16, 16, 8)


def _inner(call: Request, scale: float | None, strict: bool = False) -> Request:
    """Gated attention with the call's gates."""
    gate = _calls.settings(call.options).get("gate", "head")
    return call._replace(mechanism="gated", options=json.dumps({"gate": gate, "scale": scale, "strict": strict}))


def _prepared(q: Tensor, k: Tensor, call: Request, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Queries and keys, without ignored ones, divided by their lengths where that is asked for."""
    if mask is not None:
        k = k.masked_fill(mask[:, None, :, None], 0)
    if _calls.settings(call.options).get("l2_norm"):
        q, k = ((x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(q.dtype) for x in (q.float(), k.float()))
    return q, k


class _Rule(Launch):
    """The delta rule of one call: what is new in values beside what the state gives for their keys."""

    def __init__(
        self, k: Tensor, v: Tensor, parameters: Sequence[Tensor], call: Request, mask: Tensor | None,
        packed: tuple[list[int], list[int]] | None, initial: Tensor | None,
    ) -> None:  # fmt: skip
        # A state gives what gated attention gives to the key as a query, of the tokens before its own.
        self.call = _inner(call, 1.0, strict=True)
        *gate, beta = parameters
        super().__init__(k, k, v, gate, self.call, mask, packed, initial)
        self.initial = None if initial is None else initial.contiguous()
        self.beta = (beta.float() if mask is None else beta.float().masked_fill(mask[:, None], 0)).contiguous()

    def corrections(self, x: Tensor, reverse: bool = False) -> Tensor:
        """Of values; or the same of their gradients, from the last token to the first."""
        chunk, columns, warps = tiles(self.d, self.by_channel)
        chunks, heads = -(-self.longest // chunk), self.sequences * self.kv_heads
        found = x.new_empty((self.batch, self.kv_heads, self.keys, self.dv), dtype=torch.float32)
        inverses = found.new_empty((*found.shape[:3], chunk))
        given = self.decay, self.ignored, self.bounds, self.keys, self.kv_heads
        shared = {"REVERSE": reverse, "GATED": self.gated, "CHANNEL": self.by_channel, "IGNORED": self.ignored is not None, "PACKED": self.bounds is not None, "D": self.d,
                  "C": chunk, "PRECISION": arithmetic(torch.float32)[1], "num_stages": 1}  # fmt: skip
        if heads * chunks:
            invert[(heads * chunks,)](
                self.k, self.beta, inverses, *given, chunks, *self.k.stride()[:3], BD=min(padded(self.d), 64), num_warps=INVERTING, **shared
            )  # fmt: skip
            x = laid_out(x)
            solve[(heads * -(-self.dv // columns),)](
                self.k, x, self.beta, inverses, found, None if reverse else self.initial, *given, self.record, *self.k.stride()[:3],
                *x.stride()[:3], DV=self.dv, BD=padded(self.d), BX=columns, num_warps=warps, **shared,
            )  # fmt: skip
        return found


def forward(
    q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], call: Request, key_padding_mask: Tensor | None = None,
    packed: tuple[list[int], list[int]] | None = None, initial: Tensor | None = None, with_state: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Output, what stands for denominators, and the numbers of the final state."""
    rest = key_padding_mask, packed, initial
    q, k = _prepared(q, k, call, key_padding_mask)
    if call.mechanism == "delta":
        rule = _Rule(k, v, parameters, call, *rest)
        v, parameters = rule.corrections(v) * rule.beta[..., None], parameters[:-1]
    return kernelized.forward(q, k, v, parameters, _inner(call, _calls.settings(call.options).get("scale")), *rest, with_state)


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], out: Tensor, denominators: Tensor, call: Request,
    key_padding_mask: Tensor | None = None, packed: tuple[list[int], list[int]] | None = None, initial: Tensor | None = None,
    d_final: Tensor | None = None,
) -> tuple[list[Tensor], Tensor | None]:  # fmt: skip
    """Gradients of q, k, v, the gates and beta, and of the initial state's numbers if there were any."""
    rest = key_padding_mask, packed, initial
    prepared: Any = torch.func.vjp(lambda q, k: _prepared(q, k, call, key_padding_mask), q, k)
    (q, k), back = prepared
    inner = _inner(call, _calls.settings(call.options).get("scale"))
    if call.mechanism == "gated":
        gradients, d_initial = kernelized.backward(d_out, q, k, v, parameters, out, denominators, inner, *rest, d_final)
    else:
        gate = parameters[:-1]
        rule = _Rule(k, v, parameters, call, *rest)
        new = rule.corrections(v)
        values = new * rule.beta[..., None]
        (dq, dk, dv, *d_gate), d_initial = kernelized.backward(d_out, q, k, values, gate, out, denominators, inner, *rest, d_final)
        d_values = rule.corrections(dv, reverse=True)
        dv = d_values * rule.beta[..., None]
        ones = dv.new_ones((*dv.shape[:3], 1))
        (dk_row, dk_key, _, *of_gate), of_initial = kernelized.backward(-dv, k, k, values, gate, dv, ones, rule.call, *rest)
        d_beta = (d_values * new).sum(-1).to(parameters[-1].dtype)
        gradients = [dq, dk + dk_row + dk_key, dv.to(v.dtype), *(a + b for a, b in zip(d_gate, of_gate)), d_beta]
        if d_initial is not None and of_initial is not None:
            d_initial += of_initial
    gradients[:2] = back(tuple(gradients[:2]))
    return gradients, d_initial
