"""Two processes of DDP and of FSDP2 have the gradients of one, for every mechanism that learns something."""

import copy
import os
import socket

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from longspan.torch import TransformerEncoderLayer  # noqa: E402

WORLD, BATCH, LENGTH, WIDTH = 2, 4, 20, 16
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
    whole = nn.Sequential(*layers)
    for parameter in whole.parameters():
        if not parameter.any():
            # Some start at 0, where others have no gradient.
            nn.init.normal_(parameter)
    return whole.to(dtype)


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
    return {name: getattr(p.grad, "full_tensor", lambda grad=p.grad: grad)() for name, p in model.named_parameters()}


def work(rank, port, dtype, compiled):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (WORLD,))
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
        share = x.chunk(WORLD)[rank]
        # Sums over all tokens in another order, rounded to the type of the parameters.
        tolerance = 2 * torch.finfo(dtype).eps * (BATCH * LENGTH) ** 0.5
        for name in list(ATTENTIONS) if not compiled else ["shaw"]:
            one = Whole(model(name, dtype))
            one(x).backward()
            expected = gradients(one)

            replicas = nn.parallel.DistributedDataParallel(copy.deepcopy(one))
            shards = copy.deepcopy(one)
            for layer in shards.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(shards, mesh=mesh)
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
        dist.barrier()
    finally:
        dist.destroy_process_group()
    # Without the interpreter's end: gloo's threads may outlive it, and C++ then aborts the process.
    os._exit(0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_processes_have_the_gradients_of_one(dtype, compiled):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port, dtype, compiled), WORLD)
