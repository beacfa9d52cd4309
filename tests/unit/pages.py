"""The tables of pages that the code knows: ``python -m tests.unit.pages`` writes them between the marks of a page.

Invariant: nothing is told here. A word that is wrong between two marks is wrong in a help text, a setting, a request
or a line of the log. ``python -m tests.unit.pages --words`` counts the words that people write: all of the pages but
what stands between marks, and docs/api.md.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import click

from cli.main import PLACES
from cli.serve import setting_text
from delayd.config import CONFIGS
from delayd.delay.books.retention import NOT_SEALED
from delayd.machine.operating import WaitKind
from delayd.net.registration import RegistrationState
from delayd.reading import export, tables
from delayd.wire.requests import ANY, DELAY_LIMITS, RequestType

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
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


def _requests() -> Iterator[str]:
    yield "| type | request | served by | trusted | fenced | body | head | units of a turn |"
    yield "|---|---|---|---|---|---|---|---|"
    for kind in sorted(RequestType):
        terms = kind.terms
        servers = "any" if terms.servers == ANY else ", ".join(terms.servers)
        room = DELAY_LIMITS.by_type_trusted.get(kind, DELAY_LIMITS.plain)
        units = ("1", "16", "1, behind light ones", "64")[terms.cost]
        row = (kind.value, kind.name, servers, "yes" * terms.trusted, "yes" * terms.fenced)
        yield f"| {' | '.join(map(str, row))} | {_size(terms.body_bytes_max)} | {_size(room.head_bytes)} | {units} |"


def _size(count: int) -> str:
    mebi, kibi = count >> 20, (count >> 10) % 1024
    return " + ".join((f"{mebi} MiB",) * (mebi > 0) + (f"{kibi} KiB",) * (kibi > 0)) or "none"


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
    for table, types in (kinds | {**export.FACTS}).items():
        named = ((name, "" if kind == "long" else f" {kind}") for name, kind in types.items() if kind != "timestamp")
        yield f"| `{table}` | {', '.join(f'`{name}`{kind}' for name, kind in named)} |"


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


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "columns": _columns,
    "commands": _commands,
    "requests": _requests,
    "settings": _settings,
    "states": _states,
    "lines": _lines,
}
PAGES = tuple(DOCS / name for name in ("audit.md", "cli.md", "protocol.md", "operations.md", "log-lines.md"))


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
