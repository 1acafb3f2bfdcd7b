"""Compiling Triton's kernels ahead of their use, in processes of their own.

Duty: what a step will launch is in Triton's cache on disk before the step comes. Triton compiles a
kernel in the process, and under the lock, of whoever launches it first.

Doors: `compiler`, inside of whose rehearsals nothing is launched, and what would have been is
compiled by `server`; `rehearsal`, the steps of an engine; `absent_gpu`, for which Triton compiles
where no GPU is; `mends`, for whoever launches kernels in threads.
"""
