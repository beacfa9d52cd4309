"""Patterns: names that stand for many subjects, so that one consumer takes them all.

    orders.*         orders.eu, orders.us; not orders, and not orders.eu.cancel
    orders.>         orders.eu and orders.eu.cancel; not orders
    *.cancel         orders.cancel, mail.cancel

No subject has the characters ``*`` and ``>``, so a text is never both. Subjects that servers keep for themselves match
no pattern.
"""

import re

from delayd.errors import BadSubject
from delayd.limits import SUBJECT_BYTES_MAX
from delayd.retry_subject import is_reserved
from delayd.validate import SUBJECT_ALPHABET


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
