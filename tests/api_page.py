"""The page of the API, made from signatures and docstrings: ``python -m tests.api_page`` writes docs/api.md.

Invariant: nothing on the page is told here; a word that is wrong there is wrong in a docstring. A list of arguments or
errors that several docstrings have is told once, and the others link to it.
"""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import delayd
from delayd import errors

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
WIDTH = 110
HEAD = """# The API

`python -m tests.api_page` writes this page from the docstrings, which `help(delayd.Producer)` shows, too. A test \
compares the two. [clients.md](clients.md) and [consuming.md](consuming.md) tell how the calls are used."""
# Clients first, then what they give, then files and values.
SECTIONS = {
    "Clients": "open Producer Consumer Worker Admin Embedded AsyncProducer AsyncConsumer AsyncAdmin",
    "Messages sent": "Receipt BatchReceipt SendFuture SendVerdict BatchFailed CancelAnswer RescheduleAnswer "
    "Rescheduled RescheduledBatch MessageInfo MessageState PendingMessage PendingPage Walked",
    "Messages received": "Message MessageBatch AsyncMessage AsyncMessageBatch Backoff Retry Reject traceparent",
    "Recurring": "Recurrence RecurringInfo",
    "Files and ids": "open_data Data LogId",
}
# Parts of delayd call these, and nobody else does.
INSIDE = re.compile(
    "set_result|set_exception|settle|words?_back|give_back|of|end|pid|is_unheard|longest_ms|delay_ms"
    "|others_filed_at_ms|pull_sequences|places|receipt|encoded|decoded|newest|left"
)
LISTED = re.compile(r"([A-Z][a-z]+)(?:, .*)?:")
SHORT = 200  # Characters of a list that is told again: a link to it would be no shorter.
SUMMED_UP = re.compile(r"(?s)(?<=\S)\s*\n\n.*")


def page() -> str:
    """What docs/api.md says."""
    parts, told = [HEAD], dict[str, str]()
    for section, names in SECTIONS.items():
        parts.append(f"## {section}")
        for name in names.split():
            parts += _told(name, getattr(delayd, name), told)
    return "\n\n".join((*parts, "## Errors", *_errors())) + "\n"


def _told(name: str, it: object, told: dict[str, str]) -> Iterator[str]:
    """What is said of a name; ``told`` has each list that was told, and where."""
    yield f"### {name}"
    if isinstance(it, type) and issubclass(it, enum.Enum):
        yield _markdown(inspect.getdoc(it) or "")
        yield ", ".join(f"`{member.name}` {member.value}" for member in it)
    elif isinstance(it, type):
        twin = name.removeprefix("Async") if name.startswith("Async") else ""
        doc = inspect.getdoc(it) or ""
        takes = "" if "made by `delayd" in doc else _signature(name, it)
        if takes and not (twin and takes == _signature(name, getattr(delayd, twin))):
            yield takes
        yield _markdown(_once(doc, name, told))
        same = [member for member in _members(it) if twin and hasattr(getattr(delayd, twin), member)]
        if same:
            yield f"As those of [{twin}](#{twin.lower()}): " + ", ".join(f"`{member}`" for member in same) + "."
        for member, value in _members(it).items():
            if member not in same:
                yield from _member(name, member, value, told)
    elif callable(it):
        yield _signature(name, it)
        yield _markdown(inspect.getdoc(it) or "")
    else:
        yield f"A `{type(it).__name__}`; see [worker.md](worker.md)."


def _once(doc: str, name: str, told: dict[str, str]) -> str:
    """A docstring in which a link stands for each list that another docstring has."""
    parts = doc.split("\n\n")
    for index, part in enumerate(parts):
        title = LISTED.fullmatch(part.partition("\n")[0])
        if title and len(part) > SHORT and (first := told.setdefault(part, name)) != name:
            parts[index] = f"{title[1]}: those of [{first}](#{first.lower().replace('.', '')})."
    return "\n\n".join(parts)


def _members(owner: type) -> dict[str, object]:
    """What users of a class call and read, in the order of its definition."""
    found: dict[str, object] = {}
    for kind in owner.__mro__:
        if kind.__module__.startswith("delayd."):
            for name, value in vars(kind).items():
                shown = isinstance(value, property | cached_property | classmethod | staticmethod)
                if not name.startswith("_") and not INSIDE.fullmatch(name) and (shown or inspect.isfunction(value)):
                    found.setdefault(name, value)
    return found


def _member(owner: str, name: str, value: object, told: dict[str, str]) -> Iterator[str]:
    doc = _markdown(_once(inspect.getdoc(value) or "", f"{owner}.{name}", told))
    if isinstance(value, property | cached_property):
        yield f"**`{name}`** {doc}"
    else:
        call = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        assert callable(call)
        yield f"#### {owner}.{name}"
        yield _signature(name, call, skip=not isinstance(value, staticmethod))
        yield doc


def _signature(name: str, call: Callable[..., object], *, skip: bool = False) -> str:
    try:
        signature = inspect.signature(call)
    except ValueError:  # Nobody makes one by itself.
        return ""
    arguments = [_bare(str(argument)) for argument in signature.parameters.values()][1 if skip else 0 :]
    kinds = [argument.kind for argument in signature.parameters.values()][1 if skip else 0 :]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        arguments.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    answer = "" if signature.return_annotation in (signature.empty, "None") else f" -> {signature.return_annotation}"
    line = f"{name}({', '.join(arguments)}){answer.replace(chr(39), '')}"
    if len(line) > WIDTH:
        line = "\n".join((f"{name}(", *(f"    {argument}," for argument in arguments), f"){answer}"))
    return f"```python\n{line}\n```"


def _bare(argument: str) -> str:
    """An argument without the quotes of its annotation."""
    name, colon, rest = argument.partition(": ")
    kind, equals, default = rest.partition(" = ")
    default = "..." if default.startswith("<") else default.replace("datetime.timedelta", "timedelta")
    return name + colon + re.sub(r"^(ForwardRef\()?'(.*)'\)?$", r"\2", kind) + equals + default


def _markdown(doc: str) -> str:
    """A docstring with its blocks of code, and its lists of arguments, as Markdown has them."""
    lines: list[str] = []
    code = listed = False
    for line in doc.replace("``", "`").splitlines():
        if line.startswith(">>> "):
            lines.append(f"`{line}`")
        elif line and not line.startswith(" "):
            if code:
                lines += ["```", ""]
            code, listed = line.endswith("::"), bool(LISTED.fullmatch(line))
            lines += [line.removesuffix(":") if code else line, *([""] * (code or listed)), *(["```python"] * code)]
        elif code:
            lines.append(line[4:])
        elif listed and re.match(r"    \w[\w, ]*: ", line):
            lines.append(f"- {line.strip()}")
        else:
            lines.append(("  " if listed else "") + line.strip() if line else "")
    text = "\n".join([*lines, *(["```"] * code)])
    return re.sub(r"\n+```(?=\n|$)", "\n```", text.replace("```python\n\n", "```python\n")).strip()


def _errors() -> Iterator[str]:
    yield "Each has `code`, `message`, `retry_after_ms` (0: waiting does not help) and `details`."
    rows = ["| error | is a | says |", "|---|---|---|"]
    for name in errors.__all__:
        kind = getattr(errors, name)
        says = SUMMED_UP.sub("", inspect.getdoc(kind) or "").replace("\n", " ").replace("``", "`").replace("|", "\\|")
        rows.append(f"| `{name}` | `{kind.__mro__[1].__name__}` | {says} |")
    yield "\n".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
