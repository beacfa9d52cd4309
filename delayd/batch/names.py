"""Names of subjects, the patterns that stand for many of them, and the limits of what a message may have.

Clients and servers have the same limits (docs/protocol.md). Invariant: no server refuses, for its size, a message that
a client takes by these limits. Limits of a format stand with that format: rows and bytes of a batch in
delayd/batch/columns.py, a frame in delayd/wire/frame.py, a group of a log in delayd/log/group.py.

Each group of consumers has a *retry subject* of its own, on which messages come to it again (rule Q2):
`%retry/00c1d5f2a98b3e47/12` is that of the group 12 at the realtime server 00c1d5f2a98b3e47. On the *recurring subject*
`%cron` stand the recurring schedules, each under its name as key (docs/recurring.md). Only servers send to both. On the
*record subject* `%once` stand the records of sends that are to happen once (docs/once.md); a client sends a record with
its message, and nothing else. To everybody else these names are reserved.

A *pattern* lets one consumer take many subjects:

    orders.*         orders.eu, orders.us; not orders, and not orders.eu.cancel
    orders.>         orders.eu and orders.eu.cancel; not orders
    *.cancel         orders.cancel, mail.cancel

No subject has the characters ``*`` and ``>``, so a text is never both. Subjects that servers keep for themselves match
no pattern.
"""

import re

from delayd.errors import BadSubject

SUBJECT_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._%/-"
SUBJECT_BYTES_MAX = 255  # Its length fits one byte, and one head holds 2,000 of them (wire/meta.py).
SUBSCRIBED_MAX = 4_000  # Subjects in the list of one subscription: one head holds as many.
GROUP_NAME_BYTES_MAX = 255  # The name of a group of consumers, which is printable UTF-8.
KEY_BYTES_MAX = 200  # With a subject of 255 bytes a name still fits the index of keys (docs/formats/keys.md).
LEASE_MS_MAX = 43_200_000  # A consumer that works longer on one message extends its lease, or sends the rest.
ORDERED_WAIT_MS_MAX = 86_400_000  # A message of an ordered group waits in its place, in the memory of its server.
TAGS_MAX = 16  # Of one message: more of them would set most bits of its bloom.
TAG_BYTES_MAX = 64
HEADERS_BYTES_MAX = 32 << 10  # Routers and consoles read headers, and they should not need megabytes for that.
MESSAGE_BYTES_MAX = 4 << 20  # Headers and body: four of the largest still share a batch.
# What servers may add to a message that comes again, on top of both limits (`delayd.batch.labels`).
LIFE_BYTES_MAX = 4 << 10


RETRY_PREFIX = "%retry/"
RECURRING_SUBJECT = "%cron"
RECORD_SUBJECT = "%once"
_NAME = re.compile(r"%retry/([0-9a-f]{16})/([1-9][0-9]{0,9})")


def retry_subject(log_id: int, group_id: int) -> str:
    """The retry subject of a group of that realtime server."""
    return f"{RETRY_PREFIX}{log_id:016x}/{group_id}"


def parse_retry_subject(name: str) -> tuple[int, int] | None:
    """The realtime server's log_id and the group's id; None when it is no name of a retry subject."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1], 16), int(found[2]))


def is_reserved(name: str) -> bool:
    """Whether only servers may send to a subject of this name."""
    return name.startswith(RETRY_PREFIX) or name in (RECURRING_SUBJECT, RECORD_SUBJECT)


RESERVED = (
    f"{RECURRING_SUBJECT}, {RECORD_SUBJECT} and subjects that begin with {RETRY_PREFIX} are the servers' own; choose"
    " another name"
)
"""What somebody is told who sends there."""


def check_subject(name: bytes) -> None:
    """Check that a subject has 1 to 255 bytes of the alphabet; BadSubject says what is wrong."""
    if not 0 < len(name) <= SUBJECT_BYTES_MAX:
        raise BadSubject(f"a subject of {len(name)} bytes; it has 1 to {SUBJECT_BYTES_MAX}")
    if name.translate(None, SUBJECT_ALPHABET):
        raise BadSubject(f"subject {name!r} has a character other than letters, digits and . _ % / -")


class Pattern:
    """One pattern; ``prefix`` is what all its subjects begin with."""

    __slots__ = ("_matches", "prefix", "text")

    def __init__(self, text: str) -> None:
        words = _words(text)
        self.text = text
        wild = next((number for number, word in enumerate(words) if word in "*>"), len(words))
        self.prefix = "".join(f"{word}." for word in words[:wild])
        self._matches = re.compile(r"\.".join(_MEANS.get(word) or re.escape(word) for word in words)).fullmatch

    def matches(self, subject: str) -> bool:
        """Whether it stands for this subject, too."""
        return self._matches(subject) is not None and not is_reserved(subject)

    def meets(self, other: str) -> bool:
        """Whether a subject may exist for which this pattern and another pattern both stand.

        Word by word: ``a.*`` and ``*.b`` meet in a.b; ``a.>`` and ``*.b.c`` in a.b.c; ``a.*`` and ``a.b.>`` nowhere,
        because the first has two words and the second at least three.
        """
        mine, others = self.text.split("."), other.split(".")
        for at, (one, another) in enumerate(zip(mine, others, strict=False)):
            if one == ">" or another == ">":
                return True  # It takes this word of the other one, and all that follow.
            if one != another and "*" not in (one, another):
                return False
            if at + 1 == min(len(mine), len(others)) and len(mine) != len(others):
                return False  # One ends here, and the other goes on.
        return True


def is_pattern(text: str) -> bool:
    """Whether a text is meant as a pattern, and not as a subject."""
    return "*" in text or ">" in text


def _words(text: str) -> list[str]:
    words = text.split(".")
    if len(text.encode(errors="replace")) > SUBJECT_BYTES_MAX:
        raise BadSubject(f"a pattern of {len(text)} characters; it has at most {SUBJECT_BYTES_MAX} bytes")
    if not is_pattern(text):
        raise BadSubject(f"{text!r} is no pattern: one of its words is * or >")
    for number, word in enumerate(words, 1):
        if word == "*" or (word == ">" and number == len(words)):
            continue
        if not word or word.encode(errors="replace").translate(None, SUBJECT_ALPHABET):
            raise BadSubject(
                f"word {number} of the pattern {text!r} is {word!r}; a word between dots is * (any one word), > at the"
                " end (one word or more), or has letters, digits and _ % / -"
            )
    return words


_MEANS = {"*": r"[^.]+", ">": r".+"}
