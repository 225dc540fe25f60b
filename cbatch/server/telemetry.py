"""Spans of OpenTelemetry, where its API is installed: one for each HTTP request, and inside it one for each answer.

What becomes of spans is up to the process: `opentelemetry-instrument` reads the variables `OTEL_…`, and an application
has its own provider. Without either, nothing is recorded. Source: OpenTelemetry's conventions for HTTP servers' spans.
"""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING

import cbatch
from cbatch.errors import ConfigError
from cbatch.runtime.delivery import figures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.trace import Span, Tracer
    from starlette.types import Scope

    from cbatch.response import BatchResult


_PARENT = (b"traceparent", b"tracestate")
_N_PARENT = 512
"""Most bytes of such a header that is read: OpenTelemetry takes seconds for one of 60 KB. Source: W3C Trace Context,
3.3.1.5, which has this many kept.
"""


@cache
def find_tracer() -> Tracer | None:
    """Return what makes spans; None where OpenTelemetry is not installed. All that spans need is loaded then.

    Raises:
        ConfigError: the environment names a propagator that is not there.
    """
    try:
        import opentelemetry.propagate  # noqa: F401  # slow to load, and `begun_span` needs it
        from opentelemetry.trace import get_tracer
    except ImportError:
        return None
    except ValueError as error:  # it looks at OTEL_PROPAGATORS
        raise ConfigError(f"OTEL_PROPAGATORS: {error}") from None
    return get_tracer("cbatch.server", cbatch.__version__)


def begun_span(scope: Scope, id: str) -> Span | None:
    """Return the span of a request that has come, within that of its client; None where nothing is recorded."""
    tracer = find_tracer()
    if tracer is None:
        return None
    from opentelemetry.propagate import extract
    from opentelemetry.trace import SpanKind

    told = {
        name.decode(): value.decode("latin-1")
        for name, value in scope["headers"]
        if name in _PARENT and len(value) <= _N_PARENT
    }
    span = tracer.start_span(scope["method"], extract(told) if told else None, SpanKind.SERVER)
    if not span.is_recording():
        return None
    span.set_attribute("http.request.method", scope["method"])
    span.set_attribute("cbatch.request_id", id)
    return span


def add_answers(span: Span, results: Sequence[BatchResult], model: str) -> None:
    """Add a span for each prompt that was answered, with the values of its line in the log."""
    tracer = find_tracer()
    if tracer is None:
        return
    from opentelemetry.trace import set_span_in_context

    now = time.time_ns()
    for result in results:
        start = now - int(result.timings.total_s * 1e9)
        answer = tracer.start_span("answer", set_span_in_context(span), start_time=start)
        for name, value in figures(result, model).items():
            if isinstance(value, str | int | float):
                answer.set_attribute(f"cbatch.{name}", value)
        answer.end(now)


def end_span(span: Span, method: str, route: str, status: int) -> None:
    """End the span of a request."""
    from opentelemetry.trace import StatusCode

    span.update_name(f"{method} {route}")
    span.set_attribute("http.route", route)
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(StatusCode.ERROR)
    span.end()
