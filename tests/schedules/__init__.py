"""Random schedules: the real engine on an in-memory ledger, in a world that dies, lies and is late.

``events`` what can happen, drawn from a seed; ``stage`` makes it happen; ``check`` looks at what
came of it; ``shrink`` drops what was not needed to fail; ``findings`` what was once found.
"""
