"""Consumers: their requests are read and checked before anything is done (docs/protocol.md), and their subscriptions
are filled.

The groups of a subscription are found or made, some in each turn of the loop, and so are those of subjects that come
later and match its pattern. When a group can't be made, all subjects of its subscription are looked at again after some
seconds; the others do not wait for it. So nothing is remembered of subjects without a group, however many match a
pattern.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from delayd.batch.labels import ERROR_BYTES_MAX
from delayd.batch.names import GROUP_NAME_BYTES_MAX, SUBSCRIBED_MAX, Pattern, check_subject, is_reserved
from delayd.config import RealtimeConfig
from delayd.errors import (
    BadArgument,
    BadRequest,
    BadSubject,
    DamagedData,
    DelaydError,
    ExclusiveConflict,
    NotOrdered,
    OtherFilter,
    RetryLater,
    ServerStopped,
    Shortage,
    UnknownServer,
)
from delayd.log.pull import PullOp
from delayd.machine.alarms import Alarms
from delayd.machine.operating import LogLimit
from delayd.wire import consuming
from delayd.wire.consuming import End, GroupInfo, StaleRow, SubjectInfo, stale_head
from delayd.wire.frame import Frame, Head, HeadValue
from delayd.wire.heads import (
    HANDLE_MOST,
    INT_MAX,
    need_bool,
    need_int,
    need_list,
    need_rows,
    need_str,
    need_strs,
    need_u32,
    need_u64,
    optional_str,
)

from .group_records import GroupRecords
from .group_window import Stage
from .groups import Group
from .handoff import Peer
from .polls import Claim, Waiting
from .pulls import HANDLES_MAX, Pulls
from .retries import AskedPulls, Retries
from .subject_index import Index, StoredBatches, Subject
from .subscriptions import Subscription
from .terms import FIELDS, FROM_EARLIEST, OPEN, Beginning, beginning_of, check_beginning
from .words import stale_all

WAIT_MS_MAX = 60_000  # The longest wait of a PULL; a client that wants to wait longer asks again.
LEASE_MS_MIN = 100
WINDOW_MS_MIN = 1_000  # Of an exclusive consumer: a slow network must not look like a dead one.
WINDOW_MS_MAX = 600_000
DELAY_MS_MAX = 2 * 366 * 24 * 3_600_000  # As far ahead as a message can be due.
WAS_MAX = 1_000  # A head of 16 KiB has room for as many.
TURN_WORK = 1_024  # Work of one turn, some microseconds each: a name that is compared, a group that joins.
MAKE_WORK = 16  # A group that is made is a record of the pull log, some 50 us.
FAILURES_MAX = 64  # After so many groups that can't be made, only those that exist join until all are looked at again.
RETRY_MS = 5_000
SUBJECTS_MAX = 100  # Rows of one SUBJECTS: each may cost some reads of its consume log.
AGED_MAX = 100  # Rows of one GROUPS with `ages`.
LIST_MAX = 1_000  # Rows of one GROUPS, some milliseconds of work; the next listing goes on behind its last name.

limited = LogLimit(logging.getLogger(__name__))  # Lines that consumers can provoke.
SHARED: tuple[int, frozenset[int]] = (0, frozenset())  # Window and incarnations of a consumer that does not lead.


class Consumers:
    """Reads the requests of consumers, and of tools that list groups and subjects."""

    def __init__(
        self,
        config: RealtimeConfig,
        pulls: Pulls,
        groups: GroupRecords,
        retries: Retries,
        stored: StoredBatches,
    ) -> None:
        self._config = config
        self._pulls = pulls
        self._retries = retries
        self._groups = groups
        self._index = pulls.index
        self._stored = stored
        self._clock = pulls.clock

    def pull(self, peer: Peer, frame: Frame) -> None:
        """Answer a PULL now or later."""
        head = frame.head
        group = self._known(head) if "subscription" not in head else self._subscribed(peer, head)
        names = _names(head) if group is None else None
        wait_ms = min(need_int(head, "wait_ms"), WAIT_MS_MAX)
        lease_ms = need_int(head, "lease_ms", 0, self._config.lease_ms_max) or self._config.lease_ms
        ahead = need_u32(head, "ahead") if "ahead" in head else 0
        max_messages = need_int(head, "max_messages", 1)
        max_bytes = min(need_int(head, "max_bytes", 1), self._config.pull_bytes_max)
        stands = "stands" in head and need_bool(head, "stands")
        need_str(head, "consumer")
        in_flight_max = need_u32(head, "in_flight_max") if "in_flight_max" in head else None
        beginning = FROM_EARLIEST if FIELDS.isdisjoint(head) else beginning_of(head)
        window_ms, was = SHARED
        if "exclusive_ms" in head:
            window_ms, was = _exclusive(head)
            # A lead that lives asks again within its window.
            wait_ms = min(wait_ms, window_ms // 2)
            if isinstance(group, Subscription):
                raise BadRequest("a subscription has no lead; pull from one subject", field="exclusive_ms")
        self._pulls.waiting.check_room()
        if group is None:
            # The group is created only here: a PULL that is refused leaves no group behind.
            assert names is not None
            if beginning.ephemeral:
                self._groups.ephemeral.check_room()
            group = self._groups.create(*names, beginning)
        elif beginning is not FROM_EARLIEST and isinstance(group, Group):
            check_beginning(group, beginning)
        if isinstance(group, Group):
            if group.ephemeral:
                self._groups.ephemeral.came(peer, group)
            if in_flight_max is not None:
                self._groups.bound(group, in_flight_max)
        self._pulls.pull(
            Waiting(
                group=group,
                peer=peer,
                request_id=frame.request_id,
                max_messages=max_messages,
                max_bytes=max_bytes,
                lease_ms=max(lease_ms, LEASE_MS_MIN),
                deadline_ms=self._clock.monotonic_ms() + wait_ms,
                incarnation=self._pulls.incarnation_of(peer),
                ahead=ahead,
                stands=stands and ahead > 0,  # Empty hands have their place by arrival, so they ask again.
                window_ms=window_ms,
                was=was,
            )
        )

    def ack(self, peer: Peer, frame: Frame) -> None:
        """Answer an ACK when it is durable."""
        self._acknowledge(PullOp.ACK, peer, frame)

    def nack(self, peer: Peer, frame: Frame) -> None:
        """Answer a NACK when it is durable; messages that were given to no handler are offered again as the same
        attempt.
        """
        uncounted = "uncounted" in frame.head and need_bool(frame.head, "uncounted")
        self._acknowledge(PullOp.RETURNED if uncounted else PullOp.NACK, peer, frame)

    def retry(self, peer: Peer, frame: Frame) -> None:
        """Answer a RETRY when the decision is durable."""
        self._decide(peer, frame, retries_of)

    def reject(self, peer: Peer, frame: Frame) -> None:
        """Answer a REJECT when the decision is durable."""
        self._decide(peer, frame, rejects_of)

    def extend(self, peer: Peer, frame: Frame) -> None:
        """Answer an EXTEND; it needs no disk, for a start gives each pull a whole lease."""
        if "log_id" in frame.head:
            self._check_log_id(frame.head)
        group = self._known(frame.head)
        if group is None:
            _names(frame.head)
        handles = _handles(frame.head)
        lease_ms = max(need_int(frame.head, "lease_ms", 1, self._config.lease_ms_max), LEASE_MS_MIN)
        stale = stale_all(handles) if group is None else self._pulls.extend(group, handles, lease_ms)
        peer.answer(frame.request_id, stale_head(stale, 0 if group is None else group.wanted))

    def pull_end(self, peer: Peer, frame: Frame) -> None:
        """Answer the PULLs of this connection that wait for a group's messages, and then this request. A consumer that
        has pulled on an earlier connection says by it that it has this one now.
        """
        head = frame.head
        group = self._known(head) if "subscription" not in head else self._subscribed(peer, head)
        window_ms, was = _exclusive(head) if "exclusive_ms" in head else SHARED
        if group is None:
            _names(head)
        else:
            self._pulls.end_waiting(peer, group)
        if isinstance(group, Group):
            if group.ephemeral:
                self._groups.ephemeral.came(peer, group)
            if window_ms:
                incarnation = self._pulls.incarnation_of(peer)
                self._pulls.leads.came_back(Claim(peer, incarnation, window_ms, was | {incarnation}), group)
        peer.answer(frame.request_id, {})

    def groups(self, peer: Peer, frame: Frame) -> None:
        """List groups, from behind the last one of the listing before."""
        head = frame.head
        subject = optional_str(head, "subject")
        after = need_strs(head, "after") if head.get("after") is not None else ["", ""]
        limit = need_int(head, "limit", 1) if "limit" in head else LIST_MAX
        if len(after) != 2:
            raise BadRequest("after is no pair of a subject and a group", field="after")
        found = self._pulls.roster.listed(subject, (after[0], after[1]))
        if "ages" in head and need_bool(head, "ages"):
            now_ms = self._clock.now_ms()
            peer.answer(frame.request_id, aged_groups_head(self._index, self._stored, now_ms, found, limit))
        else:
            peer.answer(frame.request_id, groups_head(found, limit))

    def subjects(self, peer: Peer, frame: Frame) -> None:
        """List subjects."""
        head = frame.head
        prefix, after, limit = need_str(head, "prefix"), need_str(head, "after"), need_int(head, "limit", 1)
        now_ms = self._clock.now_ms()
        answer = subjects_head(self._index, self._stored, self._pulls, now_ms, prefix, after, limit)
        peer.answer(frame.request_id, answer)

    def _check_log_id(self, head: Head) -> None:
        """A word may name the server that gave its messages out; another one knows nothing of them."""
        log_id = need_u64(head, "log_id")
        if log_id != self._pulls.log_id:
            raise UnknownServer(
                f"this is the realtime server {self._pulls.log_id:016x}; say it to {log_id:016x}, which gave the"
                " messages out"
            )

    def _acknowledge(self, op: PullOp, peer: Peer, frame: Frame) -> None:
        if "log_id" in frame.head:
            self._check_log_id(frame.head)
        if "subjects" in frame.head:
            self._acknowledge_many(op, peer, frame)
            return
        group = self._known(frame.head)
        if group is None:
            # The request is first told if its names can't be those of a group.
            _names(frame.head)
        handles = _handles(frame.head)
        request_id = frame.request_id
        if group is None:
            peer.answer(request_id, stale_head(stale_all(handles), 0))
            return
        known = group
        self._pulls.acknowledge(
            op, [(known, handles)], lambda stale: peer.answer(request_id, stale_head(stale, known.wanted))
        )

    def _decide(self, peer: Peer, frame: Frame, read: Callable[[Head], list[AskedPulls]]) -> None:
        if "log_id" in frame.head:
            self._check_log_id(frame.head)
        group = self._known(frame.head)
        if group is None:
            _names(frame.head)
        wanted = read(frame.head)
        request_id = frame.request_id
        if group is None:
            stale = stale_all([(each.incarnation, each.first, each.end - each.first) for each in wanted])
            peer.answer(request_id, stale_head(stale, 0))
            return
        known = group
        self._retries.decide(known, wanted, lambda stale: peer.answer(request_id, stale_head(stale, known.wanted)))

    def _acknowledge_many(self, op: PullOp, peer: Peer, frame: Frame) -> None:
        head, request_id = frame.head, frame.request_id
        name = need_group(head)
        wanted = self._subscribed(peer, head) if "subscription" in head else None
        known: list[tuple[Group, list[list[int]]]] = []
        unknown: list[StaleRow] = []
        for subject, handles in _handles_by_subject(head):
            group = self._pulls.groups.get((subject, name))
            if group is None:
                unknown += stale_all(handles)
            else:
                known.append((group, handles))

        def answer(stale: list[StaleRow]) -> None:
            count = 0 if wanted is None else wanted.wanted
            peer.answer(request_id, stale_head([*unknown, *stale], count))

        self._pulls.acknowledge(op, known, answer, len(unknown))

    def _subscribed(self, peer: Peer, head: Head) -> Subscription:
        return self._pulls.subscriptions.of(peer, need_int(head, "subscription"))

    def _known(self, head: Head) -> Group | None:
        """The group that a request names; None when it does not exist, or the names are not valid."""
        subject, group = head.get("subject"), head.get("group")
        # The names of a group that exists were checked when it was created.
        known = (
            self._pulls.groups.get((subject, group)) if isinstance(subject, str) and isinstance(group, str) else None
        )
        # The messages of a retry subject come to consumers of the group that it belongs to.
        return None if known is not None and is_reserved(known.subject.name) else known


def _exclusive(head: Head) -> tuple[int, frozenset[int]]:
    """The window of a consumer that wants to lead its group, and which incarnations it had before."""
    window_ms = need_int(head, "exclusive_ms", WINDOW_MS_MIN, WINDOW_MS_MAX)
    was = head.get("was", [])
    if not isinstance(was, list):
        return window_ms, frozenset([need_u64(head, "was")])
    if len(was) > WAS_MAX:
        raise BadRequest(f"was names {len(was)} incarnations; it may name {WAS_MAX}", field="was")
    return window_ms, frozenset(need_u64({"was": each}, "was") for each in was)


def _handles(head: Head) -> list[list[int]]:
    """The handles of an acknowledgement, each within what the pull log can hold."""
    if len(need_list(head, "handles")) > HANDLES_MAX:
        raise BadRequest(f"more than {HANDLES_MAX} handles in one request; send several", field="handles")
    handles = need_rows(head, "handles", 3, HANDLE_MOST)
    for _, pull_first, covered in handles:
        if not 0 < covered <= INT_MAX - pull_first:
            raise BadRequest(f"a handle covers {covered} messages from {pull_first} on", field="handles")
    return handles


def _handles_by_subject(head: Head) -> list[tuple[str, list[list[int]]]]:
    """The handles of an acknowledgement of several subjects: each says how many of the handles are its own."""
    handles = _handles(head)
    found: list[tuple[str, list[list[int]]]] = []
    at = 0
    for item in need_list(head, "subjects"):
        subject, count = item if isinstance(item, list) and len(item) == 2 else (None, None)
        if not isinstance(subject, str) or type(count) is not int or not 0 < count <= len(handles) - at:
            raise BadRequest("subjects has rows of a name and how many of the handles are its own", field="subjects")
        found.append((subject, handles[at : at + count]))
        at += count
    if at != len(handles):
        raise BadRequest(f"{len(handles)} handles, of which {at} are those of a subject", field="handles")
    return found


def _names(head: Head) -> tuple[str, str]:
    subject, group = need_str(head, "subject"), need_group(head)
    need_subject(subject)
    return subject, group


def need_subject(subject: str) -> None:
    """Check the name of a subject that a consumer asks for."""
    check_subject(subject.encode())
    if is_reserved(subject):
        raise BadSubject(f"the messages of {subject} come to the consumers of the group that they belong to")


def need_group(head: Head) -> str:
    """The name of a group."""
    group = need_str(head, "group", GROUP_NAME_BYTES_MAX)
    # Names appear in log lines and on screens, so they must have no character that ends a line or moves a cursor.
    if not group or not group.isprintable():
        raise BadRequest("the name of a group has 1 to 255 bytes of printable characters", field="group")
    return group


def retries_of(head: Head) -> list[AskedPulls]:
    """Messages that are to come again."""
    return _wanted(head, "retries", _retry)


def rejects_of(head: Head) -> list[AskedPulls]:
    """Messages that are to become dead letters."""
    return _wanted(head, "rejects", _reject)


def _retry(handle: tuple[int, int, int], rest: Sequence[HeadValue]) -> AskedPulls:
    delay_ms, error = rest
    if type(delay_ms) is not int or not 0 <= delay_ms <= DELAY_MS_MAX:
        raise BadRequest(f"a message comes again after 0 to {DELAY_MS_MAX} ms", field="retries")
    return AskedPulls(*handle, delay_ms, "", _text(error, "retries"))


def _reject(handle: tuple[int, int, int], rest: Sequence[HeadValue]) -> AskedPulls:
    reason, error = (_text(value, "rejects") for value in rest)
    if not reason:
        raise BadRequest("a message is rejected for a reason", field="rejects")
    return AskedPulls(*handle, 0, reason, error)


def _wanted(
    head: Head, name: str, read: Callable[[tuple[int, int, int], Sequence[HeadValue]], AskedPulls]
) -> list[AskedPulls]:
    rows = need_list(head, name)
    if len(rows) > HANDLES_MAX:
        raise BadRequest(f"more than {HANDLES_MAX} handles in one request; send several", field=name)
    found: list[AskedPulls] = []
    for row in rows:
        if type(row) is not list or len(row) != 5:
            raise BadRequest(f"a row of {name} has 5 fields", field=name)
        incarnation, first, covered = (_number(row[at], most, name) for at, most in enumerate(HANDLE_MOST))
        if not 0 < covered <= INT_MAX - first:
            raise BadRequest(f"a handle covers {covered} messages from {first} on", field=name)
        found.append(read((incarnation, first, first + covered), row[3:]))
    last: AskedPulls | None = None
    for each in sorted(found):
        if last is not None and (last.incarnation, last.end) > (each.incarnation, each.first):
            raise BadRequest(f"{name} names the pull sequence {each.first} twice", field=name)
        last = each
    return found


def _number(value: HeadValue, most: int, name: str) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise BadRequest(f"a handle of {name} has numbers of 0 to {most}", field=name)
    return value


def _text(value: HeadValue, name: str) -> str:
    if type(value) is not str or len(value) > 2 * ERROR_BYTES_MAX:
        raise BadRequest(f"a text of {name} has at most {2 * ERROR_BYTES_MAX} characters", field=name)
    return value


class Joins:
    """Fills subscriptions; belongs to the loop."""

    def __init__(self, pulls: Pulls, groups: GroupRecords, index: Index, alarms: Alarms) -> None:
        self._pulls = pulls
        self._groups = groups
        self._index = index
        self._clock = alarms.clock
        self._turn, self._retry = alarms.alarm(self._work), alarms.alarm(self._look_again)
        self._busy: OrderedDict[Subscription, None] = OrderedDict()  # Those with something to do in the next turns.
        self._lacking: dict[Subscription, None] = {}  # Those of which a group could not be made.
        groups.on_deleted.append(self._deleted)

    def subscribe(self, peer: Peer, frame: Frame) -> None:
        """Answer a SUBSCRIBE; its groups join in the next turns."""
        head = frame.head
        group_name = need_group(head)
        subjects, pattern = _asked_for(head)
        beginning = beginning_of(head)
        if beginning.ordered or beginning.filter is not OPEN or self._pulls.leads.of_peer:
            for group in islice(self._existing(group_name, subjects, pattern), SUBSCRIBED_MAX):
                self._check(group, beginning)
        in_flight_max = need_u32(head, "in_flight_max") if "in_flight_max" in head else None
        subscription, new = self._pulls.subscriptions.subscribe(peer, group_name, subjects, pattern, beginning)
        if in_flight_max is not None and subscription.in_flight_max != in_flight_max:
            subscription.in_flight_max = in_flight_max
            subscription.look_again()  # Each of its groups hears of it.
            new = True
        if new:
            self._go_on_with(subscription)
        peer.answer(frame.request_id, {"subscription": subscription.number, "now_ms": self._clock.now_ms()})

    def _existing(self, group_name: str, subjects: Sequence[str], pattern: Pattern | None) -> Iterator[Group]:
        """The groups of a subscription that exist already."""
        groups = self._pulls.groups
        if pattern is None:
            for name in subjects:
                group = groups.get((name, group_name))
                if group is not None:
                    yield group
            return
        for (name, of), group in groups.items():
            if of == group_name and group.parent is None and pattern.matches(name):
                yield group

    def came(self, subject: Subject) -> None:
        """A subject has its first message: the subscriptions whose pattern it matches take it, too."""
        for subscription in self._pulls.subscriptions:
            if subscription.pattern is not None and subscription.pattern.matches(subject.name):
                subscription.pending.append((subject.name, True))
                self._go_on_with(subscription)

    def _deleted(self, group: Group) -> None:
        """A group is deleted: the subscriptions that have it make it anew, as a consumer of its subject alone does with
        its next PULL.
        """
        for subscription in group.subscriptions:
            # A pattern makes no group before a subject's first message, and `came` tells of that.
            if subscription.pattern is None or group.subject.end:
                subscription.pending.append((group.subject.name, False))
                self._go_on_with(subscription)

    def _look_again(self) -> None:
        for subscription in self._lacking:
            subscription.look_again()
            self._go_on_with(subscription)
        self._lacking.clear()
        self._work()

    def _work(self) -> None:
        """Do as much as one turn may."""
        left = TURN_WORK
        while self._busy and left > 0:
            subscription = next(iter(self._busy))
            if not subscription.peers or not (subscription.pending or subscription.scanned is not None):
                del self._busy[subscription]
            elif subscription.pending:
                left -= self._join(subscription, *subscription.pending.popleft())
            else:
                left -= self._scan(subscription, left)
        if self._busy:
            self._turn.soon()

    def _go_on_with(self, subscription: Subscription) -> None:
        self._busy[subscription] = None
        self._turn.soon()

    def _scan(self, subscription: Subscription, most: int) -> int:
        """Compare some of the subjects with a pattern."""
        pattern, after = subscription.pattern, subscription.scanned
        assert pattern is not None and after is not None, "only patterns are compared"
        names = [subject.name for subject in islice(self._index.listed(pattern.prefix, after), most)]
        subscription.pending.extend((name, False) for name in filter(pattern.matches, names))
        subscription.scanned = names[-1] if len(names) == most else None
        return len(names)

    def _join(self, subscription: Subscription, name: str, new: bool) -> int:
        """Let the group of a subject join; return the work that it took. A ``new`` subject came while there was the
        subscription.
        """
        group = self._pulls.groups.get((name, subscription.group_name))
        if group is None:
            if subscription.failures >= FAILURES_MAX:
                self._lacks(subscription)
                return 1
            self._make(subscription, name, new)
            return MAKE_WORK
        try:
            self._check(group, subscription.beginning)
        except (ExclusiveConflict, NotOrdered, OtherFilter) as error:
            self._failed(subscription, name, error.message)
            return 1
        if group not in subscription.members and not self._pulls.join(subscription, group):
            self._failed(subscription, name, "there is no room for more subjects in subscriptions")
        else:
            self._bound(subscription, group)
        return 1

    def _bound(self, subscription: Subscription, group: Group) -> None:
        if subscription.in_flight_max is None:
            return
        try:
            self._groups.bound(group, subscription.in_flight_max)
        except RetryLater as error:
            self._failed(subscription, group.subject.name, error.message)

    def _make(self, subscription: Subscription, name: str, new: bool) -> None:
        beginning = subscription.beginning
        if new and beginning.start is End.LATEST:
            # All of its messages are later than the subscription.
            beginning = beginning._replace(start=End.EARLIEST)
        try:
            group = self._groups.create(name, subscription.group_name, beginning)
        except ServerStopped:
            raise
        except DelaydError as error:
            subscription.failures += 1
            self._failed(subscription, name, error.message)
            return
        if not self._pulls.join(subscription, group):
            self._failed(subscription, name, "there is no room for more subjects in subscriptions")
        else:
            self._bound(subscription, group)

    def _check(self, group: Group, beginning: Beginning) -> None:
        """Refuse who may not share a group, as it refuses a PULL of that group alone."""
        self._pulls.leads.check_shared(group)
        check_beginning(group, beginning)

    def _failed(self, subscription: Subscription, name: str, reason: str) -> None:
        at = (name, subscription.group_name, reason)
        limited.warning("subject_not_joined", "subject_not_joined subject=%s group=%s reason=%r", *at)
        self._lacks(subscription)

    def _lacks(self, subscription: Subscription) -> None:
        if not self._lacking:
            self._retry.after(RETRY_MS)
        self._lacking[subscription] = None


def _asked_for(head: Head) -> tuple[list[str], Pattern | None]:
    """The subjects of a list in order, or a pattern."""
    if ("subjects" in head) == ("pattern" in head):
        raise BadRequest("a subscription has subjects or a pattern, one of the two", field="subjects")
    if "pattern" in head:
        return [], Pattern(need_str(head, "pattern"))
    subjects = sorted(set(need_strs(head, "subjects")))
    if not 0 < len(subjects) <= SUBSCRIBED_MAX:
        raise BadArgument(f"a subscription of {len(subjects)} subjects; it has 1 to {SUBSCRIBED_MAX}, or a pattern")
    for subject in subjects:
        need_subject(subject)
    return subjects, None


def groups_head(groups: Iterable[Group], limit: int) -> Head:
    """How far each group is, up to as many groups as one head holds, and whether there are more."""
    return consuming.groups_head(map(_group_info, groups), min(limit, LIST_MAX))


def aged_groups_head(index: Index, stored: StoredBatches, now_ms: int, groups: Iterable[Group], limit: int) -> Head:
    """The same, with the age of each group's oldest message that is not acknowledged."""

    infos = (aged_group(index, stored, now_ms, group) for group in groups)
    return consuming.groups_head(infos, min(limit, AGED_MAX))


def aged_group(index: Index, stored: StoredBatches, now_ms: int, group: Group) -> GroupInfo:
    """A group, with the age of its oldest message that is not acknowledged."""
    of_both = [_oldest_of_group_ms(index, stored, each) for each in _with_child(group)]
    oldest_ms = min((each for each in of_both if each is not None), default=None)
    return _group_info(group)._replace(oldest_ms_ago=None if oldest_ms is None else max(0, now_ms - oldest_ms))


def waiting_for(group: Group) -> int:
    """How many messages of a group no consumer has; those that came again as well."""
    came_again = 0 if group.child is None else group.child.subject.end - group.child.next
    again = sum([_waiting(each, Stage.OFFERED) + _waiting(each, Stage.PAUSED) for each in _with_child(group)])
    return group.subject.end - group.next + came_again + again


def _oldest_of_group_ms(index: Index, stored: StoredBatches, group: Group) -> int | None:
    """When the oldest message that a group has not acknowledged was handed over; None when there is none, or it can't
    be read.
    """
    oldest = group.oldest
    if oldest == group.subject.end:
        return None
    if group.oldest_at[0] != oldest:
        try:
            group.oldest_at = (oldest, stored.claimed_at_ms(index.locate(group.subject, oldest).offset))
        except (DamagedData, Shortage, RetryLater):
            return None
    return group.oldest_at[1]


def _group_info(group: Group) -> GroupInfo:
    """A group together with its child, whose messages all came back."""
    both = _with_child(group)
    return GroupInfo(
        subject=group.subject.name,
        group=group.name,
        end=group.subject.end,
        next=group.next,
        outstanding=sum([each.outstanding for each in both]),
        redelivering=waiting_for(group) - (group.subject.end - group.next),
        quarantined=sum([_waiting(each, Stage.UNREADABLE) for each in both]),
        oldest_unacked=group.oldest,
        group_id=group.group_id,
        leaving=sum([decision.messages for each in both for decision in each.window.leaving.values()]),
        paused=group.held_back,
        ephemeral=group.ephemeral,
        filter="" if group.filter is OPEN else str(group.filter),
        ordered=group.order is not None,
        exclusive=group.lead is not None,
        standbys=len(group.standby),
        in_flight_max=group.in_flight_max,
        oldest_ms_ago=None,
    )


def _with_child(group: Group) -> list[Group]:
    return [group] if group.child is None else [group, group.child]


def _waiting(group: Group, state: Stage) -> int:
    return group.window.others.messages[state]


def subjects_head(
    index: Index, stored: StoredBatches, pulls: Pulls, now_ms: int, prefix: str, after: str, limit: int
) -> Head:
    """Subjects by name, and whether there are more."""

    def info(subject: Subject) -> SubjectInfo:
        first = _first(index, subject)
        oldest_ms = _oldest_ms(index, stored, subject, first)
        return SubjectInfo(
            name=subject.name,
            messages=subject.end - first,
            first=first,
            end=subject.end,
            quarantined=pulls.quarantine.rows_of(subject),
            groups=len(pulls.roster.of(subject.name)),
            oldest_ms_ago=None if oldest_ms is None else max(0, now_ms - oldest_ms),
        )

    # What comes again counts with the group that it belongs to.
    own = (subject for subject in index.listed(prefix, after) if not is_reserved(subject.name))
    return consuming.subjects_head(map(info, own), min(limit, SUBJECTS_MAX))


def _first(index: Index, subject: Subject) -> int:
    """The first kept message; while the consume log is being rebuilt, the last answer."""
    try:
        return index.first(subject)
    except RetryLater:
        return min(subject.kept_from[1], subject.end)


def _oldest_ms(index: Index, stored: StoredBatches, subject: Subject, first: int) -> int | None:
    """When the first kept message was claimed; None when there is no message, or it can't be read."""
    if first == subject.end:
        return None
    if subject.oldest[0] != first:
        try:
            subject.oldest = (first, stored.claimed_at_ms(index.locate(subject, first).offset))
        except (DamagedData, Shortage, RetryLater):
            return None
    return subject.oldest[1]
