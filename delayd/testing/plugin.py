"""Plugin of pytest: fixtures with an in-memory broker. It is found by itself where delayd is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from delayd.testing.broker import InMemoryBroker
    from delayd.testing.broker_clock import BrokerClock


@pytest.fixture
def delayd_broker() -> Iterator[InMemoryBroker]:
    """An `InMemoryBroker` of this test, whose clock stands still until the test moves it."""
    # Imported here, because this module is imported by every run of pytest.
    from delayd.testing.broker import InMemoryBroker

    with InMemoryBroker() as broker:
        yield broker


@pytest.fixture
def delayd_clock(delayd_broker: InMemoryBroker) -> BrokerClock:
    """The clock of `delayd_broker`."""
    return delayd_broker.clock
