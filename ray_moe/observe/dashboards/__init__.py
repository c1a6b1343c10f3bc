"""Grafana dashboards and Prometheus rules as code.

`pages` are values (`model.Dashboard`) whose queries are built by `queries`; `files` turns pages and `rules` into what
Grafana and Prometheus read; `grafana` is the only module that talks to a Grafana.
"""
