"""Onceborn: one identity, one creation, finished or undone by the runtime alone."""

__version__ = "0.1.0"
