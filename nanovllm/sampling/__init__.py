"""Logits to tokens with all that requests wish for: controls, log-probabilities, structures.

Doors: `request_controls`, `controls` and `control_table` for what requests want; `extras`,
`extra_results` and `controlled_sampler` for what the device computes of it; `structured_output`.
"""
