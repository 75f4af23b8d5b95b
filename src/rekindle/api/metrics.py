"""Counters and histograms of one server, in a registry of its own; gauges read the engine when scraped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rekindle.api.ports import CachePort, EnginePort
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
        self.preparations = Counter(
            "rekindle_preparations", "Prompts expected next, by what became of them", ["outcome"], registry=registry
        )
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
        yield CounterMetricFamily("rekindle_audits", "Restored snapshots computed again and compared", status.audits)
        yield CounterMetricFamily(
            "rekindle_audit_mismatches", "Audits that found a wrong snapshot", status.audit_mismatches
        )
        yield from _work_counters(status.work)
        yield from _cache_counters(status.cache)
        yield from _cache_sizes(status.cache)


def _work_counters(work: Mapping[str, int]) -> Iterable[Metric]:
    """Which path ran: the stages of this process."""
    for kind, name, what, label in (
        ("step", "steps", "Forwards of a stage, replayed from a recording or run anew", "how"),
        ("experts", "expert_layers", "Layers with cold experts that ran, by the way they took", "way"),
        ("slabs", "slabs", "Pieces of pinned RAM that were asked for and not ready, or refused by the system", "how"),
        ("pages", "page_moves", "Pages sent out and brought in; attended where they lie, skipped, per forward", "how"),
    ):
        family = CounterMetricFamily(f"rekindle_{name}", what, labels=[label])
        for key, count in work.items():
            if key.startswith(f"{kind}:"):
                family.add_metric([key.removeprefix(f"{kind}:")], count)
        yield family
    yield CounterMetricFamily("rekindle_expert_swaps", "Experts that changed places", work.get("swaps:", 0))


def _cache_counters(cache: CachePort) -> Iterable[Metric]:
    for name, what, label, counts in (
        ("hits", "Lookups that found a prefix", "tier", cache.hits),
        ("restored_tokens", "Tokens of the prefixes found", "tier", cache.restored),
        ("misses", "Lookups that found nothing", "reason", cache.misses),
        ("short_hits", "Prefixes found that end before the prompt does", "reason", cache.short_hits),
        ("refused_saves", "Snapshots that were not saved", "reason", cache.refused_saves),
    ):
        family = CounterMetricFamily(f"rekindle_cache_{name}", what, labels=[label])
        for value, count in counts.items():
            family.add_metric([value], count)
        yield family
    evictions = CounterMetricFamily(
        "rekindle_cache_evictions", "Snapshots that left a tier", labels=["tier", "outcome"]
    )
    for which, count in cache.evictions.items():
        evictions.add_metric(which.split(":"), count)
    yield evictions
    yield CounterMetricFamily("rekindle_cache_published", "Snapshots published", cache.published)
    yield CounterMetricFamily("rekindle_cache_saves", "Snapshots saved to disk", cache.saves)
    yield CounterMetricFamily("rekindle_cache_bad_files", "Files on disk that could not be used", cache.bad_files)


def _cache_sizes(cache: CachePort) -> Iterable[Metric]:
    for name, what, ram, disk in (
        ("snapshots", "Snapshots in a tier", cache.ram_entries, cache.disk_entries),
        ("bytes", "Bytes that a tier takes", cache.ram_bytes, cache.disk_bytes),
        ("budget_bytes", "Bytes that a tier may take", cache.ram_budget, cache.disk_budget),
    ):
        family = GaugeMetricFamily(f"rekindle_cache_{name}", what, labels=["tier"])
        family.add_metric(["ram"], ram)
        family.add_metric(["disk"], disk)
        yield family
