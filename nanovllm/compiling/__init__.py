"""Compilation of Triton kernels ahead of their use, in separate processes.

Duty: the kernels of a step are in Triton's cache on disk before the step comes. Otherwise Triton
compiles a kernel at its first launch, in the launching process, under its lock.

Doors: `compiler`, whose rehearsals launch no kernel but have each compiled by `server`;
`rehearsal`, the steps of an engine; `absent_gpu`, for which Triton compiles without a GPU; `mends`,
for code that launches kernels in threads.
"""
