"""The measuring part of `nanovllm bench` and of the scripts in the repository's benchmarks/."""
