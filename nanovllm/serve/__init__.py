"""A door for programs that speak OpenAI's protocol: `nanovllm serve`. It calls `AsyncLLM` as any
other caller does, and is the only room that imports starlette and uvicorn.

A request passes `guard` (keys, bounds, clients that leave) to an endpoint: those of `texts` are
chats and completions, `app` has the others. `served` is what they share, `errors` what clients are
told of theirs and ours, and `metrics` counts. `server` listens, and drains at the end.

Doors: `app` and `server`.
"""
