"""Every kernel compiles for devices that are not there: no error, shared memory within the device's, products on tensor cores."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from longspan.torch._triton import aft, band, channels, gated, kernelized, means, shaw, solve, taps
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

if kernelized.INTERPRETED:
    pytest.skip("an interpreted kernel is not compiled", allow_module_level=True)

# A twelfth of the time, and nothing that is looked at here.
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")

#: Shared memory of a block, bytes.
TARGETS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, "gfx942": 64 * 1024}
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
SMALL, SMALLER, OF_FLOAT32 = (torch.bfloat16, 32, 16), (torch.bfloat16, 16, 16), (torch.float32, 64, 48)
#: Options, several in a call where they do not exclude each other, and the widths: the smallest compile soonest, float32 takes twice as long.
CALLS = {
    "plain": ((torch.bfloat16, 128, 128), {}),
    "both directions": (OF_FLOAT32, {"CAUSAL": False}),
    "delta": (OF_FLOAT32, {"MAP": "identity", "KEYS": False, "STRICT": True, "NORMALIZE": False, "DECAY": True, "GATED": True, "INITIAL": True}),
    "packed, undivided": ((torch.bfloat16, 64, 64), {"MAP": "softplus", "PACKED": True, "NORMALIZE": False, "DECAY": True}),
    "exp with gates": (SMALL, {"MAP": "exp", "DECAY": True, "GATED": True, "INITIAL": True, "END": True, "IGNORED": True, "GROUP": 2, "segments": 4}),
    "fourier with exp": (SMALLER, {"TURN": "each", "BLOCKS": 3, "SUMMED": 3, "MAP": "exp", "DECAY": True, "INITIAL": True, "END": True, "GROUP": 2}),
    "rotary in both directions": (SMALLER, {"TURN": "pairs", "BLOCKS": 4, "SUMMED": 2, "CAUSAL": False}),
}  # fmt: skip
#: Held to have no spills.
CHANNELS = {"MAP": "identity", "KEYS": False, "NORMALIZE": False, "DECAY": True, "GATED": True, "CHANNEL": True, "INITIAL": True, "END": True,
            "IGNORED": True, "segments": 4}  # fmt: skip
NUMBERS = {"queries", "keys", "tokens", "offset", "first_chunk", "kv_heads", "segments", "record", "scale", "count",
           "base", "blocks", "start", "width", "radius", "near", "ahead", "place", "chunks", "back", "shift"}  # fmt: skip
KERNELS = [("out", False), ("dq", False), ("dk", False), ("dv", False), ("out", True), ("dv", True)]


@pytest.fixture(params=TARGETS, ids=str)
def device(request):
    return GPUTarget("hip", request.param, 64) if isinstance(request.param, str) else GPUTarget("cuda", request.param, 32)


def source(role, sums, dtype, d, dv, hip=False, **options):
    """A kernel as a launch would specialise it."""
    of_call = {"CAUSAL": True, "MAP": "elu+1", "TURN": "", "BLOCKS": 1, "SUMMED": 1, "KEYS": True, "STRICT": False, "NORMALIZE": True, "DECAY": False,
               "GATED": False, "CHANNEL": False, "INITIAL": False, "END": False, "IGNORED": False, "PACKED": False, "GROUP": 1, **options}  # fmt: skip
    settings = kernelized.Settings(of_call["MAP"], of_call["NORMALIZE"], None, 1.0, of_call["KEYS"], False, *(of_call[x] for x in ("TURN", "BLOCKS", "SUMMED")))
    if settings.turn:
        tiles = kernelized.tiles_turned(role, dtype, settings.wide(d), dv, hip)
    else:
        tiles = kernelized.tiles(role, dtype, d, dv, of_call["MAP"] == "exp", hip, of_call["CHANNEL"])
    kind, precision = kernelized.arithmetic(dtype)
    precision = "ieee" if hip else precision
    segments = of_call.pop("segments", 1)
    if sums or role in ("dq", "dk"):
        of_call["END"] = False
    if sums:
        of_call["INITIAL"] = False
    exponential = of_call["MAP"] == "exp"
    constants = {"ROLE": role, "SUMS": sums, "D": d, "DV": dv, "BD": settings.wide(d), "BV": kernelized.padded(dv),
                 "BX": tiles.columns, "C": tiles.chunk, "TYPE": kind, "PRECISION": precision, **of_call}  # fmt: skip
    own = "*" + NAMES[dtype]
    pointers = {"q": own, "k": own, "v": own, "denominators": "*fp32"}
    conditional = {
        "d_out": (own, role != "out"), "delta": ("*fp32", role != "out"), "out": (own, role == "dq"), "to": (own, not sums),
        "records": ("*fp32", sums or segments > 1 or not of_call["CAUSAL"]), "initial": ("*fp32", of_call["INITIAL"]),
        "initial_exponent": ("*fp32", of_call["INITIAL"] and exponential), "end": ("*fp32", of_call["END"]),
        "end_exponent": ("*fp32", of_call["END"] and exponential), "log_decay": ("*fp32", of_call["DECAY"]),
        "ignored": ("*u8", of_call["IGNORED"]), "lengths": ("*i64", of_call["IGNORED"]), "bounds": ("*i64", of_call["PACKED"]),
        "inner": ("*fp32", of_call["CHANNEL"] and not sums), "row_sums": ("*fp32", of_call["GATED"] and role in ("dq", "dk")), "frequencies": ("*fp64", settings.turn),
        "waves": ("*fp64", settings.turn == "each"), "before_call": ("*fp64", settings.turn and of_call["INITIAL"]),
        "of_waves": ("*fp64", settings.turn and role in ("dq", "dk") and not sums),
    }  # fmt: skip
    pointers |= {name: kind for name, (kind, there) in conditional.items() if there}
    return ast(kernelized.scan, pointers, constants), {"num_warps": tiles.warps, "num_stages": tiles.stages}


def ast(kernel, pointers, constants):
    """A kernel with pointers of these types and these constants; numbers are no constants, and other pointers are none."""
    signature, fixed, aligned = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        stride = re.fullmatch(r"[a-z]+_[bht]", name) is not None
        if name in pointers:
            signature[name] = pointers[name]
        elif stride or name in NUMBERS:
            signature[name] = "fp32" if name == "scale" else "i32"
        else:
            signature[name], fixed[name] = "constexpr", constants.get(name)
        if name in pointers or stride:
            aligned[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, fixed, aligned)


def spilled(cubin, path):
    """Bytes of a thread."""
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return int(re.search(r"STACK:(\d+)", subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout)[1])


def on_tensor_cores(compiled):
    """Whether there is a product that only they compute, which an assembler has no other instruction for; on sm_80 and sm_90."""
    return compiled.metadata.target.arch not in (80, 90) or re.search(r"\b(mma\.sync|wgmma\.mma_async)\b", compiled.asm["ptx"]) is not None


@pytest.mark.parametrize("call", CALLS)
def test_compiles(device, call):
    if device.arch == 100 and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        pytest.skip("`unsupported` sends such a device with such a Triton to the formulation")
    shape, options = CALLS[call]
    if device.arch == 100:
        # `unsupported` sends grouped heads on such a device elsewhere.
        options = {**options, "GROUP": 1}
    # The delta rule's scan without a row's own token is for gradients.
    for kernel in KERNELS[call == "delta" :]:
        made, settings = source(*kernel, *shape, device.backend == "hip", **options)
        compiled = triton.compile(made, target=device, options=settings)
        held(compiled, str(kernel))
        assert shape[0] is not torch.bfloat16 or on_tensor_cores(compiled), f"{kernel}: no product on tensor cores"


def test_convolutions_compile(device):
    own, wide, sequences = "*bf16", "*fp32", {"ignored": "*u8", "lengths": "*i64"}
    read = {"k": own, "v": own, "taps": own}
    constants = {"SILU": True, "GATED": True, "INITIAL": True, "END": True, "IGNORED": True, "PACKED": False, "GROUP": 2, "TAPS": 4, "D": 64, "R": 64,
                 "BX": 64}  # fmt: skip
    forward = {**read, **sequences, "q": own, "bias": own, "to": own, "initial": wide, "end": wide}
    backward = {**read, **sequences, "q": own, "bias": own, "d_out": own, "dq": own, "d_sums": wide, "d_learned": wide, "initial": wide}
    back = {**read, **sequences, "d_sums": wide, "dk": own, "dv": own, "d_initial": wide, "d_end": wide}
    # Of packed sequences without gates.
    ungated = {**constants, "GATED": False, "INITIAL": False, "END": False, "IGNORED": False, "PACKED": True}
    packed = {**read, "to": own, "bounds": "*i64"}
    for kernel, pointers, chosen in ((taps.convolve, forward, {"BACKWARD": False}), (taps.convolve, backward, {"BACKWARD": True}),
                                     (taps.convolve_back, back, {}), (taps.convolve, packed, {"BACKWARD": False, **ungated})):  # fmt: skip
        named = {name: value for name, value in {**constants, **chosen}.items() if name in kernel.arg_names}
        compiled = triton.compile(ast(kernel, pointers, named), target=device, options={"num_warps": 4})
        assert compiled.metadata.shared <= TARGETS[device.arch]


@pytest.mark.parametrize("dtype, width", [(torch.bfloat16, 128), (torch.float32, 64)], ids=str)
def test_bands_compile(device, dtype, width, tmp_path):
    own, wide = "*" + NAMES[dtype], "*fp32"
    kind, precision = kernelized.arithmetic(dtype)
    read = {"x": own, "w": wide, "ignored": "*u8", "log_decay": wide}
    ends = {"before": wide, "after": wide, "initial": wide}
    content = {"content": wide, "of_content": wide, "levels": wide}
    constants = {
        "CAUSAL": True, "NORMALIZE": True, "EXPONENTIAL": True, "DECAY": True, "IGNORED": True, "PACKED": False, "GROUP": 1 if device.arch == 100 else 2,
        "DV": width, "C": shaw.chunk(dtype), "BX": 64, "TYPE": kind, "PRECISION": "ieee" if device.backend == "hip" else precision,
    }  # fmt: skip
    both = {"CAUSAL": False, "DECAY": False, "IGNORED": False, "PACKED": True, "EXPONENTIAL": False}
    sequences = {"bounds": "*i64"}
    out, back = {**read, **ends, "to": own, "denominators": wide}, {"x": own, "d_out": own, "delta": wide, "dw": wide, **ends}
    for kernel, pointers, chosen in (
        (band.sum_ends, {**read, "ends": wide}, {"OF_KEYS": True, "REVERSE": False}),
        (band.sum_ends, {**read, **sequences, "ends": wide, "delta": wide}, {"OF_KEYS": False, "REVERSE": True, "PACKED": True}),
        (band.band, {**out, **content}, {"OF_KEYS": False}),
        (band.band, {**out, **sequences}, {"OF_KEYS": False, **both}),
        (band.band, out, {"OF_KEYS": True}),
        (band.weigh_back, {**back, "ignored": "*u8", "log_decay": wide}, {}),
        (band.weigh_back, {**back, **sequences}, both),
    ):
        warps = shaw.WARPS_BACK if kernel is band.band and chosen["OF_KEYS"] else shaw.WARPS
        without_spills(kernel, pointers, {**constants, **chosen}, device, tmp_path, warps)


def test_means_compile(device, tmp_path):
    own, wide = "*bf16", "*fp32"
    constants = {"ONE_KEY": False, "PACKED": False, "GROUP": 2, "CAUSAL": True, "D": 80, "R": aft.BLOCK, "C": aft.NEAR, "BX": aft.COLUMNS}
    near = {"x": own, "v": own, "w": wide, "own": own, "to": own, "before": wide}
    one_key, packed = {"ONE_KEY": True}, {"PACKED": True}
    for kernel, pointers, chosen in (
        (means.sum_blocks, {"x": own, "v": own, "sums": wide, "bounds": "*i64"}, {"OF_ROWS": False, **one_key, **packed}),
        (means.sum_blocks, {"x": wide, "v": wide, "sums": wide}, {"OF_ROWS": True}),
        (means.scan_blocks, {"sums": wide, "initial": wide, "ends": wide}, {"REVERSE": False}),
        (means.collect, {**near, "after": wide}, {"ROLE": "out", "CAUSAL": False}),
        (means.collect, {**near, "bounds": "*i64", "d_out": own, "beside": wide}, {"ROLE": "dq", **one_key, **packed}),
        (means.collect, {**near, "x": wide, "after": wide, "beside": own, "final": wide, "lengths": "*i64"}, {"ROLE": "dk"}),
        (means.weigh_back, {"items": wide, "k": own, "v": own, "w": wide, "dw": wide}, {}),
    ):
        without_spills(kernel, pointers, {**constants, **chosen}, device, tmp_path, aft.WARPS)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("by_channel", [False, True], ids=["a gate a head", "a gate a channel"])
def test_the_delta_rule_compiles(device, d, by_channel, tmp_path):
    read = {"k": "*bf16", "beta": "*fp32", "inverses": "*fp32", "log_decay": "*fp32", "ignored": "*u8"}
    chunk, columns, warps = gated.tiles(d, by_channel)
    constants = {
        "GATED": True, "CHANNEL": by_channel, "IGNORED": True, "PACKED": False, "D": d, "DV": d, "BX": columns, "C": chunk,
        "PRECISION": "ieee" if device.backend == "hip" else "tf32x3",
    }  # fmt: skip
    without_spills(solve.invert, read, {**constants, "REVERSE": True, "BD": 64}, device, tmp_path, gated.INVERTING)
    for reverse, initial in ((False, {"initial": "*fp32"}), (True, {})):
        pointers = {**read, "x": "*bf16", "to": "*fp32", **initial}
        without_spills(solve.solve, pointers, {**constants, "REVERSE": reverse, "BD": d}, device, tmp_path, warps, 24 if by_channel else 16)


@pytest.mark.parametrize("dtype, width", [(torch.bfloat16, 128), (torch.float32, 64)], ids=str)
def test_gates_of_channels_compile(device, dtype, width, tmp_path):
    own = "*" + NAMES[dtype]
    precision = "ieee" if device.backend == "hip" else "tf32x3"
    constants = {"STRICT": True, "IGNORED": True, "PACKED": False, "GROUP": 1 if device.arch == 100 else 2, "D": width, "DV": width, "BD": 64, "BV": 64,
                 "C": channels.CHUNK, "PRECISION": precision}  # fmt: skip
    for role in ("out", "dq", "dk"):
        pointers = {"q": own, "k": own, "v": own, "to": "*fp32", "log_decay": "*fp32", "ignored": "*u8", **({} if role == "out" else {"d_out": own})}
        without_spills(channels.within_chunks, pointers, {**constants, "ROLE": role}, device, tmp_path, kernelized.INNER_WARPS)
    if dtype is torch.bfloat16:
        for kernel in KERNELS:
            made, options = source(*kernel, dtype, width, width, device.backend == "hip", **CHANNELS)
            compiled = triton.compile(made, target=device, options=options)
            held(compiled, str(kernel), tmp_path)
            assert on_tensor_cores(compiled), f"{kernel}: no product on tensor cores"


def without_spills(kernel, pointers, constants, device, path, warps, most=16):
    named = {name: value for name, value in constants.items() if name in kernel.arg_names}
    compiled = triton.compile(ast(kernel, pointers, named), target=device, options={"num_warps": warps, "num_stages": 1})
    held(compiled, kernel.__name__, path, most)


def held(compiled, name, path=None, most=16):
    """To the device's shared memory and, with a path for what is looked at, to spill no more bytes: four registers of 255."""
    target = compiled.metadata.target.arch
    assert compiled.metadata.shared <= TARGETS[target], f"{name}: {compiled.metadata.shared} bytes of shared memory"
    if path is not None and "cubin" in compiled.asm:
        of_thread = spilled(compiled.asm["cubin"], path / "kernel")
        assert of_thread <= most, f"{name}: {of_thread} bytes"
