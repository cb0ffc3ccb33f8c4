"""
A language model that streams
=============================

A model of text reads a long page fastest all at once, and writes fastest one token at a time. Linear attention does both with the
same weights: all tokens together in linear time, or one after the other from a *state*, whose size does not depend on how many
tokens came before. This page trains a small model of characters, checks that both ways give the same numbers, and measures what is
kept of a text.
"""

# %%
# Text that every machine with Python has: the source of two modules of its standard library. The last tenth is held out.

import inspect
import math
import random
import statistics

import matplotlib.pyplot as plt
import torch
from torch import nn

from longspan.torch import TransformerEncoderLayer

torch.manual_seed(0)
text = "".join(inspect.getsource(module) for module in (random, statistics))
letters = sorted(set(text))
ids = torch.tensor([letters.index(letter) for letter in text])
train, held_out = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]
print(f"{len(text)} characters, {len(letters)} different ones")

# %%
# The model
# ---------
#
# Two layers with Shaw's relative positions: a learned vector for each of the 16 nearest characters, and one for all that are
# farther. Each head forgets at its own pace: with a ``decay`` of 0.9 a character ten tokens back weighs a third. So a text of any
# length looks like the short ones that the model is trained on; without a decay the mean over ever more characters would not.


class LanguageModel(nn.Module):
    def __init__(self, width=64, layers=2):
        super().__init__()
        self.embed = nn.Embedding(len(letters), width)
        self.layers = nn.ModuleList(
            TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True, attention="shaw", radius=16,
                decay=[0.9, 0.95, 0.98, 0.99],
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(letters))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, is_causal=True)
        return self.head(self.norm(x))

    def read(self, tokens):
        """A prompt at once: what comes next, and each layer's state."""
        x, states = self.embed(tokens), []
        for layer in self.layers:
            x, state = layer(x, is_causal=True, output_final_state=True)
            states.append(state)
        return self.head(self.norm(x[:, -1])), states

    def step(self, token, states):
        """One more token."""
        x, after = self.embed(token), []
        for layer, state in zip(self.layers, states):
            x, state = layer.step(x, state)
            after.append(state)
        return self.head(self.norm(x)), after


model = LanguageModel()
steps = 400
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
losses = []
for step in range(steps):
    starts = torch.randint(len(train) - 129, (8,))
    batch = torch.stack([train[start : start + 129] for start in starts])
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())

# %%
# What it has to beat: a table of how often each character follows each other one, which is all that could be learned without
# attention.

pairs = torch.ones(len(letters), len(letters))
pairs.index_put_((train[:-1], train[1:]), torch.ones(len(train) - 1), accumulate=True)
table = -(pairs / pairs.sum(1, keepdim=True)).log()[held_out[:-1], held_out[1:]].mean().item()

model.eval()
with torch.no_grad():
    logits = model(held_out[None, :-1])
    held_out_loss = nn.functional.cross_entropy(logits[0], held_out[1:]).item()
print(f"{len(held_out)} characters at once, bits a character: {held_out_loss / math.log(2):.2f}, by the table {table / math.log(2):.2f}")
assert held_out_loss < 0.8 * table

# %%
# Streaming
# ---------
#
# The whole held-out text in one call gave the logits above. Its first half as a prompt and the rest one character at a time give
# the same, to rounding: the state stands for everything before.

half = 2000
with torch.no_grad():
    out, states = model.read(held_out[None, :half])
    torch.testing.assert_close(out, logits[:, half - 1], rtol=1e-3, atol=1e-3)
    for position in range(half, half + 500):
        out, states = model.step(held_out[None, position], states)
        torch.testing.assert_close(out, logits[:, position], rtol=1e-3, atol=1e-3)

# %%
# Now it goes on from a prompt by itself. Each character costs the same time, and what is kept stays as large as it was.

torch.manual_seed(1)
prompt = "    def sample(self, population"
with torch.no_grad():
    out, states = model.read(torch.tensor([[letters.index(letter) for letter in prompt]]))
    written, kept = [], []
    for _ in range(600):
        token = torch.multinomial((out / 0.6).softmax(-1), 1)[:, 0]
        written.append(letters[token])
        kept.append(sum(state.nbytes for state in states))
        out, states = model.step(token, states)
print(prompt + "".join(written[:400]))
assert len(set(kept)) == 1

# %%
# Softmax attention keeps the keys and values of every character instead: two rows of 64 numbers in each layer.

tokens = torch.arange(1, len(kept) + 1)
cache = len(model.layers) * 2 * 64 * 4 * (tokens + len(prompt))
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
left.plot(losses, color="tab:blue", label="training")
left.axhline(table, color="gray", linestyle="--", label="table of pairs")
left.axhline(held_out_loss, color="tab:orange", label="held out, at the end")
left.set(xlabel="step", ylabel="loss, nats a character", ylim=(0, None), title="Learning")
left.legend()
right.plot(tokens, torch.tensor(kept) / 1024, color="tab:blue", label="states")
right.plot(tokens, cache / 1024, color="gray", linestyle="--", label="a cache of keys and values")
right.set(xlabel="characters written", ylabel="KiB kept of the text", ylim=(0, None), title="Writing")
right.legend()
plt.show()
