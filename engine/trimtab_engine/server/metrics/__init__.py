"""Metrics of the HTTP process: exact SLO counters, shape histograms, starvation gauges, and their Prometheus form.

`catalog` says what exists, `ledger` follows requests, `exporter` renders. Nothing here knows HTTP or the scheduler.
"""
