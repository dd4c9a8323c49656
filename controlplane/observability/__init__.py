"""Metrics, spans and log lines of the control plane's processes."""

from kernel import metrics  # noqa: F401 - before anything here imports prometheus-client, which looks once where to count
