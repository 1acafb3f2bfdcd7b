"""What `nanovllm bench` and the scripts in benchmarks/ of the repository measure with."""
