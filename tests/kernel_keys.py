"""Keys of our kernels in Triton's compile cache: `python kernel_keys.py SEED`, which orders them;
with another argument as in the processes that compile for others, without torch.

Prints, as JSON, the key of each function, in one order for all seeds. Nothing is compiled.
"""

import importlib
import json
import pkgutil
import random
import sys

from triton.runtime import jit

from nanovllm.compiling.mends import mend
from nanovllm.compiling.server import import_without_torch

if __name__ == "__main__":
    mend()
    if sys.argv[2:]:
        import_without_torch()
    kernels = importlib.import_module("nanovllm.kernels")
    functions = {}
    for found in pkgutil.walk_packages(kernels.__path__, "nanovllm.kernels."):
        for value in vars(importlib.import_module(found.name)).values():
            if isinstance(value, jit.JITCallable):
                functions[f"{value.__module__}.{value.__name__}"] = value
    names = sorted(functions)
    random.Random(int(sys.argv[1])).shuffle(names)
    for name in names:
        functions[name].cache_key  # noqa: B018  computed once
    print(json.dumps({name: functions[name].cache_key for name in sorted(functions)}))
