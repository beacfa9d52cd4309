"""A home for all cases, and a subject, a producer and consumers for each."""

from collections.abc import Iterator
from itertools import count

import pytest

import delayd
from tests.conformance.public.desk import Desk
from tests.conformance.public.homes import HOMES

_numbers = count(1)


@pytest.fixture(scope="package", params=sorted(HOMES))
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with HOMES[request.param](tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture(scope="package")
def producer(address: str) -> Iterator[delayd.Producer]:
    with delayd.Producer(address) as made:
        yield made


@pytest.fixture
def subject() -> str:
    return f"case-{next(_numbers)}"


@pytest.fixture
def desk(address: str, subject: str, producer: delayd.Producer) -> Iterator[Desk]:
    with Desk(address, subject, producer) as made:
        yield made
