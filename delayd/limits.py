"""Limits of messages, each with its reason; clients and servers have the same ones (docs/protocol.md).

Invariant: no server refuses, for its size, a message that a client takes by these limits. Limits of a format stand with
that format: rows and bytes of a batch in delayd/batch.py, a frame in delayd/wire/frame.py, a group of a log in
delayd/log/group.py.
"""

SUBJECT_BYTES_MAX = 255  # Its length fits one byte, and one head holds 2,000 of them (wire/meta.py).
SUBSCRIBED_MAX = 4_000  # Subjects of one consumer that lists them: one head holds as many.
GROUP_NAME_BYTES_MAX = 255  # A group of consumers may have as long a name as a subject.
KEY_BYTES_MAX = 200  # With a subject of 255 bytes a name still fits the index of keys (docs/formats/keys.md).
LEASE_MS_MAX = 43_200_000  # A consumer that works longer on one message extends its lease, or sends the rest.
ORDERED_WAIT_MS_MAX = 86_400_000  # A message of an ordered group waits in its place, in the memory of its server.
TAGS_MAX = 16  # Of one message: more of them would set most bits of its bloom.
TAG_BYTES_MAX = 64
HEADERS_BYTES_MAX = 32 << 10  # Routers and consoles read headers, and they should not need megabytes for that.
MESSAGE_BYTES_MAX = 4 << 20  # Headers and body: four of the largest still share a batch.
# What servers may add to a message that comes again, on top of both limits (`delayd.life`).
LIFE_BYTES_MAX = 4 << 10
