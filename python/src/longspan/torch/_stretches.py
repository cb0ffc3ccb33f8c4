"""Stretches of a sequence as numbers: formed apart, joined in order, and read by queries of another stretch.

Of `Sums` a stretch is a `longspan.State`. Of `Windows` it is one key and value that stands for all that windows no longer
reach, and the rows that they do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import _calls
from .._native import State
from . import _dispatch
from ._chunked.rings import CARRY, TOKENS
from ._combine import combine
from ._states import TensorState


@dataclass(frozen=True)
class Tokens:
    """Keys and values, ``[batch, kv_heads, tokens, width]``, which of them are ignored, and where they stand."""

    k: Tensor
    v: Tensor
    #: ``[batch, tokens]``, or ``None``.
    ignored: Tensor | None
    #: ``[batch, tokens, axes]`` of Fourier positions, or ``None``.
    positions: Tensor | None = None

    @property
    def count(self) -> int:
        return self.k.shape[2]

    def part(self, start: int, end: int) -> Tokens:
        ignored = None if self.ignored is None else self.ignored[:, start:end]
        positions = None if self.positions is None else self.positions[:, start:end]
        return Tokens(self.k[:, :, start:end], self.v[:, :, start:end], ignored, positions)

    def turned(self) -> Tokens:
        """From the last to the first."""
        ignored = None if self.ignored is None else self.ignored.flip(1)
        return Tokens(self.k.flip(2), self.v.flip(2), ignored)


@dataclass(frozen=True)
class Attention:
    """A mechanism with its options and parameters, as a call has them."""

    operation: str
    name: str
    options: str
    parameters: tuple[Tensor, ...]

    def option(self, name: str) -> Any:
        return _calls.settings(self.options).get(name)

    def with_options(self, **options: Any) -> Attention:
        return replace(self, options=json.dumps({**_calls.settings(self.options), **options}))

    def with_parameters(self, *parameters: Tensor) -> Attention:
        return replace(self, parameters=parameters)

    def without_positions(self) -> tuple[Attention, Tensor, Tensor]:
        """With the positions that are given taken out, and these."""
        before = len(self.parameters) - self._maps() - 2
        q_positions, k_positions = self.parameters[before : before + 2]
        return self.with_parameters(*self.parameters[:before], *self.parameters[before + 2 :]), q_positions, k_positions

    def _maps(self) -> int:
        return 2 if self.option("feature_map").startswith("hedgehog") else 0

    def learned(self, q_positions: Tensor | None, k_positions: Tensor | None) -> tuple[Tensor, ...]:
        """The parameters with the positions of a call in their place, before those of the feature map."""
        if q_positions is None or k_positions is None:
            return self.parameters
        before = len(self.parameters) - self._maps()
        return (*self.parameters[:before], q_positions, k_positions, *self.parameters[before:])

    def call(
        self, q: Tensor, keys: Tokens, is_causal: bool, *, q_positions: Tensor | None = None, offset: int = 0, packed: Any = None,
        initial: TensorState | None = None, final: bool = False,
    ) -> Any:  # fmt: skip
        return _dispatch.attend(
            self.operation, self.name, self.options, q, keys.k, keys.v, self.learned(q_positions, keys.positions), is_causal,
            offset, keys.ignored, packed, initial, final,
        )  # fmt: skip


class Sums:
    """Stretches of kernelized attention, with Shaw's positions, with Fourier's, or with neither, and of short convolutions: a stretch's
    numbers are those of its state."""

    def __init__(self, attention: Attention, q: Tensor, keys: Tokens, is_causal: bool) -> None:
        self.attention = self.original = attention
        # A short convolution looks back under every mask, and its ignored tokens count as 0.
        self.counts_ignored = attention.name == "short-convolution"
        self.is_causal = is_causal = is_causal or self.counts_ignored
        self.normalize = True
        # Both directions of Shaw's positions are two passes, whose numerators and denominators are added.
        self.two_passes = attention.name == "shaw" and not is_causal
        if self.two_passes:
            self.normalize = attention.option("normalize")
            self.attention = attention.with_options(normalize=False)
            keys = self._weighed(keys)
        self.no_queries = q[:, :, :0].detach()
        self.sides = [self] if is_causal else [self, self]
        state = self._state(keys.part(0, 0))
        self.shape = (state.mechanism, state.options, state.parts)
        self.blank = state.numbers.detach()

    def _weighed(self, keys: Tokens) -> Tokens:
        """With a value of 1 besides, whose weighted sum is the denominator."""
        return Tokens(keys.k, torch.cat([keys.v, torch.ones_like(keys.v[..., :1])], 3), keys.ignored, keys.positions)

    def _state(self, keys: Tokens) -> TensorState:
        nowhere = None if keys.positions is None else keys.positions[:, :0]
        _, state = self.attention.call(self.no_queries, keys, True, q_positions=nowhere, final=True)
        return TensorState.of(state) if isinstance(state, State) else state

    def form(self, keys: Tokens) -> Tensor:
        """The numbers of a stretch of its own."""
        if self.two_passes:
            keys = self._weighed(keys)
        if self.counts_ignored and keys.ignored is not None:
            ignored = keys.ignored[:, None, :, None]
            keys = Tokens(keys.k.masked_fill(ignored, 0), keys.v.masked_fill(ignored, 0), None)
        numbers = self._state(keys).numbers
        if keys.ignored is not None and keys.count:
            # A state ends at the last key that is not ignored, a stretch at its last key: as many tokens follow that leave nothing.
            missing = keys.ignored.flip(1).cumprod(1).sum(1)
            nothing, first = self.blank.clone(), sum(self.shape[2][:2]) + TOKENS
            for place, count in ((first, missing % CARRY), (first + 1, missing // CARRY)):
                nothing[..., place] = count[:, None].to(nothing.dtype)
            numbers = self.join(numbers, nothing)
        return numbers

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        """The numbers of two stretches, one after the other."""
        attention = self.attention
        native = _calls.mechanism(attention.name, attention.options, attention.operation, attention.parameters)
        states = [TensorState(*self.shape, numbers) for numbers in (first, second)]
        return combine(attention.operation, native, attention.options, states[0], states[1], ()).numbers

    def read(
        self, q: Tensor, keys: Tokens, before: Tensor, after: Tensor | None, positions: Tensor | None, _start: int
    ) -> Tensor:
        """Outputs of a stretch between what is before it and, in both directions, what is after it."""
        call = self.attention.call
        out: Tensor
        if self.is_causal:
            out = call(q, keys, True, q_positions=positions, initial=TensorState(*self.shape, before))
            return out
        if not self.two_passes:
            whole = before if after is None else self.join(self.join(before, self.form(keys)), after)
            out = call(q, keys.part(0, 0), True, q_positions=positions, initial=TensorState(*self.shape, whole))
            return out
        assert after is not None
        weighed = self._weighed(keys)
        sums: Tensor = call(q, weighed, True, initial=TensorState(*self.shape, before))
        sums = sums + self._later(q.flip(2), weighed.turned(), TensorState(*self.shape, after)).flip(2)
        if not self.normalize:
            return sums[..., :-1]
        below = sums[..., -1:]
        seen = below.abs() >= torch.finfo(below.dtype).tiny
        out = torch.where(seen, sums[..., :-1] / torch.where(seen, below, 1.0), 0.0)
        return out

    def _later(self, q: Tensor, keys: Tokens, after: TensorState) -> Tensor:
        """What each query sees of keys after its own; all from the last to the first, where they come before it."""
        rel, *maps = self.attention.parameters
        radius = rel.shape[-2] // 2
        last = rel[..., 2 * radius :, :]
        # Every query but the first stands at the key before its own, so one step nearer than it is.
        nearer = torch.cat([last, rel[..., radius + 1 :, :].flip(-2), rel[..., :radius, :]], -2)
        one, rest = (self.attention.with_parameters(table, *maps) for table in (rel.flip(-2), nearer))
        return torch.cat([
            one.call(q[:, :, :1], keys.part(0, 0), True, initial=after),
            rest.call(q[:, :, 1:], keys.part(0, max(keys.count - 1, 0)), True, initial=after),
        ], 2)  # fmt: skip


class Windows:
    """Stretches of AFT, whose biases reach ``reach`` keys to one side of a query and are 0 farther away.

    All keys that no window reaches weigh as much as one key ``log sum e^k`` with their mean as its value. A stretch's numbers
    are this row and then the last ``reach`` rows, each a key, a value and a mark: 0 where no token is, 1 where one is, 2 where
    it is ignored.
    """

    def __init__(self, reach: int, keys: Tokens) -> None:
        self.reach = reach
        self.widths = (keys.k.shape[3], keys.v.shape[3], 1)
        self.blank = keys.k.new_zeros((*keys.k.shape[:2], (1 + reach) * sum(self.widths)))

    @staticmethod
    def marked(keys: Tokens) -> Tensor:
        """The row of each token."""
        marks = torch.ones_like(keys.v[..., :1])
        if keys.ignored is not None:
            marks = marks + keys.ignored[:, None, :, None].to(marks.dtype)
        return torch.cat([keys.k, keys.v, marks], 3)

    def form(self, keys: Tokens) -> Tensor:
        """The numbers of a stretch of its own."""
        rows = self.marked(keys)
        cut = max(keys.count - self.reach, 0)
        missing = rows.new_zeros((*rows.shape[:2], max(self.reach - keys.count, 0), rows.shape[3]))
        return torch.cat([self._one(rows[:, :, :cut]), missing, rows[:, :, cut:]], 2).flatten(2)

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        """The numbers of two stretches, one after the other."""
        rows, rows2 = self.rows(first), self.rows(second)
        new = int((rows2[:1, :1, 1:, -1] > 0).sum())
        far = self._one(torch.cat([rows[:, :, : 1 + new], rows2[:, :, :1]], 2))
        return torch.cat([far, rows[:, :, 1 + new :], rows2[:, :, 1 + self.reach - new :]], 2).flatten(2)

    def rows(self, numbers: Tensor) -> Tensor:
        return numbers.reshape(*numbers.shape[:2], 1 + self.reach, sum(self.widths))

    def _one(self, rows: Tensor) -> Tensor:
        """The row that stands for all of these."""
        k, v, marks = rows.split(self.widths, 3)
        absent = marks != 1
        # Of ignored rows not even NaN counts.
        k, v = k.masked_fill(absent, -torch.inf), v.masked_fill(absent, 0.0)
        largest = k.detach().amax(2, keepdim=True) if k.shape[2] else k.new_full((*k.shape[:2], 1, k.shape[3]), -torch.inf)
        largest = largest.masked_fill(largest == -torch.inf, 0.0)
        weights = (k - largest).exp()
        total = weights.sum(2, keepdim=True)
        none = total == 0
        total = total.masked_fill(none, 1.0)
        mark = (marks == 1).any(2, keepdim=True).to(marks.dtype)
        return torch.cat([largest + total.log(), (weights * v).sum(2, keepdim=True) / total, mark], 3)


class WindowsBetween:
    """A call of AFT between the stretches before and after: they are keys besides its own."""

    two_passes = True

    def __init__(self, attention: Attention, q: Tensor, keys: Tokens, is_causal: bool) -> None:
        self.original = attention
        self.is_causal = is_causal
        taps = attention.parameters[0].shape[-1] if attention.parameters else 1
        if attention.name == "aft-local":
            back, ahead = taps // 2, taps // 2
        else:
            back = taps - 1 if is_causal else (taps - 1) // 2
            ahead = taps - 1 - back
        self.sides = [Windows(back, keys)] + ([] if is_causal else [Windows(ahead, keys)])
        # Whatever is wrong is wrong of no tokens, too, and found before others wait.
        attention.call(q[:, :, :0], keys.part(0, 0), is_causal)

    def read(
        self, q: Tensor, keys: Tokens, before: Tensor, after: Tensor | None, positions: Tensor | None, start: int
    ) -> Tensor:
        """Outputs of queries from position ``start`` on."""
        rows = [self.sides[0].rows(before), Windows.marked(keys)]
        if after is not None:
            rows.append(self.sides[1].rows(after).flip(2))
        k, v, marks = torch.cat(rows, 2).split(self.sides[0].widths, 3)
        every = Tokens(k, v, marks[:, 0, :, 0] != 1)
        attention = self.original
        if attention.name == "aft-local":
            # The rows of these queries, whose places among the keys are others than their positions.
            (table,) = attention.parameters
            attention = attention.with_options(by_position=False).with_parameters(table[start : start + q.shape[2]])
        out: Tensor = attention.call(q, every, self.is_causal, offset=1 + self.sides[0].reach)
        return out
