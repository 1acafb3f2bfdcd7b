"""Records of an engine's steps and requests, as a file for viewers of traces.

Doors: `recorder`, `timeline` and `step_timer`; `trace_events` for reports.
"""
