"""Nothing about the prefix cache is silent: a log line per request, and counters."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest


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
        'rekindle_cache_refused_saves_total{reason="queue"} 1.0',
        "rekindle_cache_bad_files_total 1.0",
        "rekindle_audits_total 7.0",
        "rekindle_audit_mismatches_total 1.0",
        'rekindle_cache_bytes{tier="disk"} 900.0',
        'rekindle_cache_budget_bytes{tier="ram"} 1000.0',
        'rekindle_cache_snapshots{tier="ram"} 8.0',
    } <= page


def test_every_request_leaves_a_line_in_the_log_when_it_begins_and_one_when_it_ends(
    fresh_house: Any, caplog: pytest.LogCaptureFixture
) -> None:
    house = fresh_house()
    with caplog.at_level(logging.INFO, "rekindle.api"):
        answer = house.client().completions.create(model="m", prompt="say(abcd)")
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("request ")]
    (finished,) = house.engine.finished.values()
    (request,) = house.engine.requests
    begins, ends = lines
    assert begins.startswith(f"request {answer.id.removeprefix('cmpl-')[:8]} begins: ")
    assert f"{finished.prompt_tokens} prompt tokens" in begins
    assert f"at most {request.max_tokens}" in begins
    cache = finished.cache
    for part in (
        f"request {answer.id.removeprefix('cmpl-')[:8]} ",
        f"{finished.prompt_tokens} prompt tokens",
        f"restored {cache.restored_ram} from RAM and {cache.restored_disk} from disk",
        f"computed {cache.computed}",
        f"published {cache.published}",
        f"answered {finished.completion_tokens}",
    ):
        assert part in ends
