"""Trains a language model of bytes on one text as one sequence, cut over all processes.

    torchrun --nproc-per-node 4 one_text.py novel.txt --tokens 65536

`python one_text.py novel.txt --tokens 65536` does the same in one process, with the same losses to rounding. With
``--checkpoints FOLDER`` a run stores itself there at its end and goes on from what is there, on any number of processes.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from longspan.torch import TransformerEncoderLayer
from longspan.torch.distributed import context_parallel, mean_loss, stretch


class LanguageModel(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        self.layers = nn.ModuleList(
            TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True, attention="shaw", radius=16
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, is_causal=True)
        return nn.functional.linear(self.norm(x), self.embed.weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=65536, help="bytes of the text to learn from")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--checkpoints", type=Path)
    arguments = parser.parse_args()

    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sequence",))

    # Each process holds its stretch of the text, and the same stretch one byte later as what it has to say.
    text = torch.frombuffer(bytearray(arguments.text.read_bytes()[: arguments.tokens + 1]), dtype=torch.uint8).long()
    here = stretch(len(text) - 1, mesh)
    tokens, wanted = text[:-1][None, here], text[1:][None, here]

    torch.manual_seed(0)
    model = context_parallel(LanguageModel(arguments.width, arguments.layers), mesh)
    learner = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    first = 0
    if arguments.checkpoints:
        # A checkpoint is whole once it has its metadata, which are written last.
        first = max([int(path.parent.name) for path in arguments.checkpoints.glob("*/.metadata")], default=0)
    if first:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=arguments.checkpoints / str(first))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    for step in range(first, first + arguments.steps):
        logits = learner(tokens)
        # DistributedDataParallel takes the mean of gradients over processes, which `mean_loss` counts on.
        total = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        loss = mean_loss(total, wanted.numel(), mesh)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {loss:.5f}", flush=True)
    if arguments.checkpoints:
        weights, moments = get_state_dict(model, optimizer)
        folder = arguments.checkpoints / str(first + arguments.steps)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
