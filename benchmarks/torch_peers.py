"""What a PyTorch user would write or pick instead.

`make` gives functions of ``q``, ``k``, ``v``, ``[batch, head, token, feature]``. The feature map ``elu + 1`` and
the normaliser are inside them. What they learn they close over, as float32 tensors that require a gradient.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def phi(x):
    return F.elu(x) + 1


def linear(q, k, v):
    """All keys through one sum."""
    q, k = phi(q), phi(k)
    return (q @ (k.transpose(-1, -2) @ v)) / (q @ k.sum(-2).unsqueeze(-1) + 1e-6)


def linear_causal(chunk):
    """Sums of earlier chunks beside dense weights inside each."""
    return lambda q, k, v: _chunks(phi(q), phi(k), v, chunk)


def _chunks(q, k, v, chunk):
    batch, heads, length, _ = q.shape
    q, k, v = (x.unflatten(2, (length // chunk, chunk)) for x in (q, k, v))
    outer = k.transpose(-1, -2) @ v
    before = outer.cumsum(2) - outer
    sums = k.sum(-2)
    sums_before = sums.cumsum(2) - sums
    weights = (q @ k.transpose(-1, -2)).tril()
    numerator = weights @ v + q @ before
    denominator = weights.sum(-1, keepdim=True) + q @ sums_before.unsqueeze(-1)
    return (numerator / (denominator + 1e-6)).flatten(2, 3)


def fourier_causal(a, b, chunk):
    """Features turned by their positions, then chunks; ``a`` and ``b`` are ``[1, head, 1, feature]``."""

    def attend(q, k, v):
        position = torch.arange(q.shape[2], dtype=q.dtype).view(1, 1, -1, 1)
        at_key = position * a
        at_query = at_key + b
        q, k = phi(q), phi(k)
        q = torch.cat([q * at_query.cos(), q * at_query.sin(), q], -1)
        k = torch.cat([k * at_key.cos(), k * at_key.sin(), k], -1)
        return _chunks(q, k, v, chunk)

    return attend


def shaw_causal(table, chunk):
    """Shaw's positions in linear time: content by chunks, near keys as a band of dense blocks, far ones by prefix sums.

    ``table`` is ``[2 radius + 1, feature]``; a chunk is no shorter than the radius and divides the length.
    """
    radius = table.shape[0] // 2
    row, column = torch.arange(chunk)[:, None], torch.arange(3 * chunk)[None] - chunk
    index = (column - row).clamp(-radius, radius) + radius
    near = (column - row > -radius) & (column <= row)

    def attend(q, k, v):
        batch, heads, length, _ = q.shape
        count = length // chunk
        q, k = phi(q), phi(k)
        ones = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        weights = q @ phi(table).t()
        band = weights.unflatten(2, (count, chunk)).gather(-1, index.expand(batch, heads, count, -1, -1)) * near
        blocks = F.pad(ones, (0, 0, chunk, chunk)).unfold(2, 3 * chunk, chunk).transpose(-1, -2)
        out = (band @ blocks).flatten(2, 3)
        prefix = ones.cumsum(2)[:, :, : max(length - radius, 0)]
        out = out + weights[..., :1] * F.pad(prefix, (0, 0, min(radius, length), 0))
        q, k, ones = (x.unflatten(2, (count, chunk)) for x in (q, k, ones))
        outer = k.transpose(-1, -2) @ ones
        content = (q @ k.transpose(-1, -2)).tril() @ ones + q @ (outer.cumsum(2) - outer)
        out = out + content.flatten(2, 3)
        return out[..., :-1] / out[..., -1:]

    return attend


def toeplitz(weights, is_causal):
    """All pairs. ``weights`` is ``[head, 2 length - 1]``, the factor of distance ``j - i`` at ``j - i + length - 1``."""

    def attend(q, k, v):
        length = q.shape[2]
        factors = weights.flip(-1).unfold(-1, length, 1).flip(-1)
        scores = (phi(q) @ phi(k).transpose(-1, -2)) * factors
        scores = scores.tril() if is_causal else scores
        return (scores @ v) / scores.sum(-1, keepdim=True)

    return attend


def _channels(x):
    return x.transpose(1, 2).flatten(2)


def aft_simple_causal(q, k, v):
    q, k, v = map(_channels, (q, k, v))
    e = (k - k.amax(1, keepdim=True)).exp()
    return torch.sigmoid(q) * (e * v).cumsum(1) / e.cumsum(1)


def aft_full(w, is_causal):
    """``w`` is ``[length, length]``."""

    def attend(q, k, v):
        q, k, v = map(_channels, (q, k, v))
        e = (k - k.amax(1, keepdim=True)).exp()
        factors = w.exp().tril() if is_causal else w.exp()
        return torch.sigmoid(q) * (factors @ (e * v)) / (factors @ e)

    return attend


def aft_local_causal(w):
    """Running sums, and near keys as a band of dense blocks with ``exp(w) - 1``; ``w`` is ``[length, 2 window - 1]``."""
    length, window = w.shape[0], w.shape[1] // 2 + 1
    row, column = torch.arange(window)[:, None], torch.arange(2 * window)[None]
    offset = column - row - 1
    near = (offset >= 0) & (offset < window)

    def attend(q, k, v):
        q, k, v = map(_channels, (q, k, v))
        e = (k - k.amax(1, keepdim=True)).exp()
        x = torch.cat([e * v, e], -1)
        count = length // window
        factors = (w.exp() - 1).unflatten(0, (count, window))
        band = factors.gather(-1, offset.clamp(0, window - 1).expand(count, -1, -1)) * near
        blocks = F.pad(x, (0, 0, window, 0)).unfold(1, 2 * window, window).transpose(-1, -2)
        sums = (band @ blocks).flatten(1, 2) + x.cumsum(1)
        numerator, denominator = sums.chunk(2, -1)
        return torch.sigmoid(q) * numerator / denominator

    return attend


def aft_conv_causal(w):
    """One kernel and one key a head, ``w`` ``[head, taps]``: a convolution with ``exp(w) - 1`` beside running sums."""
    heads, taps = w.shape

    def attend(q, k, v):
        batch, _, length, width = q.shape
        k = k[..., :1]
        e = (k - k.amax(2, keepdim=True)).exp()
        x = torch.cat([e * v, e], -1)
        channels = F.pad(x.permute(0, 3, 1, 2).reshape(-1, heads, length), (taps - 1, 0))
        near = F.conv1d(channels, (w.exp() - 1)[:, None], groups=heads)
        sums = near.view(batch, width + 1, heads, length).permute(0, 2, 3, 1) + x.cumsum(2)
        return torch.sigmoid(q) * sums[..., :width] / sums[..., width:]

    return attend


def sdpa_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def recurrent_step(q, k, v, sums, keys):
    """A token through the running sums, which it returns anew; ``q``, ``k``, ``v`` are ``[batch, head, feature]``."""
    q, k = phi(q), phi(k)
    sums, keys = sums + k.unsqueeze(-1) * v.unsqueeze(-2), keys + k
    return (q.unsqueeze(-2) @ sums).squeeze(-2) / (q * keys).sum(-1, keepdim=True), sums, keys


def sdpa_step(q, k, v, cache):
    """A token over a cache ``[2, batch, head, token, feature]`` of keys and values, in whose last place it is written."""
    cache[0, :, :, -1], cache[1, :, :, -1] = k, v
    return F.scaled_dot_product_attention(q.unsqueeze(2), cache[0], cache[1])


def sdpa_window(window):
    """All pairs with a mask that hides what is not in the window."""

    def attend(q, k, v):
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen.triu(1 - window))

    return attend


def blocks_window(window):
    """Blocks of as many queries as the window, each with its own keys and those of the block before."""

    def attend(q, k, v):
        size = min(window, q.shape[2])
        q, k, v = (x.unflatten(2, (-1, size)) for x in (q, k, v))
        k, v = (torch.cat([F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1], x], 3) for x in (k, v))
        row, column = torch.arange(size)[:, None], torch.arange(2 * size) - size
        seen = (column <= row) & (row - column < window)
        first = seen & (column >= 0)
        seen = torch.cat([first[None], seen.expand(q.shape[2] - 1, -1, -1)])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).flatten(2, 3)

    return attend


def flex_window(window, length):
    """PyTorch's flexible attention, which leaves out blocks that the window hides. Compiled by itself, since otherwise it forms all
    scores; it has no backward on the CPU."""
    seen = create_block_mask(lambda b, h, i, j: (j <= i) & (i - j < window), None, None, length, length, device="cpu")
    attend = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: attend(q, k, v, block_mask=seen)


def make(name, heads, length, head_dim):
    """The function of this name; ``compiled:`` in front of it puts torch.compile there."""
    generator = torch.Generator().manual_seed(1)

    def learned(*shape):
        return torch.randn(*shape, generator=generator)

    compiled = name.startswith("compiled:")
    known = {
        "linear": lambda: linear,
        "chunk64_causal": lambda: linear_causal(min(length, 64)),
        "chunk128_causal": lambda: linear_causal(min(length, 128)),
        "shaw16_causal": lambda: shaw_causal(learned(33, head_dim).requires_grad_(), 64),
        "shaw64_causal": lambda: shaw_causal(learned(129, head_dim).requires_grad_(), 64),
        "fourier_causal": lambda: fourier_causal(
            learned(1, heads, 1, head_dim).requires_grad_(), learned(1, heads, 1, head_dim).requires_grad_(), 128
        ),
        "toeplitz": lambda: toeplitz((0.1 * learned(heads, 2 * length - 1)).exp().requires_grad_(), False),
        "toeplitz_causal": lambda: toeplitz((0.1 * learned(heads, 2 * length - 1)).exp().requires_grad_(), True),
        "aft_simple_causal": lambda: aft_simple_causal,
        "aft_full": lambda: aft_full((0.1 * learned(length, length)).requires_grad_(), False),
        "aft_full_causal": lambda: aft_full((0.1 * learned(length, length)).requires_grad_(), True),
        "aft_local64_causal": lambda: aft_local_causal((0.1 * learned(length, 127)).requires_grad_()),
        "aft_conv_causal": lambda: aft_conv_causal((0.1 * learned(heads, 33)).requires_grad_()),
        "sdpa_causal": lambda: sdpa_causal,
        "sdpa_window512": lambda: sdpa_window(512),
        "blocks_window512": lambda: blocks_window(512),
        "flex_window512": lambda: flex_window(512, length),
    }
    function = known[name.removeprefix("compiled:")]()
    return torch.compile(function, dynamic=False) if compiled else function
