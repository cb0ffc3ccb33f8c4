"""Writes the types of `longspan.ops` from its functions' signatures: ``python stubs.py`` after an option has come or gone."""

import inspect
import re
import textwrap
from pathlib import Path

from longspan import ops

STUB = Path(ops.__file__).with_suffix(".pyi")
#: Of arguments that are None by default, those that are no arrays.
TYPES = {
    "cu_seqlens": "_Packed", "decay": "float | Sequence[float]", "initial_state": "_State", "state": "_State",
    "maps": "tuple[_Array, _Array]", "scale": "float", "window": "int", "image": "tuple[int, int]",
}  # fmt: skip


def argument(parameter: inspect.Parameter, with_state: bool) -> str:
    name, default = parameter.name, parameter.default
    if default is parameter.empty:
        return f"{name}: _Array"
    if name == "output_final_state":
        return f"{name}: Literal[True]" if with_state else f"{name}: Literal[False] = False"
    if default is None:
        return f"{name}: {TYPES.get(name, '_Array')} | None = None"
    value = f'"{default}"' if isinstance(default, str) else default
    return f"{name}: {type(default).__name__} = {value}"


def declared(name: str, with_state: bool, result: str) -> str:
    parts = []
    for parameter in inspect.signature(getattr(ops, name)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(argument(parameter, with_state))
    line = f"def {name}({', '.join(parts)}) -> {result}: ..."
    if len(line) <= 140:
        return line + "\n"
    # Lines end between arguments.
    body = textwrap.fill(", ".join(part.replace(" ", "~") for part in parts) + ",", 140, initial_indent="    ", subsequent_indent="    ")
    body = body.replace("~", " ")
    return f"def {name}(\n{body}\n) -> {result}: ...  # fmt: skip\n"


def stub() -> str:
    """What the stub has to be; its beginning, up to the first function, is what stands there."""
    text = STUB.read_text(encoding="utf-8")
    begin = text.index("@overload")
    names = textwrap.fill(", ".join(f'"{name}"' for name in ops.__all__) + ",", 132, initial_indent="    ", subsequent_indent="    ")
    text = re.sub(r"__all__ = \[\n.*?\n\]", lambda _: f"__all__ = [\n{names}\n]", text[:begin], flags=re.DOTALL)
    for name in ops.__all__[1:]:
        if name.endswith("_step"):
            text += declared(name, True, "tuple[_Array, State]") + "\n"
        else:
            text += "@overload\n" + declared(name, False, "_Array") + "@overload\n" + declared(name, True, "tuple[_Array, State]")
    return text.rstrip() + "\n"


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
