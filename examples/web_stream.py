"""A web page on which answers appear as they are generated. All readers share one engine.

It needs FastAPI and uvicorn, which `pip install ".[examples]"` brings.
"""

import argparse
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, PlainTextResponse, StreamingResponse

from nanovllm import TINY, AsyncLLM, SamplingParams


def make_app(llm: AsyncLLM, params: SamplingParams) -> FastAPI:
    """The page, answers as streams of text, and the engine's counters."""
    app = FastAPI()
    app.get("/metrics")(llm.metrics)

    @app.get("/")
    async def page() -> FileResponse:
        return FileResponse(Path(__file__).with_suffix(".html"))

    @app.post("/stream")
    async def stream(request: Request) -> Response:
        ask = [{"role": "user", "content": (await request.body()).decode(errors="replace")}]
        tokenizer = await llm.get_tokenizer()
        ids = tokenizer.apply_chat_template(ask, add_generation_prompt=True, return_dict=False)
        news = llm.stream(ids, params)
        try:
            first = await anext(news)
        except ValueError as error:  # the prompt is too long
            return PlainTextResponse(str(error), 400)

        async def texts() -> AsyncIterator[str]:  # a reader who leaves ends it, which aborts
            yield first.outputs[0].text
            async for output in news:
                yield output.outputs[0].text

        return StreamingResponse(texts(), media_type="text/plain")

    return app


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=TINY, help="directory of a checkpoint, or its name")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of an answer (1024)")
    parser.add_argument("--port", type=int, default=8000, help="of 127.0.0.1 (8000); 0: a free one")
    args = parser.parse_args()
    app = make_app(AsyncLLM(args.model), SamplingParams(temperature=0, max_tokens=args.max_tokens))
    uvicorn.run(app, host="127.0.0.1", port=args.port, timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
