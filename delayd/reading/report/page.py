"""Page: the report of an audit as one page of HTML, for a manager, an auditor and whoever looks for the cause.

Invariants. The page is made of an `AuditReport` alone, so an audit with and one without Spark write the same bytes.
Each text of the data is hostile: a subject, a group, a path or an operator's words may be HTML or steer a terminal. All
of them are escaped by the template, and characters that nobody sees are written as numbers. The page has no script and
fetches nothing; its policy forbids both. What a long list leaves out is counted in its last row.
"""

import base64
import hashlib
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup

from delayd import __version__
from delayd.hours import duration_text, hour_name, instant_text
from delayd.machine.operating import counted
from delayd.reading.books import AuditReport
from delayd.reading.consumption import GroupBooks
from delayd.reading.explanations import APPENDED_LATE, CONNECTED, RESTARTED, Explanation
from delayd.reading.findings import (
    EXAMPLES,
    SENTENCES,
    AcceptanceState,
    Cause,
    CausedFindings,
    Finding,
    FindingKind,
    HourKey,
    JudgedAcceptance,
)
from delayd.reading.report.charts import HEAT_ROWS, Period, course, distribution, heat_map, limit_text, periods_of, svg
from delayd.reading.report.summary import (
    KINDS,
    audit_command,
    capital,
    command_of,
    scope_of,
    share,
    tiles_of,
    verdict_of,
    verdict_on_damage,
    visible,
)
from delayd.reading.seals import SealReport, SealState
from delayd.reading.subject_figures import CLASSES, PARTS

CAUSES_MAX = 100  # Of each list; what is left out is counted.
SUBJECTS_MAX, GROUPS_MAX = 60, 60
SEALS_MAX = 200
MEANINGS = {
    "dispatched": "left when they were due, and are in the realtime log",
    "dead": "given up by their server, which keeps them as dead letters",
    "cancelled": "ended before they were due, because somebody asked for it",
    "expired": "not delivered, because their expiry had passed",
    "in_doubt": "may have left or not: an operator decided so",
    "pending": "not due yet",
    "undecided": "due just now, on their way",
    "waiting": "due for longer; their server still holds them",
    "missing": "accepted, and not where they must be",
    "moved": "of the cancelled: went on as other messages, which are scheduled where they went",
    "redriven": "of the moved: dead letters that were sent to their group again",
}
HOW = (
    "Each message was compared in three logs that different servers write: what was accepted, what the delay server "
    "says became of it, and what the realtime server holds. No single log had to be believed.",
    "Each scheduled message is in exactly one class above, and the classes add up.",
    "The totals were computed a second time, from sequences, the table of hours and seals.",
    "Each checksum of what was read was verified. Nothing was locked or changed.",
    "The seals of the hours were computed anew from their rows. Each seal holds the digest of the one before it, so "
    "whoever changes an old hour changes all digests after it, and the last one, which you can keep elsewhere.",
)
_NUMBERS = re.compile(r"[0-9a-f]{16}|[0-9][0-9,]*")


class ListRow(NamedTuple):
    """A row of a table, and how it looks."""

    cells: Sequence[object]
    tone: str = ""


class PageTable(NamedTuple):
    """A table: names and kinds of its columns (``n`` number, ``t`` text, ``d`` digest), and rows."""

    columns: Sequence[tuple[str, str]]
    rows: Sequence[ListRow]

    @property
    def kinds(self) -> list[str]:
        """Of the columns."""
        return [kind for _, kind in self.columns]


class CauseCard(NamedTuple):
    """Findings of one cause; ``examples`` are what was found and the command that shows it."""

    kind: str
    tone: str
    title: str
    why: str
    rows: int = 1
    span: str = ""
    examples: Sequence[tuple[str, str]] = ()


def audit_page(
    report: AuditReport,
    judged: Sequence[JudgedAcceptance] = (),
    *,
    chosen: str = "every hour",
    version: str = __version__,
) -> str:
    """Write a report as a page of HTML, which is to be saved in UTF-8.

    Example::

        report = audit_directory("/var/lib/delayd", now_ms=time.time_ns() // 1_000_000)
        Path("audit.html").write_text(audit_page(report), encoding="utf-8")

    Args:
        report: what `audit_directory` returned; with any limit of findings, for the page counts all by their causes.
        judged: what operators' acceptances are worth, as `AuditReport.judged` returns it.
        chosen: which hours were asked for, in words.
        version: of the delayd that has made the report.
    """
    total = report.total
    values: dict[str, object] = {
        "verdict": verdict_of(report, judged),
        "tiles": tiles_of(report),
        "remarks": list(report.remarks),
        "scope": scope_of(report, chosen),
        "servers": _servers(report) if report.lives else None,
        "totals": _totals(report) if total.scheduled else None,
        "equation": f"{capital(total.equation)}.",
        "checked": [*HOW, *_terms(report)],
        "commands": _commands(report.places, report.directories),
        **_causes(report, judged),
        **_charts(report),
        **_subjects(report),
        "groups": _groups(report.groups),
        **_seals(report.seals),
    }
    return _render(report.data, report.read_at_ms, {**values, "version": version})


def damage_page(data: Sequence[str], read_at_ms: int, damage: Sequence[str]) -> str:
    """The page of an audit that damaged files have ended; ``damage`` are the sentences that name them."""
    values: dict[str, object] = {
        "verdict": verdict_on_damage(damage),
        "damage": damage,
        "scope": [("Data directory", " ".join(data))],
        "checked": ["An audit that can't read a file that a checkpoint counts ends without a verdict on any hour."],
        "commands": [*(_verify(place, "names every damaged byte") for place in data), *_commands(data, data)],
    }
    return _render(" ".join(data), read_at_ms, {**values, "version": __version__})


def _render(data: str, read_at_ms: int, values: dict[str, object]) -> str:
    css = _file("page.css")
    sections = {"findings": "Findings", "totals": "Totals", "heat_map": "Hours", "distribution": "Lateness"}
    sections |= {"subjects": "Subjects", "groups": "Groups", "seals_lead": "Seals", "checked": "How it was checked"}
    links = [
        ("hours" if key == "heat_map" else "lateness" if key == "distribution" else key.split("_")[0], name)
        for key, name in sections.items()
        if values.get(key) or (key == "findings" and "causes" in values)
    ]
    text: str = _template().render(
        {
            "data": data,
            "read_at": instant_text(read_at_ms),
            "css": Markup(css),
            "css_sha256": base64.b64encode(hashlib.sha256(css.encode()).digest()).decode(),
            "sections": links,
            **dict.fromkeys(_PARTS),
            **values,
        }
    )
    return text


# What a page may have; a page of damage has few of them.
_PARTS = (
    *("tiles", "damage", "remarks", "servers", "totals", "equation", "causes", "causes_rest", "findings_lead"),
    *("acceptances", "heat_map", "heat_lead", "periods", "distribution", "late_lead", "course", "course_lead"),
    *("subjects", "subjects_lead", "groups", "seals", "seals_lead", "seals_name", "chains", "last_seals"),
)


@cache
def _template() -> Template:
    made = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=visible, loader=FunctionLoader(_file), trim_blocks=False
    )
    return made.get_template("page.html")


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _servers(report: AuditReport) -> PageTable:
    rows = [
        ListRow((each.role, f"{each.log_id:016x}" if each.log_id else "", each.state.value, each.path))
        for each in report.lives
    ]
    return PageTable((("Server", ""), ("log_id", "d"), ("Now", ""), ("Directory", "t")), rows)


def _terms(report: AuditReport) -> Iterator[str]:
    limit, grace = limit_text(report.late_ms_limit), limit_text(report.lost_grace_ms)
    yield f"LATE is what left more than {limit} after it was due, counted from the later of due and accepted."
    yield f"LOST is what was due more than {grace} before its server's last word, and has no outcome."
    yield "Findings of one cause are joined above. A cause is known where a server's own files tell of it."


def _commands(places: Sequence[str], directories: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield f"{audit_command(places)} --format json --findings 1000000", "all figures, and each finding"
    for place in directories:
        yield f"delayd seals --data {shlex.quote(place)}", "the seals, from the rows of their hours"
        yield _verify(place, "every byte")


def _verify(place: str, what: str) -> tuple[str, str]:
    return f"delayd log verify --data {shlex.quote(place)}", what


def _totals(report: AuditReport) -> PageTable:
    total = report.total

    def rows(names: Sequence[str]) -> list[ListRow]:
        counts = {name: getattr(total, name) for name in names}
        return [
            ListRow(
                (name.replace("_", " "), count, share(count, total.scheduled), MEANINGS[name]),
                "bad" if name == "missing" else "",
            )
            for name, count in counts.items()
            if count
        ]

    scheduled = ListRow(("scheduled", total.scheduled, "", "the sum"), "sum")
    every = [*rows(CLASSES), scheduled, *rows(PARTS)]
    return PageTable((("", ""), ("Messages", "n"), ("", "n"), ("They were", "t")), every)


def _causes(report: AuditReport, judged: Sequence[JudgedAcceptance]) -> dict[str, object]:
    accepted = {each.key: each for each in judged if each.state is AcceptanceState.ACCEPTED}
    cards = [*_fault_cards(report), *_joined(report, accepted)]
    known = sum(each.rows for each in report.caused if each.why is not None and each.why.is_known)
    lead = "Nothing was found."
    if report.findings_count or report.broken_seals:
        lead = f"{counted(report.findings_count, 'finding|findings')}, joined by what explains them."
        late = sum(each.rows for each in report.caused if each.why is not None)
        if late:
            lead += f" Of {late:,} late messages the servers' own files explain {known:,}."
    rest = cards[CAUSES_MAX:]
    more = f"… and {counted(len(rest), 'more cause|more causes')} with {sum(each.rows for each in rest):,} findings; "
    return {
        "findings_lead": lead,
        "causes": cards[:CAUSES_MAX],
        "causes_rest": f"{more}the first of the commands below names each." if rest else "",
        "acceptances": _acceptances(judged),
    }


def _fault_cards(report: AuditReport) -> Iterator[CauseCard]:
    """What concerns no single message: broken seals, and totals."""
    for seal in report.broken_seals:
        title = f"The seal of hour {hour_name(seal.hour)} is broken"
        yield CauseCard("SEAL", "bad", title, f"{seal.differs}.", span=f"Delay server {seal.log_id:016x}.")
    alike: dict[tuple[int, str], list[Finding]] = {}
    for fault in report.faults:
        # One cause often shows in many hours, and then only numbers differ.
        alike.setdefault((fault.log_id, _NUMBERS.sub("…", fault.detail)), []).append(fault)
    for (log_id, detail), own in alike.items():
        server = f"Server {log_id:016x}."
        if len(own) == 1:
            yield CauseCard("CONSERVATION", "bad", "Totals do not add up", f"{capital(own[0].detail)}.", span=server)
            continue
        title = f"Totals do not add up, {len(own):,} times"
        shown = [(each.detail, "") for each in own[:EXAMPLES]]
        yield CauseCard("CONSERVATION", "bad", title, f"{capital(detail)}.", len(own), server, shown)


def _joined(report: AuditReport, accepted: dict[HourKey, JudgedAcceptance]) -> Iterator[CauseCard]:
    """The findings that have a message, over all hours: what breaks the books first, then the most."""
    own: dict[tuple[object, ...], list[CausedFindings]] = {}
    for each in report.caused:
        word = accepted.get((each.log_id, each.hour)) if each.kind is not FindingKind.LATE else None
        own.setdefault((each.log_id, each.cause, each.why, word.stored.path if word else ""), []).append(each)
    joined = list(own.items())
    joined.sort(
        key=lambda one: (one[1][0].kind is FindingKind.LATE, bool(one[0][3]), -sum(each.rows for each in one[1]))
    )
    for key, parts in joined:
        yield _card(report, parts, bool(key[3]))


def _card(report: AuditReport, parts: Sequence[CausedFindings], is_accepted: bool) -> CauseCard:
    first, rows = parts[0], sum(each.rows for each in parts)
    is_late = first.kind is FindingKind.LATE
    tone = "odd" if is_late and not (first.why and first.why.is_known) else "calm" if is_late or is_accepted else "bad"
    why = f"{capital(re.sub(r'{[^}]*}', '…', SENTENCES[first.kind][first.cause]))}. Without a known cause."
    if first.why is not None and first.why.is_known:
        why = f"{_explained(first.why)}."
    elif first.why is not None:
        step = "claimed in time, and appended late" if first.why == APPENDED_LATE else "claimed late"
        why = f"Without a known cause: {step}. “Why was it late?” in operations.md goes on from there."
    if is_accepted:
        why = f"An operator has accepted this, see below. {why}"
    begin, end = min(each.first_due_ms for each in parts), max(each.last_due_ms for each in parts)
    most = max(parts, key=lambda each: each.rows)
    span = f"Due at {instant_text(begin)}" if begin == end else f"Due from {instant_text(begin)} to {instant_text(end)}"
    if len(parts) > 1:
        span += f", in {len(parts):,} hours; most of them ({most.rows:,}) in hour {hour_name(most.hour)}"
    late = f", up to {duration_text(max(each.late_ms_max for each in parts))} late" if is_late else ""
    title = f"{counted(rows, 'message|messages')}{late}: {KINDS[first.kind]}"
    if first.cause is Cause.COUNTED:
        title, span = f"{counted(rows, 'hour|hours')}: {KINDS[first.kind]}", ""
    latest = sorted(parts, key=lambda each: -each.late_ms_max)
    examples = [each for part in latest for each in part.examples][:EXAMPLES]
    shown = [_example(report, each) for each in examples]
    span = f"{span}. Delay server {first.log_id:016x}.".lstrip(". ")
    return CauseCard(first.kind.name, tone, title, why, rows, span, shown)


def _explained(why: Explanation) -> str:
    begin, end = instant_text(why.from_ms), instant_text(why.until_ms)
    lasted = duration_text(why.until_ms - why.from_ms)
    server = f"{why.role} server {why.log_id:016x}"
    if why.what in (RESTARTED, CONNECTED):
        what = f"{server} was started anew" if why.what == RESTARTED else f"{server} connected anew"
        at = f"its session with realtime server {why.target_log_id:016x} began at {end}"
        return f"The {what}: {at}, and nothing had arrived there from it since {begin} ({lasted})"
    return f"The {server}: {why.what}, from {begin} to {end} ({lasted})"


def _example(report: AuditReport, found: Finding) -> tuple[str, str]:
    directory = report.directory_of(found.log_id)
    due = instant_text(found.deliver_at_ms) if found.sequence else hour_name(found.hour)
    what = f"message {found.sequence} of {found.subject}, due {due}" if found.sequence else f"hour {due}"
    command = command_of(report.places, directory, found.log_id, found.hour, found.sequence, found.subject)
    return f"{what}: {found.detail}", command


def _acceptances(judged: Sequence[JudgedAcceptance]) -> PageTable | None:
    rows: list[ListRow] = []
    for stored, state in judged:
        # Words that nobody has verified may be anybody's, so they are not shown.
        is_true = state in (AcceptanceState.ACCEPTED, AcceptanceState.DIFFERS)
        said = stored.acceptance if is_true else None
        words = (said.by, instant_text(said.at_ms), said.reason) if said else ("", "", "")
        rows.append(ListRow((hour_name(stored.hour), state.value.replace("_", " "), *words)))
    columns = (("Hour", ""), ("State", ""), ("By", "t"), ("At", ""), ("Reason", "t"))
    return PageTable(columns, rows) if rows else None


def _charts(report: AuditReport) -> dict[str, object]:
    if not report.hours:
        return {}
    what, periods = periods_of(report.hours)
    found: dict[str, object] = {
        "heat_map": svg(heat_map(periods)),
        "heat_lead": f"A column is one {what}, in UTC, by when messages were due; the darker, the more. A dotted line "
        "stands where nothing was due in between.",
        "periods": _periods(periods),
    }
    total = report.total
    if total.lateness.any():
        past = f" {counted(total.past_due, 'more was|more were')} due already when accepted." if total.past_due else ""
        found["distribution"] = svg(distribution(total, report.late_ms_limit))
        found["late_lead"] = f"How long after they were due {int(total.lateness.sum()):,} messages left.{past}"
        found["course"] = svg(course(periods))
        found["course_lead"] = (
            f"Each {what}: the line is p50, the dark bar goes up to p99, the light one to the latest."
        )
    return found


def _periods(periods: Sequence[Period]) -> PageTable:
    rows_of = [row for row in HEAT_ROWS if any(period.count(row) for period in periods)]
    rows = []
    for period in periods:
        own = period.figures
        late = [own.late_ms(each) for each in (0.5, 0.99)] + [own.late_ms_max if own.lateness.any() else None]
        counts = [period.count(row) for row in rows_of]
        times = ["" if ms is None else duration_text(ms) for ms in late]
        rows.append(ListRow((period.name, own.scheduled, *counts, *times), "bad" if period.count("faults") else ""))
    names = [("findings" if row == "faults" else row.replace("_", " "), "n") for row in rows_of]
    columns = (("Due (UTC)", ""), ("scheduled", "n"), *names, ("p50", "n"), ("p99", "n"), ("latest", "n"))
    return PageTable(columns, rows)


def _subjects(report: AuditReport) -> dict[str, object]:
    found = report.total.subjects
    if not len(found):
        return {}
    order = sorted(
        range(len(found)),
        key=lambda at: (*(-int(found.of(name)[at]) for name in ("faults", "late", "scheduled")), found.names[at]),
    )
    figures = ("scheduled", "dispatched", "pending", "missing", "faults", "late")
    shown, rest = order[:SUBJECTS_MAX], order[SUBJECTS_MAX:]
    rows = []
    for at in shown:
        counts = [int(found.of(name)[at]) for name in figures]
        others = counts[0] - sum(counts[1:4])
        tone = "bad" if counts[4] else ""
        rows.append(ListRow((found.names[at] or "(no subject)", *counts[:3], others, *counts[3:]), tone))
    if rest:
        counts = [int(found.of(name)[rest].sum()) for name in figures]
        name = counted(len(rest), "other subject|other subjects")
        rows.append(ListRow((name, *counts[:3], counts[0] - sum(counts[1:4]), *counts[3:]), "rest"))
    names = ("scheduled", "dispatched", "pending", "otherwise ended or open", "missing", "findings", "late")
    lead = f"{counted(len(found), 'subject|subjects')}: those with findings first, then late ones, then the largest."
    return {"subjects": PageTable((("Subject", "t"), *((name, "n") for name in names)), rows), "subjects_lead": lead}


def _groups(groups: Sequence[GroupBooks]) -> PageTable | None:
    if not groups:
        return None
    figures = ("pulled", "redelivered", "acknowledged", "given_back", "sent_back", "lapsed", "outstanding", "gaps")
    order = sorted(groups, key=lambda each: (-each.gaps, -each.outstanding, -each.pulled, each.subject, each.group))
    rows = [
        ListRow((each.subject, each.group or f"#{each.group_id:08x}", *(getattr(each, name) for name in figures)))
        for each in order[:GROUPS_MAX]
    ]
    rest = order[GROUPS_MAX:]
    if rest:
        sums = (sum(getattr(each, name) for each in rest) for name in figures)
        rows.append(ListRow((counted(len(rest), "other group|other groups"), "", *sums), "rest"))
    names = ((name.replace("_", " "), "n") for name in figures)
    return PageTable((("Subject", "t"), ("Group", "t"), *names), rows)


def _seals(seals: Sequence[SealReport]) -> dict[str, object]:
    kept = [each for each in seals if each.seal is not None]
    last = {each.log_id: each for each in kept}
    lead = "No hour is sealed yet. One is when it is over and each of its messages has an outcome."
    if kept:
        lead = (
            "The seal of an hour is a digest over its rows and outcomes, and over the seal before it. Keep the last "
            "one where the servers can't write: it proves all hours before it."
        )
    chains = [
        ListRow((f"{log_id:016x}", each.seal.number, hour_name(each.hour), each.seal.sha256.hex()))
        for log_id, each in last.items()
        if each.seal is not None
    ]
    step = next((step for step in (1, 24, 168, 672) if len(_last_of(kept, step)) <= SEALS_MAX), 672)
    shown = _last_of(kept, step)
    name = (
        "All seals"
        if len(shown) == len(kept)
        else f"The last seals of each {step // 24} days: {len(shown):,} of {len(kept):,}"
    )
    rows = [
        ListRow(
            (hour_name(each.hour), each.seal.number, each.state.value, each.seal.facts.rows, each.seal.sha256.hex()),
            "bad" if each.state is SealState.BROKEN else "",
        )
        for each in shown
        if each.seal is not None
    ]
    columns = (("Hour", ""), ("Number", "n"), ("State", ""), ("Rows", "n"), ("SHA-256", "d"))
    return {
        "seals_lead": lead,
        "chains": PageTable((("Delay server", "d"), ("Last seal", "n"), ("Hour", ""), ("SHA-256", "d")), chains)
        if chains
        else None,
        "seals": PageTable(columns, rows) if rows else None,
        "seals_name": name,
        "last_seals": [each.seal.sha256.hex() for each in last.values() if each.seal is not None],
    }


def _last_of(seals: Iterable[SealReport], step: int) -> list[SealReport]:
    """The last seal of each server and each so many hours, and all that are broken."""
    last = {(each.log_id, each.hour // step): each for each in seals}
    broken = {(each.log_id, each.hour): each for each in seals if each.state is SealState.BROKEN}
    return list({(each.log_id, each.hour): each for each in (*last.values(), *broken.values())}.values())
