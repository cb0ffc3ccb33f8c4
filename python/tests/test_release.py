"""What the release's workflow makes of wheels, and versions that must agree."""

import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

PYTHON = Path(__file__).parents[1]


def wheel(folder, platform, binary):
    path = folder / f"longspan_cli-1.2.3-py3-none-{platform}.whl"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(f"longspan_cli-1.2.3.data/scripts/{binary}", b"the command")
        packed.writestr("longspan_cli-1.2.3.dist-info/licenses/LICENSE-MIT", b"a licence")
        packed.writestr("longspan_cli-1.2.3.dist-info/METADATA", b"")


def archives(folder):
    return subprocess.run([sys.executable, PYTHON / "command/archives.py", folder], capture_output=True, text=True)


def test_archives_of_the_command(tmp_path):
    wheel(tmp_path, "manylinux_2_17_x86_64.manylinux2014_x86_64", "longspan")
    wheel(tmp_path, "win_amd64", "longspan.exe")
    (tmp_path / "longspan-1.2.3.tar.gz").write_bytes(b"a source distribution")
    assert archives(tmp_path).returncode == 0
    name = "longspan-1.2.3-manylinux_2_17_x86_64"
    with tarfile.open(tmp_path / f"{name}.tar.gz") as packed:
        packed.extractall(tmp_path / "out", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    command = tmp_path / "out" / name / "longspan"
    assert command.read_bytes() == b"the command" and os.access(command, os.X_OK)
    assert (command.parent / "LICENSE-MIT").exists()
    with zipfile.ZipFile(tmp_path / "longspan-1.2.3-win_amd64.zip") as packed:
        assert packed.read("longspan-1.2.3-win_amd64/longspan.exe") == b"the command"
    sums = dict(line.split("  ")[::-1] for line in (tmp_path / "SHA256SUMS").read_text().splitlines())
    assert len(sums) == 5
    assert all(hashlib.sha256((tmp_path / file).read_bytes()).hexdigest() == found for file, found in sums.items())


def test_a_wheel_without_the_command_is_refused(tmp_path):
    wheel(tmp_path, "win_amd64", "another.exe")
    assert "expected the command in it" in archives(tmp_path).stderr


def test_the_extra_asks_for_the_command_of_the_same_version():
    tomllib = pytest.importorskip("tomllib")
    versions = [tomllib.loads((PYTHON / path).read_text()) for path in ("Cargo.toml", "../Cargo.toml", "pyproject.toml")]
    own, command, package = versions[0]["package"]["version"], versions[1]["workspace"]["package"]["version"], versions[2]["project"]
    assert own == command and package["optional-dependencies"]["command"] == [f"longspan-cli=={own}"]
