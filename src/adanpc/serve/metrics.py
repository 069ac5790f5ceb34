"""Metrics: numbers about the service for Prometheus, in base units and with names that begin with ``adanpc_``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from adanpc.core import Origin

if TYPE_CHECKING:
    from adanpc.serve.service import Service

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Metrics:
    """Counters that are updated as things happen, and gauges that are looked up when Prometheus asks.

    Args:
        service: the service that is measured.
    """

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry()
        self.queries = Counter("adanpc_queries", "Queries that were answered.", registry=self._registry)
        self.admission_ratio: float | None = None  # among all queries that this process offered to the bank
        self._offered = 0
        self._joined = 0
        self._joined_total = Counter("adanpc_joined", "Queries that joined the bank.", registry=self._registry)
        self.changes = Counter("adanpc_changes", "Changes made by people.", ["kind"], registry=self._registry)
        self._requests = Counter("adanpc_requests", "HTTP requests.", ["route", "status"], registry=self._registry)
        self._seconds = Histogram(
            "adanpc_request_seconds",
            "Time from a request to the end of its answer.",
            ["route"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._counted: dict[tuple[str, int | None], tuple[Counter, Histogram]] = {}
        self._registry.register(State(service))

    def note_request(self, route: str, status: int | None, seconds: float) -> None:
        """Counts a request that was answered."""
        counted = self._counted.get((route, status))
        if counted is None:  # looked up only once, because prometheus_client is slow to find a child by its labels
            counted = (self._requests.labels(route, status), self._seconds.labels(route))
            self._counted[route, status] = counted
        counted[0].inc()
        counted[1].observe(seconds)

    def note_offered(self, offered: int, joined: int) -> None:
        """Counts queries that were offered to the bank for learning, and how many of them joined."""
        self._offered += offered
        self._joined += joined
        self._joined_total.inc(joined)
        if self._offered:
            self.admission_ratio = self._joined / self._offered

    def text(self) -> bytes:
        """Returns all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)


class State:
    """The current state of the bank and its stream."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yields all gauges."""
        bank = self._service.bank
        contents = bank.contents
        yield _gauge("adanpc_log_position", "Changes that the bank has gone through.", contents.position)
        yield _gauge("adanpc_bank_bytes", "Memory of the rows.", contents.nbytes)
        yield _gauge("adanpc_waiting_requests", "Requests that wait for the bank.", bank.waiting)
        yield _gauge("adanpc_listeners", "Connections that follow the events.", len(self._service.events))
        ratio = self._service.metrics.admission_ratio
        if ratio is not None:
            yield _gauge("adanpc_admission_ratio", "Share of the queries offered to the bank that joined.", ratio)
        if self._service.encoder is not None:
            yield _gauge(
                "adanpc_waiting_images", "Images that wait to be decoded or encoded.", self._service.waiting_images
            )
        yield self._rows()
        yield self._shares()
        yield from self._signs()

    def _rows(self) -> Metric:
        contents = self._service.bank.contents
        family = GaugeMetricFamily("adanpc_bank_rows", "Rows by their origin.", labels=["origin"])
        origins = contents.table("origin")["origin"]
        for origin in Origin:
            family.add_metric([origin.name.lower()], int((origins == origin).sum()))
        vetoed = len(contents.vetoed)
        family.add_metric(["vetoed"], vetoed)
        return family

    def _shares(self) -> Metric:
        """Returns how the admitted rows are distributed over the classes."""
        admitted = self._service.bank.contents.admitted.tolist()
        total = max(sum(admitted), 1)
        family = GaugeMetricFamily("adanpc_class_ratio", "Share of a class in the admitted rows.", labels=["class"])
        for name, count in zip(self._service.names, admitted, strict=True):
            family.add_metric([name], count / total)
        return family

    def _signs(self) -> Iterator[Metric]:
        signs = self._service.signs()
        if signs is None:
            return
        yield _gauge("adanpc_trust_ratio", "How far adapted answers are trusted.", signs.trust)
        yield _gauge("adanpc_alarm", "1 if answers were ever clearly worse than on the source.", float(signs.alarm))
        family = GaugeMetricFamily(
            "adanpc_estimated_accuracy_ratio", "Accuracy as it is estimated without labels.", labels=["answers", "end"]
        )
        for answers, accuracy in (("frozen", signs.frozen), ("given", signs.given)):
            for end, value in accuracy._asdict().items():
                family.add_metric([answers, end], value)
        yield family


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value)
