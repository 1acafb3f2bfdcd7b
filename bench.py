"""nano-vLLM's throughput benchmark: the same as `nanovllm bench` (nanovllm/cli/bench.py)."""

import sys

from nanovllm.cli.main import main

if __name__ == "__main__" and (code := main(["bench", *sys.argv[1:]])):
    sys.exit(code)
