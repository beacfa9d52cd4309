"""Names of retry subjects: what is made is read back, and nothing else is taken for one."""

import pytest

from delayd.batch.names import is_reserved, parse_retry_subject, retry_subject


@pytest.mark.parametrize(("log_id", "group_id"), [(1, 1), ((1 << 64) - 1, (1 << 32) - 1), (0xC1D5F2A98B3E47, 12)])
def test_a_name_says_whose_it_is(log_id: int, group_id: int) -> None:
    name = retry_subject(log_id, group_id)
    assert parse_retry_subject(name) == (log_id, group_id)
    assert is_reserved(name)


@pytest.mark.parametrize(
    "name",
    ["%retry/", "%retry/1/2", "%retry/00c1d5f2a98b3e47/012", "%retry/00c1d5f2a98b3e47/1/2", "retry/1", "%RETRY/1"],
)
def test_other_names_are_none(name: str) -> None:
    assert parse_retry_subject(name) is None
