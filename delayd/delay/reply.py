"""Reply: the one way out of a request that is answered in a later turn of the loop.

Invariant: a request is answered once. What it holds (its room, its look-ups, copies that are made for it) is given back
before the answer, on whichever way it ends: answered, refused, or failed in the middle.

     begin ──▶ step ──▶ step ──▶ end(answer)       what a request holds is noted with `holds`
       │         │        │
       ╰─────────┴────────┴────▶ an error: given back, and told by name

An error says that nothing was done. A request of which a part is done tells that part instead (`tells`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Generic, TypeVar

from delayd.errors import DataError, DelaydError, ServerStopped, SlowDown

T = TypeVar("T")


class Reply(Generic[T]):
    """Belongs to the loop, and to one request."""

    __slots__ = ("_answer", "_held", "_so_far")

    def __init__(self, answer: Callable[[T | DelaydError], None]) -> None:
        self._answer: Callable[[T | DelaydError], None] | None = answer
        self._held = ExitStack()
        self._so_far: Callable[[], T | None] | None = None

    def holds(self, give_back: Callable[[], object]) -> None:
        """The request has taken something, and ``give_back`` returns it."""
        self._held.callback(give_back)

    def tells(self, so_far: Callable[[], T | None]) -> None:
        """``so_far`` makes the answer that stands for an error; None while nothing of the request is done."""
        self._so_far = so_far

    def end(self, told: T | DelaydError) -> None:
        """Give back what the request holds, and answer it."""
        answer, self._answer = self._answer, None
        assert answer is not None, "a request is answered once"
        if isinstance(told, DelaydError) and self._so_far is not None:
            done = self._so_far()
            told = told if done is None else done
        self._held.close()
        answer(told)

    @contextmanager
    def begins(self) -> Iterator[None]:
        """The first step. Its error is raised to the caller, who tells it; the request holds nothing then."""
        try:
            yield
        except BaseException:
            self._answer = None
            self._held.close()
            raise

    @contextmanager
    def goes_on(self) -> Iterator[None]:
        """A later step, which runs in a callback of the loop: nobody is there to catch its error, so the error is the
        answer. Only a server that must stop passes it on.
        """
        try:
            yield
        except ServerStopped:
            raise
        except DelaydError as error:
            if self._answer is None:
                raise  # The request has been answered, so this is the error of something else.
            self.end(_told_to_callers(error))


def _told_to_callers(error: DelaydError) -> DelaydError:
    # What is damaged or short here concerns the operator, who finds it in the log and in STATUS; a caller waits for it.
    if isinstance(error, DataError):
        return SlowDown(f"this server can't read what the request needs now; ask again later: {error.message}")
    return error
