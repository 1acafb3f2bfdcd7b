"""Sampling with options of requests: controls, log-probabilities, structured outputs.

Doors: `request_controls`, `controls`, `control_table` for requests; `extras`, `logprobs`,
`extra_results`, `controlled_sampler` for their results on the device; `structured_output`.
"""
