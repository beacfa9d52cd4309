"""Unseen: subjects whose messages nobody pulls, because no group was ever created; retention removes these messages all
the same.

A new group begins at the earliest message that is kept, so messages that were removed before are never delivered to it
(rule Q3 is about groups only). Invariant: in each life such a subject is logged once before its first message is
removed, and so is the loss. An unreadable file here never keeps retention from its work.
"""

import logging
from collections.abc import Callable

from delayd.errors import RetryLater

from .index import Index, Subject

# Subjects that are followed at a time: each may cost some reads of its consume log. The listing shows all of them.
SUBJECTS_MAX = 256

log = logging.getLogger(__name__)


class Unseen:
    """Looks at subjects without groups, at the pace of housekeeping; belongs to the loop."""

    def __init__(self, index: Index, has_group: Callable[[str], bool], retention_ms: int) -> None:
        self._index = index
        self._has_group = has_group
        self._retention_ms = retention_ms
        # Subjects that had no group at the last look; a consumer may be about to create one.
        self._noticed: set[Subject] = set()
        # Subjects that were logged, with the first consume sequence that was kept then.
        self._told: dict[Subject, int] = {}
        # Subjects without kept messages, with their end at that time; they don't count against SUBJECTS_MAX.
        self._empty: dict[Subject, int] = {}

    def look(self) -> None:
        """Log subjects that had no group at the last look either."""
        self._told = {subject: first for subject, first in self._told.items() if not self._has_group(subject.name)}
        noticed: set[Subject] = set()
        for subject in self._index:
            if len(self._told) + len(noticed) >= SUBJECTS_MAX:
                break
            if subject in self._told or self._has_group(subject.name) or self._empty.get(subject) == subject.end:
                continue
            if subject not in self._noticed or (first := self._first(subject)) is None:
                noticed.add(subject)
            elif first == subject.end:
                self._empty[subject] = first
            else:
                self._told[subject] = first
                log.warning(
                    "subject_without_group subject=%s messages=%d kept_for_ms=%d then=removed_unseen "
                    "fix=let_a_consumer_of_a_group_pull_once",
                    *(subject.name, subject.end - first, self._retention_ms),
                )
        self._noticed = noticed

    def removed(self) -> None:
        """Log how many unseen messages retention has removed."""
        for subject, first in list(self._told.items()):
            if self._has_group(subject.name):
                continue
            kept_from = self._first(subject)
            if kept_from is None:
                continue
            if kept_from > first:
                log.error("messages_removed_unseen subject=%s messages=%d", subject.name, kept_from - first)
                self._told[subject] = kept_from
            if kept_from == subject.end:
                self._empty[subject] = self._told.pop(subject)

    def _first(self, subject: Subject) -> int | None:
        """The first message that is kept; None when its consume log can't be read, which a pull reports in full."""
        try:
            return self._index.first(subject)
        except RetryLater as error:
            log.warning("unseen_not_known subject=%s reason=%r", subject.name, error.message)
            return None
