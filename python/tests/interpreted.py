"""Triton's interpreter in a third of its time, with the same bits (`test_shortcuts_change_no_bit`): of thousands of small operations nearly all of
it went into finding out their types anew. Importing this makes the shortcuts."""

from collections import Counter
from dataclasses import replace

import numpy as np
from triton.language import core
from triton.runtime import interpreter

SEMANTIC = interpreter.interpreter_semantic
#: Methods of the interpreter that take two tensors: their operators, numpy's operation on numbers of one type, and whether sums are checked for overflow.
OPERATIONS = {
    "add": ("add", np.add, (False,)), "sub": ("sub", np.subtract, (False,)), "mul": ("mul", np.multiply, (False,)),
    "less_than": ("lt", np.less, ()), "greater_than": ("gt", np.greater, ()), "less_equal": ("le", np.less_equal, ()),
    "greater_equal": ("ge", np.greater_equal, ()), "equal": ("eq", np.equal, ()), "not_equal": ("ne", np.not_equal, ()),
}  # fmt: skip
#: As Triton has them: the others, which take a round about way.
PLAIN = {name: getattr(SEMANTIC, name) for name in [*OPERATIONS, "where"]}
FLOATS, INTEGERS = {"fp32": np.float32, "fp64": np.float64}, {"int32": np.int32, "int64": np.int64}
NUMBERS = {**FLOATS, **INTEGERS, "uint32": np.uint32}

_of_numpy, _block_type, _tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
_kinds, _types, _shapes, _modules = {}, {}, {}, set()
#: Of `same`, how many had a shortcut.
TAKEN = Counter()


def _kind(of):
    if of.scalar.name not in _kinds:
        _kinds[of.scalar.name] = _of_numpy(of.scalar)
    return _kinds[of.scalar.name]


def _block(self, element_ty, shape):
    key = element_ty.name, *[getattr(size, "value", size) for size in shape]
    if key not in _types:
        _block_type(self, element_ty, shape)
        _types[key] = self.shape, self.numel, self.name
    self.element_ty, self.sizes = element_ty, key[1:]
    self.shape, self.numel, self.name = _types[key]


def _made(self, handle, of):
    self.handle, self.type, self.dtype = handle, of, of.scalar
    sizes = of.sizes if of.is_block() else ()
    if sizes not in _shapes:
        _tensor(self, handle, of)
        _shapes[sizes] = self.shape, self.numel
    self.shape, self.numel = _shapes[sizes]


def _pair(x, y):
    """Numbers of two operands of one type, or of one and of a constant that takes its type, the type of the larger and that of a number of
    it: or nothing."""
    if not isinstance(x, core.tensor):
        found = _pair(y, x) if isinstance(y, core.tensor) else None
        return found and (found[1], found[0], *found[2:])
    kind = x.dtype.name
    if isinstance(y, core.tensor):
        of = x.type if x.type.is_block() else y.type
        if y.dtype.name == kind and kind in NUMBERS:
            return x.handle.data, y.handle.data, of, x.dtype
        wide = kind in INTEGERS and y.dtype.name in INTEGERS
        return (x.handle.data, y.handle.data, of, core.int64) if wide else None
    if kind in FLOATS and type(y) in (int, float) or kind in INTEGERS and type(y) is int:
        return x.handle.data, np.array([y], NUMBERS[kind]), x.type, x.dtype
    return None


def _result(handle, of, scalar):
    if not of.is_block():
        of = scalar
    elif of.element_ty is not scalar or of.sizes != handle.data.shape:
        of = core.block_type(scalar, list(handle.data.shape))
    return core.tensor(handle, of)


def _shortcut(name, operator, operation, more):
    """Of an operation; where it does not fit Triton's own."""

    def quick(x, y, *given, **named):
        if pair := _pair(x, y):
            scalar = pair[3] if more else core.int1
            return _result(interpreter.TensorHandle(operation(*pair[:2]), scalar), pair[2], scalar)
        if operator == "add" and isinstance(x, core.tensor) and isinstance(y, core.tensor) and x.dtype.is_ptr() and y.dtype.name in INTEGERS:
            return _result(SEMANTIC.builder.create_addptr(x.handle, y.handle), x.type if x.type.is_block() else y.type, x.dtype)
        return PLAIN[name](x, y, *given, **named)

    setattr(SEMANTIC, name, quick)
    value = core._unwrap_if_constexpr
    setattr(core.tensor, f"__{operator}__", lambda x, y: quick(x, value(y), *more))
    setattr(core.tensor, f"__r{operator}__", lambda x, y: quick(value(y), x, *more))


def _where(condition, x, y):
    pair = _pair(x, y) if condition.dtype is core.int1 else None
    if pair is None:
        return PLAIN["where"](condition, x, y)
    handle = interpreter.TensorHandle(np.where(condition.handle.data, *pair[:2]), pair[3])
    return _result(handle, pair[2] if pair[2].is_block() else condition.type, pair[3])


def _patched(thing, name, member, _, scope):
    """A function of the language with the interpreter for its compiler, without two calls in between."""
    plain = getattr(member, "__wrapped__", member)
    scope.set_attr(thing, name, lambda *given, **named: plain(*given, **{**named, "_semantic": SEMANTIC}))


def called(function, *given, **named):
    """A function that a kernel calls. The interpreter would replace the language's functions at each call: once for a module is enough."""
    if function.fn.__module__ not in _modules:
        _modules.add(function.fn.__module__)
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*given, **named)


def operands():
    """Numbers and blocks of each type, pointers and constants."""
    kinds = (core.int1, core.int32, core.int64, core.uint32, core.float32, core.float64, core.pointer_type(core.float32))
    for kind in kinds:
        for shape in ((1,), (4,), (4, 1), (1, 4)):
            data = np.random.default_rng(len(shape)).integers(0, 9, shape).astype(_of_numpy(kind))
            yield core.tensor(interpreter.TensorHandle(data, kind), core.block_type(kind, list(shape)) if max(shape) > 1 else kind)
    yield from (3, 0.5)


def same(name, *given):
    """Whether a shortcut gives the same numbers of the same type as Triton's own way, or the same kind of error."""
    found = []
    TAKEN[_pair(*given[name == "where" :][:2]) is not None] += 1
    for way in (getattr(SEMANTIC, name), PLAIN[name]):
        try:
            made = way(*given)
            found.append((str(made.type), str(made.handle.data.dtype), made.handle.data.shape, made.handle.data.tobytes()))
        except Exception as error:
            found.append(type(error))
    return found[0] == found[1]


# It computes whether sums of integers overflow, and tells it only where it is asked to debug.
SEMANTIC.builder.options = replace(SEMANTIC.builder.options, sanitize_overflow=False)
interpreter._get_np_dtype, interpreter._patch_attr, interpreter.InterpretedFunction.__call__ = _kind, _patched, called
core.block_type.__init__, core.tensor.__init__, SEMANTIC.where = _block, _made, _where
for _name, _operation in OPERATIONS.items():
    _shortcut(_name, *_operation)
