"""OpenAI's protocol without HTTP: bodies of requests in, answers out, whole and in pieces.

`asks` reads a body; `answers` writes what comes back, and finds in it reasoning and calls of tools
by `calls`. Fields of bodies and forms of answers that files of batches have, too, are in
`nanovllm.batch.openai_api`.

Doors: `asks` and `answers`.
"""
