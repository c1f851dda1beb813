"""The alerts: `promtool` takes them and has each come when it has to, and the runbook has a part for each."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from export.kubernetes.objects import prometheus_rule
from tests.support.long_cases import one_in

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "export" / "kubernetes" / "alerts.yaml"
CASES = Path(__file__).with_name("alerts_test.yaml")
RUNBOOK = ROOT / "docs" / "runbook.md"


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)


def test_prometheus_takes_the_rules() -> None:
    done = promtool("check", "rules", ALERTS)
    assert done.returncode == 0, done.stderr


def cases(folder: Path, rules: str) -> subprocess.CompletedProcess[str]:
    (folder / "alerts.yaml").write_text(rules)
    shutil.copy(CASES, folder)
    return promtool("test", "rules", folder / CASES.name)


def test_each_alert_fires_when_it_should_and_none_on_a_calm_day(tmp_path: Path) -> None:
    done = cases(tmp_path, ALERTS.read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    calm, *eventful = yaml.safe_load(CASES.read_text())["tests"]
    names = {alert["alert"] for alert in alerts()}
    assert {alert["alertname"] for alert in calm["alert_rule_test"]} == names
    come = {alert["alertname"] for case in eventful for alert in case["alert_rule_test"] if alert.get("exp_alerts")}
    assert come == names


@pytest.mark.long
@pytest.mark.parametrize(
    ("right", "wrong"),
    one_in(
        4,
        [
            ("avg_over_time(tbe_ready[5m]) < 0.5", "avg_over_time(tbe_ready[5m]) < -1"),
            ("for: 1h", "for: 1m"),
            ("ratio_rate1h > 14.4 * 0.001", "ratio_rate1h >= 0"),
            ("_seconds\n          and rate(tbe_serving", "_seconds\n          or rate(tbe_serving"),
        ],
    ),
)
def test_promtool_fails_on_a_wrong_rule(tmp_path: Path, right: str, wrong: str) -> None:
    rules = ALERTS.read_text()
    assert right in rules
    assert cases(tmp_path, rules.replace(right, wrong)).returncode != 0


def test_each_alert_links_to_its_section_in_the_runbook() -> None:
    parts = re.findall(r"^## (Tbe\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert parts == [alert["alert"] for alert in alerts()]
    for alert in alerts():
        assert alert["annotations"]["runbook"] == f"docs/runbook.md#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in ("page", "ticket")


def test_the_kustomize_base_has_the_same_alert_rules() -> None:
    assert prometheus_rule()["spec"] == yaml.safe_load(ALERTS.read_text())
