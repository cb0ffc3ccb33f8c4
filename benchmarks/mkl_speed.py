"""Has MKL, PyTorch's products on x86, run as fast on every processor as on Intel's.

On those of other makers MKL takes slower code than they could run: on an AMD EPYC (Zen 5) 118 instead of 257 GFLOP/s for 1024³ on one
core, and small batched products at an eighth of the speed. An opponent held back like that would flatter us, so the comparisons start their
processes behind a library that answers MKL's question for the maker with yes.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

_ANSWER = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"

#: Holds the library until the comparison ends.
_FOLDER = tempfile.TemporaryDirectory(prefix="longspan-mkl-")


@functools.cache
def environment() -> dict[str, str]:
    """What a child's environment gets on top."""
    try:
        of_intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    if of_intel or platform.machine() != "x86_64":
        return {}
    try:
        ours = str(library())
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"without a C compiler MKL stays slower than it could be, and our ratios too good: {error}", file=sys.stderr)
        return {}
    return {"LD_PRELOAD": " ".join(filter(None, [ours, os.environ.get("LD_PRELOAD")]))}


def library() -> Path:
    """Builds the library."""
    source, built = Path(_FOLDER.name, "answer.c"), Path(_FOLDER.name, "answer.so")
    source.write_text(_ANSWER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", built, source], check=True)
    return built
