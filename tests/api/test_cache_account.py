"""Nothing about the prefix cache is silent: counters tell all of it."""

from __future__ import annotations

from typing import Any

import httpx


def test_the_metrics_tell_tiers_misses_evictions_saves_bad_files_and_audits(fresh_house: Any) -> None:
    page = set(httpx.get(fresh_house().url + "/metrics").text.splitlines())
    assert {
        'rekindle_cache_restored_tokens_total{tier="ram"} 500.0',
        'rekindle_cache_restored_tokens_total{tier="disk"} 200.0',
        'rekindle_cache_hits_total{tier="disk"} 2.0',
        'rekindle_cache_misses_total{reason="unseen"} 3.0',
        'rekindle_cache_short_hits_total{reason="no_boundary"} 4.0',
        'rekindle_cache_evictions_total{outcome="to_disk",tier="ram"} 6.0',
        "rekindle_cache_published_total 11.0",
        "rekindle_cache_saves_total 9.0",
        "rekindle_cache_saves_waiting 2.0",
        "rekindle_cache_quarantined_total 1.0",
        'rekindle_cache_refused_saves_total{reason="queue"} 1.0',
        "rekindle_cache_bad_files_total 1.0",
        "rekindle_audits_total 7.0",
        "rekindle_audit_mismatches_total 1.0",
        'rekindle_cache_bytes{tier="disk"} 900.0',
        'rekindle_cache_budget_bytes{tier="ram"} 1000.0',
        'rekindle_cache_snapshots{tier="ram"} 8.0',
    } <= page
