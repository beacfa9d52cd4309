"""Tracing: the W3C `traceparent` of the message that is being handled, so that what a handler sends belongs to it.

A trace joins what many programs did for one cause. Its identity travels as the header `traceparent` of a message; a
worker puts it into `traceparent` while a handler runs, and producers add it to what is sent meanwhile. No tracing
library is needed for that.
"""

import re
from collections.abc import Mapping
from contextvars import ContextVar

HEADER = "traceparent"

traceparent: ContextVar[str] = ContextVar(HEADER, default="")
"""The trace that the present work belongs to; empty when it belongs to none."""

# Version, trace, parent and flags (https://www.w3.org/TR/trace-context/). A later version may add fields behind them.
_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def traceparent_of(headers: Mapping[str, str | bytes]) -> str:
    """The trace that headers name; empty when they name none, or not in the form of the W3C."""
    found = headers.get(HEADER, "")
    text = found if isinstance(found, str) else found.decode("ascii", "replace")
    return text if _FORM.fullmatch(text) else ""
