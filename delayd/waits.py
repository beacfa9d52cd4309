"""Waits: each state of a server that needs an operator, with the command that leads out of it.

Invariant: whatever a server says that it waits for is a kind of this table; docs/operations.md (States) has a row for
each, and says what its command costs.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Wait(NamedTuple):
    """One state; one in the list ``waits`` needs an operator to end, one in ``refuses`` ends by itself."""

    what: str  # The messages or actions that wait or are refused: `1,200 messages of orders.eu`.
    why: str  # A sentence without its full stop.
    command: str = ""  # The command or action for an operator; empty when there is nothing to do but wait.


CLOCK_UNCONFIRMED = "the wall clock jumped, or the machine was restarted, and no other clock has confirmed it yet"
_FREE_SPACE = "free space on its disk, or move --data to a larger one"
_TRUST = "compare it: delayd clock --role {role}; if it is right: delayd clock --role {role} --trust"
_FORGET = "delayd server forget {role} {log_id}"
_ACCEPT = "delayd target accept {target}"
_BACK = (
    "start realtime server {target}; gone for good: delayd target lost {target}, then "
    "delayd server forget realtime {target} --routes"
)
_NEWEST_ORIGIN = f"bring back the newest directory of this delay server; there is none: {_ACCEPT}"
_NEWEST_ORIGIN += ", and what was delivered since its copy comes a second time"
_NEWEST_TARGET = f"bring back the newest directory of realtime server {{target}}; there is none: {_ACCEPT}"
_NEWEST_TARGET += ", and what it has lost is not sent again; it is gone for good: delayd target lost {target}"
_FILE_BACK = "put {path} back from a copy, then: delayd mend take {id} --server {log_id}"
_RELEASE = "delayd mend release {id} --server {log_id}"
_GIVE_UP = "delayd mend give-up {id} --server {log_id}, and {cost}"
_FILE_OR_GIVE_UP = f"{_FILE_BACK}; there is no copy: {_GIVE_UP}"


class WaitKind(Enum):
    """What waits, and what an operator does; words in braces are filled in when a server tells of the state."""

    # Any server may not serve (rule H8).
    IN_ANOTHER_PLACE = "all of {server}", "start meta; if this is a copy, stop this server"
    PLACE_TAKEN = "all of {server}", "wait for the end of a lease; or stop the other server"
    FENCED_INSTANCE = "all of {server}", "stop this server; or the other one, then start this one again"
    STALE_EPOCH = "all of {server}", f"stop this server; or, if it was restored on purpose, {_FORGET}"
    EPOCH_OUT_OF_RANGE = "all of {server}", f"stop this server; or, if its number is right, {_FORGET}"
    WRONG_CLUSTER = "all of {server}", "stop this server, and give it the address of its own meta server"
    TARGET_NOT_ASKED = "all of {server}", _BACK
    TARGET_REFUSES = "all of {server}", _NEWEST_ORIGIN
    TARGET_HAS_LOST = "all of {server}", _NEWEST_TARGET
    QUOTAS_NOT_KNOWN = "all of {server}", "start the other delay servers, or look at their logs"
    HELD = (
        "all of the {role} server: it could not start",
        "put the file back (copied beside it, then renamed): it is looked at each second",
    )
    DELAY_AWAY = (
        "sends to it, and messages that it holds",
        "start it, or look at its log; gone for good: delayd server forget delay {log_id}",
    )
    REALTIME_AWAY = (
        "messages of its subjects",
        "start it, or look at its log; gone for good: delayd server forget realtime {log_id} --routes",
    )
    NO_DELAY_SERVER = "all sends", "start one: delayd delay --data DIR --meta {meta}"
    NO_REALTIME_SERVER = "messages of all subjects", "start one: delayd realtime --data DIR --meta {meta}"

    # Any server, its disk and its clock.
    STATE_REPLACED = "the state of this server", "find out who did so, then restart this server"
    CLOCK = "what can't be undone: {held}", _TRUST
    DISK_FULL = "all sends", _FREE_SPACE
    DISK_NEARLY_FULL = "sends of messages due from {hour} on", _FREE_SPACE
    TARGET_DISK_FULL = "messages that delay servers hand over", _FREE_SPACE
    CLOCK_WAS_AHEAD = "sealing of hours, and what frees their space", "delayd clock --role delay --trust"

    # What a delay or a realtime server can't read, by what may be decided about it (delayd.wire.mend).
    FILE_SET_ASIDE = "{what}", _FILE_BACK
    FILE_SET_ASIDE_OR_GIVEN_UP = "{what}", _FILE_OR_GIVE_UP
    SET_ASIDE = "{what}", _RELEASE
    GROUP_DAMAGED = "{what}", f"{_RELEASE}; or {_GIVE_UP}"
    GROUP_WITHOUT_NAME = "{what}", _GIVE_UP

    # A delay server, and where its messages go.
    NO_TARGET = "{rows} due messages", "start a realtime server: delayd realtime --data DIR --meta ADDRESS"
    TARGET_GIVEN_UP = (
        "{rows} due messages",
        "delayd server forget realtime {target} --routes; no other realtime server serves: start one: "
        "delayd realtime --data DIR --meta ADDRESS",
    )
    ROWS_TARGET_AWAY = "{rows} due messages for realtime server {target}", _BACK
    ROWS_TARGET_REFUSES = "{rows} due messages for realtime server {target}", _NEWEST_ORIGIN
    ROWS_TARGET_HAS_LOST = "{rows} due messages for realtime server {target}", _NEWEST_TARGET
    DRAIN_REFUSED = "{rows} messages on their way to delay server {to}", "end what that delay server waits for"
    DRAINED_AWAY = "messages on their way to delay server {origin}", "start delay server {origin}, or look at its log"
    SLOTS_LEAVING = "keys of the slots {slots}", "delayd server drain {log_id}"

    # A realtime server.
    ORIGIN_RESTORED = (
        "what the delay server {origin} has to hand over",
        "bring back the newest directory of that delay server; there is none: "
        "delayd target accept {log_id} --server {origin}",
    )
    PULLS_UNREAD = "all pulls and acknowledgements, and retention", _FILE_OR_GIVE_UP
    RETRIES_REFUSED = "{batches} batches of messages that are to come again", "end what that delay server waits for"
    RETRIES_AWAY = (
        "messages that are to come again through delay server {origin}",
        "start delay server {origin}, or look at its log",
    )
    CONTENT_DIFFERS = "a look at {rows} messages of this server's message log", "delayd log verify"
    LEFT_BEHIND = (
        "{rows} messages of {subject} for group {group}",
        "delayd route move {subject} --to {log_id}, until its consumers have emptied it",
    )

    # Meta.
    ROUTE_DAMAGED = "messages of {subject}", "delayd route move {subject} --to {to}"
    SLOTS_DISPUTED = "keys of the slots {slots}", "delayd slots move {slots} --to {to}"
    SLOTS_WITHHELD = (
        "keys of the slots {slots}",
        "start the delay servers that are missing; or delayd slots settle, if they are gone for good",
    )
    SLOTS_UNKNOWN = (
        "keys that were not used before",
        "start delay server {log_id}; gone for good: delayd server forget delay {log_id}",
    )

    def wait(self, why: str, **words: object) -> Wait:
        """The state as a server tells of it."""
        what, command = self.value
        return Wait(what.format(**words), why, command.format(**words))
