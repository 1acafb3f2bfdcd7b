"""Sampling with options of requests: controls, log-probabilities, structured outputs.

Doors: `request_controls`, `controls` and `control_table` for the options of requests; `extras`,
`extra_results` and `controlled_sampler` for their results on the device; `structured_output`.
"""
