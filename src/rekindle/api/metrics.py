"""Counters and histograms of one server, in a registry of its own; gauges read the engine when scraped."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rekindle.api.ports import EnginePort
from rekindle.engine.types import Finished

FIRST_TOKEN_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)  # seconds: a full hit to a long cold prefill
TOKEN_BUCKETS = (0.001, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 3)  # seconds


class Metrics:
    def __init__(self, engine: EnginePort) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("rekindle_requests", "Answered requests", ["route", "status"], registry=registry)
        self.cancellations = Counter("rekindle_cancellations", "Clients that left early", registry=registry)
        self.prompt = Counter("rekindle_prompt_tokens", "Prompt tokens of finished answers", registry=registry)
        self.computed = Counter("rekindle_computed_tokens", "Prompt tokens run through a forward", registry=registry)
        self.restored = Counter(
            "rekindle_restored_tokens", "Prompt tokens restored from a snapshot", ["tier"], registry=registry
        )
        self.generated = Counter("rekindle_generated_tokens", "Tokens drawn", registry=registry)
        self.first_token = Histogram(
            "rekindle_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.token = Histogram(
            "rekindle_time_per_token_seconds",
            "Between one token of an answer and the next",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        registry.register(_EngineGauges(engine))

    def count_finished(self, finished: Finished) -> None:
        self.prompt.inc(finished.prompt_tokens)
        self.computed.inc(finished.cache.computed)
        self.restored.labels("ram").inc(finished.cache.restored_ram)
        self.restored.labels("disk").inc(finished.cache.restored_disk)
        if finished.stop_token is not None:
            self.generated.inc()

    def page(self) -> bytes:
        return generate_latest(self.registry)


class _EngineGauges(Collector):
    """One look at the engine per scrape, so the numbers of one page belong together."""

    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        status = self._engine.status()
        yield GaugeMetricFamily("rekindle_running", "Sequences in a slot", status.running)
        yield GaugeMetricFamily("rekindle_queue_length", "Requests waiting for a slot", status.waiting)
        yield GaugeMetricFamily("rekindle_slots", "Places for live sequences", status.slots)
        pages = GaugeMetricFamily("rekindle_pages", "Pages of the KV pool", labels=["state"])
        pages.add_metric(["free"], status.pages.free)
        pages.add_metric(["used"], status.pages.total - status.pages.free)
        yield pages
        tokens = CounterMetricFamily("rekindle_engine_tokens", "Tokens of all requests, ended or not", labels=["how"])
        tokens.add_metric(["computed"], status.computed_tokens)
        tokens.add_metric(["restored"], status.restored_tokens)
        tokens.add_metric(["generated"], status.generated_tokens)
        yield tokens
