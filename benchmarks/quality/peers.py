"""What the command is held against where it isn't one of its own mechanisms."""

import json
import time

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

STEPS, BATCH, HIDDEN, RATE = 1500, 64, 112, 2e-3


def _read(path):
    with open(path) as lines:
        return [json.loads(line) for line in lines]


class Recurrent(nn.Module):
    """A GRU over the values and the time since the last point; its last row tells the class."""

    def __init__(self, channels, classes):
        super().__init__()
        self.input = nn.Linear(channels + 1, HIDDEN)
        self.gru = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.output = nn.Linear(HIDDEN, classes)

    def forward(self, series):
        lengths = torch.tensor([len(one) for one in series])
        rows = pack_padded_sequence(self.input(pad_sequence(series, batch_first=True)), lengths, batch_first=True, enforce_sorted=False)
        return self.output(self.gru(rows)[1][0])


def gru(train, held_out, seed):
    """Accuracy on the held-out series after as many steps of as many series as the command takes."""
    torch.manual_seed(seed)
    # A step of such a GRU is many small products, which threads only hold up.
    torch.set_num_threads(1)
    began = time.time()
    train, held_out = _read(train), _read(held_out)
    classes = sorted({one["label"] for one in train})
    values = torch.tensor([point for one in train for point in one["values"]])
    mean, deviation = values.mean(0), values.std(0) + 1e-8
    gaps = torch.tensor([b - a for one in train for a, b in zip(one["times"], one["times"][1:], strict=False)], dtype=torch.float)

    def measured(one):
        points = (torch.tensor(one["values"]) - mean) / deviation
        times = torch.tensor(one["times"], dtype=torch.float)
        return torch.cat([points, (times.diff(prepend=times[:1]) / gaps.median())[:, None]], 1)

    examples = [measured(one) for one in train]
    labels = torch.tensor([classes.index(one["label"]) for one in train])
    model = Recurrent(len(mean), len(classes))
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.07)
    for _ in range(STEPS):
        chosen = torch.randperm(len(examples))[:BATCH]
        loss = nn.functional.cross_entropy(model([examples[at] for at in chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        told = [classes[at] for at in model([measured(one) for one in held_out]).argmax(1)]
    right = sum(label == one["label"] for label, one in zip(told, held_out, strict=True))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"score": {"rate": right / len(held_out)}, "parameters": parameters, "seconds": time.time() - began}
