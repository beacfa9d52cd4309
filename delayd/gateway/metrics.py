"""Metrics: what Prometheus reads of a whole cluster, asked of its servers each time, and what this gateway counts.

Names: a counter of STATUS is ``delayd_<name>``, with the labels ``role`` and ``server``; groups have ``subject`` and
``group`` besides. A server that does not answer has ``delayd_up`` 0 and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from delayd.client.asking import ask
from delayd.client.asking.ask import GROUPS, Known, groups_head
from delayd.errors import DelaydError
from delayd.wire.consuming import GroupInfo
from delayd.wire.frame import Head
from delayd.wire.requests import RequestType

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ASKED_S = 5.0  # A server that answers later counts as down.
OF_SERVER, OF_GROUP = ("role", "server"), ("server", "subject", "group")


class Gathered(Collector):
    """Metrics of one moment."""

    def __init__(self, requests: Counter[tuple[str, int]], held: int) -> None:
        self._requests = requests
        self._held = held
        self._up: dict[tuple[str, str], bool] = {}
        self._counters: dict[str, dict[tuple[str, str], int]] = {}
        self._groups: list[tuple[tuple[str, str, str], GroupInfo]] = []

    async def ask(self, meta: str) -> None:
        """Ask meta and all servers that it knows."""
        try:
            async with asyncio.timeout(ASKED_S), ask.meta(meta) as connection:
                known = await ask.known_servers(connection)
                self._note("meta", "meta", await ask.ask(connection, RequestType.STATUS, {}))
        except (DelaydError, TimeoutError):
            self._up["meta", "meta"] = False
            return
        await asyncio.gather(*map(self._ask_one, known))

    async def _ask_one(self, server: Known) -> None:
        name = f"{server.log_id:016x}"
        try:
            async with asyncio.timeout(ASKED_S), ask.reached(server) as connection:
                self._note(server.role, name, await ask.ask(connection, RequestType.STATUS, {}))
                if server.role == "realtime":
                    for group in await GROUPS.at(connection, groups_head(None, ages=True)):
                        self._groups.append(((name, group.subject, group.group), group))
        except (DelaydError, TimeoutError):
            self._up[server.role, name] = False

    def _note(self, role: str, name: str, status: Head) -> None:
        self._up[role, name] = True
        counters = status.get("counters")
        for counter, value in counters.items() if isinstance(counters, dict) else ():
            if isinstance(counter, str) and isinstance(value, int):
                self._counters.setdefault(counter, {})[role, name] = value

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        up = GaugeMetricFamily("delayd_up", "Whether the server answers.", labels=OF_SERVER)
        for labels, is_up in sorted(self._up.items()):
            up.add_metric(labels, is_up)
        yield up
        for counter, of_servers in sorted(self._counters.items()):
            family = GaugeMetricFamily(f"delayd_{counter}", f"The figure {counter} of STATUS.", labels=OF_SERVER)
            for labels, value in sorted(of_servers.items()):
                family.add_metric(labels, value)
            yield family
        waiting = GaugeMetricFamily("delayd_group_waiting", "Messages that no consumer has.", labels=OF_GROUP)
        with_consumers = GaugeMetricFamily("delayd_group_outstanding", "Messages that consumers hold.", labels=OF_GROUP)
        oldest = GaugeMetricFamily(
            "delayd_group_oldest_seconds", "Age of the oldest message that is not acknowledged.", labels=OF_GROUP
        )
        for place, group in sorted(self._groups, key=lambda each: each[0]):
            waiting.add_metric(place, group.end - group.next + group.redelivering)
            with_consumers.add_metric(place, group.outstanding)
            if group.oldest_ms_ago is not None:
                oldest.add_metric(place, group.oldest_ms_ago / 1_000)
        yield from (waiting, with_consumers, oldest)
        requests = CounterMetricFamily(
            "delayd_gateway_requests", "Answers of this gateway.", labels=("method", "status")
        )
        for (method, status), count in sorted(self._requests.items()):
            requests.add_metric((method, str(status)), count)
        yield requests
        held = GaugeMetricFamily("delayd_gateway_leases", "Pulled messages that this gateway holds.")
        held.add_metric((), self._held)
        yield held


async def exposition(meta: str, requests: Counter[tuple[str, int]], held: int) -> bytes:
    """All metrics, in the text format of Prometheus."""
    gathered = Gathered(requests, held)
    await gathered.ask(meta)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(gathered)
    return generate_latest(registry)
