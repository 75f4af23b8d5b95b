"""OpenTelemetry traces, where the user asks for them: one span per request, below it its queue, prefill and decode.

A span has the counts and times of the log's line, and as little text. A request is in the queue until its slot holds
all that could be restored, from disk too.
"""

from __future__ import annotations

import importlib.util

from rekindle import __version__
from rekindle.api.request_log import RequestRecord
from rekindle.errors import BadConfig

NANOSECONDS = 1_000_000_000
EXPORT_SECONDS = 5  # for one attempt to hand spans over; a collector that is away must not delay the end


class Traces:
    """Hands spans over in the background. Told of a request when it has ended."""

    def __init__(self, url: str) -> None:
        """url: of a collector that speaks OTLP over HTTP, such as http://localhost:4318."""
        if not url.startswith(("http://", "https://")):
            raise BadConfig(f"--otlp {url}: must be a URL such as http://localhost:4318")
        if not _is_installed():
            raise BadConfig("--otlp needs OpenTelemetry, which is not installed: pip install 'rekindle[otlp]'")
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        path = url.rstrip("/").removesuffix("/v1/traces")
        exporter = OTLPSpanExporter(endpoint=f"{path}/v1/traces", timeout=EXPORT_SECONDS)
        self._provider = TracerProvider(resource=Resource.create({"service.name": "rekindle"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("rekindle", __version__)

    def __call__(self, record: RequestRecord) -> None:
        from opentelemetry.trace import set_span_in_context

        began = record.began
        told = record.fields()
        del told["changed"]  # quotes the client's prompt, and spans leave the machine
        attributes = _flat(told)
        span = self._tracer.start_span(record.path, start_time=_at(began), attributes=attributes)
        at, below = began, set_span_in_context(span)
        for name, seconds in _phases(record):
            child = self._tracer.start_span(name, context=below, start_time=_at(at))
            at += seconds
            child.end(_at(at))
        span.end(_at(began + record.seconds))

    def close(self) -> None:
        """Hand over what is left."""
        self._provider.shutdown()


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


def _at(seconds: float) -> int:
    return int(seconds * NANOSECONDS)


def _phases(record: RequestRecord) -> list[tuple[str, float]]:
    """What followed upon what: before the engine had it, then as the engine's clock says."""
    timings = record.timings
    if timings is None:
        return []
    engine = timings.queued + timings.prefill + timings.decode
    prepare = max(0.0, record.seconds - engine)  # body, template, tokenizer, and waiting for the model
    return [
        ("prepare", prepare),
        ("queue", timings.queued),
        ("prefill", timings.prefill),
        ("decode", timings.decode),
    ]


def _flat(fields: dict[str, object]) -> dict[str, str | int | float]:
    """Attributes have plain values only: "restored.ram" for what lies deeper, and nothing for what is not known."""
    flat: dict[str, str | int | float] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat |= {f"rekindle.{name}.{key}": each for key, each in value.items()}
        elif isinstance(value, str | int | float):
            flat[f"rekindle.{name}"] = value
    return flat
