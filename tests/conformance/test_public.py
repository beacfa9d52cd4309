"""The public clients keep their promises in each home: servers in processes, and a directory within this program."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delayd.testing.conformance import *  # noqa: F403
from tests.conformance.public.homes import HOMES


@pytest.fixture(scope="module", params=sorted(HOMES))
def delayd_address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where meta is, in each of the homes."""
    with HOMES[request.param](tmp_path_factory.mktemp("home")) as address:
        yield address
