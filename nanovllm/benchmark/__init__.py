"""Measurements of `nanovllm bench` and of the scripts in the repository's benchmarks/.

Doors: `harness` runs and records, `limits` is the roofline, `shapes` are the models' sizes,
`choices` counts a step's experts.
"""
