"""Two processes of DDP and of FSDP2 have the gradients of one, for every mechanism that learns something."""

import copy

import pytest
import torch
from longspan.torch import TransformerEncoderLayer
from test_torch_context_parallel import on
from test_torch_context_parallel_models import full, learning, sharded
from torch import nn

BATCH, LENGTH, WIDTH = 4, 20, 16
ATTENTIONS = {
    "kernelized": {},
    "kernelized, hedgehog": {"feature_map": "hedgehog"},
    "shaw": {"radius": 3},
    "fourier": {"normalizer": "dominant"},
    "toeplitz": {"radius": 3},
    "aft-full": {"length": LENGTH, "rank": 2},
    "aft-local": {"length": LENGTH, "window": 3},
    "aft-conv": {"taps": 3},
}


def model(name, dtype):
    torch.manual_seed(0)
    options = dict(ATTENTIONS[name], attention=name.split(",")[0])
    layers = [TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, **options) for _ in range(2)]
    return learning(nn.Sequential(*layers)).to(dtype)


def loss(model, x):
    for layer in getattr(model, "module", model):
        x = layer(x, is_causal=True)
    return x.float().square().mean()


class Whole(nn.Module):
    """All layers in one forward, which is what DDP wraps."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return loss(self.layers, x)


def gradients(model):
    return {name: full(p.grad) for name, p in model.named_parameters()}


def work(rank, world, dtype, compiled):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    share = x.chunk(world)[rank]
    # Sums over all tokens in another order, rounded to the type of the parameters.
    tolerance = 2 * torch.finfo(dtype).eps * (BATCH * LENGTH) ** 0.5
    for name in list(ATTENTIONS) if not compiled else ["shaw"]:
        one = Whole(model(name, dtype))
        one(x).backward()
        expected = gradients(one)

        replicas = nn.parallel.DistributedDataParallel(copy.deepcopy(one))
        shards = sharded(copy.deepcopy(one), mesh)
        if compiled:
            replicas, shards = (torch.compile(m, backend="aot_eager") for m in (replicas, shards))
        for kind, wrapped in (("ddp", replicas), ("fsdp", shards)):
            # The second time on storage that the first one freed.
            for _ in range(2):
                wrapped.zero_grad()
                wrapped(share).backward()
            found = gradients(wrapped)
            assert found.keys() and len(found) == len(expected)
            for (parameter, got), wanted in zip(found.items(), expected.values()):
                error = (got - wanted).abs().max() / wanted.abs().max()
                assert wanted.abs().max() > 0 and error < tolerance, (name, kind, parameter, error)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_processes_have_the_gradients_of_one(dtype, compiled):
    on(2, work, dtype, compiled)
