"""OpenAI's protocol without HTTP: bodies of requests in, answers out, whole and in pieces.

`bodies` and `choices` are what files of batches and the server have in common: fields of requests,
and parts of answers. For the server alone, `asks` reads what else a request asks for, and `answers`
writes what comes back; it finds reasoning and calls of tools in it by `calls`. `tools` reads the
tools of a request, and has the forms of answers that call them or begin with reasoning.

Doors: `bodies`, `choices`, `asks` and `answers`.
"""
