"""A causal model trained under FSDP2 on several processes equals one that is trained in one: torchrun --nproc-per-node 2 fsdp.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from longspan.torch import TransformerEncoderLayer

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 32), nn.Linear(32, 16)
        self.layer = TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, attention="shaw", radius=8)

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens), is_causal=True))


def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for tokens in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens)[:, 3:].flatten(0, 1), tokens[:, :-3].flatten()).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


torch.manual_seed(0)
one, sharded, batches = Model(), Model(), torch.randint(16, (10, 4 * mesh.size(), 64))
sharded.load_state_dict(one.state_dict())
fully_shard(sharded.layer, mesh=mesh)
parts = train(fully_shard(sharded, mesh=mesh), batches[:, dist.get_rank() :: mesh.size()])
torch.testing.assert_close([part.full_tensor() for part in parts], train(one, batches), rtol=1e-4, atol=1e-5)
print(f"process {dist.get_rank()} of {mesh.size()}: the same parameters")
dist.destroy_process_group()
