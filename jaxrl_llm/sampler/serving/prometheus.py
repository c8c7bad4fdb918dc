"""The sampler's numbers in Prometheus' text format."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Numbers that go up and down; every other one is a total since the start.
_PRESENT = ("version", "in_flight", "live", "slots", "occupancy")


def prometheus_text(metrics: Mapping[str, float]) -> bytes:
    """`SamplerService.metrics` as jaxrl_sampler_* samples; a total in seconds (`busy_s`) is named *_seconds_total."""
    registry = CollectorRegistry()
    registry.register(_Collector(metrics))
    return generate_latest(registry)


class _Collector:
    def __init__(self, metrics: Mapping[str, float]):
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for name, value in self._metrics.items():
            full = f"jaxrl_sampler_{name[:-2]}_seconds" if name.endswith("_s") else f"jaxrl_sampler_{name}"
            if name in _PRESENT:
                yield GaugeMetricFamily(full, f"{name} now", value=value)
            else:
                yield CounterMetricFamily(full, f"{name} since the start", value=value)
