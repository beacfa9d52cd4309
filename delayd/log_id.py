"""A server's log_id, shown alike wherever a person meets it.

It names one server's directory for ever, and a message together with its sequence.
"""

from __future__ import annotations


class LogId(int):
    """A log_id: a number on the wire and in columns, 16 hexadecimal digits in text.

    >>> LogId(0xA000000000000007)
    a000000000000007
    """

    __slots__ = ()

    def __str__(self) -> str:
        return f"{int(self):016x}"

    __repr__ = __str__
