"""Options of a call: checked, and made into the JSON text that names a compiled mechanism.

Text, because a torch operator can take it and a cache can look it up.
"""

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
        except (TypeError, ValueError):
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
        return f'{{"feature_map": {as_json(feature_map)}, "normalize": {as_json(normalize)}, "algorithm": {as_json(algorithm)}}}'
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


def expect_axes(operation: str, name: str, value: Any, axes: int, shape: str) -> None:
    given = getattr(value, "shape", None)
    if given is None:
        raise TypeError(f"{operation}: {name}: expected an array like q, got {type(value).__name__}")
    if len(given) != axes:
        raise ValueError(f"{operation}: {name}: expected shape {shape}, got shape {tuple(given)}")


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
