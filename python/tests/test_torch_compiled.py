"""States, steps and packed sequences in a compiled function without a graph break, and in an exported one."""

from contextlib import nullcontext

import pytest
import torch
from agreement import elsewhere, leaves, padding, same_gradients
from longspan import ops
from longspan.torch import (
    MultiheadAttention,
    TensorState,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
)
from longspan.torch.attention import WITHOUT_ORDER
from longspan.torch.mechanisms import MODULES
from test_torch_mechanisms import CASES as MECHANISMS
from test_torch_states import CASES, LENGTH, inputs


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


@pytest.mark.parametrize("path", [nullcontext, elsewhere])
@pytest.mark.parametrize("name", CASES)
def test_a_stretch_after_a_state(name, path):
    function, parameters = CASES[name]
    tensors = leaves(*inputs(), *parameters)

    def two(q, k, v, *parameters):
        first, rest = [x[:, :, :5] for x in (q, k, v)], [x[:, :, 5:] for x in (q, k, v)]
        a, state = function(*first, *parameters, is_causal=True, output_final_state=True)
        b, state = function(*rest, *parameters, is_causal=True, initial_state=state, output_final_state=True)
        return torch.cat([a, b], 2), state.numbers

    with path():
        out, numbers = torch.compile(two, fullgraph=True, backend="aot_eager")(*tensors)
        expected, expected_numbers = two(*tensors)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(numbers, expected_numbers)
    same_gradients(out, expected, tensors, weights=torch.randn_like(out), allow_unused=True)


@pytest.mark.parametrize("name, dynamic", [*((name, None) for name in CASES), ("shaw", True), ("short-convolution", True)])
def test_stretches_of_any_length(name, dynamic):
    function, parameters = CASES[name]
    attend = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    state, expected = None, None
    for length in (5, 3, 4):
        tensors = [x[:, :, :length] for x in inputs()]
        options = {"is_causal": True, "output_final_state": True}
        out, state = attend(*tensors, *parameters, initial_state=state, **options)
        wanted, expected = function(*tensors, *parameters, initial_state=expected, **options)
        torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", [*MECHANISMS, "gated"])
def test_without_a_break(name, is_causal):
    """By torch's own operations, as on another device, and by the kernels."""
    if name == "gated":
        function, parameters, is_causal = ops.gated_attention, [torch.rand(2, 2, LENGTH, dtype=torch.float64).log()], True
    else:
        function, parameters = MECHANISMS[name]
        # A decay has an order.
        is_causal = is_causal or "decay" in name
    tensors = [*inputs(), *parameters]

    def formulated(*tensors):
        return function(*tensors, is_causal=is_causal)

    expected = formulated(*tensors)
    for path in (elsewhere, nullcontext)[: 1 + is_causal]:
        torch.compiler.reset()
        with path():
            out = torch.compile(formulated, fullgraph=True, backend="aot_eager")(*tensors)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("feature_map", ["exp", "prf:8", "nprf:8", "dpfp:2", "taylor2", "hedgehog"])
def test_feature_maps_in_torchs_own_operations(feature_map):
    q, k, v = inputs()
    maps = [torch.randn(x.shape[1], x.shape[3], x.shape[3], dtype=q.dtype) for x in (q, k)] if feature_map == "hedgehog" else None
    options = dict(feature_map=feature_map, maps=maps, is_causal=True)
    with elsewhere():
        out = torch.compile(ops.kernelized_attention, fullgraph=True, backend="aot_eager")(q, k, v, **options)
    torch.testing.assert_close(out, ops.kernelized_attention(q, k, v, **options))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("make", [
    lambda: MultiheadAttention(12, 3, attention="fourier"),
    lambda: TransformerEncoderLayer(12, 3, 24, attention="shaw", radius=2, num_kv_heads=1),
])  # fmt: skip
def test_steps(make, dynamic):
    layer = make().eval()
    step = torch.compile(layer.step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with torch.no_grad():
        state = wanted_state = None
        for token in torch.randn(4, 2, 12):
            out, state = step(token, state)
            wanted, wanted_state = layer.step(token, wanted_state)
            torch.testing.assert_close(out, wanted)
        # From one to the other.
        token = torch.randn(2, 12)
        torch.testing.assert_close(step(token, TensorState.of(wanted_state))[0], layer.step(token, state)[0])


@pytest.mark.parametrize("compiled", [False, True])
# States that decay are of one sequence: nothing else is looked up in them.
@pytest.mark.parametrize("cross", [name for name in MODULES if name not in ("gated", "delta", "gated-delta")])
@torch.no_grad()
def test_a_decoder_steps_through_its_memory(cross, compiled):
    layer = TransformerDecoderLayer(12, 3, 24, batch_first=True, attention="shaw", radius=2, cross_attention=cross).eval()
    for parameter in layer.multihead_attn.attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tokens, memory, ignored = torch.randn(2, 6, 12), torch.randn(2, 5, 12), padding(2, 5, 1, slice(3, None))
    whole = layer(tokens, memory, tgt_is_causal=True, memory_key_padding_mask=ignored)
    step = torch.compile(layer.step, fullgraph=True, backend="aot_eager", dynamic=True) if compiled else layer.step
    state, outs = None, []
    for position in range(6):
        out, state = step(tokens[:, position], memory, state, ignored, position=position)
        outs.append(out)
    torch.testing.assert_close(torch.stack(outs, 1), whole, rtol=1e-4, atol=1e-5)
    if cross in WITHOUT_ORDER:
        torch.testing.assert_close(layer.step(tokens[:, 0], memory, None, ignored)[0], whole[:, 0], rtol=1e-4, atol=1e-5)
    else:
        with pytest.raises(ValueError, match="TransformerDecoderLayer.step: position: expected how many tokens were before"):
            layer.step(tokens[:, 0], memory)


def test_a_plain_state_is_refused_by_name():
    layer = MultiheadAttention(12, 3).eval()
    token = torch.randn(2, 12)
    with torch.no_grad():
        _, state = layer.step(token)
        with pytest.raises(Exception, match="expected a longspan.torch.TensorState in a compiled function"):
            torch.compile(layer.step, fullgraph=True, backend="aot_eager")(token, state)


def packed(q, k, v, cu_seqlens):
    return ops.kernelized_attention(q, k, v, is_causal=True, cu_seqlens=cu_seqlens)


def test_packed_sequences_by_a_tensor():
    q, k, v = (torch.randn(1, 2, 12, 4, requires_grad=True) for _ in range(3))
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    for bounds in ([0, 5, 12], [0, 1, 12], [0, 3, 7, 12]):
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        got, wanted = compiled(q, k, v, cu_seqlens), packed(q, k, v, bounds)
        torch.testing.assert_close(got, wanted)
        same_gradients(got.sin(), wanted.sin(), (q, k, v))
    with pytest.raises(ValueError, match="cu_seqlens"):
        compiled(q, k, v, torch.tensor([0, 3, 7, 13], dtype=torch.int32))


def test_an_exported_program_takes_any_length_and_boundaries():
    class Packed(torch.nn.Module):
        def forward(self, q, k, v, cu_seqlens):
            return packed(q, k, v, cu_seqlens)

    q, k, v = (torch.randn(1, 2, 12, 4) for _ in range(3))
    length = {2: torch.export.Dim("length", min=2, max=64)}
    program = torch.export.export(Packed(), (q, k, v, torch.tensor([0, 5, 12])), dynamic_shapes=(length, length, length, {}))
    for bounds in ([0, 5, 12], [0, 9, 12], [0, 3, 23]):
        q, k, v = (torch.randn(1, 2, bounds[-1], 4) for _ in range(3))
        torch.testing.assert_close(program.module()(q, k, v, torch.tensor(bounds)), packed(q, k, v, bounds))


def test_a_first_step_of_no_sequences():
    layer = TransformerEncoderLayer(12, 3, 24, attention="shaw", radius=2).eval()
    with torch.no_grad():
        out, state = layer.step(torch.empty(0, 12))
        out, state = layer.step(torch.empty(0, 12), state)
    assert out.shape == (0, 12) and state.batch == 0
