"""Drops what a failing schedule does not need in order to fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .events import Event, Schedule


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """The same failure with fewer events, each as small as it can be. ``schedule`` fails."""
    events = list(schedule.events)
    size = max(len(events) // 2, 1)
    while size:
        events, dropped = _drop(schedule, events, size, fails)
        if not dropped:
            size //= 2
    for at in range(len(events)):
        for smaller in _smaller(events[at]):
            fewer = [*events[:at], smaller, *events[at + 1 :]]
            if fails(schedule.with_events(fewer)):
                events = fewer
                break
    for simpler in (
        replace(schedule, repositories=0, agent="none"),
        replace(schedule, repositories=1, agent="none"),
        replace(schedule, agent="none"),
        replace(schedule, repositories=1),
    ):
        if simpler.repositories <= schedule.repositories and fails(simpler.with_events(events)):
            return simpler.with_events(events)
    return schedule.with_events(events)


def _drop(
    schedule: Schedule, events: list[Event], size: int, fails: Callable[[Schedule], bool]
) -> tuple[list[Event], bool]:
    at, dropped = 0, False
    while at < len(events):
        fewer = events[:at] + events[at + size :]
        if fails(schedule.with_events(fewer)):
            events, dropped = fewer, True
        else:
            at += size
    return events, dropped


def _smaller(event: Event) -> list[Event]:
    candidates = [replace(event, at=0), replace(event, what=""), replace(event, at=event.at % 4)]
    return [candidate for candidate in candidates if candidate != event]
