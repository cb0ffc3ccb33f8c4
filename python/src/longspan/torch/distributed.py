"""One sequence over many processes: each holds a stretch of it, and what they exchange does not grow with its length.

The operators are those of `longspan.ops` with a ``group``, and `context_parallel` makes a model's attention do the same. Every
rank calls with its own stretch of queries, keys and values, in the order of ranks, and gets the outputs of its queries. What is
exchanged, what it costs and what can fail: ``docs/distributed.md``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import __version__, _calls
from .. import ops as _ops
from .._calls import Request
from . import _dispatch
from ._chunked import check_shapes
from ._exchange import Exchange, agree, refuse
from ._stretches import Attention, Sums, Tokens, WindowsBetween
from .attention import Attention as AttentionModule
from .multi_head import MultiheadAttention

__all__ = [
    "aft_conv",
    "aft_local",
    "aft_simple",
    "context_parallel",
    "fourier_attention",
    "kernelized_attention",
    "mean_loss",
    "one_process",
    "shaw_attention",
    "short_convolution",
    "stretch",
]

_FORMS: dict[str, Any] = {
    "kernelized": Sums, "shaw": Sums, "fourier": Sums,
    "aft-simple": WindowsBetween, "aft-local": WindowsBetween, "aft-conv": WindowsBetween,
    "short-convolution": Sums,
}  # fmt: skip

#: Why a mechanism needs the whole sequence on every rank.
_REFUSED = {
    "toeplitz": "every distance has a weight of its own, so a stretch has no sum that later queries could read",
    "aft-full": "every pair of positions has a bias of its own, so a stretch has no mean that later queries could read",
    "softmax": "its weights need every key, so the exchange would grow with the length",
    **dict.fromkeys(("gated", "delta"), "states that decay or correct themselves are not exchanged"),
}

_HALF = (torch.float16, torch.bfloat16)

#: What all ranks have to agree on, by its name in errors.
_FACTS = ("version", "mechanism", "options", "is_causal", "cu_seqlens", "shapes of q, k and v", "dtype", "parameters", "gradients")


class Over:
    """The other ranks' stretches, in the place of an initial state: what `_dispatch.attend` hands a call on to."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, _memo: Any) -> Over:
        return self

    def _attend(
        self, asked: Request, tensors: Sequence[Any], key_padding_mask: Any, cu_seqlens: Any, output_final_state: bool
    ) -> Any:
        operation = asked.operation
        device = getattr(tensors[0], "device", torch.device("cpu"))
        # Half precision is computed in float32; only autocast hands that on.
        half = None if torch.is_autocast_enabled(device.type) else getattr(tensors[0], "dtype", None)
        try:
            if output_final_state:
                raise ValueError(f"{operation}: output_final_state: expected False over several processes, got True")
            _dispatch.check(asked, tensors, key_padding_mask)
            with torch.autocast(device.type, enabled=False):
                call = _Stretch(asked, tensors, key_padding_mask, cu_seqlens)
        except Exception as error:
            refuse(operation, len(_FACTS), error, device, self.group)
        stretches = agree(operation, call.keys.count, call.facts, call.q, self.group)
        with torch.autocast(device.type, enabled=False):
            out = call.over(self.group, stretches)
        return out.to(half) if half in _HALF else out

    #: Outside of a compiled graph, which breaks here.
    attend: Callable[..., Any] = torch.compiler.disable(_attend)


class _Stretch:
    """One rank's call: checked when it is made, then computed over all ranks."""

    def __init__(self, call: Request, tensors: Sequence[Any], key_padding_mask: Any, cu_seqlens: Any) -> None:
        mechanism, options, operation, is_causal, _ = call
        if mechanism not in _FORMS:
            raise ValueError(f"{operation}: expected a mechanism whose stretches add up, got {mechanism}: {_REFUSED[mechanism]}")
        if _calls.settings(options).get("gate") is True:
            raise ValueError(f"{operation}: log_decay: expected None over several processes, got one; a constant decay is shared out")
        self.operation = operation
        self.is_causal = is_causal
        self.cuts = None if cu_seqlens is None else _calls.boundaries(operation, cu_seqlens)
        q, k, v = tensors[:3]
        self._check(call, q, k, v, key_padding_mask)
        # Those may be positions, of which ranks have different numbers.
        same = tensors[3:] if _calls.settings(options).get("axes") is None else ()
        self.facts = dict(zip(_FACTS, (
            __version__, mechanism, options, is_causal, self.cuts, (q.shape[:2], q.shape[3], k.shape[1], k.shape[3], v.shape[3]),
            (q.dtype, k.dtype, v.dtype), [(p.shape, p.dtype) for p in same],
            # The second: whether this rank has a backward of its states, in which the others wait for it.
            torch.is_grad_enabled() and [any(t.requires_grad for t in some) for some in (tensors, tensors[1:])],
        )))  # fmt: skip
        if any(t.dtype in _HALF or t.dtype != q.dtype for t in tensors):
            tensors = [t.float() for t in tensors]
        self.q, k, v, *parameters = tensors
        attention = Attention(operation, mechanism, options, tuple(parameters))
        at = None
        self.q_positions: Tensor | None = None
        self.counted = mechanism == "fourier" and attention.option("axes") is None
        if self.counted:
            attention = attention.with_options(axes=1)
            at = self.q_positions = self._counted(0, k.shape[2])
        elif mechanism == "fourier":
            attention, self.q_positions, at = attention.without_positions()
        self.table = parameters[0] if mechanism == "aft-local" else None
        self.keys = Tokens(k, v, key_padding_mask, at)
        self.between = _FORMS[mechanism](attention, self.q, self.keys, is_causal)

    def _check(self, call: Request, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> None:
        check_shapes(call, q, k, v, mask)
        if call.offset != 0 or isinstance(call.offset, bool):
            raise ValueError(f"{self.operation}: offset: expected 0 over several processes, got {call.offset!r}")
        chosen = _calls.settings(call.options)
        if chosen.get("image") is not None:
            raise ValueError(f"{self.operation}: image: expected None over several processes: an image's rows reach over stretches")
        if not self.is_causal and chosen.get("decay") is not None:
            raise ValueError(f"{self.operation}: decay: expected None without is_causal=True, got {chosen['decay']}")
        crossed = not self.is_causal and self.cuts is None and call.mechanism in ("kernelized", "aft-simple")
        if q.shape[2] != k.shape[2] and not crossed:
            raise ValueError(f"{self.operation}: q: expected as many tokens as k, {k.shape[2]}, got {q.shape[2]}: a stretch of one "
                             "sequence")  # fmt: skip
        if 0 in (q.shape[1], k.shape[1]):
            raise ValueError(f"{self.operation}: q: expected at least one head, got shape {tuple(q.shape)}")
        if self.cuts is None:
            return
        if self.cuts[0] != self.cuts[1]:
            raise ValueError(f"{self.operation}: cu_seqlens: expected one list over several processes, got different ones for "
                             "queries and keys")  # fmt: skip
        if k.shape[0] != 1 or mask is not None:
            what = f"batch {k.shape[0]}" if k.shape[0] != 1 else "a key_padding_mask"
            raise ValueError(f"{self.operation}: cu_seqlens: expected batch 1 and no key_padding_mask beside it, got {what}")
        if not self.cuts[0] or self.cuts[0][0] != 0 or sorted(self.cuts[0]) != self.cuts[0]:
            raise ValueError(f"{self.operation}: cu_seqlens: expected ascending from 0, got {self.cuts[0]}")

    def _counted(self, start: int, tokens: int) -> Tensor:
        at = torch.arange(start, start + tokens, device=self.q.device).to(self.q.dtype)
        return at[None, :, None].expand(self.q.shape[0], -1, 1)

    def over(self, group: Any, stretches: list[int]) -> Tensor:
        rank, total = dist.get_rank(group), sum(stretches)
        ends = [sum(stretches[: n + 1]) for n in range(len(stretches))]
        starts = [end - tokens for end, tokens in zip(ends, stretches)]
        start, end = starts[rank], ends[rank]
        cuts = [0, total] if self.cuts is None else self.cuts[0]
        if cuts[-1] != total:
            raise ValueError(f"{self.operation}: cu_seqlens: expected the last to be {total}, the tokens of all ranks, "
                             f"got {cuts[-1]}")  # fmt: skip
        longest = max([b - a for a, b in zip(cuts, cuts[1:])], default=0)
        if self.table is not None and longest > self.table.shape[0]:
            raise ValueError(f"{self.operation}: expected positions in 0..{self.table.shape[0]}, the length of the table of "
                             f"biases, got a sequence of {longest} tokens over all ranks")  # fmt: skip
        # Where a sequence begins after another.
        cuts = sorted({cut for cut in cuts if 0 < cut < total})
        within = [cut - start for cut in cuts if start < cut < end]
        self._place(start, total, max([cut for cut in cuts if cut <= start], default=0))

        keys, between = self.keys, self.between
        sides = between.sides
        # What a later rank goes on with begins at the last boundary, what an earlier one sees ends at the first.
        first = max([cut for cut in cuts if start < cut <= end], default=start) - start
        sent = [sides[0].form(keys.part(first, keys.count))]
        # Where order does not matter, all stretches together are what every rank reads.
        together = len(sides) == 2 and not between.two_passes and self.cuts is None
        if len(sides) == 2 and not together:
            last = min([cut for cut in cuts if start <= cut < end], default=end) - start
            ahead = keys.part(0, last)
            sent.append(sides[1].form(ahead.turned() if between.two_passes else ahead))
        sizes = [numbers.shape[2] for numbers in sent]

        def scan(everyone: Sequence[Tensor]) -> list[Tensor]:
            if together:
                return [functools.reduce(sides[0].join, everyone)] * len(everyone)
            split = [numbers.split(sizes, 2) for numbers in everyone]
            broken = [any(a < cut <= b for cut in cuts) for a, b in zip(starts, ends)]
            before = _running(sides[0], [each[0] for each in split], broken)
            if len(sides) == 1:
                return before
            broken = [any(a <= cut < b for cut in cuts) for a, b in zip(starts, ends)]
            after = _running(sides[1], [each[-1] for each in split[::-1]], broken[::-1])[::-1]
            return [torch.cat(pair, 2) for pair in zip(before, after)]

        before, *after = Exchange.apply(self.operation, group, scan, torch.cat(sent, 2)).split(sizes, 2)
        return self._read(before, after[0] if after else None, [0, *within, keys.count])

    def _place(self, start: int, total: int, begin: int) -> None:
        """Positions over the whole sequence, which begins at ``begin``."""
        if self.counted:
            if self.q.dtype == torch.float32 and total > 1 << 24:
                raise ValueError(f"{self.operation}: expected at most 2**24 tokens in float32, got {total}; use float64")
            self.q_positions = self._counted(start, self.keys.count)
            self.keys = Tokens(self.keys.k, self.keys.v, self.keys.ignored, self.q_positions)
        self.passed = start - begin

    def _read(self, before: Tensor, after: Tensor | None, bounds: list[int]) -> Tensor:
        """Outputs of this rank: its first packed sequence has something before it, its last something after it."""
        sides, outputs = self.between.sides, []
        whole = len(bounds) == 2
        alone = bounds[1:] if after is None else bounds[1:-1]
        outputs.append(self._part(bounds[0], bounds[1], before, after if whole or after is None else sides[1].blank))
        if len(alone) > 1:
            a, b = alone[0], alone[-1]
            packed = [bound - a for bound in alone]
            positions = None if self.q_positions is None else self.q_positions[:, a:b]
            outputs.append(self.between.original.call(
                self.q[:, :, a:b], self.keys.part(a, b), self.is_causal, q_positions=positions, packed=(packed, packed)
            ))  # fmt: skip
        if after is not None and not whole:
            outputs.append(self._part(bounds[-2], bounds[-1], sides[0].blank, after))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    def _part(self, a: int, b: int, before: Tensor, after: Tensor | None) -> Tensor:
        # Queries may be others than keys, as many or not, where there is one sequence.
        q = self.q if (a, b) == (0, self.keys.count) else self.q[:, :, a:b]
        positions = None if self.q_positions is None else self.q_positions[:, a:b]
        out: Tensor = self.between.read(q, self.keys.part(a, b), before, after, positions, self.passed if a == 0 else 0)
        return out


def _running(side: Any, stretches: Sequence[Tensor], broken: Sequence[bool]) -> list[Tensor]:
    """What stands before each stretch; after a broken one, in which a sequence begins, nothing else."""
    found = [side.blank]
    for numbers, anew in zip(stretches[:-1], broken):
        found.append(numbers if anew or found[-1] is side.blank else side.join(found[-1], numbers))
    return found


_DOCUMENTATION = """`longspan.ops.{name}` of this rank's stretch of a sequence, over the ranks of a group.

Every rank calls it with its own stretch, in the order of ranks, and gets the outputs of its queries.

Parameters
----------
*tensors : Tensor
    Those of `longspan.ops.{name}`: queries, keys and values of this rank's stretch, and what is learned, the same on every rank.
group : DeviceMesh or ProcessGroup
    One dimension of a mesh, or a group.
**options
    Those of `longspan.ops.{name}`, without states and ``offset``. ``key_padding_mask`` is that of this rank's keys, ``cu_seqlens``
    that of the whole sequence.

Returns
-------
Tensor ``[B, H, Lq, dv]``
    Outputs of this rank's queries. The gradient of a learned tensor is this rank's share: sum it over ranks.

Raises
------
TypeError, ValueError
    Where this rank's call is wrong, or ranks differ in what they call.
RuntimeError
    Where another rank's call is wrong, or a rank is gone.

Notes
-----
What ranks exchange does not grow with the length.

Examples
--------
>>> import torch
>>> import torch.distributed as dist
>>> from longspan import ops
>>> from longspan.torch.distributed import {name}
>>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)    # torchrun makes more
>>> tensors = {tensors}
>>> out = {name}(*tensors, is_causal=True, group=dist.group.WORLD)
>>> torch.testing.assert_close(out, ops.{name}(*tensors, is_causal=True), rtol=1e-4, atol=1e-4)
>>> dist.destroy_process_group()
"""


def _over(function: Callable[..., Any], tensors: str) -> Callable[..., Tensor]:
    def call(*tensors: Any, group: Any, **options: Any) -> Tensor:
        if options.get("initial_state") is not None:
            raise ValueError(f"{function.__name__}: initial_state: expected None over several processes, got a state")
        out: Tensor = function(*tensors, initial_state=Over(_group(function.__name__, group)), **options)
        return out

    call.__name__ = call.__qualname__ = function.__name__
    call.__doc__ = _DOCUMENTATION.format(name=function.__name__, tensors=tensors)
    return call


_QKV = "*torch.randn(3, 1, 2, 100, 8)"

kernelized_attention = _over(_ops.kernelized_attention, f"[{_QKV}]")
shaw_attention = _over(_ops.shaw_attention, f"[{_QKV}, torch.randn(2, 33, 8)]")
fourier_attention = _over(_ops.fourier_attention, f"[{_QKV}, torch.randn(2, 8, 1), torch.randn(2, 8)]")
short_convolution = _over(_ops.short_convolution, f"[{_QKV}, torch.randn(2, 4, 8)]")
aft_simple = _over(_ops.aft_simple, f"[{_QKV}]")
aft_local = _over(_ops.aft_local, f"[{_QKV}, torch.randn(100, 7)]")
aft_conv = _over(
    _ops.aft_conv, "[torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100), torch.randn(1, 2, 100, 8), torch.randn(2, 5)]"
)


def _group(operation: str, mesh: Any) -> Any:
    """The process group of one dimension of a mesh, or the group itself."""
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(f"{operation}: mesh: expected one dimension, such as mesh[\"sequence\"], got {mesh.ndim}")
        return mesh.get_group()
    if not isinstance(mesh, dist.ProcessGroup):
        raise TypeError(f"{operation}: mesh: expected a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}")
    return mesh


def stretch(length: int, mesh: Any) -> slice:
    """Which tokens are this rank's, where ranks share them as evenly as they can.

    Parameters
    ----------
    length : int
        Tokens of the whole sequence.
    mesh : DeviceMesh or ProcessGroup
        One dimension of a mesh, or a group.

    Returns
    -------
    slice
        Of ``range(length)``.

    Examples
    --------
    >>> import torch
    >>> import torch.distributed as dist
    >>> from longspan.torch.distributed import stretch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)    # torchrun makes more
    >>> stretch(1000, dist.group.WORLD)
    slice(0, 1000, None)
    >>> dist.destroy_process_group()
    """
    group = _group("stretch", mesh)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return slice(length * rank // ranks, length * (rank + 1) // ranks)


_Module = TypeVar("_Module", bound=nn.Module)


def context_parallel(module: _Module, mesh: Any) -> _Module:
    """Makes the attention of a model that of the whole sequence, of which every rank holds a stretch.

    Every rank calls it with its own stretch of the sequence, and whatever else it does has to act on each token alone.
    Parameters and their names stay. Call it before `DistributedDataParallel` or ``fully_shard``.

    Parameters
    ----------
    module : Module
        Changed in place.
    mesh : DeviceMesh or ProcessGroup
        One dimension of a mesh, or a group.

    Returns
    -------
    Module
        ``module``.

    Raises
    ------
    ValueError
        For attention whose stretches do not add up, where there is none, and for models that make one row of a whole sequence or
        count positions from its start.

    Examples
    --------
    >>> import torch
    >>> import torch.distributed as dist
    >>> from longspan.torch import TransformerEncoderLayer
    >>> from longspan.torch.distributed import context_parallel
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)    # torchrun makes more
    >>> layer = TransformerEncoderLayer(32, 4, 64, batch_first=True, attention="shaw")
    >>> context_parallel(layer, dist.group.WORLD)(torch.randn(2, 100, 32), is_causal=True).shape
    torch.Size([2, 100, 32])
    >>> dist.destroy_process_group()
    """
    group = _group("context_parallel", mesh)
    found = []
    for name, each in module.named_modules():
        where = f"context_parallel: {name or type(each).__name__}"
        whole = getattr(each, "whole_sequence", None)
        if whole is not None:
            raise ValueError(f"{where}: expected a model that acts on each token alone beside its attention, got one that {whole}")
        if isinstance(each, AttentionModule):
            if each.mechanism not in _FORMS:
                raise ValueError(f"{where}: expected attention whose stretches add up, got {each.mechanism}: "
                                 f"{_REFUSED[each.mechanism]}")  # fmt: skip
            if each.over is not None:
                raise ValueError(f"{where}: expected attention of one process, got one that is over several already")
            found.append(each)
        elif isinstance(each, nn.MultiheadAttention):
            raise ValueError(f"{where}: expected attention of longspan, got torch's: {_REFUSED['softmax']}")
        elif isinstance(each, MultiheadAttention) and not isinstance(each.attention, AttentionModule):
            raise ValueError(f"{where}: expected a mechanism of longspan, got {type(each.attention).__name__}")
    if not found:
        raise ValueError(f"context_parallel: module: expected one with attention of longspan in it, got {type(module).__name__}")
    for each in found:
        each.over = Over(group)
    return module


@contextlib.contextmanager
def one_process(module: nn.Module) -> Iterator[None]:
    """Takes back, for as long as it is entered, what `context_parallel` did: to generate, to validate whole sequences on one rank, to
    save or copy the model itself. No other rank need enter it.

    Parameters
    ----------
    module : Module
        That `context_parallel` was given, or one that holds it.

    Returns
    -------
    context manager
        Without a value.

    Raises
    ------
    ValueError
        Where no attention in it is over several processes.

    Examples
    --------
    >>> import torch
    >>> import torch.distributed as dist
    >>> from longspan.torch import TransformerEncoderLayer
    >>> from longspan.torch.distributed import context_parallel, one_process
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)    # torchrun makes more
    >>> layer = context_parallel(TransformerEncoderLayer(32, 4, 64, batch_first=True, attention="shaw"), dist.group.WORLD)
    >>> with one_process(layer), torch.no_grad():
    ...     token, state = layer.eval().step(torch.randn(2, 32))
    >>> dist.destroy_process_group()
    """
    over = {each: each.over for each in module.modules() if isinstance(each, AttentionModule) and each.over is not None}
    if not over:
        raise ValueError("one_process: module: expected one that is over several processes, got one that is not")
    try:
        for each in over:
            each.over = None
        yield
    finally:
        for each, processes in over.items():
            each.over = processes


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: float, groups: list[Any]) -> Tensor:
        sums = torch.stack([total.double(), torch.tensor(count, dtype=torch.float64, device=total.device)])
        ranks = 1
        for group in groups:
            dist.all_reduce(sums, group=group)
            ranks *= dist.get_world_size(group)
        count = float(sums[1])
        ctx.scale = ranks / count if count else 0.0
        return (sums[0] * (1 / count if count else 0.0)).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, d_mean: Tensor) -> tuple[Any, ...]:
        return d_mean * ctx.scale, None, None


def mean_loss(total: Tensor, count: int | float, mesh: Any) -> Tensor:
    """The mean loss over all tokens of all ranks; the same on each rank.

    Its gradient on a rank is as many times its share as there are ranks, so that the *average* over ranks, which
    `DistributedDataParallel` and ``fully_shard`` form, is that of the mean.

    Parameters
    ----------
    total : Tensor
        One number: the sum of the losses of this rank's tokens.
    count : int or float
        How many they are.
    mesh : DeviceMesh or ProcessGroup
        Ranks are those of a group, or of all dimensions of a mesh.

    Returns
    -------
    Tensor
        One number; 0 where no rank has a token.

    Examples
    --------
    >>> import torch
    >>> import torch.distributed as dist
    >>> from longspan.torch.distributed import mean_loss
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)    # torchrun makes more
    >>> losses = torch.tensor([1.0, 2.0, 6.0])
    >>> mean_loss(losses.sum(), len(losses), dist.group.WORLD)
    tensor(3.)
    >>> dist.destroy_process_group()
    """
    groups = mesh.get_all_groups() if isinstance(mesh, DeviceMesh) else [_group("mean_loss", mesh)]
    if total.dim():
        raise ValueError(f"mean_loss: total: expected one number, the sum of this rank's losses, got shape {tuple(total.shape)}")
    mean: Tensor = _Mean.apply(total, float(count), groups)
    return mean
