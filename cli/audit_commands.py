"""``delayd audit``, ``spark-audit`` and ``seals``: the books of a data directory, hour by hour, what breaks them, what
operators have accepted of that, and the seals of hours.

Invariant: the exit code is 0 when the books balance and no seal is broken, or operators have accepted all that
unbalances them, and otherwise 3, whatever the format; a message that came late is named and breaks no book. An
acceptance changes no figure and hides no finding.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple, ParamSpec, TypeVar

import click

from delayd.config import DATA_DEFAULT
from delayd.errors import BadArgument, BadSetting, DataError
from delayd.hours import duration_text, hour_name, instant_text
from delayd.machine.operating import counted
from delayd.reading.archive.store import is_archive
from delayd.reading.audit import LATE_MS_LIMIT, LOST_GRACE_MS
from delayd.reading.books import AbsentServer, AuditReport
from delayd.reading.consumption import GroupBooks
from delayd.reading.files.directory import Role
from delayd.reading.findings import (
    QUANTILES,
    Acceptance,
    AcceptanceState,
    Finding,
    HourSummary,
    JudgedAcceptance,
    check_words,
    write_acceptance,
)
from delayd.reading.fleet import audit_fleet
from delayd.reading.proved import ProvedHours, encode_proved, proved_hours, read_proved
from delayd.reading.seals import (
    SealReport,
    SealsReport,
    SealState,
    verify_seals,
)
from delayd.reading.subject_figures import CLASSES, FIGURES, PARTS, SubjectFigures
from delayd.secret import Secret

from .hour_commands import EVERY_HOUR, HourRange, HourSteps, all_damage_named, hour_of_name, hours_options
from .listing import Cell, Column, ColumnKind, columns, progress, show
from .main import NOT_BALANCED, OK, USAGE, Programs
from .page_file import PageFile, ReportFiles, is_picture, report_files
from .shared_options import (
    Command,
    Shown,
    bundle,
    confirm,
    data_option,
    format_option,
    meta_option,
    paths_of,
    place_params,
    secret_of,
    secret_option,
    shown_options,
    yes_option,
)
from .times import duration

FINDINGS_DEFAULT = 10  # Or they would push the verdict off the screen; they are counted in any case.

P = ParamSpec("P")
R = TypeVar("R")

_MS = timedelta(milliseconds=1)
_QUANTILE_NAMES = tuple(f"late_p{f'{100 * quantile:g}'.replace('.', '')}_ms" for quantile in QUANTILES)
_FAULTS = ("lost", "duplicate", "early", "orphan", "mismatch", "conservation")
_SELDOM = (*CLASSES[1:], *_FAULTS, "late", *PARTS)
HOUR_COLUMNS = (
    *columns("hour"),
    *(Column(name, ColumnKind.NUMBER) for name in ("scheduled", *CLASSES)),
    *(Column(name, ColumnKind.NUMBER) for name in _FAULTS),
    *(Column(name, ColumnKind.NUMBER) for name in ("late", *PARTS)),
    *(Column(name, ColumnKind.NUMBER, detail=True) for name in ("unproven", "past_due")),
    *(Column(name, ColumnKind.DURATION) for name in (*_QUANTILE_NAMES, "late_max_ms")),
    *columns("delay_log_id:detail"),
)
FINDING_COLUMNS = columns("hour finding sequence:name subject deliver_at_ms:instant,spare detail delay_log_id:detail")


def _page_path(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    """Raise BadSetting when a picture is wanted, and nothing is there to draw it."""
    if path is not None and is_picture(path):
        from delayd.reading.tables import need

        need("matplotlib", "a picture of an audit", "report")
    return path


_TERMS = (
    hours_options,
    click.option(
        "--late-limit",
        type=duration,
        default=f"{LATE_MS_LIMIT}ms",
        show_default=True,
        help="A message that left later than this after it was due is LATE.",
    ),
    click.option(
        "--grace",
        type=duration,
        default=f"{LOST_GRACE_MS}ms",
        show_default=True,
        help="A due message without an outcome is LOST only when it was due longer ago than this.",
    ),
    click.option(
        "--findings",
        "findings_limit",
        type=click.IntRange(min=0),
        default=FINDINGS_DEFAULT,
        show_default=True,
        metavar="N",
        help="How many findings are named at most; all are counted.",
    ),
    click.option(
        "--report",
        "page_path",
        type=click.Path(),
        metavar="FILE|FOLDER",
        callback=_page_path,
        help="Write the audit also as a page of HTML, to be shown, printed and signed; FILE.png is a picture. A FOLDER"
        " gets the page and the figures under a new name.",
    ),
    click.option("--groups", is_flag=True, help="Show also what became of messages in groups of consumers."),
    secret_option,
    format_option,
)
GROUP_COLUMNS = (
    *columns("subject group"),
    *(Column(name, ColumnKind.NUMBER) for name in ("pulled", "redelivered", "acknowledged", "given_back", "sent_back")),
    *(Column(name, ColumnKind.NUMBER) for name in ("lapsed", "outstanding", "gaps")),
    *columns("group_id:name,detail realtime_log_id:detail"),
)


class AcceptanceWorth(NamedTuple):
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
        return [_acceptance_as_json(each) for each in self.found]


NOTHING_TOLD = AcceptanceWorth((), "")


def _terms(command: Callable[P, R]) -> Callable[P, R]:
    for option in reversed(_TERMS):
        command = option(command)
    return command


class BooksPlaces(NamedTuple):
    """The places that an audit reads, and the meta server that is asked which servers there are; None: none is."""

    paths: tuple[str, ...]
    meta: str | None

    @property
    def directories(self) -> list[str]:
        """The places that are no archives."""
        return [path for path in self.paths if not is_archive(path)]

    @property
    def home(self) -> str | None:
        """The first data directory: the cluster's secret lies there, unless it is named."""
        return next(iter(self.directories), None)

    def known(self) -> list[AbsentServer]:
        """The servers that meta knows; none when nobody wants to know. Raises ServerUnavailable."""
        if self.meta is None:
            return []
        # Only --discover asks a server.
        from .servers import known_servers

        return [AbsentServer(each.role, each.log_id, each.address) for each in known_servers(self.meta)]


def with_absent(report: AuditReport, known: Sequence[AbsentServer]) -> AuditReport:
    """The report, which also says which of the servers that meta knows are not among the directories."""
    here = {(life.role, life.log_id) for life in report.lives}
    return replace(report, absent=tuple(each for each in known if (each.role, each.log_id) not in here))


def _places(places: tuple[str, ...], data: str, discover: bool, meta: str) -> BooksPlaces:
    return BooksPlaces(paths_of(places, data), meta if discover else None)


_places_options = bundle(
    "places",
    _places,
    *place_params,
    click.option("--discover", is_flag=True, help="Ask meta for its servers, and name those that are not among them."),
    meta_option,
)


_proved_option = click.option(
    "--proved",
    "proved_path",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Leave out sealed hours that FILE calls proved by an earlier audit, and add those that this one proves.",
)


@click.command(cls=Command)
@_places_options
@_terms
@click.option(
    "--accept",
    "accepted_hour",
    type=hour_of_name,
    metavar="HOUR",
    help="Audit this hour, and keep a signed note that an operator has looked into its findings and accepts them.",
)
@_proved_option
@click.option("--by", metavar="NAME", help="Who accepts them.")
@click.option("--reason", metavar="TEXT", help="Why they are accepted.")
@yes_option
def audit(
    places: BooksPlaces,
    hours: HourRange,
    late_limit: timedelta,
    grace: timedelta,
    findings_limit: int,
    page_path: str | None,
    groups: bool,
    secret_file: str | None,
    form: str,
    accepted_hour: int | None,
    proved_path: str | None,
    by: str | None,
    reason: str | None,
    yes: bool,
) -> int:
    """Check that each message left once, that none left early, and how late each one left.

    The command compares what was scheduled with the dispatch logs and with the realtime message logs. The servers may
    run or not; a copy of their files will do, too. It names each message that is LOST, DUPLICATE, EARLY, ORPHAN,
    MISMATCH or LATE, and totals that do not add up (CONSERVATION). JSON has everything, CSV the hours. Of an archive it
    compares the tables of each hour with each other and with the seal.

    Servers of one cluster that run on several machines are audited together: name the directory of each, and archives.
    The command says which server's directory is missing, and which one was given twice; with --discover also, which of
    the servers that meta knows is not there.

    It also verifies the seals of the hours that it reads.

    --report writes a page for people: the verdict first, findings by cause, charts, seals, and a line for a signature.
    It needs nothing but a browser, and a file of that name is replaced. A FILE.png is one picture of its first part and
    its charts, and needs `pip install 'delayd[report]'`. A FOLDER gets each audit's page and figures (JSON) under a new
    name; `delayd gateway --audits FOLDER` shows them in the console.

    With --proved each sealed hour is read once: it is left out while its seal stays the one with which it was proved.
    Whoever changes files of such an hour afterwards is found by an audit without --proved.

    --accept keeps a note beside the delay server's logs, signed with the cluster's secret. Audits of the hour name its
    findings still, and say who accepts them and why; other findings than these raise the alarm again.

    Exit codes: 0 the books balance, or all that unbalances them is accepted; 2 so it is, but a place that a newer
    delayd wrote was left out; 3 they do not balance, a seal is broken or a file is damaged.

    $ delayd audit --data /var/lib/delayd --from -24h
    $ delayd audit --data /var/lib/delayd --late-limit 100ms --findings 50
    $ delayd audit --data /var/lib/delayd --format json | jq .total
    $ delayd audit /mnt/machine-a /mnt/machine-b s3://books/delayd
    $ delayd audit --data /var/lib/delayd --report audit.html
    $ delayd audit --data /var/lib/delayd --accept 2026112016 --by ann --reason "disk 3 was lost, #4711"
    """
    words = None
    if accepted_hour is not None:
        if hours != EVERY_HOUR:
            raise BadArgument("--accept names the hour; leave --from and --to out")
        if page_path is not None:
            raise BadArgument("an acceptance changes what a page says: leave --report out, and write it afterwards")
        if proved_path is not None:
            raise BadArgument("--accept audits one hour as a whole; leave --proved out")
        hours = HourRange(accepted_hour, accepted_hour + 1)
        words = words_of(accepted_hour, by, reason, secret_file, places.home)
    elif by is not None or reason is not None or yes:
        raise BadArgument("--by, --reason and --yes belong to --accept HOUR; name the hour whose findings are accepted")
    if places.home is None and (words is not None or groups):
        raise BadArgument("--accept and --groups need a data directory; an archive has neither notes nor groups")
    directories, known = places.directories, places.known()
    proved = {} if proved_path is None else read_proved(proved_path)
    with report_files(page_path) as files, PageFile(proved_path) as proved_file:
        damage = _damage_on(files, places.paths, hours)
        with damage as named, all_damage_named(directories, named), progress("hours", None) as advance:
            report = audit_fleet(
                places.paths,
                now_ms=time.time_ns() // 1_000_000,
                hours=hours,
                late_ms_limit=late_limit // _MS,
                lost_grace_ms=grace // _MS,
                findings_limit=findings_limit,
                progress=HourSteps(advance),
                # Whoever asks for some hours waits for no more than these.
                consumption=groups or files.page.is_wanted or hours == EVERY_HOUR,
                proved=proved,
            )
        report = with_absent(report, known)
        told = judged(report, secret_file, places.home)
        code = show_report(report, form, told, groups=groups, chosen=_chosen(hours))
        _write_report(files, report, told, hours)
        _write_proved(proved_file, report, proved)
    if directories and report.total.unproven and all(life.role != Role.REALTIME for life in report.lives):
        sys.stdout.flush()
        click.echo(
            f"delayd: {report.data} holds no realtime server's directory, so nothing shows what arrived; give the "
            "directory that `delayd up --data` was given, or the directories of all servers",
            err=True,
        )
    if words is None:
        return code
    sys.stdout.flush()
    for line in accept(report, words, yes):
        click.echo(line, err=form != "table")
    return OK


@click.command("spark-audit", cls=Command)
@_places_options
@_terms
@_proved_option
@click.pass_obj
def spark_audit(
    programs: Programs,
    places: BooksPlaces,
    hours: HourRange,
    late_limit: timedelta,
    grace: timedelta,
    findings_limit: int,
    page_path: str | None,
    groups: bool,
    secret_file: str | None,
    form: str,
    proved_path: str | None,
) -> int:
    """Do the same as `delayd audit`, with Spark: each task audits some of the hours.

    The command needs Java 17 and the extra packages of `pip install 'delayd[spark]'`. Its figures are those of `delayd
    audit`.

    Exit codes: 0 the books balance, or all that unbalances them is accepted; 2 so it is, but a place that a newer
    delayd wrote was left out; 3 they do not balance, a seal is broken or a file is damaged.

    $ delayd spark-audit --data /var/lib/delayd --from -24h
    $ delayd spark-audit /mnt/machine-a /mnt/machine-b s3://books/delayd
    """
    known = places.known()
    proved = {} if proved_path is None else read_proved(proved_path)
    with report_files(page_path) as files, PageFile(proved_path) as proved_file:
        limits = {"late_ms_limit": late_limit // _MS, "lost_grace_ms": grace // _MS, "findings_limit": findings_limit}
        with _damage_on(files, places.paths, hours):
            report = programs.spark_audit(*places.paths, hours=hours, proved=proved, **limits)
        report = with_absent(report, known)
        told = judged(report, secret_file, places.home)
        code = show_report(report, form, told, groups=groups, chosen=_chosen(hours))
        _write_report(files, report, told, hours)
        _write_proved(proved_file, report, proved)
    return code


@contextmanager
def _damage_on(files: ReportFiles, places: Sequence[str], hours: HourRange) -> Iterator[list[str]]:
    """Write a page when the block ends with damage: else one of an earlier audit would be taken for this one's."""
    named: list[str] = []
    try:
        yield named
    except DataError as error:
        read_at_ms, damage = time.time_ns() // 1_000_000, named or [error.message]
        if files.page.is_picture:
            from delayd.reading.report.picture import damage_picture

            files.page.write(damage_picture(places, read_at_ms, damage))
        elif files.page.is_wanted:
            from delayd.reading.report.page import damage_page

            files.page.write(damage_page(places, read_at_ms, damage).encode())
        _write_figures(files, {**_head_as_json(places, read_at_ms, "damaged", _chosen(hours)), "damage": damage})
        raise


def _write_proved(file: PageFile, report: AuditReport, before: ProvedHours) -> None:
    if file.is_wanted:
        file.write(encode_proved({**before, **proved_hours(report)}).encode())


def _write_report(files: ReportFiles, report: AuditReport, told: AcceptanceWorth, hours: HourRange) -> None:
    # Both take long to load, which an audit without a page does not need.
    if files.page.is_picture:
        from delayd.reading.report.picture import audit_picture

        files.page.write(audit_picture(report, told.found, chosen=_chosen(hours)))
    elif files.page.is_wanted:
        from delayd.reading.report.page import audit_page

        files.page.write(audit_page(report, told.found, chosen=_chosen(hours)).encode())
    _write_figures(files, _as_json(report, told, _chosen(hours)))


def _write_figures(files: ReportFiles, figures: Mapping[str, object]) -> None:
    if files.figures.is_wanted:
        files.figures.write(json.dumps(figures, indent=2).encode())
        sys.stdout.flush()
        click.echo(f"delayd: the audit is kept as {files.page.path}, and its figures beside it", err=True)


def _chosen(hours: HourRange) -> str:
    bounds = zip(("from", "up to"), (hours.first, None if hours.until is None else hours.until - 1), strict=True)
    return " ".join(f"{word} {hour_name(hour)}" for word, hour in bounds if hour is not None) or "every hour"


def show_report(report: AuditReport, form: str, told: AcceptanceWorth, *, groups: bool, chosen: str) -> int:
    """Write a report to stdout, and what operators have accepted of it; returns the exit code."""
    if form == "json":
        click.echo(json.dumps(_as_json(report, told, chosen), indent=2))
    else:
        hours = [_hour_row(summary) for summary in report.hours]
        if form == "table" and len(hours) > 1:
            hours.append(_hour_row(report.total))
        if hours or form != "table":
            show(_columns(hours) if form == "table" else HOUR_COLUMNS, hours, form)
    if form == "table":
        if report.findings:
            click.echo()
            show(FINDING_COLUMNS, _finding_rows(report.findings), form)
        if groups:
            click.echo()
            show(GROUP_COLUMNS, map(_shown_group, report.groups), form)
            if not all(books.group for books in report.groups):
                click.echo("# is the number of a group whose name the pull log keeps no more; `delayd log dump` of a")
                click.echo("stopped server's, or a copied, state.lmdb/data.mdb has the name under name/NUMBER")
        for line in _verdict(report, told):
            click.echo(line)
    if not report.balanced and not report.is_accepted(told.found):
        return NOT_BALANCED
    return USAGE if report.refused else OK


def _columns(hours: Sequence[Sequence[Cell]]) -> list[Column]:
    """Those of a table: what is 0 in every hour takes no room there, and the verdict has it."""
    return [
        column._replace(detail=True) if column.name in _SELDOM and not any(row[number] for row in hours) else column
        for number, column in enumerate(HOUR_COLUMNS)
    ]


def _hour_row(summary: HourSummary) -> tuple[Cell, ...]:
    counts = ("scheduled", *CLASSES, *_FAULTS, "late", *PARTS, "unproven", "past_due")
    figures: Iterator[int] = (getattr(summary, name) for name in counts)
    quantiles = (summary.late_ms(quantile) for quantile in QUANTILES)
    name = hour_name(summary.hour) if summary.hour else "all"
    timed = summary.dispatched > summary.past_due
    return (name, *figures, *quantiles, summary.late_ms_max if timed else None, f"{summary.log_id:016x}")


def _group_row(books: GroupBooks) -> tuple[Cell, ...]:
    figures = (books.pulled, books.redelivered, books.acknowledged, books.given_back, books.sent_back)
    ids = (f"{books.group_id:08x}", f"{books.log_id:016x}")
    return (books.subject or None, books.group or None, *figures, books.lapsed, books.outstanding, books.gaps, *ids)


def _shown_group(books: GroupBooks) -> tuple[Cell, ...]:
    """The row of a table, where a group without a name needs one."""
    subject, group, *figures = _group_row(books)
    return (subject, group or f"#{books.group_id:08x}", *figures)


def _finding_rows(findings: Sequence[Finding]) -> Iterator[tuple[Cell, ...]]:
    for found in findings:
        yield (
            hour_name(found.hour) if found.hour else "all",
            found.kind.name,
            found.sequence,
            found.subject,
            found.deliver_at_ms,
            found.detail,
            f"{found.log_id:016x}",
        )


def _verdict(report: AuditReport, told: AcceptanceWorth) -> Iterator[str]:
    total = report.total
    if report.hours or report.findings:
        yield ""
    if report.findings_count > len(report.findings):
        more = counted(report.findings_count - len(report.findings), "more finding|more findings")
        yield f"{more}; --findings N names more of them"
    yield from report.remarks
    if total.dispatched > total.past_due:
        figures = [f"p{100 * quantile:g} {duration_text(total.late_ms(quantile) or 0)}" for quantile in QUANTILES]
        yield f"lateness: {', '.join(figures)}, max {duration_text(total.late_ms_max)}"
    yield total.equation
    if report.seals:
        states = Counter(seal.state for seal in report.seals)
        yield f"seals: {', '.join(f'{count:,} {state}' for state, count in states.items())}"
    for seal in report.broken_seals:
        yield f"the seal of {hour_name(seal.hour)} is BROKEN: {seal.differs}"
    counts = {name: getattr(total, name) for name in _FAULTS}
    counts["conservation"] += len(report.faults)
    faults = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    if not report.hours:
        yield "there is no hour with messages to compare: --from and --to choose hours"
    yield from told.sentences
    accepted = "; all of this is accepted" if not report.balanced and report.is_accepted(told.found) else ""
    yield f"the books {'balance' if report.balanced else 'do NOT balance'}: {faults}{accepted}"


def _with_instant(finding: dict[str, Cell]) -> dict[str, Cell]:
    """The same with the instant as people write it beside the milliseconds; a finding of totals has none."""
    at_ms = finding["deliver_at_ms"]
    return {**finding, "deliver_at": instant_text(at_ms) if finding["sequence"] and isinstance(at_ms, int) else None}


def _head_as_json(places: Sequence[str], read_at_ms: int, verdict: str, chosen: str) -> dict[str, object]:
    return {
        "data": " ".join(places),
        "places": list(places),
        "read_at_ms": read_at_ms,
        "read_at": instant_text(read_at_ms),
        "chosen": chosen,
        "balanced": verdict == "balanced",
        "verdict": verdict,
    }


def _as_json(report: AuditReport, told: AcceptanceWorth, chosen: str) -> dict[str, object]:
    names = [column.name for column in HOUR_COLUMNS]
    finding_names = [column.name for column in FINDING_COLUMNS]
    group_names = [column.name for column in GROUP_COLUMNS]
    total = dict(zip(names, _hour_row(report.total), strict=True))
    del total["hour"], total["delay_log_id"]
    verdict = "balanced" if report.balanced else "accepted" if report.is_accepted(told.found) else "not_balanced"
    return {
        **_head_as_json(report.places, report.read_at_ms, verdict, chosen),
        "total": total,
        "hours": [dict(zip(names, _hour_row(summary), strict=True)) for summary in report.hours],
        "subjects": _subjects_as_json(report.total.subjects),
        "findings": [
            _with_instant(dict(zip(finding_names, row, strict=True))) for row in _finding_rows(report.findings)
        ],
        "findings_count": report.findings_count,
        "seals": {state.value: sum(seal.state is state for seal in report.seals) for state in SealState},
        "broken_seals": [{"hour": hour_name(seal.hour), "differs": seal.differs} for seal in report.broken_seals],
        "torn": [
            {"path": torn.path, "position": torn.position, "size_bytes": torn.size_bytes, "reason": torn.reason}
            for torn in report.torn
        ],
        "deleted_rows": report.deleted_rows,
        "proved_before": report.proved_before,
        "unnoted": list(report.unnoted),
        "missing": [
            {
                "role": each.role.value,
                "log_id": f"{each.log_id:016x}",
                "rows": each.rows,
                "first_hour": hour_name(each.first_hour),
                "last_hour": hour_name(each.last_hour),
                "detail": each.sentence,
            }
            for each in report.missing
        ],
        "doubled": list(report.doubled),
        "refused": list(report.refused),
        "absent": [
            {"role": each.role, "log_id": f"{each.log_id:016x}", "address": each.address} for each in report.absent
        ],
        "conservation": [fault.detail for fault in report.faults],
        "holds_up": list(report.holds_up),
        "groups": [dict(zip(group_names, _group_row(books), strict=True)) for books in report.groups],
        "missed": [
            {
                "path": life.path,
                "role": life.role,
                "state": life.state.value,
                "until_ms": life.until_ms or None,
                "until": instant_text(life.until_ms) if life.until_ms else None,
            }
            for life in report.missed
        ],
        "servers": [
            {
                "role": life.role,
                "log_id": f"{life.log_id:016x}",
                "state": life.state.value,
                "place": report.directory_of(life.log_id),
            }
            for life in report.lives
        ],
        "remarks": list(report.remarks),
        "acceptances": told.as_json,
    }


class Words(NamedTuple):
    """An operator's word on the findings of an hour, and the secret to sign it with."""

    hour: int
    by: str
    reason: str
    secret: Secret


def words_of(hour: int, by: str | None, reason: str | None, secret_file: str | None, data: str | None) -> Words:
    """Take a word as it was typed.

    Raises:
        BadArgument: the name or the reason is missing, or can't be shown in a line.
        BadSetting: the secret can't be had.
    """
    if by is None or reason is None:
        raise BadArgument("an acceptance says who accepts and why: give --by NAME and --reason TEXT, too")
    check_words(by, reason)
    return Words(hour, by, reason, secret_of(secret_file, data or DATA_DEFAULT))


def accept(report: AuditReport, words: Words, yes: bool) -> Iterator[str]:
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
    for life in report.lives:
        if life.role == Role.DELAY and life.log_id in found:
            acceptance = Acceptance(life.log_id, words.hour, found[life.log_id], words.by, words.reason, at_ms)
            path = write_acceptance(life.path, acceptance, words.secret)
            yield f"accepted by {words.by} at {instant_text(at_ms)}: {words.reason}; kept as {path}"
    if report.broken_seals or report.faults:
        yield "nobody can accept a broken seal, or totals that do not add up: audits go on to exit with 3"


def judged(report: AuditReport, secret_file: str | None, data: str | None) -> AcceptanceWorth:
    """What the acceptances of a report are worth, by the cluster's secret."""
    if not report.acceptances:
        return NOTHING_TOLD
    try:
        return AcceptanceWorth(report.judged(secret_of(secret_file, data or DATA_DEFAULT)), "")
    except BadSetting as error:
        return AcceptanceWorth(report.judged(None), error.message)


def _subjects_as_json(found: SubjectFigures) -> list[dict[str, object]]:
    return [
        {"subject": name, **dict(zip(FIGURES, counts, strict=True))}
        for name, counts in zip(found.names, found.counts.tolist(), strict=True)
    ]


def _acceptance_as_json(each: JudgedAcceptance) -> dict[str, object]:
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


SEAL_COLUMNS = columns(
    "hour number:name state rows:number dispatched:number cancelled:number,detail dead:number "
    "expired:number,detail in_doubt:number,detail body_bytes:size due_min_ms:instant,detail "
    "due_max_ms:instant,detail schedule_sha256:detail outcomes_sha256:detail previous_sha256:detail sha256:detail "
    "differs delay_log_id:detail"
)


@click.command(cls=Command)
@data_option
@hours_options
@shown_options
def seals(data: str, hours: HourRange, shown: Shown) -> int:
    """Verify the seals of hours, from files.

    The command reads the rows of each sealed hour that was not deleted, and computes anew what its seal says. It
    follows the chain of all seals, also of deleted hours, and names what differs.

    Exit codes: 0 no seal is broken; 3 a seal is broken, or a file is damaged.

    $ delayd seals --data /var/lib/delayd --from -24h
    """
    with all_damage_named([data]), progress("hours", None) as advance:
        report = verify_seals(data, hours=hours, progress=HourSteps(advance))
    listed = [each for each in report.seals if each.hour in hours or each.state is SealState.BROKEN]
    if listed or shown.form != "table":
        shown.show(SEAL_COLUMNS, (_seal_row(each) for each in listed))
    if shown.form == "table":
        for line in _verdict_on_seals(report, bool(listed)):
            click.echo(line)
    return NOT_BALANCED if report.broken else OK


def _seal_row(report: SealReport) -> tuple[Cell, ...]:
    name, log_id = hour_name(report.hour), f"{report.log_id:016x}"
    seal = report.seal
    if seal is None:
        return (name, None, report.state.value, *[None] * (len(SEAL_COLUMNS) - 5), report.differs, log_id)
    facts = seal.facts
    return (
        *(name, seal.number, report.state.value, facts.rows, facts.dispatched, facts.cancelled, facts.dead),
        *(facts.expired, facts.in_doubt, facts.body_bytes, facts.due_min_ms, facts.due_max_ms),
        *(facts.schedule_sha256.hex(), facts.outcomes_sha256.hex(), seal.previous_sha256.hex(), seal.sha256.hex()),
        *(report.differs, log_id),
    )


def _verdict_on_seals(report: SealsReport, listed: bool) -> Iterator[str]:
    if listed:
        yield ""
    for torn in report.torn:
        yield torn.sentence
    last = {each.log_id: each.seal for each in report.seals if each.seal is not None}
    for log_id, seal in last.items():
        yield f"the last seal of {log_id:016x} is number {seal.number}, {seal.sha256.hex()}"
    states = Counter(each.state for each in report.seals)
    if states:
        yield f"seals: {', '.join(f'{count:,} {state}' for state, count in states.items())}"
    else:
        yield "no hour is sealed yet; one is when it is over and each of its messages has an outcome"
