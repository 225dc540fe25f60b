"""`/metrics`: the engine's figures and the server's meters by the names of cbatch, of vLLM and of llama-server.

Source of the names: vLLM's v1 metrics; llama.cpp tools/server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from cbatch.runtime.waking import call_soon_here
from cbatch.server.batch_index import ENDED
from cbatch.server.meters import ITL_S, Histogram, Meters

if TYPE_CHECKING:
    from cbatch.server.batches import Batches
    from cbatch.server.pulse import Pulse
    from cbatch.stats import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Values = float | Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EngineFigure:
    """A figure of the engine: its names, and its value, or values by a label."""

    names: str
    """Those of others too, where they mean the same; one that ends in `_total` is a counter, else it is a gauge."""
    help: str
    of: str | Callable[[EngineStats], Values]
    """The name of the figure, or what makes the value."""
    label: str = ""

    def value(self, stats: EngineStats) -> Values:
        """Return its value, or values by label."""
        return getattr(stats, self.of) if isinstance(self.of, str) else self.of(stats)


def _by_source(n_all: int, n_job: int, n_model: int) -> Mapping[str, float]:
    return {"ngram": n_all - n_job - n_model, "job": n_job, "model": n_model}


def _successes(stats: EngineStats) -> Mapping[str, float]:
    """Return ends by vLLM's reasons."""
    found = dict.fromkeys(("stop", "length", "abort", "error"), 0)
    for reason, n in stats.n_finished.items():
        found[_REASONS[reason]] += n
    return found


_REASONS = {
    "stop": "stop",
    "tool_calls": "stop",
    "length": "length",
    "window": "length",
    "cancelled": "abort",
    "timeout": "abort",
    "error": "error",
}

ROWS = (
    EngineFigure(
        "cbatch:requests_running vllm:num_requests_running llamacpp:requests_processing",
        "Sequences that are computed in a slot.",
        "n_running",
    ),
    EngineFigure(
        "cbatch:requests_waiting vllm:num_requests_waiting llamacpp:requests_deferred",
        "Sequences that wait for a slot.",
        "n_waiting",
    ),
    EngineFigure(
        "cbatch:requests_paused",
        "Sequences that are paused, or wait for something other than a slot.",
        lambda stats: stats.n_paused + stats.n_held,
    ),
    EngineFigure("cbatch:cells", "Cells that all slots can hold.", "n_pool"),
    EngineFigure(
        "cbatch:cells_used",
        "Cells in use, those of cached prefixes included.",
        "n_cells",
    ),
    EngineFigure(
        "cbatch:cells_used_ratio vllm:kv_cache_usage_perc",
        "Cells in use, as a share of all cells: 0 to 1.",
        lambda stats: stats.n_cells / stats.n_pool if stats.n_pool else 0.0,
    ),
    EngineFigure(
        "cbatch:checkpoints",
        "Checkpoints of prefixes in host memory, from which sequences continue.",
        "n_checkpoints",
    ),
    EngineFigure(
        "cbatch:checkpoint_bytes",
        "Bytes of host memory that checkpoints take.",
        "n_checkpoint_bytes",
    ),
    EngineFigure(
        "cbatch:prompt_tokens_total",
        "Prompt tokens, computed or from the cache.",
        lambda stats: {"computed": stats.n_prompt_tokens, "cached": stats.n_cached_tokens},
        "source",
    ),
    EngineFigure(
        "vllm:prompt_tokens_total vllm:prefix_cache_queries_total",
        "Prompt tokens, cached ones included.",
        lambda stats: stats.n_prompt_tokens + stats.n_cached_tokens,
    ),
    EngineFigure(
        "vllm:prefix_cache_hits_total llamacpp:prompt_tokens_cached_total",
        "Prompt tokens from the cache.",
        "n_cached_tokens",
    ),
    EngineFigure(
        "llamacpp:prompt_tokens_total", "Prompt tokens that were computed.", "n_prompt_tokens"
    ),
    EngineFigure(
        "cbatch:output_tokens_total vllm:generation_tokens_total llamacpp:tokens_predicted_total",
        "Tokens that were sampled.",
        "n_output_tokens",
    ),
    EngineFigure(
        "cbatch:recomputed_tokens_total",
        "Tokens that were computed again after their cells were lost.",
        "n_recomputed_tokens",
    ),
    EngineFigure(
        "cbatch:pad_rows_total",
        "Pad rows, which are computed only to give steps their shape.",
        "n_pad_rows",
    ),
    EngineFigure(
        "cbatch:draft_tokens_total",
        "Draft tokens that were computed, by their source.",
        lambda stats: _by_source(
            stats.n_draft_tokens, stats.n_job_draft_tokens, stats.n_model_draft_tokens
        ),
        "source",
    ),
    EngineFigure(
        "cbatch:accepted_tokens_total",
        "Draft tokens that were accepted, by their source.",
        lambda stats: _by_source(
            stats.n_accepted_tokens, stats.n_job_accepted_tokens, stats.n_model_accepted_tokens
        ),
        "source",
    ),
    EngineFigure(
        "cbatch:threads",
        "Threads of the last step: fewer than all where that is faster.",
        "n_threads",
    ),
    EngineFigure(
        "cbatch:step_cost_seconds",
        "Seconds of a step that only decodes, by its number of rows, as measured recently.",
        "cost_rows_s",
        "rows",
    ),
    EngineFigure(
        "cbatch:prompt_cost_seconds",
        "Additional seconds of a step with prompts, however many tokens they have, as measured recently.",
        "cost_prompt_s",
    ),
    EngineFigure(
        "cbatch:prompt_token_cost_seconds",
        "Additional seconds of each prompt token in a step, as measured recently.",
        "cost_token_s",
    ),
    EngineFigure(
        "cbatch:prompt_budget_tokens",
        "Prompt tokens of a new request in a step, by the decoding rows in it, while output is streamed.",
        "cost_budget_tokens",
        "rows",
    ),
    EngineFigure(
        "cbatch:requests_finished_total",
        "Sequences that ended, by finish reason.",
        "n_finished",
        "reason",
    ),
    EngineFigure(
        "vllm:request_success_total",
        "Sequences that ended, by vLLM's reasons.",
        _successes,
        "finished_reason",
    ),
    EngineFigure(
        "cbatch:texts_total", "Texts that were embedded or scored, equal ones included.", "n_texts"
    ),
    EngineFigure(
        "cbatch:text_tokens_total", "Tokens computed for embedded or scored texts.", "n_text_tokens"
    ),
    EngineFigure(
        "cbatch:embed_seconds_total", "Seconds of computing embedded or scored texts.", "embed_s"
    ),
    EngineFigure(
        "cbatch:preemptions_total vllm:num_preemptions_total",
        "Preemptions for lack of free cells.",
        "n_preempted",
    ),
    EngineFigure(
        "cbatch:steps_total llamacpp:n_decode_total",
        "Steps, each one call of llama.cpp.",
        "n_steps",
    ),
    EngineFigure(
        "cbatch:step_seconds_total",
        "Seconds of steps by phase.",
        lambda stats: {
            "plan": stats.plan_s,
            "decode": stats.decode_s,
            "sample": stats.sample_s,
            "apply": stats.apply_s,
        },
        "phase",
    ),
    EngineFigure(
        "llamacpp:n_busy_slots_per_decode",
        "Sequences in a step, on average over all steps.",
        lambda stats: stats.avg_concurrent_seq(),
    ),
)

_HISTOGRAMS: tuple[tuple[str, str, str], ...] = (
    (
        "cbatch:queue_seconds vllm:request_queue_time_seconds",
        "Seconds from arrival to slot, of answered prompts.",
        "queue_s",
    ),
    (
        "cbatch:ttft_seconds vllm:time_to_first_token_seconds",
        "Seconds from arrival to first token, of answered prompts.",
        "ttft_s",
    ),
    (
        "cbatch:e2e_seconds vllm:e2e_request_latency_seconds",
        "Seconds from arrival to end, of answered prompts.",
        "e2e_s",
    ),
    (
        "cbatch:request_prompt_tokens vllm:request_prompt_tokens",
        "Tokens of an answered prompt.",
        "prompt_tokens",
    ),
    (
        "cbatch:request_output_tokens vllm:request_generation_tokens",
        "Output tokens of an answered prompt, in all its answers together.",
        "output_tokens",
    ),
)

_ITL = "cbatch:itl_seconds vllm:inter_token_latency_seconds"


class Exposition(Collector):
    """All metrics of one server, in a registry of its own. Reading changes nothing."""

    def __init__(self, pulse: Pulse, meters: Meters, model_name: str) -> None:
        self._pulse, self._meters = pulse, meters
        self.batches: Batches | None = None
        """The server's batches; None where it keeps none."""
        self._labels = {"vllm": {"model_name": model_name, "engine": "0"}}
        """Labels of all metrics of a dialect."""
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._text = b""
        """What this round of the event loop has made; empty if nobody asked in it."""

    def text(self) -> bytes:
        """Return all metrics in the text format 0.0.4. To be called in an event loop.

        All that ask in one round of the loop get the same text: it takes some milliseconds, for which all clients wait.
        """
        if not self._text:
            self._text = generate_latest(self.registry)
            call_soon_here()(self._forget)
        return self._text

    def _forget(self) -> None:
        self._text = b""

    def collect(self) -> Iterator[Metric]:
        """Return all metrics; those of the engine as it told them last."""
        stats = self._pulse.answer
        if stats is not None:
            for row in ROWS:
                yield from self._figures(row.names, row.help, row.value(stats), row.label)
            itl = Histogram.of(stats.itl_s, ITL_S)
            yield from self._histograms(_ITL, "Seconds between tokens of a sequence.", itl)
            age = "Seconds since the engine reported its figures; it reports them between runs."
            yield from self._figures("cbatch:figures_age_seconds", age, self._pulse.age_s)
        yield from self._of_answers()
        if (batches := self.batches) is not None:
            words = "Batches that have ended, by status."
            ended = {status: batches.n_ended[status] for status in ENDED}
            yield from self._figures("cbatch:batches_total", words, ended, "status")
            words = "Lines of batches that have ended."
            items = {outcome: batches.n_items[outcome] for outcome in ("completed", "failed")}
            yield from self._figures("cbatch:batch_requests_total", words, items, "outcome")

    def _of_answers(self) -> Iterator[Metric]:
        """Return what the server has counted itself."""
        meters = self._meters
        for names, words, of in _HISTOGRAMS:
            yield from self._histograms(names, words, getattr(meters, of))
        for name, words, seconds in (
            (
                "llamacpp:prompt_seconds_total",
                "Seconds from slot to first token, in all.",
                meters.prompt_s,
            ),
            (
                "llamacpp:tokens_predicted_seconds_total",
                "Seconds from first to last token, in all.",
                meters.output_s,
            ),
        ):
            yield from self._figures(name, words, seconds)
        for name, n, seconds in (
            ("llamacpp:prompt_tokens_seconds", meters.n_computed, meters.prompt_s),
            ("llamacpp:predicted_tokens_seconds", meters.n_decoded, meters.output_s),
        ):
            words = "Tokens per second, on average over all answers."
            yield from self._figures(name, words, n / seconds if seconds else 0.0)
        name, words = "cbatch:http_requests_total", "HTTP requests by route and status."
        family = CounterMetricFamily(name, words, labels=["route", "status"])
        for (route, status), n in sorted(meters.n_http.items()):
            family.add_metric([route, str(status)], n)
        yield family

    def _figures(self, names: str, words: str, values: Values, label: str = "") -> Iterator[Metric]:
        listed = values if isinstance(values, Mapping) else {"": values}
        for name in names.split():
            labels = self._labels_of(name)
            kind: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name, words, labels=[*labels, *([label] if label else [])])
            for key, value in listed.items():
                family.add_metric([*labels.values(), *([key] if label else [])], value)
            yield family

    def _histograms(self, names: str, words: str, counts: Histogram) -> Iterator[Metric]:
        buckets = [(_bound(bound), float(n)) for bound, n in counts.cumulative()]
        for name in names.split():
            labels = self._labels_of(name)
            family = HistogramMetricFamily(name, words, labels=[*labels])
            family.add_metric([*labels.values()], buckets, counts.total)
            yield family

    def _labels_of(self, name: str) -> Mapping[str, str]:
        return self._labels.get(name.partition(":")[0], {})


def _bound(value: float) -> str:
    return "+Inf" if value == float("inf") else repr(value)
