"""A model of today's kind is fine-tuned on the CPU: the same losses, its linear layers by Longspan's kernels."""

import time

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import longspan.transformers

config = Qwen3_5TextConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
)  # fmt: skip
text = torch.frombuffer(bytearray(open(__file__, "rb").read()), dtype=torch.uint8).long()[:300]


def fine_tune(accelerated: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(config)
    layers = longspan.transformers.accelerate(model) if accelerated else []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, start = [], time.perf_counter()
    for _ in range(20):
        loss = model(text[None], labels=text[None]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    print(f"{len(layers)} layers accelerated: loss {losses[0]:.3f} to {losses[-1]:.3f}, {time.perf_counter() - start:.1f} s")
    return torch.stack(losses)


plain, accelerated = fine_tune(False), fine_tune(True)
torch.testing.assert_close(accelerated, plain, rtol=1e-4, atol=1e-4)
print("the same losses over 20 steps")
