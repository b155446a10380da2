"""What an audit found, as metrics."""

from __future__ import annotations

from coattn.auto.audit.tally import Tally
from coattn.serve.metrics import _audit, _tables


def test_an_audit_is_in_the_metrics() -> None:
    tally = Tally(0.02)
    for i in range(20):
        tally.add(0.001 * i, 0.1, 0.09)
    audit = {**tally.summary(), "wait": 0.5}
    found = {
        metric.name: metric.samples for metric in [*_tables({"disk": None, "audit": audit}, "m"), *_audit(audit, "m")]
    }
    assert found["coattn:audits"][0].value == 20
    assert found["coattn:audit_error_target"][0].value == 0.02
    assert found["coattn:audit_wait"][0].value == 0.5
    error = {sample.labels["value"]: sample.value for sample in found["coattn:audit_error"]}
    assert error["low_95"] < error["mean"] == 0.0095 < error["high_95"]
    assert {sample.labels["value"] for sample in found["coattn:audit_missed_mass"]} == {"mean", "low_95", "high_95"}
    few = {metric.name: metric.samples for metric in _audit({**Tally(0.02).summary(), "wait": 1.0}, "m")}
    assert few["coattn:audit_error"] == []
    assert not list(_audit(None, "m"))
