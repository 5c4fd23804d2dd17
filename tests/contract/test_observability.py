"""Alerts, dashboard and the operator's page match the health rules; tests/integration/monitor stages the failures.

grafana-schema.json is, from npm's @grafana/schema 13.2.3 (Apache-2.0), the type `Dashboard` and each kind of panel's
`Options` and `FieldConfig` as JSON schemas, made by ts-json-schema-generator.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dvp_rl.contract.http import Severity, Verdict
from dvp_rl.transport.health import RULES
from tests.kit.wait import WITHIN_S

REPOSITORY = Path(__file__).parents[2]
PROMETHEUS = REPOSITORY / "deploy" / "prometheus"
GRAFANA = REPOSITORY / "deploy" / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards" / "dvp.json").read_text())
(GROUP,) = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
ALERTS = {alert["labels"]["verdict"]: alert for alert in GROUP["rules"] if "verdict" in alert["labels"]}
OTHERS = [alert for alert in GROUP["rules"] if "verdict" not in alert["labels"]]

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool on this machine (apt-get install prometheus)"
)


def promtool(*args: str | Path) -> None:
    done = subprocess.run(["promtool", *map(str, args)], capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_one_alert_per_verdict_in_the_words_of_its_rule() -> None:
    wanted = {rule.verdict: rule for rule in RULES if rule.severity is not Severity.INFO}
    assert list(ALERTS) == list(wanted), "the same verdicts, worst first"
    for verdict, rule in wanted.items():
        alert = ALERTS[verdict]
        assert alert["alert"] == "Dvp" + verdict.replace("_", " ").title().replace(" ", "")
        assert alert["expr"] == f'dvp_queue_reason{{verdict="{verdict}"}} == 1'
        assert alert["labels"]["severity"] == rule.severity
        assert alert["annotations"] == {"summary": rule.meaning, "remedy": rule.remedy}


def test_the_operators_page_says_what_the_rules_say() -> None:
    page = (REPOSITORY / "services" / "dvp_rl" / "monitor" / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", page, re.MULTILINE)
    assert rows == [(rule.verdict, rule.severity, rule.meaning, rule.remedy) for rule in RULES]
    assert all(f"`{alert['alert']}`" in page for alert in OTHERS)


@needs_promtool
def test_configuration_and_rules_are_valid() -> None:
    promtool("check", "rules", PROMETHEUS / "alerts.yml")
    # The syntax only: the secrets exist only where Prometheus runs.
    promtool("check", "config", "--syntax-only", PROMETHEUS / "prometheus.yml")


@needs_promtool
def test_each_alert_fires_when_its_time_has_come_and_no_sooner(tmp_path: Path) -> None:
    tests = [_timing(alert, series) for alert in GROUP["rules"] for series in [_series(alert)]]
    file = tmp_path / "alerts.test.yml"
    rules = {"rule_files": [str(PROMETHEUS / "alerts.yml")], "evaluation_interval": "5s", "tests": tests}
    file.write_text(yaml.safe_dump(rules))
    promtool("test", "rules", file)


def _series(alert: dict[str, Any]) -> list[dict[str, str]]:
    """Series that are healthy for one minute and then meet the alert's condition for 20 minutes."""
    well, ill = {"DvpBrokerAway": "1 0", "DvpMonitorAway": "1 0"}.get(alert["alert"], "0 1").split()
    values = f"{well}x11 {ill}x240"
    if "verdict" in alert["labels"]:
        others = [verdict for verdict in Verdict if verdict != alert["labels"]["verdict"]]
        silent = [{"series": f'dvp_queue_reason{{verdict="{verdict}"}}', "values": "0x252"} for verdict in others]
        here = f'dvp_queue_reason{{verdict="{alert["labels"]["verdict"]}"}}'
        return [{"series": here, "values": values}, *silent, UP]
    if alert["alert"] == "DvpMonitorAway":
        return [{"series": UP["series"], "values": values}]
    return [{"series": "dvp_queue_up", "values": values}, UP]


UP = {"series": 'up{job="monitor"}', "values": "1x252"}


def _timing(alert: dict[str, Any], series: list[dict[str, str]]) -> dict[str, Any]:
    amount, unit = re.fullmatch(r"(\d+)([sm])", alert["for"]).groups()  # type: ignore[union-attr]
    due = 60 + int(amount) * {"s": 1, "m": 60}[unit]
    fired = [{"exp_labels": alert["labels"], "exp_annotations": alert["annotations"]}]
    times = [(due - 5, []), (due, fired)]
    checks = [{"eval_time": f"{at}s", "alertname": alert["alert"], "exp_alerts": expected} for at, expected in times]
    quiet = [
        {"eval_time": f"{due}s", "alertname": other["alert"], "exp_alerts": []}
        for other in GROUP["rules"]
        if other is not alert
    ]
    return {"interval": "5s", "input_series": series, "alert_rule_test": [*checks, *quiet]}


def test_the_dashboard_is_one() -> None:
    schema = json.loads((Path(__file__).parent / "grafana-schema.json").read_text())
    jsonschema.Draft7Validator(schema["dashboard"]).validate(DASHBOARD)
    for panel in DASHBOARD["panels"]:
        if panel["type"] != "row":
            jsonschema.Draft7Validator(schema["options"][panel["type"]]).validate(panel["options"])
            custom = panel["fieldConfig"]["defaults"].get("custom", {})
            jsonschema.Draft7Validator(schema["custom"].get(panel["type"], {"maxProperties": 0})).validate(custom)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    (source,) = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"]
    used = {target["datasource"]["uid"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())}
    assert used == {source["uid"]}


def test_no_two_panels_of_the_dashboard_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        across, down = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = {(x, y) for x in across for y in down}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
