"""Group records: groups begin and end by records in the pull log, and an operator decides about lost progress
(docs/formats/pull.md).

A new group is served when its record is durable. A group that is deleted ends at once, and whoever asked for it is
answered when the record is durable. What a checkpoint stores of groups and removes of them is noted here. An
ephemeral group ends when none of the connections that used it is left for a while.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from delayd.batch.names import is_reserved
from delayd.errors import BadArgument, RetryLater, SlowDown
from delayd.log.control import (
    GroupBegins,
    GroupBounded,
    GroupCreated,
    GroupDeleted,
    GroupEphemeral,
    GroupFiltered,
    GroupHeldBack,
    GroupMoved,
    GroupOrdered,
    Known,
)
from delayd.log.pull import skip_group_ids
from delayd.machine.alarms import Alarms
from delayd.machine.operating import LogLimit
from delayd.wire.consuming import End, Position

from .answers import passed_over
from .commit import PullCommit
from .group_window import GroupWord
from .groups import Changes, Group, LostGroup
from .handoff import Peer
from .kept import group_keys
from .polls import RETRY_MS
from .pulls import Pulls
from .recovery import PullReplay
from .subject_index import Index, StoredBatches
from .terms import FROM_EARLIEST, OPEN, Beginning, begins_at_ms, encode_filter, find
from .unreadable import Bad
from .words import SECRET_BITS

# Pause between two groups that are forgotten to make room: each is a record of the log, and kept until a checkpoint.
ROOM_EVERY_MS = 10
AHEAD_MS_MAX = 5_000  # The clock of who moves a group may be ahead by this much.

GONE_MS = 30_000  # As long as a consumer may be away, for example while it connects anew.
LOOK_MS = 5_000  # Between two looks; each costs a microsecond a group.
CONSUMERS_MAX = 131_072  # Connections of consumers of ephemeral groups, once for each group: 0.2 KB, 26 MiB.

limited = LogLimit(logging.getLogger(__name__))  # Lines that consumers can provoke.
log = logging.getLogger(__name__)


class GroupRecords:
    """Creates and deletes groups; belongs to the loop."""

    def __init__(self, pulls: Pulls, index: Index, stored: StoredBatches, pull_log: PullCommit, alarms: Alarms) -> None:
        self.on_deleted: list[Callable[[Group], None]] = []  # Called while the group is still as it was.
        self.roster = pulls.roster
        self.changes = Changes(())
        self.removes: list[bytes] = []  # Keys of groups that are gone, for the next checkpoint.
        self.ephemeral = Ephemeral(alarms, self._end)
        self.left: dict[Group, None] = {}  # Groups of retry subjects whose own groups have ended.
        self.on_left: Callable[[], None] = lambda: None
        self._pulls = pulls
        self._index = index
        self._stored = stored
        self._log = pull_log
        self._clock = alarms.clock
        self._left_ids_out = False
        self._room_at_ms = 0  # When a group may next be forgotten to make room for another one.

    def begin(self, replay: PullReplay) -> None:
        """Serve the groups that a replay of the pull log has rebuilt."""
        self._pulls.begin(replay)
        self.changes = Changes(replay.groups.values())
        self.roster.keep_lost(replay.lost.values())
        self.removes += replay.removes
        for group in replay.groups.values():
            if group.ephemeral:
                self.ephemeral.watch(group)
            if group.parent is None and is_reserved(group.subject.name):
                self.left[group] = None

    def create(self, subject_name: str, name: str, beginning: Beginning = FROM_EARLIEST) -> Group:
        """Create a group that does not exist; its record is durable before it is served.

        Raises:
            BadArgument: there is no such position.
            SlowDown: there is no room for one more.
            RetryLater: the disk is full.
            DelaydError: its progress is lost, and an operator has not decided about it.
        """
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._room_at_ms and (idle := self.roster.to_forget(subject_name)) is not None:
            self._room_at_ms = now_ms + ROOM_EVERY_MS
            self.delete(idle)
        self.roster.check_new(subject_name, name)
        return self._make(subject_name, name, self.roster.next_id, beginning)

    def begin_anew(self, lost: LostGroup, begun: Callable[[], None]) -> None:
        """Let a group whose progress is lost begin at the earliest message that is kept; ``begun`` is called when that
        is durable.
        """
        assert lost.names is not None, "who has no names begins nothing"
        self._make(*lost.names, lost.group_id)
        self.roster.strike_lost(lost)
        self._log.when_durable(begun)

    def delete(self, group: Group | LostGroup, deleted: Callable[[], None] | None = None) -> None:
        """Delete a group, and with it that of what comes to it again; ``deleted`` is called when that is durable. The
        messages that it held go to no other group.
        """
        both = [*self.roster.children(group.group_id), group]
        # One append, so that neither a crash nor a full disk leaves a child whose group is gone.
        self._log.append_record(*[GroupDeleted(each.group_id) for each in both])
        for each in both:
            self.removes += group_keys(each.group_id)
            if isinstance(each, Group):
                self._forget(each)
            else:
                self.roster.strike_lost(each)
        if deleted is not None:
            self._log.when_durable(deleted)

    def _end(self, group: Group) -> None:
        """End a group that has no consumers any more. The group of what was to come to it again stays, until nothing of
        that is pending at the delay servers.
        """
        child = group.child
        if child is None:
            self.delete(group)
            return
        self._log.append_record(GroupDeleted(group.group_id))
        self.removes += group_keys(group.group_id)
        self._forget(group)
        child.parent = None
        self.left[child] = None
        self.on_left()

    def leave_ids_out(self) -> None:
        """Leave ids unused, once in a life: this directory was restored, copied or moved, or may have been, and groups
        that it does not know may have had the next ids (rule Q2).
        """
        if self._left_ids_out or not self.roster.known:
            return
        self._left_ids_out = True
        skipped = skip_group_ids(self._clock.now_ms())
        self.roster.next_id += skipped.ids
        # The disk may be full; then the next checkpoint stores the next id.
        with suppress(RetryLater):
            self._log.append_record(skipped)
            self._log.when_durable(lambda: None)

    def bound(self, group: Group, in_flight_max: int) -> None:
        """Let the consumers of a group hold so many messages at most, from now on (rule Q10). Nobody waits for the
        fsync: who pulls after a crash says the bound again.
        """
        if group.in_flight_max != in_flight_max:
            self._log.append_record(GroupBounded(group.group_id, in_flight_max))
            group.bound(in_flight_max)
            if group.ready:
                self._pulls.serve(group)

    def find(self, group: Group, position: Position) -> int:
        """Where a position lies in the subject of a group; raises as `realtime.terms.find` does."""
        now_ms = self._clock.now_ms()
        if begins_at_ms(position, now_ms) > now_ms + AHEAD_MS_MAX:
            raise BadArgument(
                "this instant has not come, so nobody knows which message comes then; name an earlier one"
            )
        return find(position, group.subject, self._index, self._stored)

    def move(self, group: Group, to: int, moved: Callable[[], None]) -> None:
        """Let a group go on at a consume sequence; ``moved`` is called when that is durable."""
        self._log.append_record(GroupMoved(group.group_id, to))
        self._pulls.move(group, to)
        self._log.when_durable(moved)

    def hold_back(self, group: Group, held_back: bool, done: Callable[[], None]) -> None:
        """Give nobody messages of a group, or give them again; ``done`` is called when that is durable."""
        if group.held_back != held_back:
            self._log.append_record(GroupHeldBack(group.group_id, int(held_back)))
            group.hold_back(held_back)
            self._pulls.serve(group)
        self._log.when_durable(done)

    def give_up(self, bad: Bad, done: Callable[[], None]) -> None:
        """Count the messages of an unreadable batch as acknowledged by the groups that passed over them."""
        now_ms = self._clock.now_ms()
        incarnation = self._pulls.given_out.life << SECRET_BITS
        for group, offer in bad.passed:
            at = (incarnation, self._pulls.next_pull)
            self._log.append(passed_over(group, offer, at, now_ms))
            self._pulls.pass_over(offer.messages)
            group.changing().tell(GroupWord.GIVEN_UP, offer.consume_first, offer.consume_first + offer.messages)
        self._pulls.quarantine.drop(bad)
        self._log.when_durable(done)

    def _forget(self, group: Group) -> None:
        for heard in self.on_deleted:
            heard(group)
        self.ephemeral.forget(group)
        self.left.pop(group, None)
        self._pulls.forget(group)
        self.changes.forget(group)
        if not self.roster.has(group.subject.name):
            self._index.forget_empty(group.subject.name)

    def _make(self, subject_name: str, name: str, group_id: int, beginning: Beginning = FROM_EARLIEST) -> Group:
        subject = self._index.subject(subject_name)
        at = find(beginning.start, subject, self._index, self._stored)
        group = Group(group_id, subject, name, at, self._pulls.next_pull)
        group.ephemeral, group.filter = beginning.ephemeral, beginning.filter
        # One append, so that no crash leaves a group that begins elsewhere.
        records: list[Known] = [GroupCreated(group_id, subject_name, name)]
        if beginning.start is not End.EARLIEST:
            records.append(GroupMoved(group_id, at))
        if begins_at := begins_at_ms(beginning.start, self._clock.now_ms()):
            group.begins_at_ms = begins_at
            records.append(GroupBegins(group_id, begins_at))
        if beginning.ephemeral:
            records.append(GroupEphemeral(group_id))
        if beginning.filter is not OPEN:
            records.append(GroupFiltered(group_id, encode_filter(beginning.filter)))
        if beginning.ordered:
            group.keep_order()
            records.append(GroupOrdered(group_id))
        self._log.append_record(*records)
        # These come after the append: the disk may be full, and then the next group gets this id.
        self.changes.watch(group)
        if beginning.ephemeral:
            self.ephemeral.watch(group)
        self._pulls.admit(group)
        self._log.when_durable(partial(self._pulls.open, group))
        limited.info("group_created", "group_created subject=%s group=%s start=%d", subject_name, name, group.next)
        return group


class Ephemeral:
    """The ephemeral groups of a server; ``delete`` ends one."""

    def __init__(self, alarms: Alarms, delete: Callable[[Group], None]) -> None:
        self._clock = alarms.clock
        self._look = alarms.alarm(self._look_at_all)
        self._delete = delete
        self._seen_ms: dict[Group, int] = {}  # When each was last seen with a consumer.
        self._peers: dict[Group, set[Peer]] = {}
        self._groups: dict[Peer, set[Group]] = {}
        self._consumers = 0

    def watch(self, group: Group) -> None:
        """Look after a group from now on."""
        self._seen_ms[group] = self._clock.monotonic_ms()
        if self._look.at_ms is None:
            self._look.after(LOOK_MS)

    def check_room(self) -> None:
        """Refuse a further consumer when there are too many, with SlowDown."""
        if self._consumers >= CONSUMERS_MAX:
            what = f"{self._consumers} consumers have groups that end with their connections"
            raise SlowDown(f"{what}, and there is no room for one more", retry_after_ms=RETRY_MS)

    def came(self, peer: Peer, group: Group) -> None:
        """The connection of a consumer of an ephemeral group, which lives as long as this connection from now on.

        Raises:
            SlowDown: there is no room for one more.
        """
        peers = self._peers.get(group)
        if peers is not None and peer in peers:
            return
        self.check_room()
        self._peers.setdefault(group, set()).add(peer)
        self._groups.setdefault(peer, set()).add(group)
        self._consumers += 1

    def disconnected(self, peer: Peer) -> None:
        """A connection has ended."""
        for group in self._groups.pop(peer, ()):
            self._peers[group].discard(peer)
            self._consumers -= 1
            self._seen_ms[group] = self._clock.monotonic_ms()

    def stood_still(self, ms: int) -> None:
        """No consumer could come for so long: this does not count as time without one."""
        for group in self._seen_ms:
            self._seen_ms[group] += ms

    def forget(self, group: Group) -> None:
        """A group is gone."""
        self._seen_ms.pop(group, None)
        for peer in self._peers.pop(group, ()):
            self._consumers -= 1
            of_peer = self._groups[peer]
            of_peer.discard(group)
            if not of_peer:
                del self._groups[peer]

    def _look_at_all(self) -> None:
        """Delete the groups whose consumers have been gone for long enough."""
        now_ms = self._clock.monotonic_ms()
        for group, seen_ms in list(self._seen_ms.items()):
            if self._has_consumers(group):
                self._seen_ms[group] = now_ms
            # A subscription may have ended right after the last look.
            elif now_ms - seen_ms >= GONE_MS + LOOK_MS:
                self._end(group)
        if self._seen_ms:
            self._look.after(LOOK_MS)

    def _has_consumers(self, group: Group) -> bool:
        child = group.child
        # What is on its way to a delay server could not be ended there.
        both = (group,) if child is None else (group, child)
        holds = any(each.outstanding or each.window.leaving for each in both)
        return bool(self._peers.get(group)) or bool(group.subscriptions) or holds

    def _end(self, group: Group) -> None:
        try:
            self._delete(group)
        except RetryLater:
            return  # The disk is full; the next look tries again.
        log.info("group_ended subject=%s group=%s reason=no_consumers", *group.names)
