"""Mechanisms as the settings of a run name them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .. import _options
from .attention import Attention
from .mechanisms import MODULES

Settings = dict[str, Any]

#: Mechanisms whose tables have a row for each position.
BY_POSITION = ("aft-full", "aft-local")


def _kernel(settings: Settings) -> dict[str, Any]:
    own: dict[str, Any] = settings.get("attention_options", {}).get("kernel", {})
    options = {"feature_map": settings.get("feature_map", "elu+1"), **own}
    options["gate"] = options.pop("gates", False)
    if options.get("decay") is None and "usual_decay" in settings and not options["gate"]:
        options["decay"] = settings["usual_decay"]
    return options


def _shaw(settings: Settings) -> dict[str, Any]:
    options = {"radius": settings.get("radius", 16), **settings.get("attention_options", {}).get("relative", {})}
    return {
        "radius": options["radius"], "shared": options.get("shared", False), "kernelized": options.get("content", True),
        "rel_feature_map": "identity" if options.get("raw", False) else "same", **_kernel(settings),
    }  # fmt: skip


def _fourier(settings: Settings) -> dict[str, Any]:
    options = settings.get("attention_options", {})
    kernel = _kernel(settings)
    # Fourier's normaliser says whether and by what a row is divided.
    if not kernel.pop("normalize", True):
        raise ValueError("config.json: attention_options: expected kernel.normalize = true for fourier, got false")
    normalizer = options.get("normalizer", "one-plus").replace("-", "_")
    wave = "pairs" if options.get("rotary", False) else "each"
    return {"normalizer": normalizer, "wave": wave, "axes": settings.get("axes"), **kernel}


def _toeplitz(settings: Settings) -> dict[str, Any]:
    options = dict(settings.get("attention_options", {}))
    return {"feature_map": settings.get("feature_map", "elu+1"), **options.pop("bias", {}), **options}


def _as_they_are(settings: Settings) -> dict[str, Any]:
    return dict(settings.get("attention_options", {}))


def _softmax(settings: Settings) -> dict[str, Any]:
    return {"capacity": settings.get("capacity", 4096), **settings.get("attention_options", {})}


def _by_position(settings: Settings) -> dict[str, Any]:
    return {"length": max(1024, settings["positions"]), **settings.get("attention_options", {})}


#: How the options of a mechanism's module follow from a run's settings, where these do not have them as they are.
_OPTIONS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "kernelized": _kernel, "shaw": _shaw, "fourier": _fourier, "toeplitz": _toeplitz, "aft-full": _by_position,
    "aft-local": _by_position, "softmax": _softmax, "softmax-window": lambda settings: {"window": 256, **_as_they_are(settings)},
}  # fmt: skip


#: The options of mechanisms that are parts, which are read one by one here, and what is in them.
_PARTS: dict[str, dict[str, Any]] = {
    "kernelized": {"kernel": None}, "shaw": {"relative": ("radius", "content", "shared", "raw"), "kernel": None},
    "fourier": {"axes": None, "normalizer": None, "rotary": None, "kernel": None},
}  # fmt: skip


def _expect_known(where: str, given: Any, known: Iterable[str]) -> None:
    """Refuses options that nobody reads."""
    surplus = [name for name in given if name not in known] if isinstance(given, Mapping) else [given]
    if surplus:
        raise ValueError(f"config.json: {where}: expected {', '.join(known)}, got {surplus[0]!r}")


def expect_sizes(settings: Settings) -> None:
    for key in ("d_model", "heads", "d_ff", "layers", "encoder_layers", "decoder_layers"):
        _options.expect_integer("config.json", key, settings.get(key, 1), 1, _options.MOST)


def names(settings: Settings) -> list[str]:
    """The mechanisms that settings name, of one layer after the other."""
    _options.expect_type("config.json", "attention", settings["attention"], str)
    return [name.strip() for name in settings["attention"].split(",")]


def attention(settings: Settings, name: str) -> Attention:
    known = (*MODULES, "softmax-window")
    if name not in known:
        raise ValueError(f"config.json: attention: expected one of {', '.join(known)}, got {name!r}")
    if settings["d_model"] % settings["heads"]:
        raise ValueError(f"config.json: d_model: expected a multiple of heads = {settings['heads']}, got {settings['d_model']}")
    module: Callable[..., Attention] = MODULES[name.removesuffix("-window")]
    options, listed = settings.get("attention_options", {}), set(names(settings))
    if len(listed) > 1:
        # Where layers differ the options of each stand under its name.
        _expect_known("attention_options", options, sorted(listed))
        settings = {**settings, "attention_options": (options := options.get(name, {}))}
    if name in _PARTS:
        _expect_known("attention_options", options, _PARTS[name])
        for part, known in _PARTS[name].items():
            if known is not None:
                _expect_known(f"attention_options: {part}", options.get(part, {}), known)
    try:
        return module(settings["heads"], settings["d_model"] // settings["heads"], **_OPTIONS.get(name, _as_they_are)(settings))
    except TypeError as error:
        raise ValueError(f"config.json: attention_options: {error}") from error
