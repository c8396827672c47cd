"""What can happen in a schedule, drawn from a seed, and written so that it can be replayed.

Events name their targets by a number that is taken modulo what there is at that moment, so that a
list of events still means something when some of them are dropped.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

ENDINGS: Final = ("pause", "die", "die_but_child", "lose", "unreachable")
LIES: Final = (
    "nothing",
    "half",
    "nothing_retry",
    "half_retry",
    "all_retry",
    "nothing_error",
    "half_error",
    "all_error",
    "nothing_failed",
    "half_failed",
    "all_failed",
)


@dataclass(frozen=True)
class Event:
    """One thing that happens. ``at`` picks the target, ``n`` and ``what`` say how."""

    does: str
    at: int = 0
    n: int = 0
    what: str = ""

    def __str__(self) -> str:
        return f"{self.does}({self.at}, {self.n}, {self.what!r})"


@dataclass(frozen=True)
class Schedule:
    """A creation to ask for, and what happens to it."""

    seed: int
    repositories: int
    agent: str
    """``none``, ``session`` (a profile, no start) or ``start``."""
    events: tuple[Event, ...]

    def with_events(self, events: list[Event]) -> Schedule:
        return replace(self, events=tuple(events))

    def to_json(self) -> str:
        document = asdict(self)
        document["events"] = [list(asdict(event).values()) for event in self.events]
        return json.dumps(document)

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        document: dict[str, Any] = json.loads(text)
        events = tuple(Event(*values) for values in document.pop("events"))
        return cls(events=events, **document)


_JUMPS_MS: Final = (500, 2_000, 31_000, 31_000, 90_000, 1_100_000, -5_000, -60_000)
"""The longest is more than anybody may hold a host lock."""
_WEIGHTS: Final = {
    "run": 40,
    "last": 15,
    "takeover": 6,
    "sweep": 4,
    "clock": 6,
    "fork": 5,
    "duplicate": 5,
    "create": 4,
    "child": 4,
    "lie": 6,
    "blind": 3,
    "vanish": 1,
    "plant": 2,
    "work": 4,
    "release": 1,
    "delete": 1,
    "unpark": 1,
}
THEMES: Final[dict[str, dict[str, int]]] = {
    # What is raised above the weights.
    "mixed": {},
    "lies": {"lie": 30, "blind": 15, "last": 30, "takeover": 12},
    "undoing": {"delete": 6, "plant": 12, "work": 12, "lie": 12, "last": 40, "takeover": 12},
    "zombies": {"fork": 15, "duplicate": 15, "takeover": 20, "sweep": 10, "clock": 10},
    "deaths": {"takeover": 40, "last": 40, "child": 12, "work": 15},
    "crowd": {"create": 20, "sweep": 10, "release": 5, "delete": 4},
}


def generate(seed: int) -> Schedule:
    """The schedule of a seed: always the same one."""
    dice = random.Random(seed)
    theme = dice.choice(tuple(THEMES))
    repositories = dice.choice((0, 1, 1, 1, 2))
    agent = dice.choice(("none", "session", "start", "start")) if repositories else "none"
    weights = {**_WEIGHTS, **THEMES[theme]}
    length = dice.randint(3, 24)
    events = [Event("create")]
    if theme == "lies":
        events += [_event(dice, "lie", theme) for _ in range(dice.randint(1, 3))]
    if theme == "undoing":
        # Something exists, and then the way leads back.
        repositories = 2
        if dice.random() < 0.6:
            how = dice.choice(("nothing_failed", "half_failed"))
            events.append(Event("lie", 3, what=how))
        events.append(Event("run", 0, dice.randint(40, 140)))
        if dice.random() < 0.5:
            events.append(Event("work", dice.randrange(2)))
        events += [_event(dice, "blind", theme) for _ in range(dice.randint(0, 2))]
        events += [_event(dice, "lie", theme) for _ in range(dice.randint(0, 2))]
        if dice.random() < 0.5:
            events.append(Event("delete"))
    events.append(Event("run", 0, dice.randint(1, 60)))
    for does in dice.choices(list(weights), list(weights.values()), k=length):
        events.append(_event(dice, does, theme))
    return Schedule(seed, repositories, agent, tuple(events))


def _event(dice: random.Random, does: str, theme: str) -> Event:
    at = dice.randrange(64)
    match does:
        case "run" | "last":
            weights = (4, 6, 4, 3, 1) if theme == "deaths" else (10, 3, 2, 3, 1)
            ending = dice.choices(ENDINGS, weights)[0]
            return Event(does, at, dice.choice((1, 2, 3, 5, 8, 13, 30, 80)), ending)
        case "clock":
            return Event(does, n=dice.choice(_JUMPS_MS))
        case "takeover":
            return Event(does, n=dice.choice((31_000, 95_000, 95_000)))
        case "child":
            return Event(does, at, dice.choice((1, 1, 0)))
        case "lie":
            return Event(does, at, what=dice.choice(LIES))
        case "blind":
            return Event(does, at, dice.choice((1, 2, 3, 9)))
        case "plant":
            return Event(does, at, dice.choice((0, 1)))
        case _:
            return Event(does, at)
