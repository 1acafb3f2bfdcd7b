"""Records of an engine's steps and requests: counters, and a file for viewers of traces.

Doors: `metrics`; `recorder`, `timeline` and `step_timer`; `trace_events` for reports.
"""
