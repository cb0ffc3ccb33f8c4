"""The page of quality is what its results say, and a run that was interrupted goes on."""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

import data
import peers
import pytest
import quality
from rows import TABLES, Row, Table

STANDIN = """#!{python}
import json, pathlib, sys
if sys.argv[1] == "train":
    folder = pathlib.Path(sys.argv[sys.argv.index("--out" if "--out" in sys.argv else "--resume") + 1])
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("resumed" if "--resume" in sys.argv else "begun")
    sys.exit(0 if "--resume" in sys.argv else 1)
ended = (pathlib.Path(sys.argv[2]) / "config.json").read_text() == "resumed"
scores = {{"recalled": {{"rate": 0.5, "low": 0.4, "high": 0.6}}}}
if sys.argv[1] == "eval":
    assert sys.argv[3:] == ["--beam", "4", "--json"]
    print(json.dumps({{"recalled": {{"rate": 0.75}}}}))
    sys.exit()
print(json.dumps({{"held_out": scores if ended else None, "parameters": 7, "seconds": 60, "step": 3}}))
"""


@pytest.fixture
def options(tmp_path):
    command = tmp_path / "longspan"
    command.write_text(STANDIN.format(python=sys.executable))
    command.chmod(0o755)
    return argparse.Namespace(runs=tmp_path / "runs", longspan=str(command), threads=1)


def test_the_page_is_what_the_results_say():
    assert quality.PAGE.read_text() == quality.page(json.loads(quality.RESULTS.read_text()))


def test_every_row_has_a_key_of_its_own():
    keys = [quality.key(table, row, seed) for table in TABLES for row in table.rows for seed in row.seeds]
    assert len(set(keys)) == len(keys)
    assert set(json.loads(quality.RESULTS.read_text())) <= set(keys)


def test_a_run_that_was_interrupted_goes_on(options):
    row = Row("a model", "--synthetic mqar --seed {seed}")
    table = Table("some", "Some", "Text.", "recalled", "recalled, %", [row])
    with pytest.raises(subprocess.CalledProcessError):
        quality.run(table, row, 1, options)
    found = quality.run(table, row, 1, options) | {"machine": "a machine"}
    assert (options.runs / "some/a-model/1/config.json").read_text() == "resumed"
    # One that has ended is only read.
    before = (options.runs / "some/a-model/1/config.json").stat().st_mtime_ns
    assert quality.run(table, row, 1, options)["parameters"] == 7
    assert (options.runs / "some/a-model/1/config.json").stat().st_mtime_ns == before
    searched = Row("a model", "--synthetic mqar --seed {seed}", evaluate="--beam 4")
    assert quality.run(table, searched, 1, options)["score"] == {"rate": 0.75}
    assert quality.command(searched) == "longspan train --synthetic mqar --seed 1 --out run && longspan eval run --beam 4"
    text = quality.section(table, {quality.key(table, row, 1): found})
    assert "| a model | 7 | 50.0 (40.0–60.0) | 1 |" in text and "longspan train --synthetic mqar --seed 1" in text
    two = Table("some", "Some", "Text.", "recalled", "recalled, %", [Row("a model", "", (1, 2))])
    assert "50.0 (40.0–60.0), 1 of 2 seeds" in quality.section(two, {"some/a-model/1": found})
    assert "| a model | – | – | – |" in quality.section(table, {})


def test_points_are_dropped_and_counted(tmp_path, monkeypatch):
    points = [[float(at)] for at in range(50)]
    monkeypatch.setattr(data, "_archive", lambda *_: [("a", points), ("b", points)])
    times, index = ([json.loads(line) for line in data.file(tmp_path, f"Set-60-1-{kind}-train.jsonl").open()] for kind in ("times", "index"))
    for one, other in zip(times, index, strict=True):
        assert [[time] for time in one["times"]] == one["values"] == other["values"]
        assert other["times"] == list(range(20)) and one["label"] == other["label"]
    assert times[0]["times"] != times[1]["times"]
    mixed = [json.loads(line) for line in data.file(tmp_path, "Set-mixed-1-times-train.jsonl").open()]
    assert len(mixed[0]["times"]) != len(mixed[1]["times"])


def test_the_gru_learns(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "STEPS", 60)
    draw = random.Random(1)

    def written(name, count):
        path: Path = tmp_path / name
        lines = []
        for n in range(count):
            times = sorted(draw.random() * 10 for _ in range(draw.randint(5, 9)))
            lines.append(json.dumps({"times": times, "values": [[n % 2 + draw.random() / 2] for _ in times], "label": str(n % 2)}))
        path.write_text("\n".join(lines))
        return path

    found = peers.gru(written("train", 60), written("held_out", 40), 1)
    assert found["score"]["rate"] > 0.9 and found["parameters"] > 0
