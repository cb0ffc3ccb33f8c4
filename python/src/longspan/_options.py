"""Options of a call: checked, and made into the JSON text that names a compiled mechanism.

Text, because a torch operator can take it and a cache can look it up.
"""

from __future__ import annotations

import sys
from numbers import Integral, Real
from typing import Any

import numpy as np


#: The largest size of a module.
MOST = (1 << 24) - 1


def as_json(value: Any) -> str:
    """JSON of an option. Not by the module json, which torch.compile cannot trace."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None:
        return "null"
    if value is True:
        return "true"
    if value is False:
        return "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join([as_json(entry) for entry in value]) + "]"
    return repr(value)


def as_object(**options: Any) -> str:
    return "{" + ", ".join([f'"{name}": {as_json(value)}' for name, value in options.items()]) + "}"


def expect_type(operation: str, name: str, value: Any, kind: type) -> None:
    if not isinstance(value, (bool, np.bool_) if kind is bool else kind):
        raise TypeError(f"{operation}: {name}: expected {kind.__name__}, got {type(value).__name__}")


def expect_integer(operation: str, name: str, value: Any, least: int, most: int) -> None:
    """Refuses what is no integer, of Python's or NumPy's, from ``least`` to ``most``."""
    expected = f"{operation}: {name}: expected an integer from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{expected}, got {value!r}")
    if not least <= int(value) <= most:
        raise ValueError(f"{expected}, got {value}")


def expect_scale(operation: str, scale: Any) -> None:
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, Real)):
        raise TypeError(f"{operation}: scale: expected a number or None, got {scale!r}")
    if scale is not None and not abs(float(scale)) < float("inf"):
        raise ValueError(f"{operation}: scale: expected a finite number, got {scale}")


def _differentiated(value: Any) -> bool:
    """Whether a gradient with respect to this is wanted."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return False
    dual: bool = torch.autograd.forward_ad.unpack_dual(value).tangent is not None
    return dual or (value.requires_grad and torch.is_grad_enabled())


def decays(operation: str, k: Any, decay: Any) -> list[float] | None:
    if decay is None:
        return None
    if _differentiated(decay) or (isinstance(decay, (list, tuple)) and any(map(_differentiated, decay))):
        raise ValueError(f"{operation}: decay: expected constants, got a tensor that requires a gradient, which there is none "
                         "of; give decay.detach()")  # fmt: skip
    if isinstance(decay, Real) or getattr(decay, "ndim", None) == 0:
        numbers = [float(decay)] * (k.shape[1] if getattr(k, "ndim", 0) > 1 else 1)
    else:
        try:
            numbers = [float(gamma) for gamma in decay]
        except TypeError:
            kind = type(decay).__name__
            raise TypeError(f"{operation}: decay: expected a number or a sequence of numbers, got {kind}") from None
    for gamma in numbers:
        if not 0.0 < gamma <= 1.0:
            raise ValueError(f"{operation}: decay: expected numbers in (0, 1], got {gamma}")
    return numbers


def kernel(
    operation: str, k: Any, feature_map: str, decay: Any, normalize: bool, algorithm: str, log_decay: Any = None, **more: Any
) -> str:
    expect_type(operation, "feature_map", feature_map, str)
    expect_type(operation, "algorithm", algorithm, str)
    expect_type(operation, "normalize", normalize, bool)
    if not more and decay is None and log_decay is None:
        return _plain(feature_map, normalize, algorithm)
    options = falling(operation, k, decay, log_decay)
    return as_object(feature_map=feature_map, normalize=normalize, algorithm=algorithm, **options, **more)


def falling(operation: str, k: Any, decay: Any, log_decay: Any) -> dict[str, Any]:
    """The options that say how weights fall with time."""
    if log_decay is None:
        return {"decay": decays(operation, k, decay)}
    if decay is not None:
        raise ValueError(f"{operation}: log_decay: expected None beside a decay, got both; add the decay's logarithm to it")
    axes = getattr(k, "ndim", 4)
    shape = "(batch, kv_heads, tokens)" if axes == 4 else "(batch, kv_heads)"
    expect_axes(operation, "log_decay", log_decay, axes - 1, shape)
    return {"gate": True}


def gate(operation: str, wanted: bool, decay: Any) -> dict[str, Any]:
    """The option of a layer whose tokens bring decays."""
    expect_type(operation, "gate", wanted, bool)
    if wanted and decay is not None:
        raise ValueError(f"{operation}: gate: expected False beside a decay, got True")
    return {"gate": True} if wanted else {}


def gates(log_decay: Any) -> tuple[Any, ...]:
    """The parameter of decays that each token brings, which comes after all others; that of one token has an axis for it."""
    if log_decay is None:
        return ()
    return (log_decay[:, :, None] if log_decay.ndim == 2 else log_decay,)


def _plain(feature_map: str, normalize: bool, algorithm: str) -> str:
    return f'{{"feature_map": {as_json(feature_map)}, "normalize": {as_json(normalize)}, "algorithm": {as_json(algorithm)}}}'


def shaw(
    operation: str, k: Any, rel: Any, kernelized: bool, feature_map: str, rel_feature_map: str, decay: Any, normalize: bool,
    algorithm: str, log_decay: Any = None, **more: Any,
) -> str:  # fmt: skip
    expect_type(operation, "kernelized", kernelized, bool)
    if rel_feature_map not in ("same", "identity"):
        raise ValueError(f"{operation}: rel_feature_map: expected 'same' or 'identity', got {rel_feature_map!r}")
    shape = getattr(rel, "shape", None)
    if shape is None:
        raise TypeError(f"{operation}: rel: expected an array like q, got {type(rel).__name__}")
    if len(shape) not in (2, 3) or shape[-2] % 2 != 1:
        raise ValueError(
            f"{operation}: rel: expected shape (heads, 2R+1, head_dim) or (2R+1, head_dim), got shape {tuple(shape)}"
        )
    return kernel(
        operation, k, feature_map, decay, normalize, algorithm, log_decay, kernelized=kernelized, rel_feature_map=rel_feature_map,
        **more,
    )  # fmt: skip


def softmax(operation: str, scale: float | None, capacity: int, window: int | None) -> str:
    expect_scale(operation, scale)
    expect_integer(operation, "capacity", capacity, 0, 1 << 32)
    if window is not None:
        expect_integer(operation, "window", window, 1, 1 << 22)
    return as_object(scale=None if scale is None else float(scale), capacity=capacity, window=window)


#: Which parameters a normaliser of Fourier positions leaves free, besides ``b``.
FREE: dict[str, tuple[str, ...]] = {
    "one_plus": (), "dominant": ("c", "beta"), "unrotated": ("c",), "none": ("c", "beta"), "literal": ("c",),
}  # fmt: skip


def fourier(
    operation: str, k: Any, a: Any, b: Any, c: Any, beta: Any, q_positions: Any, k_positions: Any, normalizer: str, wave: str,
    feature_map: str, decay: Any, algorithm: str, log_decay: Any = None, **more: Any,
) -> tuple[str, tuple[Any, ...]]:  # fmt: skip
    if normalizer not in FREE:
        raise ValueError(f"{operation}: normalizer: expected one of {', '.join(FREE)}, got {normalizer!r}")
    if wave not in ("each", "pairs"):
        raise ValueError(f"{operation}: wave: expected 'each' or 'pairs', got {wave!r}")
    if wave == "pairs" and normalizer in ("one_plus", "dominant"):
        raise ValueError(f"{operation}: normalizer: expected unrotated, literal or none with wave='pairs', got {normalizer!r}")
    wanted = () if wave == "pairs" else ("b", *FREE[normalizer])
    parameters = [a]
    for name, value in (("b", b), ("c", c), ("beta", beta)):
        if (value is not None) != (name in wanted):
            expected, got = ("an array", "None") if name in wanted else ("None", "an array")
            raise ValueError(f"{operation}: {name}: expected {expected} with wave={wave!r} and "
                             f"normalizer={normalizer!r}, got {got}")  # fmt: skip
        if value is not None:
            parameters.append(value)
    if (q_positions is None) != (k_positions is None):
        raise ValueError(f"{operation}: k_positions: expected both q_positions and k_positions or neither, got one")
    axes = None
    if q_positions is not None:
        axes = int(a.shape[-1]) if len(getattr(a, "shape", ())) == 3 else 1
        parameters += [q_positions, k_positions]
    expect_type(operation, "feature_map", feature_map, str)
    expect_type(operation, "algorithm", algorithm, str)
    options = as_object(
        wave=wave, normalizer=normalizer, axes=axes, feature_map=feature_map, algorithm=algorithm,
        **falling(operation, k, decay, log_decay), **more,
    )  # fmt: skip
    return options, tuple(parameters)


def expect_axes(operation: str, name: str, value: Any, axes: int, shape: str) -> None:
    given = getattr(value, "shape", None)
    if given is None:
        raise TypeError(f"{operation}: {name}: expected an array like q, got {type(value).__name__}")
    if len(given) != axes:
        raise ValueError(f"{operation}: {name}: expected shape {shape}, got shape {tuple(given)}")


_KINDS = ("table", "clipped", "buckets", "grid")


def toeplitz(
    operation: str, bias: Any, kind: str, max_distance: int, bidirectional: bool, feature_map: str, normalize: bool,
    algorithm: str, centred: bool,
) -> str:  # fmt: skip
    if kind not in _KINDS:
        raise ValueError(f"{operation}: kind: expected one of {', '.join(_KINDS)}, got {kind!r}")
    if kind == "grid":
        expect_axes(operation, "bias", bias, 3, "(heads, 2 * height - 1, 2 * width - 1)")
    else:
        expect_axes(operation, "bias", bias, 2, "(heads, distances)")
    centred = centred and kind == "table"
    if (centred or kind in ("clipped", "grid")) and any(n % 2 != 1 for n in bias.shape[1:]):
        expected = {"table": "(heads, 2n - 1) with a state", "clipped": "(heads, 2R + 1)",
                    "grid": "(heads, 2 * height - 1, 2 * width - 1)"}[kind]  # fmt: skip
        raise ValueError(f"{operation}: bias: expected shape {expected}, got shape {tuple(bias.shape)}")
    expect_integer(operation, "max_distance", max_distance, 1, (1 << 40) - 1)
    expect_type(operation, "bidirectional", bidirectional, bool)
    expect_type(operation, "feature_map", feature_map, str)
    expect_type(operation, "algorithm", algorithm, str)
    expect_type(operation, "normalize", normalize, bool)
    return as_object(
        kind=kind, centred=centred, max_distance=max_distance, bidirectional=bidirectional, feature_map=feature_map,
        normalize=normalize, algorithm=algorithm,
    )  # fmt: skip


def aft_local(operation: str, w: Any, by_position: bool) -> str:
    expect_axes(operation, "w", w, 2, "(queries, 2s - 1)")
    if w.shape[1] % 2 != 1:
        raise ValueError(f"{operation}: w: expected shape (queries, 2s - 1), got shape {tuple(w.shape)}")
    return as_object(by_position=by_position)


def aft_conv(
    operation: str, k: Any, w: Any, gamma: Any, beta: Any, axes: int, image: Any = None
) -> tuple[Any, tuple[Any, ...], str]:
    expect_axes(operation, "k", k, axes, "(batch, heads, keys)" if axes == 3 else "(batch, heads)")
    if image is None:
        expect_axes(operation, "w", w, 2, "(heads, taps)")
    else:
        sides = list(image) if isinstance(image, (tuple, list)) else []
        if len(sides) != 2:
            raise TypeError(f"{operation}: image: expected (height, width), got {image!r}")
        for side in sides:
            expect_integer(operation, "image", side, 1, MOST)
        expect_axes(operation, "w", w, 3, "(heads, rows of taps, taps)")
    if (gamma is None) != (beta is None):
        raise ValueError(f"{operation}: beta: expected both gamma and beta or neither, got one")
    normalized = gamma is not None
    options = as_object(normalized=normalized) if image is None else as_object(normalized=normalized, image=tuple(image))
    return k[..., None], (w, gamma, beta) if normalized else (w,), options


def short_convolution(operation: str, taps: Any, silu: bool) -> str:
    expect_axes(operation, "taps", taps, 3, "(kv_heads, width, head_dim)")
    expect_type(operation, "silu", silu, bool)
    return as_object(silu=silu)


def depthwise_convolution(operation: str, taps: Any, bias: Any, silu: bool) -> tuple[str, tuple[Any, ...]]:
    expect_axes(operation, "taps", taps, 3, "(heads, width, d)")
    if bias is not None:
        expect_axes(operation, "bias", bias, 2, "(heads, d)")
    expect_type(operation, "silu", silu, bool)
    parameters = (taps,) if bias is None else (taps, bias)
    return as_object(silu=silu, gated=False, bias=bias is not None), parameters


def gated(
    operation: str, log_decay: Any, others: tuple[Any, ...], l2_norm: bool, scale: float | None
) -> tuple[str, tuple[Any, ...]]:
    expect_type(operation, "l2_norm", l2_norm, bool)
    expect_scale(operation, scale)
    for beta in others:
        expect_axes(operation, "beta", beta, 3, "(batch, kv_heads, tokens)")
    if log_decay is None:
        return as_object(gate="none", l2_norm=l2_norm, scale=scale), others
    axes = getattr(log_decay, "ndim", None)
    if axes not in (3, 4):
        expect_axes(operation, "log_decay", log_decay, 3, "(batch, kv_heads, tokens), or with a last axis of head_dim")
    return as_object(gate="head" if axes == 3 else "channel", l2_norm=l2_norm, scale=scale), (log_decay, *others)


def maps(operation: str, feature_map: str, given: Any) -> tuple[Any, ...]:
    """Parameters of a feature map that learns; they come after those of positions."""
    learned = isinstance(feature_map, str) and feature_map.startswith("hedgehog")
    if given is None and not learned:
        return ()
    if not learned:
        raise ValueError(f"{operation}: maps: expected None with feature_map={feature_map!r}, which learns nothing")
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise TypeError(f"{operation}: maps: expected (map of queries, map of keys) with feature_map={feature_map!r}, "
                        f"got {type(given).__name__}")  # fmt: skip
    for name, matrix in zip(("map of queries", "map of keys"), given):
        expect_axes(operation, name, matrix, 3, "(heads, width, head_dim)")
    return tuple(given)
