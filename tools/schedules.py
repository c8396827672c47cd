"""Random schedules: ``make schedules N=20000`` plays that many, ``SEED=...`` replays one.

Each seed is one schedule (tests/schedules/events.py). A seed that fails is shrunk and printed in a
form that tests/schedules/findings.py takes. Two processes by default, each with a ledger in memory.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import resource
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from schedules.events import Schedule, generate  # noqa: E402
from schedules.shrink import shrink  # noqa: E402
from schedules.stage import Stage  # noqa: E402

BATCH = 50
PER_MINUTE = 2_000
"""What 'Random schedules' of design 6-quality asks of two cores."""

_stage: Stage | None = None


def main() -> int:
    arguments = _parse()
    if arguments.seed is not None:
        return replay(generate(arguments.seed))
    first = arguments.first if arguments.first is not None else int(time.time()) * 1000
    batches = [
        range(at, min(at + BATCH, first + arguments.n))
        for at in range(first, first + arguments.n, BATCH)
    ]
    began = time.monotonic()
    counts: Counter[str] = Counter()
    failed: list[tuple[int, list[str]]] = []
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for ends, bad in pool.imap_unordered(play_all, batches):
            counts += ends
            failed += bad
        pool.close()
        pool.join()
    minutes = (time.monotonic() - began) / 60
    rate = arguments.n / minutes
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    each_ms = (used.ru_utime + used.ru_stime) * 1000 / arguments.n
    print(
        f"{arguments.n} schedules from seed {first}: {rate:,.0f} a minute"
        f" in {arguments.processes} processes; {each_ms:.0f} ms of CPU each"
    )
    print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    for seed, wrong in sorted(failed)[:3]:
        print(f"\nseed {seed} fails: {'; '.join(wrong)}")
        print(f"replay: make schedules SEED={seed}")
        print(f"shrunk: {shrunk(generate(seed)).to_json()}")
    if failed:
        print(f"\n{len(failed)} schedules failed")
    if rate < PER_MINUTE:
        print(f"slower than {PER_MINUTE:,} a minute", file=sys.stderr)
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=4_000, help="how many schedules")
    parser.add_argument("--first", type=int, help="the first seed; default: by the clock")
    parser.add_argument("--seed", type=int, help="replay this one, and tell what happens")
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args()


def play_all(seeds: range) -> tuple[Counter[str], list[tuple[int, list[str]]]]:
    """A batch, in a process that keeps its stage."""
    stage = _here()
    counts: Counter[str] = Counter()
    bad = []
    for seed in seeds:
        wrong = stage.play(generate(seed))
        counts += stage.ends()
        if wrong:
            bad.append((seed, wrong))
    return counts, bad


def shrunk(schedule: Schedule) -> Schedule:
    return shrink(schedule, lambda candidate: bool(_here().play(candidate)))


def replay(schedule: Schedule) -> int:
    """One schedule, event by event."""
    stage = _here()
    wrong = stage.play(schedule, tell=print)
    print(f"ends: {dict(stage.ends())}")
    if not wrong:
        print("nothing is wrong")
        return 0
    print(f"\nwrong: {'; '.join(wrong)}")
    small = shrunk(schedule)
    print(f"shrunk: {small.to_json()}\n")
    stage.play(small, tell=print)
    return 1


def _here() -> Stage:
    global _stage
    if _stage is None:
        _stage = Stage()
        gc.collect()
        gc.freeze()  # the imports: nothing that a collection need look at again
    return _stage


if __name__ == "__main__":
    sys.exit(main())
