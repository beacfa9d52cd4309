"""The alerts and the dashboard use metrics that there are, in words that Prometheus understands."""

from __future__ import annotations

import json
import re
from typing import Any

import promql_parser
import pytest
import yaml

from delayd.wire.exposition import MetricKind
from delayd.wire.metrics import METRICS
from tests.unit.pages import ROOT

RULES: list[dict[str, Any]] = yaml.safe_load((ROOT / "deploy/prometheus/delayd.rules.yml").read_text())["groups"][0][
    "rules"
]
DASHBOARD = json.loads((ROOT / "deploy/grafana/delayd.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
NAMES = {
    f"{metric.name}{ending}"
    for metric in METRICS
    for ending in (("_bucket", "_sum", "_count") if metric.kind is MetricKind.HISTOGRAM else ("",))
}


def named(expression: str) -> set[str]:
    return set(re.findall(r"\bdelayd_\w+", expression))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_an_alert_is_understood_and_says_what_to_look_at(rule: dict[str, Any]) -> None:
    promql_parser.parse(rule["expr"])
    assert named(rule["expr"]) <= NAMES and (named(rule["expr"]) or rule["expr"].startswith("up{"))
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"].endswith((".", "?"))


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_a_panel_is_understood(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        expression = target["expr"].replace("$__rate_interval", "1m").replace("$server", ".*")
        promql_parser.parse(expression)
        assert named(expression) and named(expression) <= NAMES
        labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        used = [metric for metric in METRICS if named(expression) & {metric.name, f"{metric.name}_bucket"}]
        assert labels <= {label for metric in used for label in metric.labels}


def test_panels_stand_beside_and_below_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
