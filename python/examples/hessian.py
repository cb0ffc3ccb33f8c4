"""Hessian-vector products of a loss through this attention equal those of its definition."""

import torch
from torch.autograd.functional import hvp

from longspan import ops


def features(x):
    return torch.nn.functional.elu(x) + 1


def definition(q, k, v, rel):
    """Weights phi(q_i).(phi(k_j) + phi(rel at the clipped distance)), of all pairs."""
    distance = torch.arange(q.shape[2])[None] - torch.arange(q.shape[2])[:, None]
    near = features(rel)[:, distance.clamp(-radius, radius) + radius]
    weights = features(q) @ features(k).mT + torch.einsum("bhid,hijd->bhij", features(q), near)
    weights = weights.masked_fill(distance > 0, 0.0)
    return weights @ v / weights.sum(-1, keepdim=True)


def loss(attention):
    return lambda *tensors: attention(*tensors).tanh().square().sum()


torch.manual_seed(0)
radius = 3
tensors = (*torch.randn(3, 2, 2, 20, 4, dtype=torch.float64).unbind(), torch.randn(2, 2 * radius + 1, 4, dtype=torch.float64))
direction = tuple(torch.randn_like(tensor) for tensor in tensors)
_, ours = hvp(loss(lambda *tensors: ops.shaw_attention(*tensors, is_causal=True)), tensors, direction)
_, wanted = hvp(loss(definition), tensors, direction)
torch.testing.assert_close(ours, wanted)
assert max(product.abs().max() for product in wanted) > 0.1
print("equal, for queries, keys, values and positions:", [f"{product.norm():.2f}" for product in ours])
