"""Operations: the table of all that a gateway may be asked, from which its routes and its OpenAPI document are made."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from delayd.gateway import clock
from delayd.gateway.admin import (
    DeadLine,
    DeadTotal,
    DiedAsked,
    DiedWithin,
    GroupDeleted,
    GroupsListed,
    KeepPending,
    LettersDone,
    NewQuota,
    PausedGroup,
    QuotasListed,
    QuotasQuery,
    Rewinding,
    Rewound,
    SubjectsListed,
    SubjectsQuery,
)
from delayd.gateway.cron_routes import (
    ComingListed,
    CronNote,
    CronQuery,
    NewSchedule,
    NextAsked,
    NextQuery,
    Schedule,
    ScheduleDeleted,
    SchedulesListed,
)
from delayd.gateway.forecast import ClusterForecast, ForecastQuery, PeriodQuery, SubjectForecast
from delayd.gateway.groups import Groups
from delayd.gateway.once import NAME_CHARS_MAX
from delayd.gateway.openapi import AnyOf, Operation, document
from delayd.gateway.push_routes import NewTarget, Rotation, Terms
from delayd.gateway.sends import EVENTS, queried
from delayd.gateway.streams import MSGPACK, NDJSON
from delayd.gateway.traces import MessageLife
from delayd.gateway.values import (
    JSON,
    Browse,
    ByKey,
    CancelledMessage,
    Extension,
    Follow,
    Given,
    GivenBack,
    LeaseHeard,
    Leases,
    MessageFate,
    NewMessage,
    PackedMessage,
    PendingLine,
    PendingTotal,
    Problem,
    Pull,
    PulledMessage,
    PulledMessages,
    SendOptions,
    Unwanted,
    When,
)

if TYPE_CHECKING:
    from delayd.gateway.app import Gateway

TEXT = "text/plain"


def operations_of(gateway: Gateway) -> list[Operation]:
    """All that a gateway may be asked."""
    op = Operation
    admin, push, cron = gateway.admin, gateway.push, gateway.cron
    schedule, match = "/v1/cron/{name}", ("If-Match",)
    many, one = "/v1/subjects/{subject}/messages", "/v1/subjects/{subject}/messages/{id}"
    group = "/v1/subjects/{subject}/groups/{group}"
    given, fate, ended, moved = Given, MessageFate, CancelledMessage, {JSON: When}
    kept = AnyOf((given, Problem), "list")
    bodies = {
        JSON: AnyOf((NewMessage, list[NewMessage])),
        NDJSON: AnyOf((NewMessage,), "lines"),
        MSGPACK: AnyOf((PackedMessage,), "lines"),
        "application/octet-stream": bytes,
    }
    named = {"Idempotency-Key": {"type": "string", "minLength": 1, "maxLength": NAME_CHARS_MAX}}
    lines = AnyOf((given, Problem), "lines")
    pending = AnyOf((PendingLine, PendingTotal, Problem), "lines")
    letters = AnyOf((DeadLine, DeadTotal, Problem), "lines")
    said = AnyOf((LeaseHeard, Problem), "results")
    target = dict[str, Any]

    async def described(request: Request) -> Response:
        queried(request)
        return Response(msgspec.json.encode(document(operations)), media_type=JSON)

    operations = [
        op(
            *("POST", many, "send", "Send one message, a list, or a stream.", gateway.send, given),
            query=SendOptions,
            takes=bodies,
            may_be_empty=True,
            status=201,
            headers=named,
            also={200: kept, (200, NDJSON): lines, (200, MSGPACK): lines},
            fails=(409, 422, 429),
        ),
        op(
            *("GET", many, "list", "One message by its key, or all that are pending.", gateway.listed, pending),
            query=Browse,
            media=NDJSON,
            also={JSON: fate},
            fails=(404,),
        ),
        op(
            *("PATCH", many, "move_by_key", "Move a pending message.", gateway.move, given),
            query=ByKey,
            takes=moved,
            fails=(404, 409),
            conditions=match,
            tagged=True,
        ),
        op(
            *("DELETE", many, "cancel_by_key", "Cancel a pending message.", gateway.cancel, ended),
            query=ByKey,
            fails=(404, 409),
            conditions=match,
        ),
        op("GET", one, "get", "What became of a message.", gateway.get, fate, fails=(404,), tagged=True),
        op(
            *("PATCH", one, "move", "Move a pending message.", gateway.move, given),
            takes=moved,
            fails=(404, 409),
            conditions=match,
            tagged=True,
        ),
        op(
            *("DELETE", one, "cancel", "Cancel a pending message.", gateway.cancel, ended),
            fails=(404, 409),
            conditions=match,
        ),
        op("GET", f"{one}/trace", "trace", "The life of a message so far.", gateway.trace, MessageLife, fails=(404,)),
        op(
            *("GET", "/v1/subjects/{subject}/trace", "trace_by_key", "The same by the key of a message."),
            *(gateway.trace, MessageLife),
            query=ByKey,
            fails=(404,),
        ),
        op(
            *("GET", "/v1/forecast", "forecast", "How many messages come due when.", gateway.forecasts.of_cluster),
            ClusterForecast,
            query=PeriodQuery,
        ),
        op(
            *("GET", "/v1/subjects/{subject}/forecast", "forecast_of", "The same of one subject."),
            *(gateway.forecast, SubjectForecast),
            query=ForecastQuery,
        ),
        op(
            *("POST", f"{group}/pull", "pull", "Get due messages for a group.", gateway.pull, PulledMessages),
            takes={JSON: Pull},
            may_be_empty=True,
            fails=(429,),
        ),
        *(
            op("POST", f"/v1/leases/{word}", word, summary, endpoint, said, takes={JSON: kind})
            for word, kind, endpoint, summary in (
                ("ack", Leases, gateway.says(Leases, Groups.ack), "The work on messages is done."),
                ("nack", GivenBack, gateway.says(GivenBack, Groups.nack), "Messages are to come again."),
                ("reject", Unwanted, gateway.says(Unwanted, Groups.reject), "Messages become dead letters."),
                ("extend", Extension, gateway.says(Extension, Groups.extend), "Messages are held for longer."),
            )
        ),
        op(
            *("GET", f"{group}/events", "follow", "Due messages as events.", gateway.follow),
            AnyOf((PulledMessage, Problem), "lines"),
            query=Follow,
            media=EVENTS,
            fails=(429,),
        ),
        op(
            *("GET", "/v1/subjects", "subjects", "Subjects, and who serves them.", admin.subjects),
            SubjectsListed,
            query=SubjectsQuery,
        ),
        op("GET", "/v1/groups", "groups", "All groups.", admin.groups, GroupsListed),
        op(
            *("GET", "/v1/subjects/{subject}/groups", "groups_of", "The groups of a subject.", admin.groups),
            GroupsListed,
        ),
        op("GET", group, "group", "How far a group is.", admin.group, GroupsListed, fails=(404,)),
        op(
            *("DELETE", group, "delete_group", "End a group.", admin.delete, GroupDeleted),
            query=KeepPending,
            fails=(404,),
        ),
        *(
            op("POST", f"{group}/{word}", word, summary, endpoint, PausedGroup, fails=(404,))
            for word, endpoint, summary in (
                ("pause", admin.pause, "Give a group nothing for now."),
                ("resume", admin.resume, "Give a paused group messages again."),
            )
        ),
        op(
            *("POST", f"{group}/rewind", "rewind", "Let a group go on elsewhere.", admin.rewind, Rewound),
            takes={JSON: Rewinding},
            fails=(404,),
        ),
        op(
            *("GET", f"{group}/dead", "dead_letters", "The dead letters of a group.", admin.dead_letters, letters),
            query=DiedWithin,
            media=NDJSON,
            fails=(404,),
        ),
        *(
            op(
                *("POST", f"{group}/dead/{word}", word, summary, endpoint, LettersDone),
                takes={JSON: DiedAsked},
                may_be_empty=True,
                fails=(404,),
            )
            for word, endpoint, summary in (
                ("redrive", admin.redrive, "Send dead letters again."),
                ("purge", admin.purge, "End dead letters."),
            )
        ),
        op(
            *("GET", "/v1/quotas", "quotas", "Quotas, and how much of them is used.", admin.quotas),
            QuotasListed,
            query=QuotasQuery,
        ),
        op(
            *("PUT", "/v1/subjects/{subject}/quota", "set_quota", "Set a subject's quota.", admin.set_quota),
            NewQuota,
            takes={JSON: NewQuota},
        ),
        op(
            *("GET", "/v1/cron", "schedules", "All recurring schedules.", cron.listed, SchedulesListed),
            query=CronQuery,
        ),
        op("GET", schedule, "schedule", "A recurring schedule.", cron.get, Schedule, fails=(404,), tagged=True),
        op(
            *("PUT", schedule, "put_schedule", "Make or change a recurring schedule.", cron.put, Schedule),
            takes={JSON: NewSchedule},
            fails=(409,),
            conditions=("If-Match", "If-None-Match"),
            tagged=True,
        ),
        op(
            *("DELETE", schedule, "delete_schedule", "End a schedule.", cron.delete, ScheduleDeleted),
            fails=(404,),
            conditions=match,
        ),
        op(
            *("POST", f"{schedule}/pause", "pause_schedule", "Send nothing for now.", cron.pause, Schedule),
            takes={JSON: CronNote},
            may_be_empty=True,
            fails=(404, 409),
            conditions=match,
            tagged=True,
        ),
        op(
            *("POST", f"{schedule}/resume", "resume_schedule", "Send again, from now on.", cron.resume, Schedule),
            fails=(404, 409),
            conditions=match,
            tagged=True,
        ),
        op(
            *("POST", f"{schedule}/run", "run_schedule", "Send one message now.", cron.run, Schedule),
            headers=named,
            fails=(404, 409),
            tagged=True,
        ),
        op(
            *("GET", f"{schedule}/next", "next_occurrences", "When a schedule fires next.", cron.next, ComingListed),
            query=NextQuery,
            fails=(404,),
        ),
        op(
            *("POST", "/v1/recurrence/next", "try_recurrence", "When a recurrence would fire.", cron.preview),
            ComingListed,
            takes={JSON: NextAsked},
        ),
        op("GET", "/v1/push", "push_targets", "All push targets.", push.listed, target),
        op(
            *("POST", "/v1/push", "create_push", "Create a push target.", push.create, target),
            takes={JSON: NewTarget},
            status=201,
            fails=(409,),
        ),
        op("GET", "/v1/push/{name}", "push_target", "A push target.", push.get, target, fails=(404,)),
        op(
            *("PATCH", "/v1/push/{name}", "change_push", "Change a push target.", push.change, target),
            takes={JSON: Terms},
            fails=(404, 409),
        ),
        op("DELETE", "/v1/push/{name}", "delete_push", "End a push target.", push.delete, target, fails=(404, 409)),
        op(
            *("POST", "/v1/push/{name}/key", "rotate_push", "A new key for a push target.", push.rotate, target),
            takes={JSON: Rotation},
            may_be_empty=True,
            fails=(404, 409),
        ),
        op("POST", "/v1/push/{name}/test", "test_push", "POST once, now.", push.test, target, fails=(404,)),
        op("GET", "/metrics", "metrics", "What Prometheus reads.", gateway.metrics, bytes, media=TEXT),
        op("GET", "/healthz", "health", "Whether this gateway serves.", gateway.health, bytes, media=TEXT),
        op(
            *("GET", "/readyz", "ready", "Whether meta answers this gateway.", gateway.ready, bytes),
            media=TEXT,
            also={(503, TEXT): bytes},
        ),
        op("GET", "/v1/openapi.json", "openapi", "This document.", described, target),
    ]
    if gateway.clock is not None:
        operations += [
            op("GET", "/v1/clock", "clock", "What the clock shows.", partial(clock.show, gateway.clock), target),
            op(
                *("POST", "/v1/clock/advance", "advance_clock", "Move the clock."),
                *(partial(clock.advance, gateway.clock), target),
                takes={JSON: clock.Move},
            ),
        ]
    return operations
