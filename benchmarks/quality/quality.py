#!/usr/bin/env python3
"""Runs the rows of rows.py that have no result yet, and writes docs/quality.md from all results.

A run that is interrupted goes on where it was. Results are kept in results.json, runs and data under --runs.
"""

import argparse
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import data
from rows import TABLES, Row, Table

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results.json", HERE.parent.parent / "docs" / "quality.md"
HEAD = """# What the models learn

Held to tasks with published numbers, softmax attention of the same size beside. Written by

```sh
python benchmarks/quality/quality.py        # hours; goes on where it stopped; --only TABLE, --list, --page, --help
```

from runs of the command `longspan`. In parentheses 95 % intervals over what was held out; where there are several seeds, the mean of
them and the least and the greatest. Minutes are of training, on the machine that is named, which others shared: they say how long to
wait, not how fast anything is ([performance](performance.md) does). Files that commands name are made by `benchmarks/quality/data.py`.
A dash: not run yet; an empty cell: left out.
"""


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def key(table: Table, row: Row, seed: int) -> str:
    return "/".join(slug(part) for part in (table.key, row.column, row.name, str(seed)) if part)


def machine() -> str:
    info = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return f"{os.cpu_count()} cores of {name[1] if name else 'an unknown processor'}"


def run(table: Table, row: Row, seed: int, options) -> dict:
    """Runs a row, or goes on with it."""
    files = {name: data.file(options.runs / "data", name) for name in re.findall(r"\{([^{}=]+)\}", row.arguments.replace("{seed}", str(seed)))}
    arguments = [
        re.sub(r"\{([^{}=]+)\}", lambda name: str(files[name[1]]), word)
        for word in row.arguments.replace("{seed}", str(seed)).split()
    ]
    if row.peer:
        import peers

        return getattr(peers, row.peer)(*(files[name] for name in files), seed)
    folder = options.runs / key(table, row, seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | ({"LONGSPAN_THREADS": str(options.threads)} if options.threads else {})

    def longspan(*command) -> str:
        return subprocess.run([options.longspan, *command], check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout

    begun = (folder / "config.json").exists()
    info = json.loads(longspan("info", folder, "--json")) if begun else {}
    if not info.get("held_out"):
        longspan(*(["train", "--resume", folder] if begun else ["train", *arguments, "--out", folder]))
        info = json.loads(longspan("info", folder, "--json"))
    held_out = json.loads(longspan("eval", folder, *row.evaluate.split(), "--json")) if row.evaluate else info["held_out"]
    return {"score": held_out[table.score], "parameters": info["parameters"], "seconds": info["seconds"], "steps": info["step"]}


def cell(table: Table, found: list) -> str:
    """The scores of a row's seeds."""
    seeds, found = len(found), [one["score"] for one in found if one]
    if not found:
        return "–"
    rates = [one["rate"] * table.scale for one in found]
    low, high = (min(rates), max(rates)) if len(rates) > 1 else ((found[0].get(end) or 0) * table.scale for end in ("low", "high"))
    spread = f" ({low:.{table.digits}f}–{high:.{table.digits}f})" if high > 0 else ""
    some = f", {len(found)} of {seeds} seeds" if len(found) < seeds else ""
    return f"{sum(rates) / len(rates):.{table.digits}f}{spread}{some}"


def command(row: Row) -> str:
    """What a person would type."""
    arguments = re.sub(r"\{([^{}=]+)\}", r"\1", row.arguments.replace("{seed}", str(row.seeds[0])))
    evaluate = f" --out run && longspan eval run {row.evaluate}" if row.evaluate else ""
    return f"# {row.peer}: see benchmarks/quality/peers.py, {arguments}" if row.peer else f"longspan train {arguments}" + evaluate


def section(table: Table, results: dict) -> str:
    """A table of the page."""
    found = {id(row): [results.get(key(table, row, seed)) for seed in row.seeds] for row in table.rows}
    names, columns = (list(dict.fromkeys(getattr(row, what) for row in table.rows)) for what in ("name", "column"))
    lines = [f"## {table.title}", "", table.text, ""]
    heads = ["model", "parameters", *(columns if columns != [""] else [table.metric]), "minutes"]
    lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name in names:
        rows = [row for row in table.rows if row.name == name]
        done = [one for row in rows for one in found[id(row)] if one]
        sizes = sorted({one["parameters"] for one in done})
        parameters = "–" if not sizes else str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]}"
        by_column = {row.column: cell(table, found[id(row)]) for row in rows}
        cells = [by_column.get(column, "") for column in columns]
        minutes = f"{sum(one['seconds'] for one in done) / 60:.0f}" if done else "–"
        lines.append(f"| {name} | {parameters} | {' | '.join(cells)} | {minutes} |")
    if columns != [""]:
        lines[2] += f" In columns: {table.metric}."
    machines = sorted({one["machine"] for all in found.values() for one in all if one})
    if machines:
        lines += ["", f"Machine: {'; '.join(machines)}."]
    if table.after:
        lines += ["", table.after]
    examples = list(dict.fromkeys(command(row) for row in table.rows if row.column == columns[-1]))
    lines += ["", "```sh", *examples, "```", ""]
    return "\n".join(lines)


def page(results: dict) -> str:
    return "\n".join([HEAD, *(section(table, results) for table in TABLES), (HERE / "ordinary.md").read_text()])


def write(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text)
    draft.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="rows whose key contains this")
    parser.add_argument("--runs", type=Path, default=Path("runs/quality"), help="where runs and data are kept")
    parser.add_argument("--longspan", default="longspan", help="the command")
    parser.add_argument("--threads", type=int, help="of each run; all cores if not given")
    parser.add_argument("--list", action="store_true", help="only list the keys of all rows, and which are done")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for table in TABLES:
        for row in table.rows:
            for seed in row.seeds:
                name = key(table, row, seed)
                if options.page or options.only not in name:
                    continue
                if options.list:
                    print("done" if name in results else "    ", name, shlex.quote(row.arguments))
                elif name not in results:
                    print(name, file=sys.stderr)
                    found = run(table, row, seed, options)
                    found |= {"machine": machine(), "date": datetime.date.today().isoformat()}
                    # Another process may have written meanwhile.
                    results = (json.loads(RESULTS.read_text()) if RESULTS.exists() else {}) | {name: found}
                    write(RESULTS, json.dumps(results, indent=1, sort_keys=True) + "\n")
                    write(PAGE, page(results))
    if options.page:
        write(PAGE, page(results))


if __name__ == "__main__":
    main()
