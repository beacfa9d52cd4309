"""What `help()` says of the audit in Spark, the data source, and the tables of a report."""

import inspect
from collections.abc import Callable

import pytest

from delayd.reading.arrow import findings_table, groups_table, hours_table
from pyspark_delayd import DefaultSource
from spark.audit import audit_data
from spark.session import audit
from spark.sink import OPTIONS as WRITTEN

OPTIONS = ("view", "from", "to", "subject", "with", "tasks", "pushdown", *WRITTEN)


@pytest.mark.parametrize("function", [audit_data, audit, hours_table, findings_table, groups_table])
def test_each_function_shows_an_example_and_explains_each_argument(function: Callable[..., object]) -> None:
    told = inspect.getdoc(function) or ""
    assert "Example::" in told
    for argument in inspect.signature(function).parameters:
        assert f"{argument}:" in told, f"help({function.__name__}) does not explain {argument}"


def test_the_data_source_shows_an_example_and_explains_each_option() -> None:
    told = inspect.getdoc(DefaultSource) or ""
    assert "Example::" in told
    for option in OPTIONS:
        assert f"{option}:" in told, f"help(DefaultSource) does not explain {option}"
