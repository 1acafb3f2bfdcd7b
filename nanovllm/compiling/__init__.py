"""Compiling Triton's kernels ahead of their use, in processes of their own.

Duty: what a step will launch is in Triton's cache on disk before the step comes. Triton compiles a
kernel in the process, and under the lock, of whoever launches it first.

Doors: `Compiler.rehearsal` (`compiler.py`), inside of which nothing is launched, and what would
have been is compiled by `server.py`; `mend` (`mends.py`), for whoever launches kernels in threads;
`Rehearsal` (`rehearsal.py`), the steps of an engine; `AbsentGPU` (`absent_gpu.py`), for which
Triton compiles where no GPU is.
"""
