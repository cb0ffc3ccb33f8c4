"""The modules of the attention-free transformer (Zhai et al. 2021): see `mechanisms`."""

from typing import Any

import torch
from torch import nn

from .. import _options
from ..ops._aft import aft_conv_options
from .attention import Attention


class AftFull(Attention):
    """`longspan.ops.aft_full` as a module, for sequences of bounded length.

    It learns ``u`` and ``z``, ``[length, rank]`` each, or with ``rank=None`` ``w``, ``[length, length]``; they start close to
    no bias.

    Parameters
    ----------
    length : int
        Tokens of the longest sequence.
    rank : int, optional
        Of the biases; ``None`` for one number for each pair of positions.
    num_heads, head_dim, num_kv_heads, device, dtype
        As in `Attention`.
    """

    mechanism = "aft-full"

    def __init__(
        self, num_heads: int, head_dim: int, *, length: int = 1024, rank: int | None = 64, num_kv_heads: int | None = None,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_heads, head_dim, "{}", num_kv_heads)
        _options.expect_integer("AftFull", "length", length, 1, _options.MOST)
        _options.expect_integer("AftFull", "rank", 1 if rank is None else rank, 1, _options.MOST)
        self._learn({"device": device, "dtype": dtype}, length=length, rank=rank)

    def _draw(self) -> None:
        for table in self._learned():
            nn.init.normal_(table, std=0.01 if len(self._own) == 1 else 0.1)


class AftLocal(Attention):
    """`longspan.ops.aft_local` as a module, for sequences of bounded length.

    It learns ``w``, ``[length, 2 * window - 1]``, which starts close to no bias.

    Parameters
    ----------
    window : int
        Keys at this distance or farther have no bias.
    length : int
        Tokens of the longest sequence.
    num_heads, head_dim, num_kv_heads, device, dtype
        As in `Attention`.
    """

    mechanism = "aft-local"
    w: nn.Parameter

    def __init__(
        self, num_heads: int, head_dim: int, *, window: int = 8, length: int = 1024, num_kv_heads: int | None = None,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        _options.expect_integer("AftLocal", "window", window, 1, _options.MOST)
        _options.expect_integer("AftLocal", "length", length, 1, _options.MOST)
        super().__init__(num_heads, head_dim, _options.as_object(by_position=True), num_kv_heads)
        self._learn({"device": device, "dtype": dtype}, window=window, length=length)

    def _draw(self) -> None:
        nn.init.normal_(self.w, std=0.01)


class AftSimple(Attention):
    """`longspan.ops.aft_simple` as a module; it learns nothing.

    Parameters
    ----------
    num_heads, head_dim, num_kv_heads, device, dtype
        As in `Attention`.
    """

    mechanism = "aft-simple"

    def __init__(
        self, num_heads: int, head_dim: int, *, num_kv_heads: int | None = None, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_heads, head_dim, "{}", num_kv_heads)
        self._learn({})


class AftConv(Attention):
    """`longspan.ops.aft_conv` as a module.

    It learns ``w``, ``[num_heads, taps]``, or of an image ``[num_heads, tap_rows, taps]``, and unless ``normalized`` is false
    ``gamma`` and ``beta``, ``[num_heads]``, which start at 0, as published.

    Parameters
    ----------
    taps, tap_rows : int
        Sides of the kernel; ``tap_rows``, of images alone, is ``taps`` by default.
    normalized : bool
        The kernel is ``gamma (w - mean) / std + beta``.
    image : (int, int), optional
        Height and width of the image whose pixels the tokens are, row after row.
    num_heads, head_dim, num_kv_heads, device, dtype
        As in `Attention`.

    Notes
    -----
    A key of a head is one number: ``k`` is ``[B, Hkv, Lk, 1]``.

    Examples
    --------
    >>> import torch
    >>> from longspan.torch import AftConv
    >>> attention = AftConv(4, 8, taps=5)
    >>> q, v = torch.randn(2, 2, 4, 100, 8)
    >>> k = torch.randn(2, 4, 100, 1)
    >>> attention(q, k, v, is_causal=True).shape
    torch.Size([2, 4, 100, 8])
    """

    mechanism = "aft-conv"
    w: nn.Parameter

    def __init__(
        self, num_heads: int, head_dim: int, *, taps: int = 15, normalized: bool = True, image: tuple[int, int] | None = None,
        tap_rows: int | None = None, num_kv_heads: int | None = None, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        _options.expect_integer("AftConv", "taps", taps, 1, _options.MOST)
        tap_rows = taps if tap_rows is None else tap_rows
        _options.expect_integer("AftConv", "tap_rows", tap_rows, 1, _options.MOST)
        w, scale = torch.empty((1, 1) if image is None else (1, 1, 1)), torch.empty(1) if normalized else None
        _, _, options = aft_conv_options("AftConv", torch.empty(1, 1, 1), w, scale, scale, 3, image)
        super().__init__(num_heads, head_dim, options, num_kv_heads)
        self._learn({"device": device, "dtype": dtype}, taps=taps, tap_rows=None if image is None else tap_rows)

    def _draw(self) -> None:
        _, *scale = self._learned()
        nn.init.normal_(self.w, std=1.0 if scale else 0.01)
        for each in scale:
            nn.init.zeros_(each)

    @property
    def key_dim(self) -> int:
        return 1
