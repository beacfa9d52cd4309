"""Names of retry subjects: what is made is read back, and nothing else is taken for one."""

import pytest

from delayd.batch.names import parse_retry_subject


@pytest.mark.parametrize(
    "name",
    ["%retry/", "%retry/1/2", "%retry/00c1d5f2a98b3e47/012", "%retry/00c1d5f2a98b3e47/1/2", "retry/1", "%RETRY/1"],
)
def test_other_names_are_none(name: str) -> None:
    assert parse_retry_subject(name) is None
