"""The tables of pages that the code knows: ``python -m tests.unit.pages`` writes them between the marks of a page.

Invariant: nothing is told here. A word that is wrong between two marks is wrong in a help text, a setting, a request
or a line of the log. ``python -m tests.unit.pages --words`` counts the words that people write: all of the pages but
what stands between marks, and docs/api.md.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import click

from bench.cases import DELAYD, cases
from cli.main import PLACES
from cli.serve import setting_text
from delayd.batch import columns, names
from delayd.batch.columns import ASKED_BY_KEY, DTYPES, KIND_COLUMNS, BatchKind, ColumnId, KindColumns
from delayd.config import CONFIGS
from delayd.delay import kept_state, parts, producers, state_values, subjects
from delayd.delay.books import sealing
from delayd.delay.books.retention import NOT_SEALED
from delayd.delay.ending import message_requests
from delayd.delay.filing import hour_table
from delayd.delay.handoff import dispatcher, target_words
from delayd.delay.keys import owned_slots
from delayd.log import control, key_run, tail
from delayd.machine import identity, state
from delayd.machine.operating import WaitKind
from delayd.net import budget, machine, tokens
from delayd.net.registration import RegistrationState
from delayd.reading import export, tables
from delayd.reading.archive.rows import CONSUMPTION_TYPES
from delayd.reading.findings import SENTENCES
from delayd.reading.views.query import AUDITED, SEALS, types_of
from delayd.wire import frame, metrics, scheduling, status
from delayd.wire.consuming import GroupInfo, SubjectInfo
from delayd.wire.requests import ANY, DELAY, DELAY_LIMITS, LISTS, MAPS, META, REALTIME, RequestType, named_types
from meta import core as meta_core
from meta import push, registry, slots
from meta import tokens as meta_tokens
from realtime import answers as realtime_parts
from realtime import consumers, delay_servers, group_records, group_window, groups, polls, pulls, subscriptions
from realtime import kept as realtime_kept

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FORMATS = DOCS / "formats"
MARKED = re.compile(r"(<!-- (\w+): begin \(python -m [\w.]+ writes what follows\) -->\n)(.*?)(<!-- \2: end -->)", re.S)

# Modules of a program whose logs an operator reads apart from those of servers.
WHOSE = {
    "delayd/delay": "Delay server",
    "realtime": "Realtime server",
    "meta": "Meta",
    "delayd/client": "Clients and workers",
    "delayd/worker": "Clients and workers",
    "delayd/testing": "Clients and workers",
}
LEVELS = ("info", "warning", "error", "critical")  # Debugging is off, and no change of state.
CALLS = (*LEVELS, "exception", "log")
CALLED = re.compile(rf"\b(?:log|limited)\.(?:{'|'.join(CALLS)})\b")
# Events whose name is computed, by the rest of their line.
COMPUTED = {
    "%s meta=%s code=%s reason=%r": {RegistrationState.AWAY.value, RegistrationState.REFUSED.value},
    "%s hour=%s reason=%r": {NOT_SEALED, "seal_differs", "content_differs"},
}


@cache
def commands() -> dict[str, click.Command]:
    """Each command that does something, by its words, in the order of the overview."""
    found: dict[str, click.Command] = {}
    for name, place in PLACES.items():
        command = getattr(import_module(f"cli.{place.module}"), place.name)
        if not isinstance(command, click.Group) or command.invoke_without_command:
            found[name] = command
        if isinstance(command, click.Group):
            found |= {f"{name} {sub}": each for sub, each in command.commands.items()}
    return found


def _commands() -> Iterator[str]:
    yield from ("| command | what it does |", "|---|---|")
    for name, command in commands().items():
        says = " ".join((command.help or "").partition("\n\n")[0].split())
        arguments = (each.make_metavar(click.Context(command)) for each in command.params if _is_argument(each))
        yield f"| {_code(' '.join((name, *arguments)))} | {_cell(says)} |"


def _is_argument(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Argument)


def _requests(*roles: str) -> Callable[[], Iterator[str]]:
    """The requests that exactly these servers serve, or for all servers those that several kinds of them serve."""

    def rows() -> Iterator[str]:
        names = ["type", "request", "served by", "trusted", "right", "fenced", "body", "head", "units"]
        names += ["its head has", "its answer has"]
        yield f"| {' | '.join(names)} |"
        yield f"|{'---|' * len(names)}"
        for kind in sorted(RequestType):
            terms = kind.terms
            if terms.servers == roles or (roles == ANY and len(terms.servers) > 1):
                room = DELAY_LIMITS.by_type_trusted.get(kind, DELAY_LIMITS.plain)
                units = ("1", "16", "1, behind light ones", "64")[terms.cost]
                served = "any" if terms.servers == ANY else ", ".join(terms.servers)
                right = ", ".join(right.value for right in terms.needs)
                row = (str(kind.value), kind.name, served, "yes" * terms.trusted, right, "yes" * terms.fenced)
                sizes = (_size(terms.body_bytes_max), _size(room.head_bytes), units)
                yield f"| {' | '.join((*row, *sizes, _declared(terms.fields), _declared(terms.answer)))} |"

    return rows


def _declared(fields: str) -> str:
    return ", ".join(f"{_code(name)} {_cell(type_)}" for name, type_ in named_types(fields))


def _declared_rows() -> Iterator[str]:
    yield from ("| type | is | of |", "|---|---|---|")
    for what, rows in (("list", LISTS), ("map", MAPS)):
        yield from (f"| {name} | a {what} | {_declared(fields)} |" for name, fields in rows.items())


def _bounds(*constants: tuple[ModuleType, str]) -> Callable[[], Iterator[str]]:
    def rows() -> Iterator[str]:
        yield from ("| bound | of what |", "|---|---|")
        for module, name in constants:
            value = getattr(module, name)
            shown = _size(value) if "BYTES" in name and value >= 1 << 20 else f"{value:,}" + " B" * ("BYTES" in name)
            yield f"| {shown} | {_cell(_comment(module, name))} |"

    return rows


def _comment(module: ModuleType, name: str) -> str:
    """What is said of a constant, behind it or above."""
    found = re.search(rf"^((?:# .+\n)*){name} = [^#\n]+?(?:  # (.+))?$", inspect.getsource(module), re.MULTILINE)
    assert found and any(found.groups()), f"{module.__name__} does not say what {name} is"
    return found[2] or " ".join(found[1].replace("\n# ", " ").split()[1:])


def _state_keys() -> Iterator[str]:
    yield from ("| server | key | value |", "|---|---|---|")
    for whose, module, name in STATE_KEYS:
        found = re.fullmatch(r"(?:`(<[^`]+)` )?(.+)", _comment(module, name))
        assert found
        key = f"{getattr(module, name).decode()}{found[1] or ''}"
        yield f"| {whose} | {_code(key)} | {_cell(_linked(found[2], FORMATS))} |"


def _listing(kind: type[GroupInfo] | type[SubjectInfo]) -> Callable[[], Iterator[str]]:
    """The fields of a row of a listing, with the comments behind those that have one."""

    def rows() -> Iterator[str]:
        yield from ("| field | what it is |", "|---|---|")
        said = _said(kind, r"(\w+): [\w |]+(?: = \w+)?")
        yield from (f"| `{name}` | {said.get(name, '')} |" for name in kind._fields)

    return rows


def _size(count: int) -> str:
    mebi, kibi = count >> 20, (count >> 10) % 1024
    return " + ".join((f"{mebi} MiB",) * (mebi > 0) + (f"{kibi} KiB",) * (kibi > 0)) or "none"


def _batch_columns() -> Iterator[str]:
    yield from ("| id | name | type | what it is |", "|---|---|---|---|")
    said = _said(columns, r"(\w+) = \d+")
    for column in ColumnId:
        kind = DTYPES[column]
        shown = f"{kind.kind.replace('V', '')}{kind.itemsize * 8}" if kind.kind != "V" else f"{kind.itemsize} bytes"
        yield f"| {column.value} | {column.name.lower()} | {shown} | {_linked(said[column.name], FORMATS)} |"


def _kinds() -> Iterator[str]:
    yield from ("| kind | has the columns | may have |", "|---|---|---|")
    of: list[tuple[str, KindColumns]] = [(kind.name, KIND_COLUMNS[kind]) for kind in BatchKind]
    of[-1:] = [("ASKED, by receipt", KIND_COLUMNS[BatchKind.ASKED]), ("ASKED, by key", ASKED_BY_KEY)]
    for name, kind in of:
        had = (
            ", ".join(each.name.lower() for each in sorted(chosen))
            for chosen in (kind.required, kind.allowed - kind.required)
        )
        yield f"| {name} | {' | '.join(had)} |"


def _records() -> Iterator[str]:
    yield from ("| type | fields | says |", "|---|---|---|")
    for name, kind in control.CLASSES.items():
        shown = {bytes: "bin", int: "int", str: "str", list: "[epoch, id]"}
        declared = zip(kind._fields, control.FIELDS[kind], strict=True)
        given = ", ".join(f"{_code(field)} {shown[type_]}" for field, type_ in declared)
        yield f"| `{name!s}` | {given} | {_linked(_doc(kind), FORMATS)} |"


def _moves() -> Iterator[str]:
    yield from ("| a message is | word | then it is | because |", "|---|---|---|---|")
    said = _said(group_window, r"\(Stage\.(\w+), GroupWord\.(\w+)\): Stage\.\w+,")
    for (stage, word), then in group_window.MOVES.items():
        names = (each.name.lower().replace("_", " ") for each in (stage, word, then))
        yield f"| {' | '.join(names)} | {said[f'{stage.name} {word.name}']} |"


def _said(module: object, before: str) -> dict[str, str]:
    """The comments behind lines of a module that fit a pattern, by what its groups found."""
    found = re.finditer(rf"^    {before}  # (?P<said>.+)$", inspect.getsource(module), re.MULTILINE)  # type: ignore[arg-type]
    return {" ".join(each.groups()[:-1]): _cell(each["said"]) for each in found}


def _parts() -> Iterator[str]:
    yield from ("| step | what it is |", "|---|---|")
    for name in re.findall(r"\w+", inspect.getdoc(parts).split("\n\n")[1].splitlines()[0]):  # type: ignore[union-attr]
        yield f"| `{name}` | {_doc(getattr(parts, name))} |"


def _cases() -> Iterator[str]:
    yield from ("| cases | what is measured |", "|---|---|")
    of: dict[str, list[str]] = {}
    for case in cases("full"):
        side = case.sides[DELAYD]
        of.setdefault((side.func if isinstance(side, partial) else side).__module__, []).append(_code(case.name))
    for module, found in of.items():
        yield f"| {', '.join(found)} | {_doc(import_module(module))} |"


def _rooms() -> Iterator[str]:
    yield from ("| room | what it is |", "|---|---|")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {each.get("containers", [""])[0]: each["layers"] for each in contracts if each["type"] == "layers"}

    def within(package: str) -> Iterator[str]:
        prefix = f"{package}." if package else ""
        yield from (f"{prefix}{name}" for layer in layers[package] for name in re.findall(r"[\w.]+", layer))

    def rooms(package: str) -> Iterator[Path]:
        folder = ROOT / package.replace(".", "/")
        if folder.is_dir():
            yield folder
            below = sorted(each.parent.name for each in folder.glob("*/__init__.py"))
            for name in within(package) if package in layers else (f"{package}.{each}" for each in below):
                yield from rooms(name)

    for top in within(""):
        for room in rooms(top):
            text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
            said = _linked(" ".join(text.partition("\n\n")[0].split()), DOCS)
            yield f"| `{room.relative_to(ROOT)}` | {said} |"


def _linked(text: str, folder: Path) -> str:
    """A text of the code in which pages are links from a page of a folder."""

    def link(path: re.Match[str]) -> str:
        page = ROOT / path[0]
        target = page if page.is_file() else page / "README.md"
        return f"[{page.relative_to(DOCS)}]({os.path.relpath(target, folder)})"

    return re.sub(r"\bdocs/[\w/-]+(\.md)?", link, text)


def _doc(kind: type | ModuleType) -> str:
    """The first paragraph of a docstring, as a cell."""
    return _cell(" ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split()).replace("``", "`"))


def _settings() -> Iterator[str]:
    of: dict[str, list[str]] = {}
    for role, kind in CONFIGS.items():
        for each in fields(kind):
            bounds = f"{each.metadata['least']} to {each.metadata['most']}" if "least" in each.metadata else ""
            value = str(each.default).lower() if isinstance(each.default, bool) else each.default
            shown = f'`"{value}"`' if isinstance(each.default, str) else f"`{value}`{_unit(each.name, each.default)}"
            row = f"| `{each.name}` | {{}} | {shown} | {bounds} | {_cell(setting_text(role, each.name))} |"
            of.setdefault(row, []).append(role)
    yield from ("| setting | of | default | range | what it is |", "|---|---|---|---|---|")
    for row, roles in of.items():
        yield row.format("all" if len(roles) == len(CONFIGS) else ", ".join(roles))


def _unit(name: str, value: object) -> str:
    """`256 MiB` behind bytes, and `5 min` behind milliseconds, where the number is round."""
    assert isinstance(value, int)
    scales = {
        "_ms": ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s")),
        "bytes": ((1 << 30, "GiB"), (1 << 20, "MiB")),
    }
    for ending, units in scales.items():
        for scale, unit in units:
            if ending in name and value and not isinstance(value, bool) and value % scale == 0:
                return f" ({value // scale} {unit})"
    return ""


def _states() -> Iterator[str]:
    yield from ("| line | what leads out of it |", "|---|---|")
    told = (tuple(re.sub(r"\{(\w+)\}", lambda word: word[1].upper(), text) for text in kind.value) for kind in WaitKind)
    yield from (f"| `{what}` | {command} |" for what, command in dict.fromkeys(told))


def _columns() -> Iterator[str]:
    yield from ("| table | columns |", "|---|---|")
    kinds: dict[str, tables.Types] = {name: tables.TABLES[name].types for name in (*export.LOGS, "lifecycle")}
    for table, types in (kinds | {"hour": export.HOUR, **export.FACTS}).items():
        named = ((name, "" if kind == "long" else f" {kind}") for name, kind in types.items() if kind != "timestamp")
        yield f"| `{table}` | {', '.join(f'`{name}`{kind}' for name, kind in named)} |"


def _metrics() -> Iterator[str]:
    """Each metric, with the servers that have it and the alerts that use it."""
    rules = (ROOT / "deploy" / "prometheus" / "delayd.rules.yml").read_text()
    alerts = re.findall(r"- alert: (\w+)\n +expr: (.+)\n", rules)
    yield from ("| metric | type | labels besides | of | what it is | alerts |", "|---|---|---|---|---|---|")
    of = {each.metric: role or "all" for role, sources in metrics.OF_ROLE.items() for each in sources}
    of[metrics.LOG_COMMIT] = "delay, realtime"
    of |= dict.fromkeys(metrics.OF_REALTIME_BESIDES, "realtime") | dict.fromkeys(metrics.OF_GATEWAY, "gateway")
    for each in metrics.METRICS:
        used = [name for name, how in alerts if re.search(rf"\b{each.name}(_bucket)?\b", how)]
        labels = ", ".join(_code(label) for label in each.labels if label not in metrics.OF_SERVER)
        cells = (_code(each.name), each.kind, labels, of.get(each, "all"), _cell(each.text), ", ".join(used))
        yield f"| {' | '.join(cells)} |"


def _views() -> Iterator[str]:
    yield from ("| view | columns |", "|---|---|")
    for view in (*AUDITED, SEALS):
        types = types_of(view)
        named = ((name, "" if kind == "long" else f" {kind}") for name, kind in types.items() if kind != "timestamp")
        yield f"| `{view}` | {', '.join(f'`{name}`{kind}' for name, kind in named)} |"


def _archived_columns() -> Iterator[str]:
    yield from ("| table | columns |", "|---|---|")
    kinds: dict[str, Mapping[str, tuple[str, object]]] = {
        "schedule": tables.ARCHIVED_SCHEDULE,
        "message": tables.ARCHIVED_MESSAGE,
    }
    types = {table: {name: kind for name, (kind, _) in made.items()} for table, made in kinds.items()}
    for table, own in {**types, "consumption": CONSUMPTION_TYPES}.items():
        named = ((name, "" if kind == "long" else f" {kind}") for name, kind in own.items())
        yield f"| `{table}` | {', '.join(f'`{name}`{kind}' for name, kind in named)} |"


def _findings() -> Iterator[str]:
    yield from ("| finding | what it says of a message |", "|---|---|")
    for kind, sentences in SENTENCES.items():
        yield from (f"| {kind.name} | {re.sub('{.*?}', '…', sentence)} |" for sentence in sentences.values())


class Line(NamedTuple):
    """A line that the code logs."""

    whose: str
    form: str  # `hour_loaded hour= rows=`.
    levels: frozenset[str]

    @property
    def event(self) -> str:
        """Its first word."""
        return self.form.split()[0]


@cache
def logged() -> tuple[Line, ...]:
    """Each line that a program of delayd may log, once for each kind of program."""
    found: dict[tuple[str, str], frozenset[str]] = {}
    for path in sorted(path for folder in ("delayd", "meta", "realtime", "cli", "spark") for path in _sources(folder)):
        source = path.read_text()
        if not CALLED.search(source):  # Most modules log nothing.
            continue
        name = str(path.relative_to(ROOT))
        whose = next((told for folder, told in WHOSE.items() if name.startswith(f"{folder}/")), "Every server")
        for function in ast.walk(ast.parse(source)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for form, levels in _logged_in(function, name):
                    found[whose, form] = found.get((whose, form), frozenset()) | levels
    return tuple(Line(whose, form, levels) for (whose, form), levels in found.items())


def _sources(folder: str) -> Iterator[Path]:
    return (ROOT / folder).rglob("*.py")


def _logged_in(function: ast.AST, name: str) -> Iterator[tuple[str, frozenset[str]]]:
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "limited" as logger), attr=level)) if (
                level in CALLS
            ):
                # A LogLimit is told the cause first.
                form = getattr(node.args[1 if level == "log" or logger == "limited" else 0], "value", None)
                assert isinstance(form, str), f"{name}:{node.lineno} logs no literal"
                levels = frozenset({level.replace("exception", "error")} if level != "log" else _computed(function))
                for event in sorted(COMPUTED.get(form, {form.split()[0]})):
                    yield " ".join((event, *re.findall(r"(\w+=)", form.partition(" ")[2]))), levels


def _computed(function: ast.AST) -> Iterator[str]:
    """The levels that a function names."""
    named = (
        node.attr.lower() for node in ast.walk(function) if isinstance(node, ast.Attribute) and node.attr.isupper()
    )
    return (level for level in named if level in LEVELS)


def _lines() -> Iterator[str]:
    for whose in ("Every server", *dict.fromkeys(reversed(WHOSE.values()))):
        yield from (f"**{whose}**", "", "| line | level |", "|---|---|")
        for line in sorted((line for line in logged() if line.whose == whose), key=lambda line: line.form):
            yield f"| `{line.form}` | {', '.join(sorted(line.levels, key=LEVELS.index))} |"
        yield ""


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# Keys of the state of each server, whose comments begin with what follows the key.
STATE_KEYS = (
    ("all", identity, "PLACE_KEY"),
    ("delay, realtime", tokens, "STATE_KEY"),
    ("meta, delay", state, "PREFIX"),
    ("delay", kept_state, "CHECKPOINT_KEY"),
    ("delay", hour_table, "PREFIX"),
    ("delay", hour_table, "BESIDE_PREFIX"),
    ("delay", hour_table, "OUTCOME_PREFIX"),
    ("delay", hour_table, "GIVEN_UP_PREFIX"),
    ("delay", hour_table, "SALVAGE_PREFIX"),
    ("delay", state_values, "DROPPED_KEY"),
    ("delay", state_values, "ENDED_KEY"),
    ("delay", state_values, "RESTORED_KEY"),
    ("delay", key_run, "STATE_KEY"),
    ("delay", sealing, "KEY"),
    ("delay", producers, "PREFIX"),
    ("delay", state_values, "TARGET_PREFIX"),
    ("delay", target_words, "END_PREFIX"),
    ("delay", target_words, "LOST_PREFIX"),
    ("delay", target_words, "ACCEPTED_PREFIX"),
    ("delay", target_words, "REFUSER_PREFIX"),
    ("delay", dispatcher, "SEEN_KEY"),
    ("delay", control, "QUOTA_PREFIX"),
    ("delay", owned_slots, "STATE_KEY"),
    ("delay", owned_slots, "LEAVING_KEY"),
    ("realtime", tail, "CHECKPOINT_KEY"),
    ("realtime", realtime_kept, "ORIGIN_PREFIX"),
    ("realtime", tail, "SUBJECT_PREFIX"),
    ("realtime", realtime_kept, "LIVES_KEY"),
    ("realtime", realtime_kept, "OFFERS_KEY"),
    ("realtime", realtime_kept, "UNREAD_KEY"),
    ("realtime", tail, "GROUP_PREFIX"),
    ("realtime", realtime_kept, "NAME_PREFIX"),
    ("realtime", tail, "COPY_PREFIX"),
    ("meta", machine, "SERVER_PREFIX"),
    ("meta", meta_core, "ROUTE_PREFIX"),
    ("meta", meta_core, "LOOK_PREFIX"),
    ("meta", meta_core, "MOVE_PREFIX"),
    ("meta", push, "PREFIX"),
    ("meta", meta_tokens, "PREFIX"),
    ("meta", slots, "STATE_KEY"),
    ("meta", slots, "MEMBER_PREFIX"),
    ("meta", slots, "DOUBT_KEY"),
    ("meta", registry, "PREFIX"),
)
TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "columns": _columns,
    "views": _views,
    "archived_columns": _archived_columns,
    "commands": _commands,
    "findings": _findings,
    "declared_rows": _declared_rows,
    "requests_of_any": _requests(*ANY),
    "requests_of_meta": _requests(META),
    "requests_of_delay": _requests(DELAY),
    "requests_of_realtime": _requests(REALTIME),
    "bounds_of_frames": _bounds(
        (scheduling, "BATCHES_MAX"),
        (delay_servers, "FRAME_BATCHES_MAX"),
        (realtime_parts, "PARTS_MAX"),
        (status, "WAITS_MAX"),
        (frame, "HEAD_BYTES_MAX"),
        (frame, "BODY_BYTES_MAX"),
        (budget, "UNFINISHED_BYTES_MAX"),
        (budget, "UNTAKEN_BYTES_MAX"),
        (budget, "REQUESTS_MAX"),
        (budget, "CONNECTIONS_MAX"),
    ),
    "bounds_of_delay": _bounds(
        (producers, "BYTES_MAX"),
        (producers, "PRODUCER_BYTES"),
        (producers, "NUMBER_BYTES"),
        (producers, "NUMBERS_MAX"),
        (producers, "NEW_AT_ONCE"),
        (producers, "WAITERS_MAX"),
        (producers, "FENCED_MAX"),
        (subjects, "BYTES_MAX"),
        (subjects, "NAME_BYTES"),
        (message_requests, "ROWS_UNDER_WAY_MAX"),
        (message_requests, "ROWS_OWED_MAX"),
    ),
    "bounds_of_realtime": _bounds(
        (names, "GROUP_NAME_BYTES_MAX"),
        (pulls, "HANDLES_MAX"),
        (groups, "GROUPS_MAX"),
        (groups, "GROUPS_OF_SUBJECT_MAX"),
        (group_records, "CONSUMERS_MAX"),
        (names, "SUBSCRIBED_MAX"),
        (subscriptions, "OF_PEER_MAX"),
        (subscriptions, "SUBSCRIPTIONS_MAX"),
        (subscriptions, "NAMES_MAX"),
        (subscriptions, "MEMBERS_MAX"),
        (polls, "WAITING_MAX"),
        (pulls, "HELD_MAX"),
        (consumers, "LIST_MAX"),
        (consumers, "AGED_MAX"),
        (consumers, "SUBJECTS_MAX"),
    ),
    "metrics": _metrics,
    "listed_groups": _listing(GroupInfo),
    "listed_subjects": _listing(SubjectInfo),
    "batch_columns": _batch_columns,
    "kinds": _kinds,
    "records": _records,
    "moves": _moves,
    "parts": _parts,
    "state_keys": _state_keys,
    "cases": _cases,
    "rooms": _rooms,
    "settings": _settings,
    "states": _states,
    "lines": _lines,
}
# Each page that says that this module writes a part of it.
PAGES = tuple(sorted(page for page in DOCS.rglob("*.md") if "begin (python -m tests.unit.pages " in page.read_text()))


def written(page: str) -> str:
    """The page with its tables as they are now; those of other programs stay as they are."""

    def table(mark: re.Match[str]) -> str:
        begin, name, _, end = mark.groups()
        return mark[0] if name not in TABLES else "\n".join((begin, *TABLES[name](), "", end)).replace("\n\n\n", "\n\n")

    return MARKED.sub(table, page)


def words() -> dict[str, int]:
    """By page: the words that people write."""
    pages = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md")))
    texts = {str(page.relative_to(ROOT)): MARKED.sub("", page.read_text()) for page in pages if page.name != "api.md"}
    return {name: len(text.split()) for name, text in texts.items()}


def files_on_the_page() -> set[str]:
    """Files of a data directory, as docs/operations.md writes them."""
    page = (DOCS / "operations.md").read_text()
    rows = re.findall(r"^\| (`[^|]+`) \|", page[page.index("## Files") : page.index("## Settings")], re.MULTILINE)
    return {path for cells in rows for path in re.findall(r"`([^`]+)`", cells)}


def as_on_the_page(path: str) -> str:
    """A file's path in a data directory, as the page writes it."""
    path = re.sub(r"\d{20}", "<offset>", path)
    path = re.sub(r"\d{10}", "<hour>", path)
    path = re.sub(r"consume/\d{8}", "consume/<subject>", path)
    return re.sub(r"\d{8}", "<day>", path)


if __name__ == "__main__":
    if "--words" in sys.argv:
        counted = words()
        print("\n".join(f"{count:6} {name}" for name, count in (*counted.items(), ("in all", sum(counted.values())))))
    else:
        for each in PAGES:
            each.write_text(written(each.read_text()))
