"""Patterns: which subjects each stands for, and which texts are none."""

import pytest

from delayd.batch.names import Pattern, is_pattern
from delayd.errors import BadSubject


@pytest.mark.parametrize(
    ("text", "prefix", "subjects", "others"),
    [
        (
            "orders.*",
            "orders.",
            ["orders.eu", "orders.%a/b-c_"],
            ["orders", "orders.eu.cancel", "orders.", "xorders.eu"],
        ),
        ("orders.>", "orders.", ["orders.eu", "orders.eu.cancel"], ["orders", "ordersx.eu"]),
        ("*.cancel", "", ["orders.cancel"], ["cancel", "orders.eu.cancel", "orders.cancelled"]),
        ("orders.*.cancel", "orders.", ["orders.eu.cancel"], ["orders.cancel", "orders.eu.us.cancel"]),
        ("a-b.*.>", "a-b.", ["a-b.c.d", "a-b.c.d.e"], ["a-b.c", "a_b.c.d"]),
        (">", "", ["orders", "orders.eu"], ["%retry/0/1"]),
        ("*", "", ["orders"], ["orders.eu", "%retry/0/1"]),
    ],
)
def test_a_pattern_stands_for_the_subjects_whose_words_fit(
    text: str, prefix: str, subjects: list[str], others: list[str]
) -> None:
    pattern = Pattern(text)
    assert is_pattern(text) and pattern.prefix == prefix
    assert [subject for subject in [*subjects, *others] if pattern.matches(subject)] == subjects
    assert all(subject.startswith(prefix) for subject in subjects)


@pytest.mark.parametrize(
    "text",
    ["", "orders", "ord*", "orders.>.eu", ">.eu", "orders..*", ".*", "*.", "orders.*.\n", "a b.*", "é.*", "\ud800.*",
     "a" * 254 + ".*", "**", "*>"],
)  # fmt: skip
def test_a_text_that_is_no_pattern_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadSubject):
        Pattern(text)
