"""Every Python example of the documentation runs as written."""

import re
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

REPOSITORY = Path(__file__).parents[2]


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def examples():
    pages = {"the package's page": metadata("longspan").get_payload() or metadata("longspan")["Description"]}
    for name in ("README.md", "docs/python.md"):
        if (REPOSITORY / name).exists() and (REPOSITORY / "Cargo.toml").exists():
            pages[name] = (REPOSITORY / name).read_text(encoding="utf-8")
    return [pytest.param(code, id=f"{page} {i}") for page, text in pages.items() for i, code in enumerate(blocks(text))]


@pytest.mark.parametrize("code", examples())
def test_example(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "<example>", "exec"), {"__name__": "__main__"})


def test_there_are_examples():
    assert len(examples()) >= 2


@pytest.mark.parametrize("script, said", [
    ("hessian.py", "equal, for queries, keys, values and positions"), ("constant_memory.py", "the full forward's logits"),
    ("fsdp.py", "process 1 of 2: the same parameters"), ("fine_tuning.py", "the same losses over 20 steps"),
])  # fmt: skip
def test_script(script, said):
    path = Path(__file__).parents[1] / "examples" / script
    if not path.exists():
        pytest.skip(f"the examples are not here: no {path}")
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 40
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if script == "fsdp.py" else []
    done = subprocess.run([sys.executable, *start, path], timeout=300, capture_output=True, text=True)
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
