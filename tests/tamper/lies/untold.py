"""Lies that nothing in the files tells; docs/guarantees.md lists them, each with its reason.

Invariant: the tests show that nobody finds them, so that one that becomes detectable leaves this list.
"""

from __future__ import annotations

from delayd.log.group import GroupKind
from tests.tamper.honest import DELAY
from tests.tamper.liar import Liar, Written
from tests.tamper.lies.lie import Tell


def undetectable() -> list[tuple[str, Tell, str]]:
    """Lies that no reader of the files can find, and why; docs/guarantees.md lists them."""

    def newest(liar: Liar) -> None:
        hour = max(int(name[:-4]) for name in liar.disk.list_folder(f"{DELAY}/dispatch/20270115"))
        path = f"{DELAY}/dispatch/20270115/{hour}.log"
        liar.edit(path, lambda groups: groups[:-1])

    def cut_message_log(liar: Liar) -> None:
        liar.edit(liar.message_log, without_last_rows)

    def earlier_checkpoint(liar: Liar) -> None:
        liar.publish(settled_ms=0)

    return [
        (
            "an outcome that no checkpoint and no watermark covers yet is taken out",
            newest,
            "it looks as if it was in flight",
        ),
        (
            "the newest group of the message log is cut off",
            cut_message_log,
            "a crash leaves the same, before the receipt",
        ),
        ("the delay server's word is that nothing is settled", earlier_checkpoint, "what waits is not lost"),
    ]


def without_last_rows(groups: list[Written]) -> list[Written]:
    data = [number for number, group in enumerate(groups) if group.kind is GroupKind.DATA]
    return groups[: data[-1]]
