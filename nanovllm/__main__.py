"""`python -m nanovllm`: the command line, as the script `nanovllm` runs it."""

import sys

from nanovllm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
