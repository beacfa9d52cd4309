"""What `help()` says of the clients: each has an example, and each argument that a user may give is explained."""

import inspect

import pytest

import delayd

CLIENTS = (delayd.Producer, delayd.AsyncProducer, delayd.Consumer, delayd.AsyncConsumer)
CALLS = [
    (client, name)
    for client in CLIENTS
    for name, call in inspect.getmembers(client, inspect.isfunction)
    if not name.startswith("_") and len(inspect.signature(call).parameters) > 1
]


@pytest.mark.parametrize("client", CLIENTS)
def test_each_client_shows_how_it_is_used_and_what_it_is_told(client: type) -> None:
    told = inspect.getdoc(client) or ""
    assert "Example::" in told and f"delayd.{client.__name__}(" in told
    for name in list(inspect.signature(client).parameters):
        assert f"{name}:" in told, f"help({client.__name__}) does not explain {name}"


@pytest.mark.parametrize(("client", "name"), CALLS)
def test_each_argument_of_a_call_is_explained(client: type, name: str) -> None:
    told = inspect.getdoc(getattr(client, name)) or ""
    for argument in list(inspect.signature(getattr(client, name)).parameters)[1:]:
        assert f"{argument}:" in told or f"``{argument}``" in told, f"help of {name} does not explain {argument}"
