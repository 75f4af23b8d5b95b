"""Counters and histograms of one server, in a registry of its own; gauges read the engine when scraped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rekindle.api.model_host import ModelHost
from rekindle.api.served import ModelState
from rekindle.engine.types import EngineStatus, Finished

FIRST_TOKEN_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)  # seconds: a full hit to a long cold prefill
QUEUE_BUCKETS = (0.001, 0.01, 0.1, 0.3, 1, 3, 10, 30, 100, 300)  # seconds
TOKEN_BUCKETS = (0.001, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 3)  # seconds


class Metrics:
    def __init__(self, models: ModelHost) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("rekindle_requests", "Answered requests", ["route", "status"], registry=registry)
        self.cancellations = Counter("rekindle_cancellations", "Clients that left early", registry=registry)
        self.prompt = Counter("rekindle_prompt_tokens", "Prompt tokens of finished answers", registry=registry)
        self.computed = Counter("rekindle_computed_tokens", "Prompt tokens run through a forward", registry=registry)
        self.restored = Counter(
            "rekindle_restored_tokens", "Prompt tokens restored from a snapshot", ["tier"], registry=registry
        )
        self.generated = Counter("rekindle_generated_tokens", "Tokens drawn", registry=registry)
        self.drafted = Counter(
            "rekindle_draft_tokens", "Tokens drafted for finished answers", ["outcome"], registry=registry
        )
        self.blocks = Counter("rekindle_draft_blocks", "Drafted blocks of finished answers", registry=registry)
        self.draft_positions = Counter(
            "rekindle_draft_position_tokens",
            "Tokens drafted for finished answers, by their place in the block",
            ["position", "outcome"],
            registry=registry,
        )
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
        self.queue = Histogram(
            "rekindle_queue_seconds",
            "From the request's submission to a slot, of finished answers",
            buckets=QUEUE_BUCKETS,
            registry=registry,
        )
        registry.register(_EngineGauges(models))
        registry.register(_ModelGauges(models))

    def count_finished(self, finished: Finished) -> None:
        self.prompt.inc(finished.prompt_tokens)
        self.queue.observe(finished.timings.queued)
        self.computed.inc(finished.cache.computed)
        for tier, tokens in finished.cache.restored_from.items():
            self.restored.labels(tier).inc(tokens)
        self.blocks.inc(finished.draft.blocks)
        self.drafted.labels("proposed").inc(finished.draft.proposed)
        self.drafted.labels("accepted").inc(finished.draft.accepted)
        for place, (proposed, accepted) in enumerate(finished.draft.positions, start=1):
            self.draft_positions.labels(str(place), "proposed").inc(proposed)
            self.draft_positions.labels(str(place), "accepted").inc(accepted)
        if finished.stop_token is not None:
            self.generated.inc()

    def page(self) -> bytes:
        return generate_latest(self.registry)


class _EngineGauges(Collector):
    """One look at the engines per scrape, so the numbers of one page belong together. Sums over the models."""

    def __init__(self, models: ModelHost) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        status = self._models.status()
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
        yield from _cache_counters(status)
        yield from _cache_sizes(status)


class _ModelGauges(Collector):
    """Of each model: whether it is loaded, and what it has done."""

    def __init__(self, models: ModelHost) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("rekindle_model_line", "Requests that wait for a model", self._models.waiting)
        states = GaugeMetricFamily("rekindle_model_state", "1 for the state a model is in", labels=["model", "state"])
        seconds = GaugeMetricFamily("rekindle_model_load_seconds", "Of the last load", labels=["model"])
        loads = CounterMetricFamily("rekindle_model_loads", "Loads, by outcome", labels=["model", "outcome"])
        for slot in self._models.slots:
            for state in ModelState:
                states.add_metric([slot.name, state.value], float(slot.state is state))
            seconds.add_metric([slot.name], slot.load_seconds)
            loads.add_metric([slot.name, "ready"], slot.loads)
            loads.add_metric([slot.name, "failed"], slot.failures)
        yield from (states, seconds, loads, self._tokens())

    def _tokens(self) -> Metric:
        tokens = CounterMetricFamily(
            "rekindle_model_tokens", "Tokens, as rekindle_engine_tokens", labels=["model", "how"]
        )
        for slot, status in self._models.statuses().items():
            tokens.add_metric([slot.name, "computed"], status.computed_tokens)
            tokens.add_metric([slot.name, "restored"], status.restored_tokens)
            tokens.add_metric([slot.name, "generated"], status.generated_tokens)
        return tokens


def _work_counters(work: Mapping[str, int]) -> Iterable[Metric]:
    """Which path ran: the stages of this process."""
    for kind, name, what, label in (
        ("step", "steps", "Forwards of a stage, replayed from a recording or run anew", "how"),
        ("kernels", "kernels", "Kernels compiled, or loaded from Triton's cache, at their first launch", "how"),
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


def _cache_counters(status: EngineStatus) -> Iterable[Metric]:
    cache = status.cache
    for name, what, label, counts in (
        ("hits", "Lookups that found a prefix", "tier", cache.hits),
        ("restored_tokens", "Tokens of the prefixes found", "tier", cache.restored),
        ("misses", "Lookups that found nothing", "reason", cache.misses),
        ("short_hits", "Prefixes found that end before the prompt does", "reason", cache.short_hits),
        (
            "refused_saves",
            "Saves that were refused; for want of a place in the queue they are made later",
            "reason",
            cache.refused_saves,
        ),
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
    yield CounterMetricFamily("rekindle_cache_saves", "Snapshots saved to tiers that outlive the process", cache.saves)
    yield CounterMetricFamily("rekindle_cache_quarantined", "Snapshots found wrong", cache.quarantined)
    yield CounterMetricFamily("rekindle_cache_bad_files", "Files on disk that could not be used", cache.bad_files)


def _cache_sizes(status: EngineStatus) -> Iterable[Metric]:
    cache = status.cache
    yield GaugeMetricFamily("rekindle_cache_saves_waiting", "Snapshots that wait to be saved", cache.saves_waiting)
    for name, what, by_tier in (
        ("snapshots", "Snapshots in a tier", cache.entries),
        ("bytes", "Bytes that a tier takes", cache.bytes),
        ("budget_bytes", "Bytes that a tier may take", cache.budgets),
    ):
        family = GaugeMetricFamily(f"rekindle_cache_{name}", what, labels=["tier"])
        for tier, value in by_tier.items():
            family.add_metric([tier], value)
        yield family
