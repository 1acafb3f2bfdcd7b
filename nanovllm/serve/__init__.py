"""A door for programs that speak OpenAI's protocol: `nanovllm serve`. It calls `AsyncLLM` as any
other caller does, and is the only room that imports starlette and uvicorn.

A request passes `guard` (keys, bounds, clients that leave) to an endpoint of `app`, and `metrics`
counts it. `server` listens, and drains at the end.

Doors: `app` and `server`.
"""
