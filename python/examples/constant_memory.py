"""A Hugging Face model with this attention generates, in constant memory, what its full forward gives."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from longspan.transformers import StateCache, register

register("longspan")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
    eos_token_id=None, initializer_range=0.3, attn_implementation="longspan",
)  # fmt: skip
model = LlamaForCausalLM(config).eval()
prompt = torch.randint(1, 64, (2, 16))

sizes = []
for length in (8, 200):
    cache = StateCache()
    done = model.generate(
        prompt, cache=cache, max_new_tokens=length, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    sizes.append(cache.nbytes)
assert sizes[0] == sizes[1] > 0, sizes

with torch.no_grad():
    whole = model(done.sequences[:, :-1], use_cache=False).logits[:, prompt.shape[1] - 1 :]
torch.testing.assert_close(torch.stack(done.logits, 1), whole, rtol=1e-3, atol=1e-3)
print(f"{done.sequences.shape[1]} tokens, {sizes[1]} bytes of states as after {16 + 8}: the full forward's logits")
