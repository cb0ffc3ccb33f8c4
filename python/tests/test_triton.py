"""Triton's kernels: on a CUDA device if there is one, else under Triton's interpreter, in a process of its own:
``TRITON_INTERPRET=1 pytest tests/test_triton.py``. tests/test_triton_compiles.py compiles them without a device."""

import itertools
import json
import os
from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no CUDA device; TRITON_INTERPRET=1 runs these tests without one", allow_module_level=True)

from longspan import ops  # noqa: E402
from longspan._calls import Request  # noqa: E402
from longspan.torch import GatedDeltaAttention, TensorState, _dispatch, _operators, _triton, chunked_attention  # noqa: E402
from longspan.torch._check import CASES, TOLERANCES, Case, error, examine, exactly  # noqa: E402
from longspan.torch._triton import kernelized  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"


if INTERPRETED:
    import interpreted


@pytest.fixture(autouse=True)
def on_device(monkeypatch):
    """Under the interpreter tensors on the CPU are taken for those of a device."""
    if INTERPRETED:
        monkeypatch.setattr(_triton, "serves", lambda tensor: tensor.dtype is not torch.float64)


def has_kernels(case, dtype):
    """Whether it is one of those that are not torch's to serve."""
    if dtype is torch.bfloat16 and (case.width % 16 or case.value_width % 16) and not ("convolution" in case.mechanism or "aft" in case.mechanism):
        return False
    if case.mechanism in ("gated", "delta", "aft-simple", "aft-local", "aft-conv") or "convolution" in case.mechanism:
        return True
    if case.mechanism == "shaw" and case.decays:
        return False
    known = case.mechanism in ("kernelized", "shaw") or (case.mechanism == "fourier" and case.name != "in the plane")
    return known and case.options.get("feature_map", "elu+1") in _triton.MAPS


#: Large keys that have decayed before the later rows: those of the CPU's kernels in single precision are 0.
FALLING = [
    Case("exponents that fall by 150, decay", inputs="falls", queries=140, keys=140, options={"feature_map": "exp", "decay": (0.1,)}),
    Case("exponents that fall by 150, a gate a head", inputs="falls", queries=140, keys=140, decays=True, segments=3, options={"feature_map": "exp"}),
]


def cut(monkeypatch, segments):
    monkeypatch.setattr(kernelized.Launch, "segments", lambda launch, chunk, units: segments)


@pytest.mark.skipif(not INTERPRETED, reason="of the interpreter")
def test_shortcuts_change_no_bit():
    """Each beside the interpreter's own way, for numbers and blocks of every type and pairs of shapes, and for constants."""
    operands = list(interpreted.operands())
    for x, y in itertools.product(operands, repeat=2):
        assert all(interpreted.same(name, x, y, *more) for name, (_, _, more) in interpreted.OPERATIONS.items())
        assert all(interpreted.same("where", z, x, y) for z in operands if getattr(z, "dtype", None) is interpreted.core.int1)
    assert interpreted.TAKEN[True] > 2000 and interpreted.TAKEN[False] > 2000


@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [x for x in TOLERANCES if x is not torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES + FALLING, ids=str)
def test_agrees_with_the_kernels_in_doubles(case, dtype, monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_triton, "serves", lambda tensor: False)
        exact = exactly(case, dtype)
    cut(monkeypatch, case.segments)
    # The interpreter runs one program after the other, the same each time.
    row = examine(case, DEVICE, dtype, exact, 1 if INTERPRETED else 2)
    assert row.right, str(row)
    by = "Triton" if has_kernels(case, dtype) else "torch's operations, as Triton lacks "
    assert row.by.startswith(by), row.by


STATES = [
    Case(f"{name}, decay {d}, {n} tokens{', padded' * bool(p)}{', undivided' * (not w)}", batch=2, queries=n, keys=n, padding=p, segments=s,
         options={"feature_map": name, "decay": d, "normalize": w})
    for w in (True, False) for name in ("elu+1", "exp") for d in (None, (0.9,))
    for n, p, s in ((1, "", 1), (40, "", 1), (40, "ends", 1), (140, "", 3))
]  # fmt: skip


def native(function, *tensors, **options):
    """The same by the CPU's kernels in doubles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_triton, "serves", lambda tensor: False)
        return function(*tensors, **options)


@pytest.mark.parametrize("case", STATES, ids=str)
def test_states_move_between_devices(case, monkeypatch):
    cut(monkeypatch, case.segments)
    q, k, v, d_out = case.tensors()
    before = [torch.randn(2, heads, 7, 16) for heads in (2, 1, 1)]
    run = partial(ops.kernelized_attention, **case.options, is_causal=True, output_final_state=True)
    # One of the CPU's goes on on the device.
    state = native(run, *before)[1]
    of_cpu = TensorState.of(state)
    exact = [x.double().requires_grad_() for x in (q, k, v, of_cpu.numbers)]
    inputs = [x.to(DEVICE).requires_grad_() for x in (q, k, v, of_cpu.numbers)]
    mask = case.mask()
    expected, last = native(run, *exact[:3], key_padding_mask=mask, initial_state=TensorState(of_cpu.mechanism, of_cpu.options, of_cpu.parts, exact[3]))
    got, ours = run(*inputs[:3], key_padding_mask=None if mask is None else mask.to(DEVICE),
                    initial_state=TensorState(of_cpu.mechanism, of_cpu.options, of_cpu.parts, inputs[3]))  # fmt: skip
    assert error(got, expected) < 3e-6
    assert ours.numbers.device.type == DEVICE and (ours.mechanism, ours.options, ours.parts) == (last.mechanism, last.options, last.parts)
    sums = 16 * 16 + 16
    # Numbers count from an exponent, which need not be the same.
    other = (ours.numbers[..., sums : sums + 1].cpu() - last.numbers[..., sums : sums + 1]).exp().double() if case.options["feature_map"] == "exp" else 1.0
    assert error(ours.numbers[..., :sums].cpu() * other, last.numbers[..., :sums]) < 3e-6
    assert torch.equal(ours.numbers[..., sums + 1 :].cpu().double(), last.numbers[..., sums + 1 :].detach())
    weights = torch.randn(2, 1, sums, dtype=torch.float64)
    loss = (got * d_out.to(DEVICE)).sum() + (ours.numbers[..., :sums] * (weights * other).float().detach().to(DEVICE)).sum()
    wanted = (expected * d_out.double()).sum() + (last.numbers[..., :sums] * weights).sum()
    for name, a, b in zip(("q", "k", "v", "state"), torch.autograd.grad(loss, inputs), torch.autograd.grad(wanted, exact)):
        a, b = (a[..., :sums], b[..., :sums]) if name == "state" else (a, b)
        assert error(a, b) < 3e-6, name
    # And back: the CPU's step from the device's state.
    token = [torch.randn(2, heads, 16) for heads in (2, 1, 1)]
    on_cpu = native(ops.kernelized_attention_step, *token, state=ours.detach(), **case.options)[0]
    exactly = native(ops.kernelized_attention_step, *[x.double() for x in token], state=last.detach(), **case.options)[0]
    assert error(on_cpu, exactly) < 3e-6


@pytest.mark.parametrize("case", [case for case in CASES if str(case) in ("aft-simple: padded", "aft-local: padded", "aft-conv: padded")], ids=str)
def test_the_cpu_goes_on_from_states_of_means(case):
    q, k, v, _, *learned = case.tensors()
    token, run = case.tensors(tokens=1)[:3], partial(case.attend, output_final_state=True)
    ours = run(*[x.to(DEVICE) for x in (q, k, v, *learned)])[1].detach()
    theirs = native(run, *[x.double() for x in (q, k, v, *learned)])[1]
    got = native(run, *token, *learned, key_padding_mask=None, initial_state=ours)[0]
    assert error(got, native(run, *[x.double() for x in (*token, *learned)], key_padding_mask=None, initial_state=theirs)[0]) < 3e-6


@pytest.mark.parametrize("feature_map", ["elu+1", "exp"])
def test_steps_are_the_whole(feature_map):
    case = Case("steps", queries=5, keys=5, options={"feature_map": feature_map})
    q, k, v = (x.to(DEVICE) for x in case.tensors()[:3])
    whole = case.attend(q, k, v, output_final_state=True)[0]
    state, tokens = None, []
    for i in range(5):
        out, state = ops.kernelized_attention_step(q[:, :, i], k[:, :, i], v[:, :, i], state, feature_map=feature_map)
        tokens.append(out)
    assert isinstance(state, TensorState)
    assert error(torch.stack(tokens, 2), whole) < 3e-6


@pytest.mark.parametrize("where", ["q", "k", "v", "d_out"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("segments, mechanism", [(1, "kernelized"), (4, "kernelized"), (1, "shaw"), (1, "delta"), (3, "channel"), (1, "kda"), (1, "aft")])
def test_what_is_not_finite_reaches_only_rows_that_see_it(where, number, segments, mechanism, monkeypatch):
    cut(monkeypatch, segments)
    attend = {
        "kernelized": ops.kernelized_attention, "shaw": partial(ops.shaw_attention, rel=torch.randn(1, 11, 16, device=DEVICE)),
        "delta": partial(ops.delta_attention, beta=torch.rand(1, 1, 100, device=DEVICE)),
        "channel": partial(ops.gated_attention, log_decay=-torch.rand(1, 1, 100, 16, device=DEVICE)),
        "aft": partial(ops.aft_local, w=torch.randn(100, 9, device=DEVICE)),
        "kda": partial(ops.delta_attention, beta=torch.rand(1, 1, 100, device=DEVICE), log_decay=-torch.rand(1, 1, 100, 16, device=DEVICE)),
    }[mechanism]  # fmt: skip
    attend = partial(attend, is_causal=True)
    q, k, v, d_out = (x.to(DEVICE) for x in Case("", heads=1, queries=100, keys=100).tensors())
    clean = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = attend(*clean)
    wanted = torch.autograd.grad(expected, clean, d_out)
    dict(q=q, k=k, v=v, d_out=d_out)[where][0, 0, 40, 3] = number
    tensors = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*tensors)
    gradients = torch.autograd.grad(out, tensors, d_out)
    if where in ("k", "v"):
        # Rows from there on see the key.
        torch.testing.assert_close(out[:, :, :40], expected[:, :, :40])
        torch.testing.assert_close(gradients[0][:, :, :40], wanted[0][:, :, :40])
        assert not out[:, :, 40:].isfinite().all(-1).any()
    else:
        others = [i for i in range(100) if i != 40]
        torch.testing.assert_close(gradients[0][:, :, others], wanted[0][:, :, others])
        # Keys after the row have nothing of it.
        for ours, theirs in zip(gradients[1:], wanted[1:]):
            torch.testing.assert_close(ours[:, :, 41:], theirs[:, :, 41:], rtol=1e-4, atol=1e-5)
    if where == "q":
        torch.testing.assert_close(out[:, :, others], expected[:, :, others])


def test_distances_that_no_row_sees_change_no_bit():
    q, k, v = torch.randn(3, 1, 2, 40, 8, device=DEVICE)
    rel = torch.randn(2, 7, 8, device=DEVICE)
    of_later = rel + 150 * (torch.arange(7, device=DEVICE) > 3)[:, None]
    results = [ops.shaw_attention(q, k, v, x, feature_map="exp", is_causal=True) for x in (rel, of_later)]
    assert torch.equal(*results) and results[0].abs().sum() > 0


def test_what_ignored_keys_hold_changes_no_bit():
    case = Case("", batch=2, padding="some")
    q, k, v, d_out = (x.to(DEVICE) for x in case.tensors())
    results = []
    for filling in (0.0, float("nan")):
        ignored = case.mask().to(DEVICE)[:, None, :, None]
        tensors = [x.requires_grad_() for x in (q.clone(), k.masked_fill(ignored, filling), v.masked_fill(ignored, filling))]
        out = case.attend(*tensors)
        results.append([out, *torch.autograd.grad(out, tensors, d_out)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("mechanism, options, reason", [
    ("toeplitz", {}, "the mechanism toeplitz"), ("shaw", {"gate": True}, "gates beside Shaw's positions"), ("kernelized", {"feature_map": "dpfp"}, "the feature map dpfp"),
    ("fourier", {"axes": 1}, "positions that are given"), ("aft-conv", {"image": [2, 2]}, "the mechanism aft-conv over images"), ("fourier", {"normalizer": "literal"}, "the literal normaliser"),
])  # fmt: skip
def test_what_the_kernels_do_not_do_has_a_name(mechanism, options, reason):
    call = Request(mechanism, json.dumps(options), "call", True, 0)
    x = torch.zeros(1, 1, 4, 8, device=DEVICE)
    assert _triton.unsupported(call, (x, x, x, x[..., 0])) == reason
    plain = call._replace(mechanism="kernelized", options="{}")
    assert _triton.unsupported(plain, (x.double(),) * 3) == "float64"
    assert _triton.unsupported(plain, (x,) * 3) is None
    assert _triton.unsupported(plain, (x.bfloat16(),) * 3) == "bfloat16 in heads whose width is no multiple of 16"
    wide = torch.zeros(1, 1, 4, 48, device=DEVICE, dtype=torch.bfloat16)
    assert _triton.unsupported(plain, (wide,) * 3) is None and _triton.unsupported(plain, (wide, wide, x.bfloat16())) is not None


def test_what_sums_of_gates_lack_by_rounding_is_given_back():
    x = torch.randn(3, 400, dtype=torch.float64)
    whole = torch.randn(3, dtype=torch.float64)
    x[:, -1] += whole - x.sum(-1)
    exact = x.flip(-1).cumsum(-1).flip(-1)
    rounded = x.bfloat16().double()
    got = kernelized._following(rounded, whole)
    assert torch.allclose(got[:, 0], whole)
    assert error(got, exact) < 0.8 * error(rounded.flip(-1).cumsum(-1).flip(-1), exact)
    assert kernelized._following(x[:, :1], whole * 0).abs().max() == 0 and kernelized._following(x[:, :0], whole).shape == (3, 0)


def test_what_the_kernels_do_not_do_takes_the_formulation():
    q, k, v = torch.randn(3, 1, 2, 40, 8, device=DEVICE)
    got = ops.toeplitz_attention(q.requires_grad_(), k, v, bias := torch.randn(2, 79, device=DEVICE), is_causal=True)
    expected = chunked_attention(q, k, v, [bias], mechanism="toeplitz", options='{"kind": "table"}', is_causal=True)
    assert torch.equal(got, expected)


def test_wrong_calls_are_refused():
    q, k, v = torch.randn(3, 2, 2, 8, 8, device=DEVICE, requires_grad=True)
    refused = partial(pytest.raises, ValueError)
    with refused(match="k: expected shape"):
        ops.kernelized_attention(q, k[..., :4], v)
    with refused(match="aft_simple: v: expected shape"):
        ops.aft_simple(q, k, v[..., :1])
    with refused(match="expected 1 for packed sequences"):
        ops.kernelized_attention(q, k, v, cu_seqlens=[0, 8])
    with refused(match="expected None beside a key_padding_mask"):
        ops.kernelized_attention(q[:1], k[:1], v[:1], cu_seqlens=[0, 8], key_padding_mask=torch.zeros(1, 8, dtype=torch.bool, device=DEVICE))
    with refused(match="states: expected a causal mask"):
        ops.kernelized_attention(q, k, v, output_final_state=True)
    with refused(match="gated_attention: is_causal: expected a causal mask"):
        ops.gated_attention(q, k, v, k[..., 0], is_causal=False)
    with refused(match="gated_attention: parameters: expected shape"):
        ops.gated_attention(q, k, v, k[:, :1, :, 0])
    _, state = ops.kernelized_attention(q, k, v, is_causal=True, output_final_state=True)
    with refused(match="another feature map, decay or table"):
        ops.kernelized_attention(q, k, v, feature_map="relu", is_causal=True, initial_state=state)


def test_autocast_leaves_the_digits_of_frequencies(monkeypatch):
    """On a device; here one without numbers."""
    monkeypatch.setattr(_dispatch, "_autocast", lambda device: True)
    monkeypatch.setattr(_triton, "serves", lambda tensor: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    q, k, v, a, b = torch.empty(5, 1, 2, 3, 4, device="meta").unbind()
    types = [x.dtype for x in _dispatch._as_autocast_wants((q, k, v, a, b))]
    assert types == [torch.bfloat16] * 3 + [torch.float32] * 2


def test_frequencies_and_gates_may_be_finer_than_what_they_are_for():
    case = next(case for case in CASES if str(case) == "fourier: plain, a gate a head")
    q, k, v, d_out, *learned = (x.to(DEVICE) for x in case.tensors())
    exact = native(case.attend, *[x.bfloat16().double() for x in (q, k, v)], *[x.double() for x in learned])
    inputs = [x.bfloat16().requires_grad_() for x in (q, k, v)] + [x.requires_grad_() for x in learned]
    # As a call under autocast goes on.
    call = Request("fourier", json.dumps({"gate": True}), "call", True, 0)
    out = _operators.Eager.apply(None, None, call, None, None, *inputs)
    assert error(out, exact) < TOLERANCES[torch.bfloat16]
    gradients = torch.autograd.grad(out, inputs, d_out.bfloat16())
    assert [x.dtype for x in gradients] == [x.dtype for x in inputs]


def test_second_derivatives_take_the_formulation():
    q, k, v = torch.randn(3, 1, 1, 6, 4, device=DEVICE, requires_grad=True)
    (dq,) = torch.autograd.grad(ops.kernelized_attention(q, k, v, is_causal=True).square().sum(), q, create_graph=True)
    (again,) = torch.autograd.grad(dq.sum(), v)
    out = chunked_attention(q, k, v, is_causal=True).square().sum()
    (expected,) = torch.autograd.grad(torch.autograd.grad(out, q, create_graph=True)[0].sum(), v)
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["fourier: plain", "shaw: positions alone", "delta: a gate a head", "aft-local: one token"])
def test_compiled_gradients(name):
    """Inside of an operator, where autograd records nothing."""
    case = next(case for case in CASES if str(case) == name)
    q, k, v, d_out, *learned = (x.to(DEVICE) for x in case.tensors())
    inputs = [x.requires_grad_() for x in (q, k, v, *learned)]
    attend = torch.compile(case.attend, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad((attend(*inputs) * d_out).sum(), inputs)
    for ours, expected in zip(found, torch.autograd.grad((case.attend(*inputs) * d_out).sum(), inputs)):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("feature_map", ["elu+1", "exp"])
@pytest.mark.skipif(INTERPRETED, reason="a CUDA graph is a device's")
def test_a_step_in_a_cuda_graph(feature_map):
    q, k, v = (x.to(DEVICE) for x in Case("", batch=2, heads=4, kv_heads=2, queries=9, keys=9).tensors()[:3])
    options = {"feature_map": feature_map, "decay": [0.9, 0.8]}
    with torch.no_grad():
        whole = ops.kernelized_attention(q, k, v, is_causal=True, **options)
        _, state = ops.kernelized_attention(q[:, :, :7], k[:, :, :7], v[:, :, :7], is_causal=True, output_final_state=True, **options)
        token = [x[:, :, 7].clone() for x in (q, k, v)]
        ops.kernelized_attention_step(*token, state, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, after = ops.kernelized_attention_step(*token, state, **options)
            # The graph's own memory, so that a replay goes on where the last one ended.
            state.numbers.copy_(after.numbers)
        for i in (7, 8):
            for held, x in zip(token, (q, k, v)):
                held.copy_(x[:, :, i])
            graph.replay()
            assert error(out, whole[:, :, i]) < 3e-6


def test_modules_move_to_a_device():
    from longspan.torch import TransformerEncoderLayer

    torch.manual_seed(0)
    layer = TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, num_kv_heads=2, decay=0.95)
    x = torch.randn(2, 70, 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_triton, "serves", lambda tensor: False)
        expected = layer(x, is_causal=True)
        wanted = torch.autograd.grad(expected.square().sum(), list(layer.parameters()))
    layer, x = layer.to(DEVICE), x.to(DEVICE)
    got = layer(x, is_causal=True)
    # torch's own products take TF32 for float32 on some devices.
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(torch.autograd.grad(got.square().sum(), list(layer.parameters())), wanted):
        assert error(ours, theirs) < 1e-3
    layer.eval()
    with torch.no_grad():
        _, state = layer(x[:, :69], is_causal=True, output_final_state=True)
        last, state = layer.step(x[:, 69], state)
    torch.testing.assert_close(last, got[:, 69], rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_generate_keeps_its_states_there():
    pytest.importorskip("transformers")
    from test_transformers import StateCache, greedy, model

    torch.manual_seed(0)
    llama = model("longspan-decay").to(DEVICE)
    ids = torch.randint(2, 50, (2, 9), device=DEVICE)
    cache = StateCache()
    got = llama.generate(ids, max_new_tokens=8, do_sample=False, past_key_values=cache)
    assert torch.equal(got, greedy(llama, ids, 8))
    assert all(layer.state.numbers.device.type == DEVICE for layer in cache.layers) and cache.nbytes > 0


def test_a_module_behind_a_convolution(monkeypatch):
    """In both directions, through a state and a token after it, with gradients of what it learns."""
    module = GatedDeltaAttention(4, 8, convolution=4, num_kv_heads=2).to(DEVICE)
    q, k, v = (torch.randn(1, heads, 70, width, device=DEVICE) for heads, width in ((4, 8), (2, module.key_dim), (2, 8)))

    def found():
        first, state = module(q[:, :, :69], k[:, :, :69], v[:, :, :69], is_causal=True, output_final_state=True)
        last, _ = module.step(q[:, :, 69], k[:, :, 69], v[:, :, 69], state)
        out = torch.cat([first, last[:, :, None]], 2)
        return [out, module(q, k, v), *torch.autograd.grad(out.cos().sum(), module.parameters())]

    by_triton = found()
    monkeypatch.setattr(_triton, "serves", lambda tensor: False)
    module, q, k, v = module.cpu(), q.cpu(), k.cpu(), v.cpu()
    for got, expected in zip(by_triton, found()):
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-3, atol=1e-3)
