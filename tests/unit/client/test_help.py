"""What `help()` says of public names: the clients show an example, and every argument and column is explained."""

import inspect
import re
import subprocess
import sys
from functools import cached_property

import pytest

import delayd
from delayd.client.pulling.message import MessageColumns, MessageView
from delayd.client.sending.receipts import Failure
from delayd.reading.books import audit_directory

CLIENTS = (delayd.Producer, delayd.AsyncProducer, delayd.Consumer, delayd.AsyncConsumer)
# What clients give to their users.
GIVEN = (
    delayd.Receipt,
    delayd.BatchReceipt,
    delayd.BatchFailed,
    delayd.SendFuture,
    delayd.Message,
    delayd.MessageBatch,
    delayd.AsyncMessage,
    delayd.AsyncMessageBatch,
)
MEMBERS = [
    (owner, name, member)
    for owner in (*CLIENTS, *GIVEN, MessageColumns, MessageView, Failure)
    for name, member in vars(owner).items()
    if not name.startswith("_") and isinstance(member, property | cached_property | classmethod | staticmethod)
]
CALLS = [
    (client, name)
    for client in (*CLIENTS, *GIVEN)
    for name, call in inspect.getmembers(client, inspect.isfunction)
    if not name.startswith("_") and len(inspect.signature(call).parameters) > 1
]
INNER_CALLS = ("settle", "word_back", "words_back")  # Messages call them; users never do.
BLOCKING = [call for call in CALLS if not call[0].__name__.startswith("Async") and call[1] not in INNER_CALLS]
ERRORS = [error for error in vars(delayd.errors).values() if inspect.isclass(error) and issubclass(error, Exception)]
OF_ONE_MEANING = {"subject", "group"}
FOR_PRODUCERS_ONLY = ("set_result", "set_exception")  # The producer ends a `SendFuture` with them; users never do.


@pytest.mark.parametrize("client", CLIENTS)
def test_each_client_shows_how_it_is_used_and_what_it_is_told(client: type) -> None:
    told = inspect.getdoc(client) or ""
    assert "Example::" in told and f"delayd.{client.__name__}(" in told
    for name in list(inspect.signature(client).parameters):
        assert f"{name}:" in told, f"help({client.__name__}) does not explain {name}"


@pytest.mark.parametrize("given", GIVEN)
def test_what_a_client_gives_shows_how_it_is_used(given: type) -> None:
    assert "Example::" in (inspect.getdoc(given) or "")


def test_each_field_of_a_receipt_is_explained() -> None:
    told = inspect.getdoc(delayd.Receipt) or ""
    for name in delayd.Receipt._fields:
        assert f"{name}:" in told, f"help(Receipt) does not explain {name}"


@pytest.mark.parametrize(("client", "name"), [call for call in CALLS if call[1] not in FOR_PRODUCERS_ONLY])
def test_each_argument_of_a_call_is_explained(client: type, name: str) -> None:
    own = inspect.getdoc(getattr(client, name)) or ""
    # What another call says of an argument, or the word itself, need not be said again.
    named = [getattr(client, each, None) for each in re.findall(r"`(\w+)`", own)]
    told = "\n".join([own, *(inspect.getdoc(each) or "" for each in named if inspect.isfunction(each))])
    for argument in set(list(inspect.signature(getattr(client, name)).parameters)[1:]) - OF_ONE_MEANING:
        # Of many messages an argument has many values, each as the call for one message explains it.
        one = argument.removesuffix("s")
        explained = re.search(rf"\b{one}s?\b[\w, ]*:|``{one}s?``", told)
        assert explained, f"help of {name} does not explain {argument}"


@pytest.mark.parametrize(("client", "name"), BLOCKING)
def test_a_blocking_call_says_nothing_of_event_loops_and_what_it_returns(client: type, name: str) -> None:
    call = getattr(client, name)
    told, returns = inspect.getdoc(call) or "", str(inspect.signature(call).return_annotation)
    assert not re.search(r"\bawait |\basync |`Async", told), told
    assert not inspect.iscoroutinefunction(call) and not re.search(r"Async|^Pages|Coroutine|Sent", returns), returns


@pytest.mark.parametrize(("owner", "name", "member"), MEMBERS, ids=lambda each: getattr(each, "__name__", None))
def test_each_property_is_explained(owner: type, name: str, member: object) -> None:
    assert inspect.getdoc(member), f"help of {owner.__name__}.{name} is empty"


def test_the_audit_shows_an_example_and_explains_each_argument() -> None:
    told = inspect.getdoc(audit_directory) or ""
    assert "Example::" in told
    for argument in inspect.signature(audit_directory).parameters:
        assert f"{argument}:" in told, f"help(audit_directory) does not explain {argument}"


@pytest.mark.parametrize("error", ERRORS)
def test_each_error_says_what_it_means(error: type[Exception]) -> None:
    assert error.__dict__.get("__doc__"), f"help({error.__name__}) is empty"


def test_each_name_is_seen_by_dir_help_and_completion_before_it_was_used() -> None:
    look = (
        "import delayd, pydoc, rlcompleter; seen = dir(delayd);"
        "missing = [name for name in delayd.__all__ if name not in seen];"
        "completed = rlcompleter.Completer({'delayd': delayd}).complete('delayd.Prod', 0);"
        "page = pydoc.plain(pydoc.render_doc(delayd));"
        "print(missing, completed, 'class Producer' in page, 'class Worker' in page)"
    )
    told = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.split() == ["[]", "delayd.Producer(", "True", "True"], told.stdout + told.stderr
