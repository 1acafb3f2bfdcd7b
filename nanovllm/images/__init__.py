"""Image inputs on the host: read, resized and counted before a request reaches the engine.

Doors: `image`, `positions` and `stored`, what the engine knows of them; `processor`, `prompts`,
`picture`, `urls`, `fetching` and `reading`, what callers may pass; `preparation`, the threads.
"""
