"""The files that the runs learn from. Each is made once, under the folder of the runs, from a Debian or a Python package."""

import json
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

AEON = "aeon==1.6.0"


def file(folder: Path, name: str) -> Path:
    """The file of this name: `kjv.txt`, or a part of a set of series."""
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        text = _king_james() if name == "kjv.txt" else _series(folder, name)
        draft = path.with_suffix(".draft")
        draft.write_text(text)
        draft.replace(path)
    return path


def _king_james() -> str:
    """The King James text, a verse a line, without the numbers of the verses."""
    if not shutil.which("bible"):
        sys.exit("`bible` is not installed; on Debian: apt-get install bible-kjv")
    verses = subprocess.run(["bible", "-f", "-l100000", "Ge1:1-Re22:21"], capture_output=True, text=True, check=True).stdout
    return "".join(verse.split(" ", 1)[1] for verse in verses.splitlines(keepends=True))


def _series(folder: Path, name: str) -> str:
    """`SET-DROPPED-SEED-POSITIONS-PART.jsonl`: a part of a set, so many percent of its points dropped (`mixed`: 0 to 90, each series its
    own share), its times or counted points."""
    data, dropped, seed, positions, part = name.removesuffix(".jsonl").split("-")
    draw = random.Random(f"{data} {dropped} {seed} {part}")
    lines = []
    for label, points in _archive(folder, data, part.upper()):
        count = len(points)
        share = draw.random() * 0.9 if dropped == "mixed" else int(dropped) / 100
        kept = sorted(draw.sample(range(count), max(2, round(count * (1 - share)))))
        times = kept if positions == "times" else list(range(len(kept)))
        lines.append(json.dumps({"times": times, "values": [points[at] for at in kept], "label": label}))
    return "\n".join(lines) + "\n"


def _archive(folder: Path, data: str, part: str):
    """Label and points of each series of a `.ts` file of the package `aeon`; a point is a list of channels."""
    wheels = list(folder.glob("aeon-*.whl"))
    if not wheels:
        with tempfile.TemporaryDirectory() as place:
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", place, AEON], check=True)
            wheels = [Path(shutil.move(wheel, folder)) for wheel in Path(place).glob("*.whl")]
    with zipfile.ZipFile(wheels[0]) as wheel:
        text = wheel.read(f"aeon/datasets/data/{data}/{data}_{part}.ts").decode()
    for line in text.split("@data\n", 1)[1].splitlines():
        if line.strip():
            *channels, label = line.strip().split(":")
            columns = [[float(value) for value in channel.split(",")] for channel in channels]
            yield label, [list(point) for point in zip(*columns, strict=True)]
