"""Whether a head is as `delayd.wire.requests` declares it: each field there, of its type, and no other field."""

from __future__ import annotations

from delayd.wire.frame import Head, HeadValue
from delayd.wire.requests import LISTS, MAPS, named_types

NUMBERS = {
    "u32": (0, (1 << 32) - 1),
    "u64": (0, (1 << 64) - 1),
    "int": (0, (1 << 63) - 1),
    "instant": (0, 253_402_300_799_999),
}
BYTES = {"bytes": None, "bytes32": 32, "slots": 128, "versions": 4_096}
TEXTS = {"group": (1, 255), "host": (1, 253), "str": (0, 4_096), "text": (0, 8_192)}


def faults(fields: str, head: Head) -> list[str]:
    """What of a head is not as these fields are declared."""
    declared = named_types(fields)
    names = {name.removesuffix("?"): kind for name, kind in declared}
    missing = [f"no {name}" for name, _ in declared if not name.endswith("?") and name not in head]
    strays = [f"{name} is not declared" for name in head if name not in names]
    wrong = [f"{name}:{names[name]} is {value!r:.60}" for name, value in head.items() if not fits(names, name, value)]
    return [*missing, *strays, *wrong]


def fits(names: dict[str, str], name: str, value: HeadValue) -> bool:
    """Whether a value has the type of its name, or its name is not declared."""
    return name not in names or admits(names[name], value)


def admits(kind: str, value: HeadValue) -> bool:
    """Whether a value has a declared type, and lies within its bounds."""
    kind, _, nil = kind.partition("|")
    low, dots, high = kind.partition("..")
    if value is None:
        return bool(nil)
    if kind in NUMBERS or dots:
        least, most = NUMBERS.get(high or kind, (0, 0))
        if dots:
            least, most = int(low), most or int(high)
        return type(value) is int and least <= value <= most
    if kind.startswith("["):
        return isinstance(value, list) and all(admits(kind[1:-1], each) for each in value)
    if kind.startswith("{"):
        return isinstance(value, dict) and all(admits(kind[1:-1], each) for each in value.values())
    if kind in LISTS:
        items = named_types(LISTS[kind])
        return isinstance(value, list) and len(value) == len(items) and all(map(admits, (t for _, t in items), value))
    if kind in MAPS:
        return isinstance(value, dict) and not faults(MAPS[kind], value)
    if kind in BYTES:
        return isinstance(value, bytes) and BYTES[kind] in (None, len(value))
    if kind == "position":
        return value in ("earliest", "latest") or value in ({"instant_ms": 7}, {"sequence": 7})
    if kind == "bool":
        return isinstance(value, bool)
    if "/" in kind:
        return value in kind.split("/")
    least, most = TEXTS[kind]
    return isinstance(value, str) and least <= len(value) <= most
