"""The gated RMS norm of attention's heads."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GatedRMSNorm(nn.Module):
    """``x / sqrt(mean(x**2) + eps) * weight * silu(gate)`` of each head: the RMS norm of its numbers, times a gate.

    Parameters
    ----------
    num_heads, head_dim : int
        Heads of a token; numbers of a head.
    eps : float
        What keeps the division finite.
    device, dtype
        As in torch's modules.

    Raises
    ------
    ValueError
        For sizes below 1.

    Notes
    -----
    It stands between attention and its output projection in RetNet (Sun et al. 2023, section 2.2, where it is a group norm) and gated
    linear attention (Yang et al. 2024); Mamba-2 (Dao and Gu 2024) gates first and then norms. ``gated_attention=True`` puts it into
    `MultiheadAttention`. ``weight``, ``[num_heads * head_dim]``, begins at 1 and has a number for each column of every head.

    Examples
    --------
    >>> import torch
    >>> from longspan.torch import GatedRMSNorm
    >>> norm = GatedRMSNorm(4, 8)
    >>> x, gate = torch.randn(2, 10, 32), torch.randn(2, 10, 32)
    >>> heads = x.unflatten(-1, (4, 8))
    >>> expected = (heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2) * gate * torch.sigmoid(gate)
    >>> torch.testing.assert_close(norm(x, gate), expected)
    """

    def __init__(
        self, num_heads: int, head_dim: int, eps: float = 1e-5, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        for name, size in (("num_heads", num_heads), ("head_dim", head_dim)):
            if size < 1:
                raise ValueError(f"GatedRMSNorm: {name}: expected an integer from 1 on, got {size}")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_heads * head_dim, device=device, dtype=dtype))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """The gated norms of heads that stand side by side.

        Parameters
        ----------
        x, gate : Tensor ``[..., num_heads * head_dim]``
            The heads, which may be float32 where the gate is of half precision, and what opens them.

        Returns
        -------
        Tensor
            Of the shape of ``x`` in the type of ``gate``.

        Raises
        ------
        ValueError
            For another width, and for a gate of another shape than ``x``.
        """
        width = self.num_heads * self.head_dim
        if x.shape[-1:] != (width,):
            raise ValueError(f"GatedRMSNorm: x: expected rows of num_heads * head_dim = {width} numbers, got shape "
                             f"{tuple(x.shape)}")  # fmt: skip
        if gate.shape != x.shape:
            raise ValueError(f"GatedRMSNorm: gate: expected shape {tuple(x.shape)}, as x, got {tuple(gate.shape)}")
        heads = x.unflatten(-1, (self.num_heads, self.head_dim))
        normed = F.rms_norm(heads, (self.head_dim,), eps=self.eps).flatten(-2)
        return (normed * self.weight * F.silu(gate)).to(gate.dtype)


def before_norm(*tensors: Tensor) -> list[Tensor]:
    """Queries, keys and values of heads that are normed: where heads are not divided by a sum of weights they grow beyond float16."""
    return [tensor.float() if tensor.dtype is torch.float16 else tensor for tensor in tensors]
