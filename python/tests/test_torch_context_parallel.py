"""One sequence over several processes has the outputs and gradients of one process, and sends the bytes that the page says."""

import os
import re
import socket

import pytest
import torch
import torch.distributed as dist
from longspan import ops
from longspan.torch import distributed

BATCH, HEADS, LENGTH, WIDTH = 2, 2, 90, 8
# One rank has nothing, one less than the reach of windows.
CUTS = {2: [[0, 45, 90], [0, 0, 90], [0, 87, 90]], 4: [[0, 22, 45, 67, 90], [0, 40, 40, 43, 90], [0, 1, 3, 90, 90]]}
# Boundaries within ranks, between them, at both ends of one and twice at one place.
PACKED = [0, 17, 40, 43, 43, 61, 90]
TOLERANCE = 2e-5


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape)))


def positive(*shape):
    return draw(*shape).abs()


RADIUS = 5
REL = lambda: draw(HEADS, 2 * RADIUS + 1, WIDTH, seed=1)  # noqa: E731
A = lambda: draw(HEADS, WIDTH, 1, seed=2)  # noqa: E731
EACH = lambda seed: draw(HEADS, WIDTH, seed=seed)  # noqa: E731
MAPS = lambda: [draw(HEADS, 4, WIDTH, seed=4), draw(HEADS, 4, WIDTH, seed=5)]  # noqa: E731


def plain(name, **options):
    return lambda module, q, k, v, *p, **o: getattr(module, name)(q, k, v, *p, **options, **o)


def with_maps(name, count, **options):
    return lambda module, q, k, v, *p, **o: getattr(module, name)(q, k, v, *p[:count], maps=p[count:], **options, **o)


def fourier(names, **options):
    return lambda module, q, k, v, *p, **o: module.fourier_attention(q, k, v, **dict(zip(names, p)), **options, **o)


def at_positions(module, q, k, v, a, b, **o):
    # Two axes, of this rank's tokens, which `work` says.
    return module.fourier_attention(q, k, v, a, b, q_positions=at_positions.here, k_positions=at_positions.here, **o)


def one_key(module, q, k, v, w, gamma, beta, **o):
    return module.aft_conv(q, k[..., 0], v, w, gamma=gamma, beta=beta, **o)


def grouped(module, q, k, v, **o):
    return module.kernelized_attention(q, k[:, :1], v[:, :1], **o)


CASES = {
    "kernelized": (plain("kernelized_attention"), list),
    "kernelized, decay": (plain("kernelized_attention", decay=[0.9, 1.0]), list),
    "kernelized, exp": (plain("kernelized_attention", feature_map="exp"), list),
    "kernelized, prf": (plain("kernelized_attention", feature_map="prf:16:seed=3"), list),
    "kernelized, dpfp": (plain("kernelized_attention", feature_map="dpfp:2"), list),
    "kernelized, taylor2": (plain("kernelized_attention", feature_map="taylor2"), list),
    "kernelized, hedgehog": (with_maps("kernelized_attention", 0, feature_map="hedgehog:4"), MAPS),
    "kernelized, undivided": (plain("kernelized_attention", normalize=False), list),
    "kernelized, grouped": (grouped, list),
    "shaw": (plain("shaw_attention"), lambda: [REL()]),
    "shaw, decay": (plain("shaw_attention", decay=[0.9, 0.99]), lambda: [REL()]),
    "shaw, exp": (plain("shaw_attention", feature_map="exp"), lambda: [0.3 * REL()]),
    "shaw, hedgehog": (with_maps("shaw_attention", 1, feature_map="hedgehog:4"), lambda: [REL(), *MAPS()]),
    "shaw, positions alone": (plain("shaw_attention", kernelized=False), lambda: [REL()]),
    "shaw, shared": (plain("shaw_attention"), lambda: [REL()[0]]),
    "shaw, radius 0": (plain("shaw_attention"), lambda: [REL()[:, RADIUS : RADIUS + 1]]),
    "shaw, undivided": (plain("shaw_attention", normalize=False), lambda: [REL()]),
    "fourier": (fourier("ab"), lambda: [A(), EACH(3)]),
    "fourier, dominant": (fourier(["a", "b", "c", "beta"], normalizer="dominant"), lambda: [A(), EACH(3), EACH(4), EACH(5)]),
    "fourier, unrotated": (fourier("abc", normalizer="unrotated"), lambda: [A(), EACH(3), EACH(4)]),
    "fourier, rotary": (fourier("a", normalizer="unrotated", wave="pairs"), lambda: [A()[:, : WIDTH // 2]]),
    "fourier, decay": (fourier("ab", decay=[0.9, 0.99]), lambda: [A(), EACH(3)]),
    "fourier, at positions": (at_positions, lambda: [draw(HEADS, WIDTH, 2), EACH(3)]),
    "short-convolution": (plain("short_convolution"), lambda: [draw(HEADS, 4, WIDTH, seed=6)]),
    "short-convolution, one tap": (plain("short_convolution"), lambda: [draw(HEADS, 1, WIDTH, seed=6)]),
    "aft-simple": (plain("aft_simple"), list),
    "aft-local": (plain("aft_local"), lambda: [draw(LENGTH, 2 * RADIUS + 1)]),
    "aft-conv": (one_key, lambda: [draw(HEADS, 6), positive(HEADS), draw(HEADS)]),
}


def inputs(name):
    function, parameters = CASES[name]
    return function, [draw(BATCH, HEADS, LENGTH, WIDTH, seed=seed) for seed in (1, 2, 3)], parameters()


def differs(name, got, wanted):
    error = (got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)
    return [] if error <= TOLERANCE else [f"{name}: {error:.2e}"]


def kinds(name):
    yield "causal", {"is_causal": True}
    yield "causal, padded", {"is_causal": True, "padded": True}
    yield "causal, packed", {"is_causal": True, "cu_seqlens": PACKED}
    if "decay" not in name:
        yield "both ways", {}
        yield "both ways, padded", {"padded": True}
        yield "both ways, packed", {"cu_seqlens": PACKED}


def padding():
    # To the end of one entry; in the other where stretches begin and end.
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    mask[0, 38:] = True
    for a, b in ((0, 2), (20, 23), (42, 50), (80, 90)):
        mask[1, a:b] = True
    return mask


def compare(rank, name, cuts, kind, options):
    function, tensors, parameters = inputs(name)
    options = dict(options)
    if "cu_seqlens" in options:
        tensors = [t[:1] for t in tensors]
    mask = padding() if options.pop("padded", False) else None
    positions = draw(tensors[0].shape[0], LENGTH, 2, seed=8)
    weights = draw(tensors[0].shape[0], HEADS, LENGTH, WIDTH, seed=9)
    whole = [t.clone().requires_grad_() for t in (*tensors, *parameters)]
    at_positions.here = positions
    expected = function(ops, *whole, key_padding_mask=mask, **options)
    (expected * weights).sum().backward()

    here = slice(cuts[rank], cuts[rank + 1])
    own = [t[:, :, here].clone().requires_grad_() for t in tensors] + [p.clone().requires_grad_() for p in parameters]
    at_positions.here = positions[:, here]
    got = function(
        distributed, *own, key_padding_mask=None if mask is None else mask[:, here], group=dist.group.WORLD, **options
    )
    (got * weights[:, :, here]).sum().backward()
    for each in own[3:]:
        dist.all_reduce(each.grad)
    wrong = []
    for part, a, b in [("out", got, expected[:, :, here])] + [
        (label, x.grad, y.grad[:, :, here]) for label, x, y in zip("qkv", own, whole)
    ]:
        if a.numel():
            # Relative to the whole tensor's largest number, of which a short stretch may have little.
            scale = {"out": expected, "q": whole[0].grad, "k": whole[1].grad, "v": whole[2].grad}[part].abs().max().clamp(min=1e-30)
            error = (a - b).abs().max() / scale
            wrong += [f"{part}: {error:.2e}"] if not error <= TOLERANCE else []
    for index, (x, y) in enumerate(zip(own[3:], whole[3:])):
        assert y.grad.abs().max() > 0
        wrong += differs(f"parameter {index}", x.grad, y.grad)
    return [f"{name}, {kind}, {cuts}, rank {rank}: {w}" for w in wrong]


def every_mechanism(rank, world, names):
    wrong = []
    for name in names:
        for kind, options in kinds(name):
            for cuts in CUTS[world]:
                wrong += compare(rank, name, cuts, kind, options)
    assert not wrong, "\n".join(wrong)


def run(rank, port, world, work, *arguments):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        work(rank, world, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    # Without the interpreter's end: gloo's threads may outlive it, and C++ then aborts the process.
    os._exit(0)


def on(world, work, *arguments):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Where there are forks, those of one process that has imported all: an import takes longer than most of the work.
    method = "forkserver" if "forkserver" in torch.multiprocessing.get_all_start_methods() else "spawn"
    torch.multiprocessing.set_forkserver_preload(["longspan.torch.distributed", "longspan.transformers", "torch.distributed.fsdp", "torch._dynamo", "pytest"])
    torch.multiprocessing.start_processes(run, (port, world, work, *arguments), world, start_method=method)


@pytest.mark.parametrize("world", CUTS)
def test_every_mechanism_has_the_outputs_and_gradients_of_one_process(world):
    on(world, every_mechanism, list(CASES))


#: Numbers of a stretch of one head; see docs/distributed.md.
def numbers(name, both_ways):
    state = lambda sums: (sums + 4 + 15) // 16 * 16  # noqa: E731
    d, r = WIDTH, RADIUS
    if name == "kernelized":
        return state(d * d + d)
    if name == "shaw":
        return 2 * state(d * (d + 1) + d + (r + 1) * (d + 2)) if both_ways else state(d * d + d + (r + 1) * (d + 1))
    if name == "fourier":
        return state(3 * d * d + 3 * d)
    if name == "short-convolution":
        return 3 * d + 1
    if name == "aft-simple":
        return (2 if both_ways else 1) * (2 * d + 1)
    if name == "aft-local":
        return (2 if both_ways else 1) * (r + 1) * (2 * d + 1)
    # Six taps: five keys before a query, or two before and three after it.
    return (3 + 4 if both_ways else 6) * (d + 2)


def bytes_are_those_of_the_page(rank, world):
    sent, gather = [], dist.all_gather_into_tensor

    def counted(out, tensor, **more):
        assert out.nbytes == world * tensor.nbytes
        sent.append(tensor.nbytes)
        return gather(out, tensor, **more)

    dist.all_gather_into_tensor = counted
    for name in ("kernelized", "shaw", "fourier", "short-convolution", "aft-simple", "aft-local", "aft-conv"):
        for both_ways in (False, True):
            for length in (20, LENGTH):
                function, tensors, parameters = inputs(name)
                here = distributed.stretch(length, dist.group.WORLD)
                own = [t[:, :, here].clone().requires_grad_() for t in tensors]
                sent.clear()
                out = function(distributed, *own, *parameters, is_causal=not both_ways, group=dist.group.WORLD)
                out.sum().backward()
                exchanged = BATCH * HEADS * 4 * numbers(name, both_ways)
                assert sent == [88, exchanged, exchanged], (name, both_ways, length, sent, exchanged)
    dist.all_gather_into_tensor = gather


def test_bytes_are_those_of_the_page():
    on(2, bytes_are_those_of_the_page)


def half_precision(rank, world):
    function, tensors, (rel,) = inputs("shaw")
    here = distributed.stretch(LENGTH, dist.group.WORLD)
    own = [t[:, :, here] for t in tensors]
    for options in ({"is_causal": True}, {}):
        expected = ops.shaw_attention(*(t.bfloat16() for t in tensors), rel.bfloat16(), **options)[:, :, here]
        got = distributed.shaw_attention(*(t.bfloat16() for t in own), rel.bfloat16(), group=dist.group.WORLD, **options)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, expected)
        with torch.autocast("cpu", torch.bfloat16):
            expected = ops.shaw_attention(*(t.bfloat16() for t in tensors), rel, **options)[:, :, here]
            got = distributed.shaw_attention(*(t.bfloat16() for t in own), rel, group=dist.group.WORLD, **options)
        assert got.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_half_precision_and_autocast():
    on(2, half_precision)


def tokens(count=5, batch=1, **options):
    return [torch.ones(batch, HEADS, count, WIDTH, **options) for _ in range(3)]


def raises(kind, message, call):
    with pytest.raises(kind, match=re.escape(message)):
        call()


def faults(rank, world):
    group = dist.group.WORLD
    attend = lambda *t, **o: distributed.kernelized_attention(*t, group=group, **o)  # noqa: E731
    q, k, v = tokens()

    # One rank's mistake is its own error there, and ends the others, too.
    if rank == 1:
        raises(ValueError, "v: expected shape (1, 2, 5, 8), got shape (1, 2, 4, 8)", lambda: attend(q, k, v[:, :, 1:]))
    else:
        raises(RuntimeError, "kernelized_attention: expected a call on every rank, got an error on rank 1", lambda: attend(q, k, v))
    for what, call in {
        "mechanism": lambda: attend(q, k, v) if rank else distributed.aft_simple(q, k, v, group=group),
        "options": lambda: attend(q, k, v, feature_map="elu+1" if rank else "relu"),
        "is_causal": lambda: attend(q, k, v, is_causal=bool(rank)),
        "dtype": lambda: attend(*tokens(dtype=torch.float64 if rank else torch.float32)),
        "shapes of q, k and v": lambda: attend(*tokens(batch=1 + rank)),
        "gradients": lambda: attend(q, k, v.requires_grad_(bool(rank))),
        "cu_seqlens": lambda: attend(q, k, v.detach(), cu_seqlens=[0, 3 + rank, 10]),
        "parameters": lambda: distributed.shaw_attention(q, k, v.detach(), torch.ones(HEADS, 3 + 2 * rank, WIDTH), group=group),
    }.items():
        raises(ValueError, f": {what}: expected the same on every rank, got another on rank 1 than on rank 0", call)

    v = v.detach()
    for message, call in {
        "cu_seqlens: expected the last to be 10, the tokens of all ranks, got 9": lambda: attend(q, k, v, cu_seqlens=[0, 9]),
        "cu_seqlens: expected ascending from 0": lambda: attend(q, k, v, cu_seqlens=[3, 1, 10]),
        "cu_seqlens: expected one list": lambda: attend(q, k, v, cu_seqlens=([0, 10], [0, 3, 10])),
        "cu_seqlens: expected batch 1": lambda: attend(*tokens(batch=2), cu_seqlens=[0, 10]),
        "offset: expected 0": lambda: attend(q, k, v, is_causal=True, offset=1),
        "decay: expected None without is_causal=True": lambda: attend(q, k, v, decay=0.5),
        "output_final_state: expected False": lambda: attend(q, k, v, is_causal=True, output_final_state=True),
        "key_padding_mask: expected shape (1, 5)": lambda: attend(q, k, v, key_padding_mask=torch.ones(1, 4).bool()),
        "q: expected as many tokens as k": lambda: attend(q[:, :, 1:], k, v, is_causal=True),
        "k: expected shape": lambda: attend(q[..., 1:], k, v),
        "rel: expected": lambda: distributed.shaw_attention(q, k, v, torch.ones(HEADS, 4, WIDTH), group=group),
        "length of the table of biases": lambda: distributed.aft_local(q, k, v, torch.ones(9, 3), group=group),
        "image: expected None": lambda: distributed.aft_conv(q, k[..., 0], v, torch.ones(HEADS, 3, 3), image=(1, 5), group=group),
        "got toeplitz: every distance has a weight": lambda: ops.toeplitz_attention(
            q, k, v, torch.ones(HEADS, 3), kind="clipped", initial_state=distributed.Over(group)),
    }.items():  # fmt: skip
        raises(ValueError, message, call)
    raises(TypeError, "q", lambda: attend(*tokens(dtype=torch.int64)))
    raises(TypeError, "mesh: expected a DeviceMesh or a ProcessGroup, got int",
           lambda: distributed.kernelized_attention(q, k, v, group=3))
    state = ops.kernelized_attention(q, k, v, is_causal=True, output_final_state=True)[1]
    raises(ValueError, "initial_state: expected None", lambda: attend(q, k, v, is_causal=True, initial_state=state))

    x = q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(attend(x, x, x, is_causal=True).square().sum(), x, create_graph=rank < 0)
    assert gradient.abs().sum() > 0
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(attend(x, x, x, is_causal=True).square().sum(), x, create_graph=True)[0].sum().backward()

    # Queries of another sequence, which is cut elsewhere.
    memory = draw(1, HEADS, 7, WIDTH)
    own = memory[:, :, distributed.stretch(7, group)]
    queries = draw(1, HEADS, 2 + rank, WIDTH)
    torch.testing.assert_close(attend(queries, own, own), ops.kernelized_attention(queries, memory, memory))


def test_faults_are_errors_on_every_rank():
    on(2, faults)


def one_ends(rank, world):
    if rank == 1:
        os._exit(0)
    try:
        distributed.kernelized_attention(*tokens(), group=dist.group.WORLD)
    except RuntimeError as error:
        assert "kernelized_attention: rank 0: expected an answer from all 2 ranks, got none" in str(error), error
        os._exit(0)
    raise AssertionError("expected an error")


def test_a_rank_that_ends_is_an_error_of_the_others():
    on(2, one_ends)
