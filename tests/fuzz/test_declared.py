"""What a request declares of its fields is what servers take: each field of each request, around its bounds.

Each value is sent to a real server, in a request that is right otherwise. A value beyond the declaration is refused, in
whatever way; a value within it is never called a bad field.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random

import pytest

from delayd.secret import SECRET_FILE
from delayd.wire.frame import HeadValue
from delayd.wire.requests import RequestType
from tests.end_to_end.raw_client import Raw, prove
from tests.end_to_end.up_process import Up, up

from .declared import NUMBERS, admits, faults
from .requests import SPECS, Requests

BOUNDS = (0, *(high for _, high in NUMBERS.values()))
NESTED: list[HeadValue] = [[], [None], [1], ["x"], [[1, 2, 3]], [["x", 1]], ["x", "x"], [True], [-1]]
VALUES: list[HeadValue] = [
    *(value for bound in BOUNDS for value in (bound - 1, bound, bound + 1) if value < 1 << 64),
    *(2, 3, 5_000, 5_001, 65_535, 65_536, 65_537),
    *(None, True, 0.5, "", "x", "x" * 4_097, "earliest", b"", bytes(32), bytes(128), bytes(4_096), {}, {"sequence": 7}),
    *NESTED,
]


# These are read only beside others, so a value that is wrong may be ignored.
BESIDE_OTHERS = ("was", "subscription")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("declared"), "--port", "0") as running:
        yield running.until_ready()


def trusted(servers: Up, role: str) -> Raw:
    raw = Raw(servers.ready(role)[-1].endpoint.port)
    prove(raw, bytes.fromhex((servers.data / SECRET_FILE).read_text().split()[0]))
    return raw


def fit(kind: RequestType, name: str, head: dict[str, HeadValue]) -> None:
    """Have a request say no more than what goes with a field, so that a server reads this field."""
    if kind is RequestType.REGISTER and name != "role":
        head["role"] = "delay"
    if kind is RequestType.SUBSCRIBE:
        head.pop("subjects" if name == "pattern" else "pattern")
    if name in ("subject", "group"):
        for other in ("subscription", "subjects"):
            head.pop(other, None)
    if name == "subjects" and "handles" in head:
        head["handles"] = [[1, 1, 1]]


@pytest.mark.parametrize("role", SPECS)
def test_rule_E1_a_field_is_taken_within_its_declaration_and_refused_beyond_it(servers: Up, role: str) -> None:
    source, wrong = Requests(role, Random(4), int(time.time() * 1000)), list[str]()
    raw = trusted(servers, role)
    for name, value, (kind, head, body) in source.around(VALUES):
        type_ = kind.terms.types[name]
        taken = admits(type_, value)
        if taken and name == "wait_ms" and value:
            continue  # It would wait.
        fit(kind, name, head)
        answer = raw.ask(kind, head, body)
        if answer.code is None and (said := faults(kind.terms.answer, answer.head)):  # type: ignore[arg-type]
            wrong.append(f"the answer to {kind.name}: {said}"[:200])
        field = dict(answer.head.get("details") or {}).get("field")  # type: ignore[call-overload]
        bad = answer.code == "bad_request" and field == name
        if bad if taken else answer.code is None and name not in BESIDE_OTHERS:
            wrong.append(f"{kind.name} {name}:{type_} {value!r:.30} {answer.head}"[:200])
        if answer.code == "stale_session":  # This ends a connection.
            raw.__exit__()
            raw = trusted(servers, role)
    raw.__exit__()
    assert not wrong, "\n".join(wrong)
