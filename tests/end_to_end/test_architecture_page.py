"""The stops on docs/architecture.md are there, and a real message passes them in the order of the page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import delayd
from bench.stays import Stay, Watch
from tests.waiting import holds_in_time

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
STOP = re.compile(r"`([a-z_/]+\.py):([\w.]+)`")
SECTIONS = {title: text for title, _, text in (each.partition("\n") for each in PAGE.split("\n## ")[1:])}
FILES = sorted({file for file, _ in STOP.findall(PAGE)})
CONSUMER = "delayd/client/pulling/consumer.py"


@pytest.mark.parametrize("file", FILES)
def test_each_stop_is_there(file: str) -> None:
    there = set(_names(ast.parse((ROOT / file).read_text())))
    assert {name for at, name in STOP.findall(PAGE) if at == file} <= there


def _names(tree: ast.AST, inside: str = "") -> Iterator[str]:
    """The functions and classes of a file, and the methods of its classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield inside + node.name
            yield from _names(node, f"{inside}{node.name}.")


@pytest.mark.timeout(300)
def test_a_message_passes_the_stops_in_the_order_of_the_page(tmp_path: Path) -> None:
    # On a machine that stands still for a moment the message is due before its home is closed.
    holds_in_time(timedelta(seconds=3), lambda delay: _check_order(_ways(tmp_path / f"data{delay}", delay)))


def _check_order(ways: dict[str, list[Stay]]) -> None:
    for section, calls in ways.items():
        for table in re.findall(r"(?:^\|.*\n)+", SECTIONS[section], re.MULTILINE):
            left = iter(calls)
            for stop in STOP.findall(table):
                assert stop in left, f"{section}: {stop} is not passed, or not behind the stop above it"


def _ways(data: Path, delay: timedelta) -> dict[str, list[Stay]]:
    """By section of the page: what is called while one message is sent, filed by a stop, loaded by a start, and taken.

    Another message is cancelled in between.
    """
    watch = Watch()
    try:
        with delayd.open(data) as home, home.producer() as producer:
            far = producer.send("way", b"cancelled", delay=timedelta(hours=1))

            def send() -> None:
                producer.send("way", b"taken", delay=delay)
                # Rows enter the wheel behind the answer, and before the next request.
                producer.get("way", receipt=far)

            sent = watch.calls(send)
            cancelled = watch.calls(lambda: producer.cancel("way", receipt=far))
            stopped = watch.calls(home.close)

        def live_on() -> None:
            with delayd.open(data) as home, home.consumer("way", group="late") as consumer:
                message = next(iter(consumer))
                assert message.body == b"taken"
                message.ack()

        lived_on = watch.calls(live_on)
    finally:
        watch.close()
    acknowledged = lived_on.index((CONSUMER, "AsyncMessage.ack"))
    closed = lived_on.index((CONSUMER, "AsyncConsumer.close"))
    return {
        "From the send to the receipt": sent,
        "Until it is due": sent + stopped + lived_on,
        "From the due instant to the consumer": lived_on[:acknowledged],
        "The outcome": lived_on,
        "The acknowledgement": lived_on[acknowledged:closed],
        "A cancel": cancelled,
        "A restart": lived_on[:acknowledged],
    }
