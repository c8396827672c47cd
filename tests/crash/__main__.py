"""One lane as a process: ``python -m crash --folder F --out FILE ...`` (tests/ in PYTHONPATH).

Prints nothing; writes one JSON line per cell to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict
from pathlib import Path

from support.postgresql import PostgreSQL

from .lane import Cell, Lane
from .sabotage import SABOTAGES
from .scenes import SCENES


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--postgresql", help="a superuser's URL; without it: SQLite")
    parser.add_argument("--lane", default="0/1", help="this one of so many: takes every n-th cell")
    parser.add_argument("--sample", type=int, help="so many cells, drawn with --seed")
    parser.add_argument("--also", action="append", default=[], help="this cell, whatever is drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", help="cells whose name holds this text")
    parser.add_argument("--sabotage", choices=sorted(SABOTAGES), help="break a law on purpose")
    parser.add_argument("--scene", action="append", help="these scenes only")
    given = parser.parse_args()
    server = PostgreSQL(given.postgresql) if given.postgresql else None
    lane = Lane(given.folder, server)
    try:
        lane.prepare([s for s in SCENES if not given.scene or s.name in given.scene])
        if given.sabotage:
            SABOTAGES[given.sabotage]()
        with given.out.open("a") as out:
            for cell in chosen(lane.cells(), given):
                result = lane.run(cell)
                line = {**asdict(result), "log": lane.log_tail() if result.problems else ""}
                out.write(json.dumps(line) + "\n")
                out.flush()
    finally:
        lane.close()


def chosen(cells: list[Cell], given: argparse.Namespace) -> list[Cell]:
    """The cells that this lane takes."""
    if given.only:
        cells = [cell for cell in cells if any(text in str(cell) for text in given.only)]
    if given.sample:
        named = [cell for cell in cells if str(cell) in given.also]
        others = [cell for cell in cells if str(cell) not in given.also]
        drawn = random.Random(given.seed).sample(others, min(given.sample, len(others)))
        cells = named + drawn
    number, count = map(int, given.lane.split("/"))
    return cells[number::count]


main()
