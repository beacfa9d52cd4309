"""The public clients keep their promises in each home: servers in processes, and a directory within this program."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import delayd
from delayd.testing.conformance import *  # noqa: F403
from tests.end_to_end.up_process import up


@pytest.fixture(scope="module", params=["servers", "embedded"])
def delayd_address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where meta is, in each of the homes."""
    folder = tmp_path_factory.mktemp("home")
    if request.param == "servers":
        with up(folder, "--port", "0") as running:
            yield running.meta
    else:
        with delayd.open(folder / "data") as home:
            yield home.address
