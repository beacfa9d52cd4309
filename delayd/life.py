"""Lives: a message that comes to its group again is a new message; its headers say what it was before (rule Q2).

Headers that begin with `delayd.` are the servers' own: producers can't set them, and consumers see them as attributes
of a message.
"""

LIFE_PREFIX = "delayd."
ATTEMPT = "delayd.attempt"  # How often handlers of the group got the message in its earlier lives.
ORIGIN = "delayd.origin"  # The sequence of its first life, at the same delay server.
FIRST_DUE_MS = "delayd.first_due_ms"  # When it was due the first time.
ERROR = "delayd.error"  # What its last handler said.
HISTORY = "delayd.history"  # JSON: [attempts, when, error] of its latest lives.
KEY = "delayd.key"  # The key of its first life: a label, because the message does not hold the key any more.
REASON = "delayd.reason"  # Why it is a dead letter.
DEAD_AT_MS = "delayd.dead_at_ms"  # Since when.

HISTORY_MAX = 10  # Lives that the history names.
ERROR_BYTES_MAX = 2_000  # Of an error or a reason; a longer one is cut.

TAG_PREFIX = "%"  # Tags that begin with it are the servers' own, too.
DEAD_TAG = "%dead"  # Of a message that is kept as a dead letter.
DEAD_KEPT_MS = 725 * 24 * 3_600_000  # How long a dead letter is kept: a week less than the furthest due instant.


def cut_text(text: str) -> str:
    """A text of at most ERROR_BYTES_MAX bytes: its beginning."""
    data = text.encode(errors="replace")
    return (
        text
        if len(data) <= ERROR_BYTES_MAX and data.decode() == text
        else data[:ERROR_BYTES_MAX].decode(errors="ignore")
    )
