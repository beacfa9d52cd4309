"""Metrics: what is measured, each metric declared once, and how those that STATUS tells are made of it.

Invariant: nothing is counted here. A server's page and the gateway's are made of the same STATUS by `families_of`; only
histograms and groups are added by whoever has them. docs/metrics.md is made of the same tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from delayd.batch.names import Pattern, check_subject, is_pattern
from delayd.machine.histogram import Counted
from delayd.recurrence.deciding import SkipReason
from delayd.wire.consuming import GroupInfo
from delayd.wire.exposition import MILLISECONDS, NANOSECONDS, Family, Metric, MetricKind, Number, histogram
from delayd.wire.frame import Head

TOP = 20  # Groups that are told one by one unless all are asked for.

OF_SERVER = ("role", "server")
OF_GROUP = ("server", "subject", "group")
_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM


class Source(NamedTuple):
    """Where STATUS has the values of a metric: the names of counters, or of fields, with the value of the last label if
    the metric has one more than role and server.
    """

    metric: Metric
    names: Mapping[str, str]
    scale: float = 1  # The metric is the figure times this.


def _of(name: str, kind: MetricKind, text: str, source: str, scale: float = 1) -> Source:
    return Source(Metric(f"delayd_{name}", kind, text, OF_SERVER), {source: ""}, scale)


def _by(name: str, kind: MetricKind, text: str, label: str, names: Mapping[str, str], scale: float = 1) -> Source:
    return Source(Metric(f"delayd_{name}", kind, text, (*OF_SERVER, label)), names, scale)


MS = 0.001

# What every server says of itself.
OF_EACH = (
    _of("start_time_seconds", _GAUGE, "When it started, by its clock.", "started_at_ms", MS),
    _of("clock_seconds", _GAUGE, "Its clock.", "now_ms", MS),
    _of("clock_confirmed", _GAUGE, "Whether it trusts its clock.", "clock_confirmed"),
    _of("clock_in_doubt", _GAUGE, "Whether it doubts its clock since the machine booted.", "clock_in_doubt"),
    _of("fenced", _GAUGE, "Whether it serves nobody, for its directory may be a copy.", "fenced"),
    _of("cordoned", _GAUGE, "Whether it takes no new messages, because an operator said so.", "cordoned"),
    _of("held", _GAUGE, "Whether a damaged file holds its start.", "held"),
    _of("connections", _GAUGE, "Open connections.", "connections"),
    _of("connections_max", _GAUGE, "As many connections it takes.", "connections_max"),
    _of(
        "loop_wait_seconds_max",
        _GAUGE,
        "The longest turn of its loop in the last minute.",
        "loop_wait_ms_max_minute",
        MS,
    ),
    _of("free_bytes", _GAUGE, "Free bytes of its disk.", "free_bytes"),
    _of("subjects", _GAUGE, "Subjects that it knows.", "subjects"),
    _of("next_sequence", _GAUGE, "The number of its next message.", "next_sequence"),
    _of("dead_letters", _GAUGE, "Dead letters that are kept.", "dead_letters"),
)
OF_DELAY = (
    _of("accepted_messages_total", _COUNTER, "Messages that it has ever accepted.", "accepted_rows"),
    _by(
        "ended_messages_total",
        _COUNTER,
        "Messages by what became of them, since its start.",
        "how",
        {
            f"ended_{how}": how
            for how in (
                "dispatched",
                "cancelled",
                "moved",
                "replaced",
                "rejected",
                "kept",
                "in_flight",
                "drained",
                "dead",
                "expired",
                "in_doubt",
            )
        },
    ),
    _by(
        "occurrences_total",
        _COUNTER,
        "Occurrences of recurring schedules, since its start: those that ran, and those that were skipped, by reason.",
        "how",
        {f"occurrences_{how}": how for how in ("ran", *map(str, SkipReason))},
    ),
    _by(
        "pending_messages",
        _GAUGE,
        "Pending messages by when they are due: already, within a minute, in this hour or the next, in the 23 hours"
        " behind, or later.",
        "due",
        {f"pending_{due}": due for due in ("overdue", "minute", "hour", "day", "further")},
    ),
    _of(
        "oldest_overdue_seconds",
        _GAUGE,
        "How long the oldest due message without an outcome waits.",
        "oldest_overdue_ms",
        MS,
    ),
    _of(
        "furthest_due_timestamp_seconds",
        _GAUGE,
        "The end of the last hour with pending messages; 0: there are none.",
        "furthest_due_ms",
        MS,
    ),
    _of("waiting_messages", _GAUGE, "Due messages that no realtime server has taken.", "waiting_rows"),
    _of("undecided_batches", _GAUGE, "Batches at realtime servers whose outcome is not durable.", "undecided_batches"),
    _of("targets", _GAUGE, "Realtime servers for which it has had messages.", "targets"),
    _of("targets_away", _GAUGE, "Those of them that are away.", "targets_away"),
    _of("taken_messages_10s", _GAUGE, "Messages that realtime servers took in the last ten seconds.", "taken_rows_10s"),
    _by(
        "late_seconds",
        _GAUGE,
        "How late the messages of the last ten seconds reached realtime servers.",
        "quantile",
        {"late_ms_p50": "0.5", "late_ms_p99": "0.99", "late_ms_max": "1"},
        MS,
    ),
    _of("quarantined_messages", _GAUGE, "Messages whose stored batch can't be read.", "quarantined_rows"),
    _of("quarantined_hours", _GAUGE, "Hours that are set aside.", "quarantined_hours"),
    _of("quarantined_entries", _GAUGE, "What `delayd mend list` lists.", "quarantined"),
    _of("dead_messages", _GAUGE, "Messages of kept hours that realtime servers refused for good.", "dead_rows"),
    _of("message_log_end_bytes", _GAUGE, "The durable end of the message log.", "message_log_end"),
    _of("message_log_replay_bytes", _GAUGE, "Where the next start reads the message log from.", "replay_offset"),
    _of("unfiled_messages", _GAUGE, "Messages that no checkpoint has filed yet.", "pending_rows"),
    _of("filed_messages", _GAUGE, "Messages in schedule logs, with and without an outcome.", "scheduled_rows"),
    _of("loaded_messages", _GAUGE, "Messages in memory until they are due.", "loaded_rows"),
    _of("leaving_messages", _GAUGE, "Messages on their way to other delay servers.", "leaving_rows"),
    _of("owed_outcomes", _GAUGE, "Cancelled or moved messages whose outcomes are not written yet.", "owed_rows"),
    _of("subjects_bytes", _GAUGE, "Memory for names of subjects.", "subjects_bytes"),
    _of("producers", _GAUGE, "Producers that it remembers.", "producers"),
    _of("producers_bytes", _GAUGE, "Memory for producers.", "producers_bytes"),
    _of("queued_bytes", _GAUGE, "Bytes of sends that wait for the disk.", "queued_bytes"),
    _by(
        "asked",
        _GAUGE,
        "What unanswered requests hold.",
        "what",
        {"asked_rows": "rows", "asked_copies": "copies", "key_look_ups": "keys", "find_pieces": "finds"},
    ),
)
OF_REALTIME = (
    _of("arrived_messages_total", _COUNTER, "Messages that delay servers handed over, since its start.", "messages"),
    _of("arrived_batches_total", _COUNTER, "Batches of these messages.", "batches"),
    _of("arrived_frames_total", _COUNTER, "Frames of these batches.", "frames"),
    _by(
        "refused_frames_total",
        _COUNTER,
        "Frames of delay servers that were refused.",
        "why",
        {"refused": "refused", "fenced": "fenced"},
    ),
    _by(
        "consumed_messages_total",
        _COUNTER,
        "Messages by what consumers, or the end of a lease, did with them, since its start; one that comes again counts"
        " again.",
        "what",
        {
            "pulled": "pulled",
            "redelivered": "redelivered",
            "acked": "acknowledged",
            "nacked": "given_back",
            "returned": "returned",
            "lapsed": "lapsed",
            "extended": "extended",
            "expired": "expired",
            "filtered": "filtered",
            "retried": "retried",
            "died": "rejected",
        },
    ),
    _of(
        "retries_taken_total",
        _COUNTER,
        "Retried and rejected messages that delay servers have taken.",
        "retries_accepted",
    ),
    _of("waiting_pulls", _GAUGE, "Pulls that wait for messages.", "waiting_pulls"),
    _of("leads", _GAUGE, "Exclusive groups with a leader.", "leads"),
    _of("checkpoints_total", _COUNTER, "Checkpoints since its start.", "checkpoints"),
    _of("kept_bytes", _GAUGE, "Bytes of the message log that are kept.", "kept_bytes"),
    _of("end_offset_bytes", _GAUGE, "The durable end of the message log.", "end_offset"),
    _of("indexed_offset_bytes", _GAUGE, "Where the next start reads the message log from.", "indexed_offset"),
    _of("in_doubt_batches", _GAUGE, "Batches whose outcome no delay server has confirmed yet.", "in_doubt"),
    _of("groups", _GAUGE, "Groups of consumers.", "groups"),
)
OF_META = (
    _of("requests_total", _COUNTER, "Requests since its start.", "requests"),
    _of("servers", _GAUGE, "Servers that it knows.", "servers"),
    _of("routes", _GAUGE, "Subjects that have a realtime server.", "routes"),
    _of("transactions_total", _COUNTER, "Transactions of its state since its start.", "transactions"),
)
OF_ROLE: Mapping[str, Sequence[Source]] = {"": OF_EACH, "delay": OF_DELAY, "realtime": OF_REALTIME, "meta": OF_META}
"""The metrics of servers of a role; "" stands for all roles."""

# What STATUS tells in lists, or by names that are not known before.
WAITS = Metric("delayd_waits", _GAUGE, "States that only an operator can end; `delayd status` names them.", OF_SERVER)
REFUSES = Metric("delayd_refuses", _GAUGE, "What it refuses for now; each of these ends by itself.", OF_SERVER)
RETRIES_WAITING = Metric(
    "delayd_retries_waiting", _GAUGE, "Batches of retried or rejected messages that wait for a delay server.",
    (*OF_SERVER, "delay_server"),
)  # fmt: skip
RETRIES_PREFIX = "retries_for_"

# What a server measures and STATUS does not tell.
LATE_DURABLE = Metric(
    "delayd_lateness_durable_seconds", _HISTOGRAM,
    "From when a message was due until it was durable at the realtime server.", OF_SERVER,
)  # fmt: skip
LATE_DELIVERED = Metric(
    "delayd_lateness_delivered_seconds", _HISTOGRAM,
    "From when a message was due until a consumer first got it; each group counts.", OF_SERVER,
)  # fmt: skip
LOG_COMMIT = Metric(
    "delayd_log_commit_seconds", _HISTOGRAM,
    "From handing a group to the thread of a log until the server heard of its fsync.", (*OF_SERVER, "log"),
)  # fmt: skip

# Groups of consumers, from a realtime server.
ALL_WAITING = Metric(
    "delayd_groups_waiting_messages", _GAUGE, "Messages that no consumer has, of all groups together.", OF_SERVER
)
GROUP_WAITING = Metric("delayd_group_waiting_messages", _GAUGE, "Messages of a group that no consumer has.", OF_GROUP)
GROUP_OUTSTANDING = Metric(
    "delayd_group_outstanding_messages", _GAUGE, "Messages of a group that consumers hold.", OF_GROUP
)
GROUP_OLDEST = Metric(
    "delayd_group_oldest_seconds", _GAUGE, "Age of the oldest message of a group that is not acknowledged.",
    OF_GROUP,
)  # fmt: skip

# What the gateway has besides.
UP = Metric("delayd_up", _GAUGE, "Whether the server answers the gateway.", OF_SERVER)
GATEWAY_REQUESTS = Metric("delayd_gateway_requests_total", _COUNTER, "Answers of this gateway.", ("method", "status"))
GATEWAY_LEASES = Metric("delayd_gateway_leases", _GAUGE, "Pulled messages that this gateway holds.")

OF_SEVERAL = (WAITS, REFUSES, LOG_COMMIT)
OF_REALTIME_BESIDES = (
    *(RETRIES_WAITING, LATE_DURABLE, LATE_DELIVERED),
    *(ALL_WAITING, GROUP_WAITING, GROUP_OUTSTANDING, GROUP_OLDEST),
)
OF_GATEWAY = (UP, GATEWAY_REQUESTS, GATEWAY_LEASES)
METRICS = (
    *(each.metric for sources in OF_ROLE.values() for each in sources),
    *OF_SEVERAL,
    *OF_REALTIME_BESIDES,
    *OF_GATEWAY,
)


class Asked(NamedTuple):
    """The STATUS of one server; ``name`` is the value of the label ``server``."""

    role: str
    name: str
    status: Head


def families_of(asked: Sequence[Asked]) -> Iterator[Family]:
    """All metrics that STATUS of these servers tells; a figure that a server does not have has no sample."""
    for role, sources in OF_ROLE.items():
        for source in sources:
            own = [each for each in asked if role in ("", each.role)]
            yield Family(source.metric, [sample for each in own for sample in _samples(each, source)])
    for metric, field in ((WAITS, "waits"), (REFUSES, "refuses")):
        yield Family(metric, [((each.role, each.name), _length(each.status, field)) for each in asked])
    yield Family(
        RETRIES_WAITING,
        [
            ((each.role, each.name, name.removeprefix(RETRIES_PREFIX)), value)
            for each in asked
            for name, value in _counters(each.status).items()
            if name.startswith(RETRIES_PREFIX) and isinstance(value, int)
        ],
    )


def families_of_groups(told: Callable[[], Iterable[tuple[str, GroupInfo]]]) -> Iterator[Family]:
    """What is told of groups, one by one; ``told`` gives each group with the name of its realtime server, and is called
    for each metric. A group without an oldest message has no age.
    """
    yield Family(
        GROUP_WAITING,
        (((server, each.subject, each.group), waiting_of(each)) for server, each in told()),
    )
    yield Family(GROUP_OUTSTANDING, (((server, each.subject, each.group), each.outstanding) for server, each in told()))
    yield Family(
        GROUP_OLDEST,
        (
            ((server, each.subject, each.group), each.oldest_ms_ago / 1_000)
            for server, each in told()
            if each.oldest_ms_ago is not None
        ),
    )


def waiting_of(group: GroupInfo) -> int:
    """How many messages of a group no consumer has."""
    return group.end - group.next + group.redelivering


def family_of_logs(role: str, server: str, took: Iterable[tuple[str, Counted]]) -> Family:
    """How long the groups of each log of a server took, in ns."""
    return Family(LOG_COMMIT, histogram(NANOSECONDS, [((role, server, log), counted) for log, counted in took]))


def family_of_lateness(metric: Metric, role: str, server: str, late: Counted) -> Family:
    """How late messages were, in ms."""
    return Family(metric, histogram(MILLISECONDS, [((role, server), late)]))


def matches(text: str) -> Callable[[str], bool]:
    """Whether a subject fits a text, which is a pattern or a subject; BadSubject when it is neither."""
    if is_pattern(text):
        return Pattern(text).matches
    check_subject(text.encode(errors="replace"))
    return text.__eq__


def _counters(status: Head) -> Mapping[str, object]:
    counters = status.get("counters")
    return counters if isinstance(counters, dict) else {}


def _samples(asked: Asked, source: Source) -> Iterable[tuple[Sequence[str], Number]]:
    counters = _counters(asked.status)
    for name, label in source.names.items():
        value = counters.get(name, asked.status.get(name))
        if isinstance(value, int):
            place = (asked.role, asked.name, label)[: len(source.metric.labels)]
            yield place, int(value) if source.scale == 1 else round(value * source.scale, 3)


def _length(status: Head, field: str) -> int:
    rows = status.get(field)
    return len(rows) if isinstance(rows, list) else 0
