"""Longspan on this machine's CUDA device, beside the device's own limits, PyTorch and flash-linear-attention if it is installed.

Needs nothing but longspan and torch, ends within eight minutes: python benchmarks/gpu.py [--quick] [--cases SECONDS]
A time is printed only where the same call's output and gradients were checked in this run. Kernels are compiled beforehand, side by side.
Of flash-linear-attention's configurations two a kernel are tried: all of them take half an hour.
"""

import argparse
import multiprocessing
import os
import time

import torch
import torch.nn.functional as F

from longspan import ops
from longspan.torch import chunked_attention

#: Sizes: batch, tokens, heads, numbers in one.
SHAPES = ((1, 8192, 96, 128), (2, 16384, 16, 128), (4, 2048, 16, 128), (4, 4096, 64, 128), (8, 1024, 8, 64))
#: Tokens and width.
CONFORMANCE = ((1000, 128), (777, 64), (300, 40))
#: What relative errors may be in bfloat16 and float32.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 3e-5}


def milliseconds(call, seconds=0.15):
    """The median of a call, by the device's clock."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.time()
    call()
    torch.cuda.synchronize()
    count = max(5, min(100, int(seconds / max(time.time() - start, 1e-6))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for before, after in events:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in events)[count // 2]


def inputs(batch, tokens, heads, width, dtype=torch.bfloat16):
    """Queries, keys, values and the gradient of the output, token after token as projections give them."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    return [torch.randn(batch, tokens, heads, width, device="cuda", dtype=dtype, generator=generator).transpose(1, 2) for _ in range(4)]


def gradients(function, q, k, v, d_out):
    """Output and gradients, recorded anew."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def error(got, expected):
    return ((got.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def definition(q, k, v, is_causal=True):
    """Pair by pair, in doubles."""
    phi = lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp())  # noqa: E731
    weights = phi(q) @ phi(k).mT
    weights = weights.tril() if is_causal else weights
    return weights @ v / weights.sum(-1, keepdim=True)


def of_pytorch(q, k, v):
    """The same in PyTorch's operations in the inputs' own type, pair by pair: what bfloat16 costs there."""
    phi = lambda x: F.elu(x) + 1  # noqa: E731
    weights = (phi(q) @ phi(k).mT).tril()
    return weights @ v / weights.sum(-1, keepdim=True)


def ours(q, k, v, is_causal=True):
    return ops.kernelized_attention(q, k, v, is_causal=is_causal)


def rotary(q, k, v):
    """Fourier's pairs, with the frequencies of RoPE, of the same numbers in every type."""
    half = q.shape[-1] // 2
    a = (10000.0 ** (-torch.arange(half, device=q.device) / half)).bfloat16().to(q.dtype).expand(k.shape[1], half)[..., None]
    return ops.fourier_attention(q, k, v, a, wave="pairs", normalizer="unrotated", is_causal=True)


def decaying(q, k, v):
    """A decay that each token brings, under the normaliser."""
    return ops.kernelized_attention(q, k, v, is_causal=True, log_decay=F.logsigmoid(k[..., 0].bfloat16()).to(q.dtype))


def shaw(q, k, v):
    """Relative positions to a distance of 64, of the same numbers in every type."""
    rel = torch.linspace(-1, 1, 129 * q.shape[-1], device=q.device).bfloat16().to(q.dtype).view(129, -1)
    return ops.shaw_attention(q, k, v, rel, is_causal=True)


def delta(q, k, v):
    """The gated delta rule."""
    gate, beta = F.logsigmoid(k[..., 0].bfloat16()).to(q.dtype), torch.sigmoid(v[..., 0].bfloat16()).to(q.dtype)
    return ops.delta_attention(q, k, v, beta, gate)


#: What is timed beside `ours`, in the first two sizes.
OTHERS = {"longspan, rotary": rotary, "longspan, a decay a token": decaying, "longspan, Shaw, radius 64": shaw,
          "longspan, gated delta rule": delta}  # fmt: skip


def fewer_configurations():
    """Of what flash-linear-attention tries two: tiles of 64, 4 warps, the fewest and the most stages of those."""
    import triton

    autotune = triton.autotune

    def of_two(configs, *rest, **named):
        fits = [c for c in configs if c.num_warps == 4]
        kept = [c for c in fits if c.num_stages in (2, 3) and all(c.kwargs.get(name, 64) == 64 for name in ("BK", "BV"))] or fits or configs
        return autotune(kept[:1] + kept[1:][-1:], *rest, **named)

    triton.autotune = of_two


def compiled(job):
    """Compiles what is timed later, in a process of its own; Triton keeps it on disk."""
    kind, *rest = job
    try:
        if kind == "fla":
            fewer_configurations()
            attend, shape, dtype = fla(), (1, 256, rest[0], 128), torch.bfloat16
        else:
            from longspan.torch._triton import kernelized

            shape, dtype, segments, is_causal = rest
            kernelized.Launch.segments = lambda *_: segments
            attend = lambda q, k, v: ours(q, k, v, is_causal)  # noqa: E731
        if attend is not None:
            gradients(attend, *inputs(*shape, dtype))
    except Exception as failed:  # noqa: BLE001
        return f"{job}: {type(failed).__name__}: {str(failed)[:200]}"
    return None


def compile_all(quick):
    jobs = [("fla", heads) for heads in (96, 16, 3)]
    jobs += [("ours", (1, 300, 16, width), torch.bfloat16, segments, is_causal)
             for width in ((128,) if quick else (128, 64)) for segments in (1, 2) for is_causal in (True, False)]
    jobs += [("ours", (1, 300, 3, width), dtype, 1, True) for dtype in TOLERANCES for _, width in CONFORMANCE]
    jobs.append(("ours", (1, 300, 1, 128), torch.float32, 2, True))
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        for failure in pool.imap_unordered(compiled, jobs, chunksize=1):
            if failure:
                print(failure)


def fla():
    try:
        from fla.ops.linear_attn import chunk_linear_attn
    except ImportError as missing:
        print(f"flash-linear-attention: not there ({missing})")
        return None

    def attend(q, k, v, normalize=True):
        phi = lambda x: F.elu(x) + 1  # noqa: E731
        q, k, v = (x.transpose(1, 2) for x in (phi(q), phi(k), v))
        return chunk_linear_attn(q, k, v, scale=1.0, normalize=normalize)[0].transpose(1, 2)

    return attend


def conformance(others):
    print("\nErrors against the definition in doubles, relative: out, dq, dk, dv; and whether a second run gives the same bits")
    for dtype in TOLERANCES:
        for tokens, width in CONFORMANCE:
            tensors = inputs(1, tokens, 3, width, dtype)
            exact = gradients(definition, *[x.double() for x in tensors])
            got, again = gradients(ours, *tensors), gradients(ours, *tensors)
            errors = [error(a, b) for a, b in zip(got, exact)]
            print(f"{str(dtype)[6:]:9} {tokens:5} x {width:3}  ours   ", *[f"{e:.1e}" for e in errors],
                  "same bits" if all(map(torch.equal, got, again)) else "OTHER BITS", "" if max(errors) < TOLERANCES[dtype] else "WRONG")  # fmt: skip
            if dtype is torch.bfloat16 and width == 128:
                for name, function in others.items():
                    print(f"{'':22} {name:8}", *[f"{error(a, b):.1e}" for a, b in zip(gradients(function, *tensors), exact)])


def examined(job):
    """A case of `longspan.check`, in a process of its own, since compilers take most of the time."""
    number, dtype, device = job
    from longspan.torch._check import CASES, examine, exactly

    torch.set_num_threads(1)
    try:
        row = examine(CASES[number], device, dtype, exactly(CASES[number], dtype))
        return row.by, row.right, str(row)
    except Exception as failed:  # noqa: BLE001
        return "", False, f"{CASES[number]} {dtype}: {type(failed).__name__}: {str(failed)[:200]}"


def cases(seconds, device="cuda"):
    """As many of `longspan.check`'s cases, in all types, as the time lets; first each once in float32."""
    from longspan.torch._check import CASES

    jobs = [(number, dtype, device) for dtype in (torch.float32, torch.bfloat16, torch.float16) for number in range(len(CASES))]
    end, rows = time.time() + seconds, []
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        results = pool.imap_unordered(examined, jobs)
        try:
            while len(rows) < len(jobs):
                rows.append(results.next(max(end - time.time(), 0.01)))
        except multiprocessing.TimeoutError:
            pass
    by_triton = sum(by == "Triton" for by, _, _ in rows)
    print(f"{len(rows)} of {len(jobs)} cases, {by_triton} by Triton; not right or not the same bits twice:")
    print("\n".join(text for _, right, text in rows if not right) or "none", flush=True)


def times(attend_fla, quick):
    print("\nMilliseconds, bfloat16, causal, elu + 1 inside: forward, with backward; memory above the inputs with backward, MB")
    for shape in SHAPES[: 2 if quick else None]:
        q, k, v, d_out = inputs(*shape)
        rows = {"longspan": ours, "longspan, both directions": lambda q, k, v: ours(q, k, v, False)}
        rows |= OTHERS if shape in SHAPES[:2] else {}
        if attend_fla and shape in SHAPES[:2]:
            rows["FLA, feature map and normaliser"] = attend_fla
            rows["FLA, undivided, no feature map"] = None
        if shape[1] * shape[2] <= 1 << 19:
            rows["SDPA (softmax)"] = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if shape == SHAPES[2] and not quick:
            rows["longspan's formulation, compiled"] = torch.compile(lambda q, k, v: chunked_attention(q, k, v, is_causal=True), dynamic=False)
        for name, function in rows.items():
            try:
                if function is None:
                    from fla.ops.linear_attn import chunk_linear_attn

                    flat = [x.transpose(1, 2) for x in (q, k, v)]
                    whole = lambda q, k, v, flat=flat: chunk_linear_attn(  # noqa: E731
                        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=1.0, normalize=False)[0].transpose(1, 2)  # fmt: skip
                else:
                    whole = function
                if name == "longspan" or name in OTHERS or "normaliser" in name or "compiled" in name:
                    reference = gradients(OTHERS.get(name, ours), *[x[:, :1, :2048].float() for x in (q, k, v, d_out)])
                    got = gradients(whole, q, k, v, d_out)
                    # The first rows do not see what comes after; of gradients this holds for queries.
                    wrong = max(error(a[:, :1, :2048], b.double()) for a, b in zip(got[:2], reference[:2]))
                    if not wrong < TOLERANCES[torch.bfloat16]:
                        print(f"{shape}  {name}: WRONG, {wrong:.1e}")
                        continue
                    del got
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                gradients(whole, q, k, v, d_out)
                memory = (torch.cuda.max_memory_allocated() - before) / 1e6
                with torch.no_grad():
                    forward = milliseconds(lambda: whole(q, k, v))
                both = milliseconds(lambda: gradients(whole, q, k, v, d_out))
                print(f"{shape!s:24} {name:34} {forward:8.3f} {both:8.3f} {memory:9.0f}", flush=True)
            except Exception as failed:  # noqa: BLE001
                print(f"{shape}  {name}: {type(failed).__name__}: {str(failed)[:200]}")


def steps():
    print("\nOne token, microseconds, batch 8, 16 heads of 128: eager, and by a CUDA graph; its largest difference from the whole's last token")
    q, k, v, _ = (x.contiguous() for x in inputs(8, 65, 16, 128))
    with torch.no_grad():
        whole = ours(q, k, v)[:, :, -1].float()
        _, state = ops.kernelized_attention(*[x[:, :, :-1] for x in (q, k, v)], is_causal=True, output_final_state=True)
        token = [x[:, :, -1].contiguous() for x in (q, k, v)]
        out = []
        step = lambda: out.append(ops.kernelized_attention_step(*token, state)[0])  # noqa: E731
        eager = 1e3 * milliseconds(step)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        out[-1].fill_(float("nan"))
        graph.replay()
        print(f"{eager:.1f} {1e3 * milliseconds(graph.replay):.1f} {(out[-1].float() - whole).abs().max().item():.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two sizes alone")
    parser.add_argument("--cases", type=float, metavar="SECONDS", help="only the cases of longspan.check, so long")
    arguments = parser.parse_args()
    start = time.time()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, time.strftime("%Y-%m-%d"), flush=True)
    if arguments.cases:
        cases(arguments.cases)
        return
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    print(f"copy {2 * x.numel() / 1e9 / milliseconds(lambda: x.clone()):.2f} TB/s, products {2e-9 * 8192**3 / milliseconds(lambda: a @ a):.0f} Tflop/s")
    del x, a
    compile_all(arguments.quick)
    print(f"compiled after {time.time() - start:.0f} s", flush=True)
    fewer_configurations()
    attend_fla = fla()
    conformance({"PyTorch": of_pytorch} | ({"FLA": attend_fla} if attend_fla else {}))
    times(attend_fla, arguments.quick)
    steps()
    print(f"\n{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
