"""Gated linear attention and the delta rule beside transformers' own functions in PyTorch, on the CPU: first errors, then times.

    python benchmarks/gated.py [--threads 2] [--rounds 6]

Errors are relative to the largest number, f32 against the recurrence in float64. Times are the least of the rounds, ours and theirs by
turns, milliseconds forward / with backward, of one sequence; ONNX Runtime has no backward.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import onnx_peers
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from longspan import fla, ops

NAMES = ("out", "dq", "dk", "dv", "dg", "dbeta")


def draw(tokens: int, heads: int, width: int, decay: float, by_channel: bool = False) -> list[Tensor]:
    q, k, v = torch.randn(3, 1, tokens, heads, width)
    g = -decay * torch.rand(1, tokens, heads, *([width] if by_channel else []))
    return [x.requires_grad_() for x in (q, k, v, g, torch.rand(1, tokens, heads))]


def run(function: Callable[..., tuple[Tensor, Tensor | None]], tensors: Sequence[Tensor]) -> list[Tensor]:
    q, k, v, g, beta = tensors
    out, _ = function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), tensors)]


def in_doubles(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: object) -> tuple[Tensor, None]:
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    state, outs = q.new_zeros(1, q.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        update = (v[:, t] - torch.einsum("bhij,bhi->bhj", state, k[:, t])) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * update[:, :, None]
        outs.append(torch.einsum("bhij,bhi->bhj", state, q[:, t]) * q.shape[3] ** -0.5)
    return torch.stack(outs, 1), None


def errors() -> None:
    print("error             " + "".join(f"{name:>9}" for name in NAMES))
    for decay in (0.02, 1.0, 12.0):
        torch.manual_seed(0)
        tensors = draw(512, 2, 64, decay)
        exact = run(in_doubles, [x.detach().double().requires_grad_() for x in tensors])
        for name, function in (("longspan", fla.chunk_gated_delta_rule), ("transformers", torch_chunk_gated_delta_rule)):
            found = run(function, tensors)
            row = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, exact)]
            print(f"{name:<12} {-decay:5} " + "".join(f"{error:9.1e}" for error in row), flush=True)


def least(functions: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Milliseconds of each, by turns."""
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for n, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[n] = min(best[n], 1e3 * (time.perf_counter() - start))
    return best


def onnxruntime(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, threads: int) -> Callable[[], object]:
    """A call of ONNX Runtime's, whose operator leaves it to others to divide queries and keys by their length; checked once."""
    q, k = (x.detach() * (x.detach().square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    inputs = [x.transpose(1, 2) for x in (q, k, v.detach())]
    peer = onnx_peers.Peer("onnxruntime_gated_delta", *inputs, threads, g.detach(), beta.detach(), q.shape[3] ** -0.5)
    ours = fla.chunk_gated_delta_rule(q, k, v.detach(), g.detach(), beta.detach())[0]
    assert (torch.from_numpy(peer.output()).transpose(1, 2) - ours).abs().max() < 1e-5 * ours.abs().max()
    return lambda: peer.run(False)


def times(rounds: int, threads: int) -> None:
    print("\nms                         forward   with backward")
    for heads, width, tokens in ((8, 64, 4096), (32, 128, 1024), (32, 128, 4096)):
        q, k, v, g, beta = draw(tokens, heads, width, 1.0)
        by_channel = draw(tokens, heads, width, 1.0, True)[3]
        swapped = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        normalized = {"use_qk_l2norm_in_kernel": True}
        calls: dict[str, Callable[[], Any]] = {
            "kernelized": lambda: ops.kernelized_attention(*swapped, is_causal=True),
            "gated, a head": lambda: fla.chunk_simple_gla(q, k, v, g)[0],
            "gated, a channel": lambda: fla.chunk_gla(q, k, v, by_channel)[0],
            "gated delta": lambda: fla.chunk_gated_delta_rule(q, k, v, g, beta, **normalized)[0],
            "its transformers": lambda: torch_chunk_gated_delta_rule(q, k, v, g, beta, **normalized)[0],
            "its ONNX Runtime": onnxruntime(q, k, v, g, beta, threads),
            "KDA": lambda: fla.chunk_kda(q, k, v, by_channel, beta, **normalized)[0],
        }
        if tokens * heads <= 8 * 4096:
            # It forms the decays of all pairs of a chunk in each channel.
            calls["its transformers "] = lambda: chunk_kimi_delta_attention(q, k, v, by_channel, beta, **normalized)[0]
        with torch.no_grad():
            forward = least(list(calls.values()), rounds)
        learning = [name for name in calls if "ONNX" not in name]
        backward = least([lambda call=calls[name]: call().sum().backward() for name in learning], max(rounds // 2, 1))  # type: ignore[misc]
        both = dict(zip(learning, backward))
        for name, one in zip(calls, forward):
            print(f"{heads:2} x {width:3}, {tokens} {name:<17} {one:8.1f} {both.get(name, float('nan')):10.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    errors()
    times(options.rounds, options.threads)


if __name__ == "__main__":
    main()
