"""Rows of a state that lie in a circle, and the marks of a state: as ``state.rs`` of each mechanism has them."""

import torch
from torch import Tensor

#: Places of the marks of kernelized attention: the exponent of its sums, the ring's oldest row, and the count of tokens in two numbers.
SHIFT, OLDEST, TOKENS, CARRY = 0, 1, 2, 1 << 20


def tokens(marks: Tensor) -> Tensor:
    """The count of tokens."""
    return marks[..., TOKENS] + CARRY * marks[..., TOKENS + 1]


def rows_at(rows: Tensor, places: Tensor) -> Tensor:
    """Of rows ``[batch, kv_heads, rows, width]``, those at ``places``, which are the same for all heads or not."""
    places = places.expand(*rows.shape[:2], places.shape[-1])
    found: Tensor = rows.gather(2, places[..., None].expand(*places.shape, rows.shape[3]))
    return found


def present(rows: Tensor, there: Tensor) -> Tensor:
    """Rows without a gradient where no token is."""
    return torch.where(there, rows, rows.detach())


def ordered(ring: Tensor, slot: Tensor, count: int) -> Tensor:
    """A ring's rows from the oldest to the newest, where the next one goes to ``slot``, ``[batch, kv_heads, 1]``."""
    whole = ring.unflatten(-1, (count, ring.shape[-1] // count))
    return rows_at(whole, (slot.detach().long() + torch.arange(count, device=ring.device)) % count)


def values_of(ring: Tensor, slot: Tensor, count: int) -> Tensor:
    """The same of rows ``[v, 1]``, which are 0 where no token is: whether one is there has no gradient."""
    rows = ordered(ring, slot, count)
    there = rows[..., -1:].detach()
    return torch.cat([present(rows[..., :-1], there == 1), there], -1)


def circled(rows: Tensor, lengths: Tensor, slot: Tensor, count: int) -> Tensor:
    """Of rows with ``count`` older ones in front, the last ``count`` before those at ``lengths``, in a ring whose next row goes to ``slot``."""
    back = (slot - torch.arange(count, device=rows.device) - 1) % count + 1
    return rows_at(rows, count + lengths - back).flatten(2)
