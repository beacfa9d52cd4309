"""App: finds the worker that a command line names as ``module:worker``, and imports its module.

Invariant: whatever is wrong with the user's module is one sentence that says where, and exit code 2.
"""

import os
import sys
import traceback
from importlib import import_module

from delayd.errors import BadArgument
from delayd.worker.worker import Worker

DEFAULT = "worker"


def split(target: str) -> tuple[str, str]:
    """Module and variable of ``module:worker``; BadArgument when it is none."""
    module, _, name = target.partition(":")
    name = name or DEFAULT
    if module.endswith(".py") or not all(word.isidentifier() for word in (*module.split("."), *name.split("."))):
        raise BadArgument(f"{target} names no worker; write MODULE:WORKER, such as app:worker for app.py")
    return module, name


def load_worker(target: str) -> Worker:
    """Import the module and return its worker; BadArgument says what keeps it."""
    module, name = split(target)
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: object = import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, too.
        if isinstance(error, ModuleNotFoundError) and _is_itself(error.name, module):
            raise BadArgument(f"there is no module {error.name!r} in {folder} or on Python's path") from error
        raise BadArgument(f"{module} can't be imported: {_told(error)}{_place(error)}") from error
    for word in name.split("."):
        found = getattr(found, word, None)
        if found is None:
            raise BadArgument(f"{module} has no {name!r}; name the variable that holds the delayd.Worker")
    if not isinstance(found, Worker):
        raise BadArgument(f"{target} is a {type(found).__name__} and no delayd.Worker")
    if not found.handlers:
        raise BadArgument(f"{target} has no handler; register one with @{name}.on(subject, group=...)")
    return found


def _is_itself(missing: str | None, module: str) -> bool:
    return missing is not None and (module == missing or module.startswith(f"{missing}."))


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _place(error: BaseException) -> str:
    """Where it was raised: the innermost line of the user's own code."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return ""  # Its text has the file and the line.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if os.path.isfile(frame.filename)]
    own = [frame for frame in frames if _is_own(frame.filename)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _is_own(path: str) -> bool:
    return "site-packages" not in path and not path.startswith(
        (os.path.dirname(os.__file__), os.path.dirname(__file__))
    )
