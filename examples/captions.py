"""Caption the pictures of a folder. The same command again goes on where it was interrupted.

    python scripts/make_tiny_vision.py        # a tiny model that sees, and a folder of pictures
    python examples/captions.py --model tiny-vision --folder tiny-pictures

A file that is no picture has an error in the place of a caption.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.batch import ResumableSink, run

SUFFIXES = {
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp", ".dib", ".tif"),
    *(".tiff", ".avif", ".jp2", ".j2k", ".jpx", ".ico", ".ppm", ".pgm", ".pbm", ".pnm", ".tga"),
}


def rows(folder: Path, question: str) -> Iterator[dict[str, Any]]:
    """A row for each picture, by its path below the folder."""
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in SUFFIXES:
            name = path.relative_to(folder).as_posix()
            yield {"custom_id": name, "prompt": question, "multi_modal_data": {"image": str(path)}}


def main() -> None:
    """Caption the pictures that have no caption yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="pictures, also in subfolders")
    parser.add_argument("--model", required=True, help="directory of a checkpoint, or its name")
    parser.add_argument("--output", default="captions.jsonl", help="(captions.jsonl)")
    parser.add_argument("--question", default="Describe this picture.", help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of a caption (64)")
    parser.add_argument("--max-pixels", type=int, help="of a picture; larger ones are scaled down")
    args = parser.parse_args()
    folder = args.folder.resolve()  # however it is spelled
    if not folder.is_dir():
        parser.error(f"--folder must be a folder, got {folder}")
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    job = {**vars(args), "folder": str(folder), "output": None}  # which may be moved
    sink = ResumableSink(args.output, job)  # an output of another job is refused
    limits = {} if args.max_pixels is None else {"max_pixels": args.max_pixels}
    with sink, LLM(args.model, mm_processor_kwargs=limits) as llm:
        before = sink.num_finished
        try:
            for result in run(llm, sink.unfinished(rows(folder, args.question)), params, chat=True):
                sink.write(result)
        except KeyboardInterrupt:
            print("interrupted: the same command goes on")
        total, errors = sink.num_finished, sink.num_errors
    print(f"{args.output}: {total} results, {total - before} of them new, {errors} with an error")


if __name__ == "__main__":
    main()
