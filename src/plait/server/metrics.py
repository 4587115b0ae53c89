"""Prometheus metrics, with vLLM's names behind the prefix plait_."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from plait.engine.stats import EngineStats
    from plait.engine.token_output import RequestTiming

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

# name, help, attribute of EngineStats
_GAUGES = (
    ("num_requests_running", "Sequences that are in the current step.", "num_running"),
    ("num_requests_waiting", "Sequences that wait for a place or for blocks.", "num_waiting"),
    ("kv_cache_usage_perc", "Share of the key/value blocks that requests hold, 0 to 1.", "kv_usage"),
    ("kv_cache_blocks", "Blocks of the key/value pool.", "num_blocks"),
    ("kv_cache_free_blocks", "Blocks that no request holds.", "num_free_blocks"),
    ("kv_pool_touched_bytes", "Bytes of the key/value pool that lie in memory.", "kv_touched_bytes"),
)
_COUNTERS = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_query_tokens"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
    ("num_preemptions", "Sequences that lost their blocks and were computed again.", "preemptions"),
    ("prompt_tokens", "Prompt tokens of the requests taken.", "prompt_tokens"),
    ("generation_tokens", "Tokens generated.", "generated_tokens"),
    ("engine_steps", "Steps of the engine.", "steps"),
)

ReadStats = Callable[[], Sequence[tuple[str, "EngineStats | None"]]]


class _EngineCollector(Collector):
    """Gauges and counters that the engine keeps; read when somebody asks."""

    def __init__(self, read: ReadStats) -> None:
        self._read = read

    def collect(self) -> Iterator[Any]:
        known = [(name, stats) for name, stats in self._read() if stats is not None]
        for metric, text, attribute in _GAUGES:
            gauge = GaugeMetricFamily(f"plait_{metric}", text, labels=["model_name"])
            for name, stats in known:
                if (value := getattr(stats, attribute)) is not None:
                    gauge.add_metric([name], value)
            yield gauge
        for metric, text, attribute in _COUNTERS:
            counter = CounterMetricFamily(f"plait_{metric}", text, labels=["model_name"])
            for name, stats in known:
                counter.add_metric([name], getattr(stats, attribute))
            yield counter


class Metrics:
    """The server's metrics in a registry of their own. read: (model id, its latest stats) for every model."""

    def __init__(self, read: ReadStats) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(read))
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self.inter_token = self._histogram("inter_token_latency_seconds", "Between two tokens of a choice.", _SECONDS)
        self.end_to_end = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self.queue = self._histogram("request_queue_time_seconds", "From arrival to the first step.", _SECONDS)
        self.prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.generation = self._histogram("request_generation_tokens", "Tokens generated for a choice.", _TOKENS)
        self.success = Counter(
            "plait_request_success",
            "Choices that ended, by finish reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"plait_{name}", text, ["model_name"], buckets=buckets, registry=self.registry)

    def request_ended(self, model: str, timing: RequestTiming | None, num_prompt: int, choices: Sequence[Any]) -> None:
        """A request came to its own end. choices: CompletionOutput."""
        self.prompt.labels(model).observe(num_prompt)
        for choice in choices:
            self.generation.labels(model).observe(len(choice.token_ids))
            self.success.labels(model, choice.finish_reason or "stop").inc()
        if timing is None:
            return
        for histogram, moment in (
            (self.queue, timing.first_scheduled_s),
            (self.first_token, timing.first_token_s),
            (self.end_to_end, timing.finished_s),
        ):
            if moment is not None:
                histogram.labels(model).observe(moment - timing.arrival_s)

    def text(self) -> bytes:
        """Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)
