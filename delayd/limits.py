"""The limits of what a user may send, each with its reason; clients and servers hold the same ones (docs/protocol.md).

Invariant: whatever a client takes by these, no server refuses for its size. Limits of a format stand with that format:
rows and bytes of a batch in delayd/batch.py, a frame in delayd/wire/frame.py, a group of a log in delayd/log/group.py.
"""

SUBJECT_BYTES_MAX = 255  # Its length fits one byte, and one head holds 2,000 of them (wire/meta.py).
GROUP_NAME_BYTES_MAX = 255  # A group of consumers has a name as long as a subject's may be.
HEADERS_BYTES_MAX = 32 << 10  # They are read by routers and consoles, which should not need megabytes.
MESSAGE_BYTES_MAX = 4 << 20  # Headers and body: four of the largest still share a batch.
