"""What `help` says of every public name: that it says enough, that it names what there is, and that its examples run."""

import doctest
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import longspan

MODULES = ["longspan", "longspan.ops"]
if importlib.util.find_spec("torch"):
    MODULES += ["longspan.fla", "longspan.torch", "longspan.torch.attention", "longspan.torch.distributed", "longspan.torch.flops", "longspan.torch.runs"]
if importlib.util.find_spec("onnxscript"):
    MODULES.append("longspan.torch.onnx")
if importlib.util.find_spec("transformers"):
    MODULES += ["longspan.transformers"]

#: Methods that other parts of the package call.
INTERNAL = {"files", "first"}


def names_of(module):
    return getattr(module, "__all__", [name for name in vars(module) if name == "Attention"])


def own(thing, name):
    """Whether a class of ours makes it known, and not torch or transformers, whose models have more methods than `forward`."""
    others = [base for base in thing.__mro__ if not base.__module__.startswith("longspan")]
    inherited = name != "forward" and any(name in vars(base) for base in others)
    return not name.startswith("_") and name not in INTERNAL and not inherited


def public():
    """Functions, classes, and the methods and properties that a class of ours defines."""
    found = {}
    for module in map(importlib.import_module, MODULES):
        for name in names_of(module):
            thing = getattr(module, name)
            if inspect.isclass(thing) and thing.__module__.startswith("longspan"):
                found[f"{module.__name__}.{name}"] = thing
                for method, attribute in vars(thing).items():
                    if own(thing, method) and (callable(attribute) or isinstance(attribute, (classmethod, staticmethod, property))):
                        found[f"{module.__name__}.{name}.{method}"] = getattr(thing, method)
            elif callable(thing):
                found[f"{module.__name__}.{name}"] = thing
    return found


PUBLIC = public()
REFERENCE = Path(__file__).parents[2] / "docs" / "site" / "api"
PAGES = {**{name: importlib.import_module(name) for name in MODULES}, **PUBLIC}


def section(text, title):
    """The lines of a section in NumPy's style."""
    match = re.search(rf"^{title}\n-+\n(.*?)(?=^\w+\n---|\Z)", text, re.MULTILINE | re.DOTALL)
    return match and match[1]


def documented(text):
    """Names in the section of parameters; one line may have several."""
    lines = re.findall(r"^([*\w][^\n]*)$", section(text, "Parameters") or "", re.MULTILINE)
    return {name.strip(" *") for line in lines for name in line.split(" : ")[0].split(",")}


@pytest.mark.parametrize("name", PUBLIC)
def test_says_enough(name):
    thing = PUBLIC[name]
    text = inspect.getdoc(thing)
    assert text, f"{name} has no docstring"
    # A dataclass without one gets its signature.
    assert not text.startswith(f"{name.rsplit('.', 1)[-1]}(")
    if not callable(thing):
        return
    whole = PUBLIC.get(name.removesuffix("_step"))
    if name.endswith("_step") and whole is not None and not inspect.isclass(whole):
        # What is not said is as in the call, and as in the module's text on steps.
        assert f"One token of `{whole.__name__}`" in text and "`longspan.ops`" in text
        assert set(inspect.signature(thing).parameters) <= documented(inspect.getdoc(whole)) | {"state"}
        return
    # A variant says what differs.
    variant = "`chunk_gated_delta_rule`" in text and name.startswith("longspan.fla.")
    # Of ``others`` forward says that it refuses them.
    assert documented(text) == set(inspect.signature(thing).parameters) - {"self", "others"}
    method = name.rsplit(".", 1)[-1]
    if variant:
        return
    if not inspect.isclass(thing):
        returned = inspect.signature(thing).return_annotation
        assert (section(text, "Returns") is None) == (returned in (None, "None") or method in ("set_num_threads", "empty_cache"))
    # A method may have its example in that of its class; forward is the call of a module.
    around = PUBLIC.get(name.rsplit(".", 1)[0])
    if around is None:
        # A mechanism whose module is called as all of them has its example in their base class.
        base = inspect.isclass(thing) and any(one.__name__ == "Attention" and ">>> " in inspect.getdoc(one) for one in thing.__mro__[1:])
        assert ">>> " in (section(text, "Examples") or "") or base
    elif method not in ("forward", "reset_parameters"):
        assert f".{method}(" in (section(text, "Examples") or section(inspect.getdoc(around), "Examples"))


@pytest.mark.parametrize("name", PAGES)
def test_examples_run(name):
    text = inspect.getdoc(PAGES[name])
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    said = []
    failed = doctest.DocTestRunner(verbose=False).run(test, out=said.append).failed
    assert not failed, "".join(said)


@pytest.mark.skipif("longspan.torch" not in MODULES or not REFERENCE.exists(), reason="no torch, or no repository")
def test_the_reference_has_every_module():
    page = (REFERENCE / "torch.rst").read_text(encoding="utf-8")
    assert set(longspan.torch.__all__) <= set(re.findall(r"^.. auto(?:class|function):: (\w+)$", page, re.MULTILINE))


def test_everything_is_found():
    assert len(PUBLIC) > (90 if "longspan.transformers" in MODULES else 20)


def test_torch_is_found_without_its_import():
    code = """
import sys, longspan
assert {"torch", "transformers", "ops", "explain"} <= set(dir(longspan))
assert "torch" not in sys.modules
assert not hasattr(longspan, "tensorflow")
try:
    assert callable(longspan.torch.MultiheadAttention)
except AttributeError as error:
    assert str(error) == "longspan.torch: needs torch: pip install 'longspan[torch]'", error
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert longspan.__version__
