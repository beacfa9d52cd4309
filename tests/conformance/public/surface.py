"""The public methods of the clients, found by their signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

# What is public by its name only: the clients' own parts call it.
INNER = {
    "Consumer": {"settle", "word_back", "words_back"},
    "AsyncConsumer": {"settle", "word_back", "words_back"},
    "SendFuture": {"set_result", "set_exception", "receipt", "set_running_or_notify_cancel"},
}


def methods_of(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Each method that users call by its name."""
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") and name not in INNER.get(kind.__name__, set()):
            yield name, method


def parameters_of(call: Callable[..., Any]) -> list[inspect.Parameter]:
    """What a call may be given."""
    found = inspect.signature(call).parameters.values()
    return [each for each in found if each.name != "self" and each.kind is not inspect.Parameter.VAR_KEYWORD]
