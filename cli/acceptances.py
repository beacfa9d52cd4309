"""What operators have accepted of findings, as audits tell it; and ``delayd audit --accept``, which notes such a word.

Invariant: an acceptance changes no figure and hides no finding. It only decides whether an audit ends with an alarm.
"""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from delayd.disk import RealDisk
from delayd.errors import BadArgument, BadSetting
from delayd.hours import hour_name
from delayd.reading.acceptances import Acceptance, AcceptanceState, JudgedAcceptance, check_words, write_acceptance
from delayd.reading.books import AuditReport
from delayd.reading.directory import find_directories
from delayd.secret import Secret

from .options import confirm, secret_of
from .times import instant_text


class Words(NamedTuple):
    """An operator's word on the findings of an hour, and the secret to sign it with."""

    hour: int
    by: str
    reason: str
    secret: Secret


def words_of(hour: int, by: str | None, reason: str | None, secret_file: str | None, data: str) -> Words:
    """Take a word as it was typed.

    Raises:
        BadArgument: the name or the reason is missing, or can't be shown in a line.
        BadSetting: the secret can't be had.
    """
    if by is None or reason is None:
        raise BadArgument("an acceptance says who accepts and why: give --by NAME and --reason TEXT, too")
    check_words(by, reason)
    return Words(hour, by, reason, secret_of(secret_file, data))


def accept(data: str, report: AuditReport, words: Words, yes: bool) -> Iterator[str]:
    """Ask, and keep the word beside each delay server that has findings in the hour; what was done, in lines.

    Raises:
        BadArgument: the hour has no findings that unbalance its books, or the answer was no.
    """
    name = hour_name(words.hour)
    found = {log_id: sha256 for (log_id, hour), sha256 in report.findings_sha256.items() if hour == words.hour}
    if not found:
        raise BadArgument(f"nothing unbalances the books of hour {name}, so there is nothing to accept")
    confirm(
        f"Audits name the findings of hour {name} still, and end with exit code 0 in spite of them, as long as these "
        "findings stay as they are now.",
        yes,
    )
    at_ms = time.time_ns() // 1_000_000
    for directory in find_directories(RealDisk(), data):
        if directory.log_id in found:
            sha256 = found[directory.log_id]
            acceptance = Acceptance(directory.log_id, words.hour, sha256, words.by, words.reason, at_ms)
            path = write_acceptance(directory.path, acceptance, words.secret)
            yield f"accepted by {words.by} at {instant_text(at_ms)}: {words.reason}; kept as {path}"
    if report.broken_seals or report.faults:
        yield "nobody can accept a broken seal, or totals that do not add up: audits go on to exit with 3"


class Told(NamedTuple):
    """What the acceptances of a report are worth; ``why`` they can't be verified, if they can't."""

    found: Sequence[JudgedAcceptance]
    why: str

    @property
    def sentences(self) -> Iterator[str]:
        """What an audit says of them."""
        for stored, state in self.found:
            said, what = stored.acceptance, ""
            # Words that nobody has verified may be anybody's, so they are not shown.
            if state is AcceptanceState.NOT_SIGNED:
                what = f"{stored.path} is not signed with this cluster's secret, and counts for nothing"
            elif state is AcceptanceState.NOT_VERIFIED:
                what = f"{stored.path} can't be verified, and counts for nothing: {self.why}"
            elif stored.error is not None:
                what = stored.error.message
            elif said is not None:
                fits = state is AcceptanceState.ACCEPTED
                what = "" if fits else "its findings are NOT those that were "
                what += f"accepted by {said.by} at {instant_text(said.at_ms)}: {said.reason}"
            yield f"hour {hour_name(stored.hour)}: {what}"

    @property
    def as_json(self) -> list[dict[str, object]]:
        """The same for programs; without the words of acceptances that nobody has verified."""
        return [_as_json(each) for each in self.found]


NOTHING_TOLD = Told((), "")


def judged(report: AuditReport, secret_file: str | None, data: str) -> Told:
    """What the acceptances of a report are worth, by the cluster's secret."""
    if not report.acceptances:
        return NOTHING_TOLD
    try:
        return Told(report.judged(secret_of(secret_file, data)), "")
    except BadSetting as error:
        return Told(report.judged(None), error.message)


def _as_json(each: JudgedAcceptance) -> dict[str, object]:
    stored, state = each
    verified = state in (AcceptanceState.ACCEPTED, AcceptanceState.DIFFERS)
    said = stored.acceptance if verified else None
    return {
        "hour": hour_name(stored.hour),
        "delay_log_id": f"{stored.log_id:016x}",
        "state": state.value,
        "by": said.by if said else None,
        "reason": said.reason if said else None,
        "at_ms": said.at_ms if said else None,
        "at": instant_text(said.at_ms) if said else None,
        "path": stored.path,
    }
