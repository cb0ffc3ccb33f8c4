"""What ranks tell each other: what each is about to compute, then its stretch's numbers, and in the backward their gradients."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

#: From every rank's numbers, which are equally many, what each rank is to be given.
Scan = Callable[[Sequence[Tensor]], list[Tensor]]


def gather(operation: str, tensor: Tensor, group: Any) -> list[Tensor]:
    """``tensor`` of every rank."""
    ranks = dist.get_world_size(group)
    gathered = tensor.new_empty((ranks, *tensor.shape))
    if tensor.numel():
        try:
            dist.all_gather_into_tensor(gathered.flatten(), tensor.contiguous().flatten(), group=group)
        except RuntimeError as error:
            said = str(error).strip().split("\n")[0]
            raise RuntimeError(f"{operation}: rank {dist.get_rank()}: expected an answer from all {ranks} ranks, got none: one "
                               f"of them has ended, is late, or is in another call ({said})") from error  # fmt: skip
    return list(gathered)


def _number(fact: Any) -> int:
    """A fact as a number of 64 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(fact).encode(), digest_size=8).digest(), "little", signed=True)


def agree(operation: str, tokens: int, facts: dict[str, Any], like: Tensor, group: Any) -> list[int]:
    """Tokens of every rank, once all are about to compute the same; else one error on each rank, before anything can hang."""
    message = [0, tokens, *map(_number, facts.values())]
    said = torch.stack(gather(operation, torch.tensor(message, device=like.device), group)).tolist()
    for rank, (failed, *_) in enumerate(said):
        if failed:
            raise RuntimeError(f"{operation}: expected a call on every rank, got an error on rank {_global(group, rank)}; see its "
                               "own message")  # fmt: skip
    for index, name in enumerate(facts, 2):
        others = [_global(group, rank) for rank, each in enumerate(said) if each[index] != said[0][index]]
        if others:
            raise ValueError(f"{operation}: {name}: expected the same on every rank, got another on rank "
                             f"{', '.join(map(str, others))} than on rank {_global(group, 0)} (here: {facts[name]})")  # fmt: skip
    return [each[1] for each in said]


def refuse(operation: str, facts: int, error: Exception, device: torch.device, group: Any) -> NoReturn:
    """Tells the others, which wait in `agree`, that this rank has none of what they have, and raises its error."""
    try:
        gather(operation, torch.tensor([1] + [0] * (1 + facts), device=device), group)
    except RuntimeError:
        pass  # They are not there either, and this rank's own error says more.
    raise error


def _global(group: Any, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


class Exchange(torch.autograd.Function):
    """What ``scan`` gives this rank of all ranks' numbers.

    The backward gathers the gradients of what every rank was given, and takes them back through the scan to this rank's own
    numbers: as many bytes again, and nothing else crosses ranks.
    """

    @staticmethod
    def forward(ctx: Any, operation: str, group: Any, scan: Scan, numbers: Tensor) -> Tensor:
        everyone = gather(operation, numbers, group)
        ctx.call = operation, group, scan
        ctx.save_for_backward(*everyone)
        return scan(everyone)[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, d_given: Tensor) -> tuple[Any, ...]:
        operation, group, scan = ctx.call
        if torch.is_grad_enabled():
            raise RuntimeError(f"{operation}: second derivatives: expected a call in one process, got one over several")
        everyone = list(ctx.saved_tensors)
        rank = dist.get_rank(group)
        with torch.enable_grad():
            own = everyone[rank] = everyone[rank].detach().requires_grad_()
            given = scan(everyone)
        reached = [(x, d) for x, d in zip(given, gather(operation, d_given, group)) if x.requires_grad]
        if not reached:
            return None, None, None, torch.zeros_like(own)
        (d_own,) = torch.autograd.grad([x for x, _ in reached], own, [d for _, d in reached])
        return None, None, None, d_own
