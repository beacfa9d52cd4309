"""A service that holds messages until they are due and delivers each of them once, on time."""

__version__ = "0.1.0"
