"""Summary: what the page and the picture of an audit say first: the verdict, the totals and the scope.

Invariant: made of an `AuditReport` alone.
"""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup

from delayd.hours import duration_text, hour_start_ms, instant_text
from delayd.machine.operating import counted
from delayd.reading.books import AuditReport
from delayd.reading.findings import FindingKind, JudgedAcceptance
from delayd.reading.report.charts import limit_text
from delayd.reading.seals import SealState

KINDS = {
    FindingKind.LOST: "accepted, and gone: it did not arrive, and nobody holds it any more",
    FindingKind.DUPLICATE: "recorded or delivered more than once",
    FindingKind.EARLY: "left before it was due",
    FindingKind.ORPHAN: "recorded or delivered, though nothing was scheduled",
    FindingKind.MISMATCH: "two logs contradict each other about it",
    FindingKind.LATE: "left later than the limit, which breaks no book",
    FindingKind.CONSERVATION: "totals do not add up",
}
UNSEEN = "\N{REPLACEMENT CHARACTER}"


class Tile(NamedTuple):
    """One figure at the top of a page."""

    name: str
    value: str
    note: str
    tone: str = ""


class Verdict(NamedTuple):
    """The first that a page says."""

    word: str
    tone: str
    sentences: Sequence[str]


def verdict_of(report: AuditReport, judged: Sequence[JudgedAcceptance]) -> Verdict:
    """Whether the books balance, and the sums that show it."""
    total = report.total
    faults = {name: getattr(total, name) for name in ("lost", "duplicate", "early", "orphan", "mismatch")}
    faults["conservation"] = total.conservation + len(report.faults)
    said = ", ".join(f"{name} {count:,}" for name, count in faults.items())
    late = f"{total.late:,} left more than {limit_text(report.late_ms_limit)} late, which breaks no book."
    found = [f"{capital(total.equation)}. {capital(said)}.", *([late] if total.late else [])]
    if report.broken_seals:
        broken = counted(len(report.broken_seals), "seal is|seals are")
        found.append(f"{broken} BROKEN: rows of a sealed hour, or seals, were changed.")
    if not report.hours and report.balanced:
        return Verdict("There is nothing to audit", "calm", ["No hour with messages was found or chosen."])
    if report.balanced:
        return Verdict("The books balance", "good", found)
    if report.is_accepted(judged):
        found.append(
            "Operators have looked into each hour with such findings, and accept them; the page says who, and why."
        )
        return Verdict("The books do not balance; all findings are accepted", "odd", found)
    return Verdict("The books do NOT balance", "bad", found)


def tiles_of(report: AuditReport) -> Iterator[Tile]:
    """The figures at the top."""
    total = report.total
    yield Tile("Scheduled", f"{total.scheduled:,}", counted(len(report.hours), "hour|hours") + " with messages")
    yield Tile("Dispatched", f"{total.dispatched:,}", share(total.dispatched, total.scheduled))
    for kind in (FindingKind.LOST, FindingKind.DUPLICATE, FindingKind.EARLY):
        count = getattr(total, kind.name.lower())
        yield Tile(kind.name.capitalize(), f"{count:,}", KINDS[kind].split(":")[0], "bad" if count else "good")
    rest = total.orphan + total.mismatch + total.conservation + len(report.faults)
    yield Tile("Contradictions", f"{rest:,}", "orphan, mismatch, conservation", "bad" if rest else "good")
    note = f"more than {limit_text(report.late_ms_limit)} after due"
    yield Tile("Late", f"{total.late:,}", note, "odd" if total.late else "good")
    middle, high = total.late_ms(0.5), total.late_ms(0.99)
    if middle is not None and high is not None:
        note = f"p99 {duration_text(high)}, at most {duration_text(total.late_ms_max)}"
        yield Tile("Half left within", duration_text(middle), note)
    if report.seals:
        states = Counter(seal.state for seal in report.seals)
        note = ", ".join(f"{count:,} {state}" for state, count in sorted(states.items()))
        tone = "bad" if report.broken_seals else "good"
        yield Tile("Seals", f"{states[SealState.VERIFIED]:,} of {len(report.seals):,}", note, tone)


def verdict_on_damage(damage: Sequence[str]) -> Verdict:
    """That of an audit that damaged files have ended."""
    what = counted(len(damage), "file can't|files can't") + " be read, so nobody can say what became of the messages."
    return Verdict("The books could NOT be audited", "bad", (what,))


def scope_of(report: AuditReport, chosen: str) -> Iterator[tuple[str, str]]:
    """What was audited: names and values."""
    yield "Data directory", report.data
    yield "Hours", chosen
    if report.hours:
        hours = [each.hour for each in report.hours]
        first, last = instant_text(hour_start_ms(min(hours))), instant_text(hour_start_ms(max(hours) + 1))
        yield "Due", f"from {first} to {last}"


def audit_command(places: Sequence[str]) -> str:
    """The command that audits these places again."""
    return f"delayd audit --data {shlex.quote(places[0])}" if len(places) == 1 else f"delayd audit {shlex.join(places)}"


def command_of(
    places: Sequence[str], directory: str | None, log_id: int, hour: int, sequence: int, subject: str
) -> str:
    """The command that shows what a finding is about: a trace of its message, or the audit of its hour.

    Args:
        places: what was audited.
        directory: the data directory of its delay server; None in an archive, which has no servers, and a trace reads
            the logs of servers.
        log_id: of its delay server.
        hour: of the finding.
        sequence: of its message; 0 for a finding of totals.
        subject: of its message.
    """
    if sequence and subject and directory is not None:
        return f"delayd trace {shlex.quote(subject)} {sequence} --server {log_id:016x} --data {shlex.quote(directory)}"
    begin, end = (instant_text(hour_start_ms(each))[:16] + "Z" for each in (hour, hour + 1))
    return f"{audit_command(places)} --from {begin} --to {end}"


def visible(value: object) -> object:
    """A text without characters that nobody sees, that turn the direction of others, or that UTF-8 does not have."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(each if each.isprintable() else f"{UNSEEN}{ord(each):x}" for each in value)


def capital(text: str) -> str:
    """A sentence that begins with a capital letter."""
    return text[:1].upper() + text[1:]


def share(part: int, whole: int) -> str:
    """A part of the whole, in percent."""
    if not whole:
        return ""
    percent = 100 * part / whole
    # 99.99996 % is not 100 %, and somebody will ask.
    if part not in (0, whole) and (percent < 0.01 or percent > 99.99):
        return "below 0.01 %" if percent < 1 else "above 99.99 %"
    return f"{percent:.2f} %".replace(".00 ", " ")
