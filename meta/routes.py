"""Routes: which realtime server has which subject.

Invariant: a route that is given out is durable, and does not change by itself. A route that is decided and not durable
yet counts as taken, so that it is not decided a second time. A route is *unused* until a delay server asks for it,
because a delay server asks only for subjects with messages. Unused routes, which only consumers have looked at, are
bounded, and given back when nobody has looked at them for a while (rule B1). A waiting consumer looks again and again,
so its route stays.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

from delayd.wire.meta import SubjectPage

UNUSED_MAX = 100_000  # Routes of subjects that no message has used: 40 MB in memory and on disk.
# How long after the last look such a route is given back; a waiting consumer looks six times within this.
UNUSED_MS = 3_600_000
GIVEN_BACK_MAX = 1_000  # Routes that one transaction gives back, so that a turn of the loop is bounded.


class RouteTable:
    """Routes by subject, in memory; about 200 B each."""

    def __init__(
        self,
        stored: Iterable[tuple[str, int]],
        unused: Iterable[tuple[str, int]] = (),
        lost: Iterable[str] = (),
        now_ms: int = 0,
    ) -> None:
        self.lost = set(lost)  # Subjects whose route did not check: they have no route until an operator moves them.
        self._durable = dict(stored)
        looked = {name: log_id for name, log_id in unused if name not in self._durable}
        self._unused = dict.fromkeys(looked, now_ms)  # When each was looked at last, monotonic; the oldest first.
        self._durable |= looked
        self._decided: dict[str, int] = {}
        self._counts = Counter(self._durable.values())
        self._names = sorted(self._durable)
        self._names_sorted = True
        self._names_stale = False  # Whether some of them have no route any more, or are in the list twice.

    def __len__(self) -> int:
        return len(self._durable)

    def get(self, subject: str) -> int | None:
        """The log_id that serves a subject, if the route is durable."""
        return self._durable.get(subject)

    def has_unsettled(self, subjects: Iterable[str]) -> bool:
        """Whether a route of these is decided and not durable yet."""
        return bool(self._decided) and any(subject in self._decided for subject in subjects)

    def has_routes(self, log_id: int) -> bool:
        """Whether a subject is routed to a server."""
        return self._counts[log_id] > 0

    def unused_of(self, subjects: Iterable[str]) -> dict[str, int]:
        """Pick the subjects whose route is durable and was not used yet."""
        if not self._unused:
            return {}
        return {subject: self._durable[subject] for subject in subjects if subject in self._unused}

    def has_room(self, subjects: Iterable[str]) -> bool:
        """Whether unused routes may be made for these subjects."""
        new = sum(1 for subject in set(subjects) if subject not in self._durable and subject not in self._decided)
        return not new or len(self._unused) + len(self._decided) + new <= UNUSED_MAX

    def look(self, subjects: Iterable[str], now_ms: int) -> None:
        """Note that somebody asks for these subjects: unused routes among them stay for a while."""
        if self._unused:
            for subject in subjects:
                if subject in self._unused:
                    del self._unused[subject]
                    self._unused[subject] = now_ms

    def forgotten(self, before_ms: int) -> list[str]:
        """Unused routes with no look at them since ``before_ms``, the oldest first; at most GIVEN_BACK_MAX."""
        found: list[str] = []
        for subject, looked_ms in self._unused.items():
            if looked_ms >= before_ms or len(found) == GIVEN_BACK_MAX:
                break
            found.append(subject)
        return found

    def give_back(self, subjects: Iterable[str]) -> None:
        """Forget unused routes that were removed: a later question for one of their subjects gets a new route."""
        for subject in subjects:
            self._counts[self._durable.pop(subject)] -= 1
            del self._unused[subject]
            self._names_stale = True

    def set_used(self, subjects: Iterable[str]) -> None:
        """Note that these subjects have messages; the state says so already."""
        for subject in subjects:
            self._unused.pop(subject, None)

    def move(self, subject: str, log_id: int) -> None:
        """Give a subject to another server: an operator decided so, and that is durable."""
        known = self._durable.get(subject)
        if known is not None:
            self._counts[known] -= 1
        else:
            self._names.append(subject)
            self._names_sorted = False
        self.lost.discard(subject)
        self._durable[subject] = log_id
        self._counts[log_id] += 1
        self._unused.pop(subject, None)

    def remove(self, log_id: int) -> None:
        """Take all subjects away from a server: an operator decided so, and that is durable."""
        for subject in self.subjects_of(log_id):
            del self._durable[subject]
            self._unused.pop(subject, None)
        self._names = sorted(self._durable)
        self._names_sorted = True
        del self._counts[log_id]

    def subjects_of(self, log_id: int) -> list[str]:
        """All subjects that are routed to a server; walks over every route."""
        return [subject for subject, owner in self._durable.items() if owner == log_id]

    def decide(self, subjects: Iterable[str], live: Sequence[int]) -> dict[str, int]:
        """Choose for each subject without a route the live server with the fewest subjects, the lowest of them first.

        The routes are given out after `settle`. Without a live server none is decided.
        """
        servers = [(self._counts[log_id], log_id) for log_id in live]
        heapq.heapify(servers)
        decided: dict[str, int] = {}
        for subject in subjects if servers else ():
            if subject not in self._durable and subject not in self._decided and subject not in self.lost:
                count, log_id = servers[0]
                heapq.heapreplace(servers, (count + 1, log_id))
                self._decided[subject] = decided[subject] = log_id
                self._counts[log_id] += 1
        return decided

    def settle(
        self, decided: Mapping[str, int], *, durable: bool, unused: Container[str] = (), now_ms: int = 0
    ) -> None:
        """Make decided routes valid once they are durable; or take them back, because nothing of them was stored."""
        for subject, log_id in decided.items():
            del self._decided[subject]
            if durable:
                self._durable[subject] = log_id
                if subject in unused:
                    self._unused[subject] = now_ms
            else:
                self._counts[log_id] -= 1
        if durable:
            self._names.extend(decided)
            self._names_sorted = self._names_sorted and not decided

    def page(self, prefix: str, after: str, limit: int) -> SubjectPage:
        """At most `limit` subjects that begin with `prefix` and come behind `after`, in order of name."""
        if self._names_stale:
            self._names, self._names_stale, self._names_sorted = sorted(self._durable), False, True
        elif not self._names_sorted:
            # This costs little when most names are in order; it is done here because only listings need it.
            self._names.sort()
            self._names_sorted = True
        names = self._names
        begin = max(bisect_left(names, prefix), bisect_right(names, after))
        page: list[tuple[str, int]] = []
        while begin < len(names) and names[begin].startswith(prefix):
            if len(page) == limit:
                return SubjectPage(page, more=True)
            page.append((names[begin], self._durable[names[begin]]))
            begin += 1
        return SubjectPage(page, more=False)
