"""Metrics for Prometheus, under vLLM's names with the prefix `coattn:`. Reading them costs the engine nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric

from coattn.engine.request import RequestOutput
from coattn.serve.engine import EngineThread

Values = Iterable[tuple[tuple[str, ...], float]]
Family = type[Gauge] | type[Counter]
Table = tuple[tuple[str, str, str], ...]
"""Metrics of one kind: `(name, key of the report, help)`"""
UNIT = "in units of what attention adds to the mean value."
SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
FIRST = (*SHORT, 20, 40, 80, 160, 640, 2560)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = tuple(float(1 << power) for power in range(21))

HISTOGRAMS = (
    ("time_to_first_token_seconds", "Until the first token, waiting included.", FIRST),
    ("inter_token_latency_seconds", "Between two parts of a streamed answer.", BETWEEN),
    ("request_time_per_output_token_seconds", "Mean time per token after the first, per request.", BETWEEN),
    ("e2e_request_latency_seconds", "From a request's arrival to its end.", WHOLE),
    ("request_queue_time_seconds", "Until the request first got a slot.", WHOLE),
    ("request_prefill_time_seconds", "From the slot to the first token.", WHOLE),
    ("request_decode_time_seconds", "From the first token to the last.", WHOLE),
    ("request_prompt_tokens", "Tokens of a prompt.", TOKENS),
    ("request_generation_tokens", "Tokens of an answer.", TOKENS),
)
METRICS: dict[tuple[str | None, Family], Table] = {
    (None, Gauge): (
        ("num_requests_running", "running", "Requests that run."),
        ("num_requests_waiting", "waiting", "Requests that wait."),
    ),
    (None, Counter): (
        ("prompt_tokens", "prefill_tokens", "Tokens of prompts that were read."),
        ("generation_tokens", "new_tokens", "Tokens that were drawn."),
        ("num_preemptions", "preemptions", "How often a request's memory was given to others."),
        ("prefix_cache_queries", "asked_tokens", "Tokens of prompts that were looked for among the stored."),
        ("prefix_cache_hits", "cached_tokens", "Tokens of prompts that were stored already."),
        ("prefix_cache_evictions", "prefix_evicted", "Stored blocks of prompts that were given up."),
        ("decode_steps", "decode_steps", "Decode steps."),
        ("prefill_steps", "prefill_steps", "Steps that read prompts."),
        ("failed_steps", "failed_steps", "Steps that failed."),
        ("remote_prefill_prompts", "elsewhere_prompts", "Prompts that another process has read."),
        ("remote_prefill_tokens", "elsewhere_tokens", "Tokens of these prompts."),
        ("remote_prefill_failures", "elsewhere_failed", "Prompts that another process was to read and did not."),
    ),
    ("disk", Counter): (
        ("disk_cache_hits", "read_tokens", "Tokens of prompts that were read from the disk."),
        ("disk_cache_refusals", "refused_tokens", "Tokens on the disk that were computed sooner than read."),
        ("disk_cache_read_bytes", "read_bytes", "Bytes that were read from the disk."),
        ("disk_cache_written_bytes", "written_bytes", "Bytes that were written to the disk."),
        ("disk_cache_skipped_blocks", "skipped", "Blocks that were given up since the disk was too slow or full."),
        ("disk_cache_deleted_blocks", "deleted", "Blocks that were deleted to keep to the limit."),
        ("disk_cache_damaged_blocks", "damaged", "Blocks on the disk that were damaged."),
    ),
    ("disk", Gauge): (
        ("disk_cache_bytes", "bytes", "Bytes of blocks on the disk."),
        ("disk_cache_read_bytes_per_second", "read_bytes_per_s", "Measured speed of reading blocks from the disk."),
        ("prompt_tokens_per_second", "prompt_tokens_per_s", "Measured speed of computing prompts."),
    ),
    ("audit", Counter): (("audits", "audits", "Cases that were compared with exact attention."),),
    ("audit", Gauge): (
        ("audit_error_target", "error_target", f"Error of attention's output that is allowed, {UNIT}"),
        ("audit_wait", "wait", "Floors that a missing token must weigh for a step to wait for it."),
        ("audit_over_target", "over_target", "How many times larger than allowed the error is, where it is."),
    ),
}
"""By the part of the report that has the value, if it is not the report itself. An engine may lack a part."""
AUDITED: Table = (
    ("audit_error", "error", f"Error of attention's output as audited, {UNIT}"),
    ("audit_missed_mass", "missed_mass", "Share of the softmax that was not attended by its own keys, as audited."),
)


class Metrics:
    """Histograms over requests, and counts and gauges that are read from the engine when somebody asks."""

    def __init__(self, engine: EngineThread, name: Callable[[], str]) -> None:
        self.engine, self._name = engine, name
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._histograms = {
            what: Histogram(f"coattn:{what}", text, ["model_name"], registry=self.registry, buckets=buckets)
            for what, text, buckets in HISTOGRAMS
        }
        self._named: dict[tuple[str, str], Histogram] = {}
        """With their label, which takes longer to look up than a time takes to count."""

    def done(self, output: RequestOutput) -> None:
        """A request has ended."""
        waited, first, total = output.waited_s, output.first_token_s, output.total_s
        self.observe("request_prompt_tokens", output.prompt_tokens)
        self.observe("request_generation_tokens", output.new_tokens)
        self.observe("request_queue_time_seconds", waited)
        self.observe("e2e_request_latency_seconds", total)
        if waited is None or first is None or total is None:
            return
        self.observe("time_to_first_token_seconds", first)
        self.observe("request_prefill_time_seconds", first - waited)
        self.observe("request_decode_time_seconds", total - first)
        if output.new_tokens > 1:
            self.observe("request_time_per_output_token_seconds", (total - first) / (output.new_tokens - 1))

    def observe(self, what: str, value: float | None) -> None:
        if value is not None:
            key = what, self._name()
            if key not in self._named:
                self._named[key] = self._histograms[what].labels(key[1])
            self._named[key].observe(value)

    def collect(self) -> Iterator[Metric]:
        """What the engine counts, for the registry."""
        ready, opened = self.engine.condition == "ready", self.engine.recoveries
        yield _metric(Gauge, "ready", "Whether requests are taken.", [((), ready)])
        yield _metric(Counter, "engine_recoveries", "How often the engine broke and was opened again.", [((), opened)])
        llm = self.engine.llm
        if llm is None:
            return
        report, name = llm.report(), self._name()
        yield from _tables(report, name)
        ended = [((name, reason), count) for reason, count in report["requests"].items()]
        labels = ("model_name", "finished_reason")
        yield _metric(Counter, "request_success", "Requests by how they ended.", ended, *labels)
        yield from _audit(report["audit"], name)
        yield from self._tiers(llm, report)

    def _tiers(self, llm: Any, report: dict[str, Any]) -> Iterator[Metric]:
        names = {"gpu": "gpu" if llm.model.device.type == "cuda" else "memory", "host": "host"}
        held = [((names[tier],), report[f"{tier}_kv_bytes"]) for tier in names]
        yield _metric(Gauge, "kv_bytes", "KV memory that the engine holds.", held, "tier")
        sample, capacity = self.engine.sample, llm.engine.scheduler.admission.capacity
        free = {} if sample is None else sample.free
        used = [
            ((names[tier],), 1 - (free.get(tier) or 0) / whole)
            for tier, whole in capacity.items()
            if whole and free.get(tier) is not None
        ]
        text = "Share of a tier's KV memory that sequences have. 1 is full."
        yield _metric(Gauge, "kv_cache_usage_perc", text, used, "tier")


def _tables(report: dict[str, Any], name: str) -> Iterator[Metric]:
    """A metric of each row; a count that the report lacks is zero, and a speed that is not known yet is left out."""
    for (part, kind), table in METRICS.items():
        values = report if part is None else report[part]
        for what, key, text in () if values is None else table:
            value = values.get(key, 0)
            if value is not None:
                yield _metric(kind, what, text, [((name,), value)], "model_name")


def _audit(audit: dict[str, Any] | None, name: str) -> Iterator[Metric]:
    """What was measured of a method that promises an error; nothing of others."""
    if audit is None:
        return
    for what, key, text in AUDITED:
        low, high = audit[f"{key}_95"] or (None, None)
        values = (("mean", audit[key]), ("low_95", low), ("high_95", high))
        shown = [((name, which), value) for which, value in values if value is not None]
        yield _metric(Gauge, what, text, shown, "model_name", "value")


def _metric(kind: Family, what: str, text: str, values: Values, *labels: str) -> Metric:
    family = kind(f"coattn:{what}", text, labels=labels)
    for key, value in values:
        family.add_metric(key, float(value))
    return family
