"""What came of tiers, in the timeline and in metrics."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from stoker.trace import ChromeTrace, PrometheusSink
from support.tiers import SilentTier
from support.traced import TracedRun

FROZEN = SilentTier('peer "a"')


def test_a_late_and_then_abandoned_tier_is_reported(tmp_path: Path) -> None:
    path, prometheus = tmp_path / "trace.json", PrometheusSink()
    with ChromeTrace(path, clock=lambda: 0.0) as trace:
        TracedRun(tiers=[FROZEN], slots=3, sinks=[trace, prometheus]).run()
    events = json.loads(path.read_text())
    told = [tuple(tier) for event in events if event.get("cat") == "fetch" for tier in event["args"]["tiers"]]
    counts = Counter(told)
    assert {outcome for _, outcome in counts} <= {"late", "beaten", "not asked"}
    assert len(told) == 12
    assert counts[FROZEN.name, "not asked"] >= 8
    families = text_string_to_metric_families(generate_latest(prometheus.registry).decode())
    samples = [sample for family in families for sample in family.samples if sample.name == "stoker_tier_reads_total"]
    assert {(each.labels["tier"], each.labels["outcome"]): each.value for each in samples} == counts
