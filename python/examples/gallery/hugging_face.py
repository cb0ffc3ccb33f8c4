"""
Another attention in a Hugging Face model
=========================================

`longspan.transformers.register` makes linear attention known to ``transformers`` by a name, and a model of theirs takes it by that
name: nothing else in the model changes. But its weights were learned with softmax attention. This page shows what the exchange does
to a model, how much further training mends it, and what ``generate`` then keeps of a text. The model is a small Llama with random
weights; nothing is loaded from a hub.
"""

# %%
# A task that needs attention: a line of random letters, then the same line again. From the second time on a model can know what
# comes next if it looks up what followed the letter that it has just seen.

import matplotlib.pyplot as plt
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from longspan.transformers import StateCache, register

LETTERS, LINE = 32, 12


def lines(count):
    line = torch.rand(count, LETTERS).argsort(1)[:, :LINE] + 1
    return line.repeat(1, 2)


def loss_of(model, ids):
    """Of the second line alone: the first is random."""
    return model(ids, labels=ids.clone().index_fill(1, torch.arange(LINE + 1), -100)).loss


def train(model, steps, peak):
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps)
    losses = []
    for _ in range(steps):
        loss = loss_of(model.train(), lines(32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


# %%
# With softmax attention
# ----------------------

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=LETTERS + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
    bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
)
model = LlamaForCausalLM(config)
before = train(model, 300, 5e-3)
print(f"softmax attention: {before[-1]:.3f}")

# %%
# The exchange
# ------------
#
# One call. The feature map says how a weight depends on query and key: with ``"taylor2"`` it is the exponential's series up to the
# second term. That is too far from the exponential for weights that were learned with it, and close enough to go on from.

register("longspan-taylor", feature_map="taylor2")
model.set_attn_implementation("longspan-taylor")
with torch.no_grad():
    torch.manual_seed(1)
    exchanged = loss_of(model.eval(), lines(256)).item()
print(f"linear attention, the same weights: {exchanged:.3f}")
after = train(model, 200, 3e-3)
with torch.no_grad():
    mended = loss_of(model.eval(), lines(256)).item()
print(f"linear attention, after {len(after)} more steps: {mended:.3f}")
assert exchanged > 1 and mended < 0.2

figure, axis = plt.subplots(figsize=(8, 3.4), layout="constrained")
axis.plot(before, color="gray", label="softmax attention")
axis.plot(range(len(before), len(before) + len(after)), after, color="tab:blue", label="linear attention")
axis.axvline(len(before), color="black", linewidth=0.8, linestyle=":")
axis.set(xlabel="step", ylabel="loss of the second line", ylim=(0, None))
axis.legend()
plt.show()

# %%
# Writing
# -------
#
# Given a line, the model writes it again and again. With a `longspan.transformers.StateCache` what it keeps of the text does not
# grow; a cache of keys and values, which every attention works with, does. Both give what whole forward passes give.

prompt = lines(1)[:, :LINE]
print("prompt ", prompt[0].tolist())


def generate(tokens, cache):
    ids = model.generate(prompt, cache=cache, max_new_tokens=tokens, do_sample=False)
    return ids[0, LINE:].tolist()


written = generate(LINE, StateCache())
print("written", written)
ids = prompt
with torch.no_grad():
    for _ in range(LINE):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
assert written == ids[0, LINE:].tolist() == generate(LINE, DynamicCache())
assert sum(a == b for a, b in zip(written, prompt[0].tolist())) >= LINE - 1

# %%

tokens = [4, 32, 128, 256]
states, keys_and_values = [], []
for count in tokens:
    cache = StateCache()
    generate(count, cache)
    states.append(cache.nbytes / 1024)
    cache = DynamicCache()
    generate(count, cache)
    keys_and_values.append(sum(2 * layer.keys.nbytes for layer in cache.layers) / 1024)
assert len(set(states)) == 1 and keys_and_values[-1] > 10 * keys_and_values[0]

figure, axis = plt.subplots(figsize=(8, 3.4), layout="constrained")
axis.plot(tokens, states, color="tab:blue", marker="o", label="StateCache")
axis.plot(tokens, keys_and_values, color="gray", marker="o", label="DynamicCache")
axis.set(xlabel="tokens written", ylabel="KiB kept of the text", ylim=(0, None))
axis.legend()
plt.show()
