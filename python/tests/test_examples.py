"""Every Python example of the documentation runs as written."""

import re
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
def test_example(code):
    exec(compile(code, "<example>", "exec"), {"__name__": "__main__"})


def test_there_are_examples():
    assert len(examples()) >= 2
