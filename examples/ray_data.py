"""Answer the prompts of Parquet files with an engine on each GPU of a Ray cluster.

    pip install ".[ray]"
    python examples/ray_data.py --input prompts/ --output answers/ --model Qwen/Qwen3-8B --engines 8
    python examples/ray_data.py     # a thousand sums, with the embedded checkpoint, on a CPU too

The input has the columns `id` and `prompt`. The same command again goes on: rows whose id is in the
output are not computed again. A worker that dies is replaced, and the rows that it had are computed
again. RAY_ADDRESS names the cluster; without it, Ray starts one on this machine.
"""

import argparse
from pathlib import Path

import pyarrow
import ray
from pyarrow import compute, fs, parquet

from nanovllm import TINY
from nanovllm.batch import RayGenerate

ROWS = 256  # of a task: what is computed again where a worker dies, and what a file of output has
NUM_TASKS = 4  # that an engine has at once, so that it has rows of the next when one ends


def write_sums(directory: str) -> None:
    """An input."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    ids = range(1000)
    prompts = [f"{100 + 7 * id_ % 900}+{100 + 13 * id_ % 900}=" for id_ in ids]
    table = pyarrow.table({"id": ids, "prompt": prompts})
    parquet.write_table(table, f"{directory}/sums.parquet")


def finished_ids(directory: str) -> pyarrow.Array:
    """Of the rows in the output. A file that a kill has left half written is removed."""
    filesystem, root = fs.FileSystem.from_uri(directory)
    found = []
    for file in filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True)):
        if file.extension != "parquet":
            continue
        try:
            found.append(parquet.read_table(file.path, columns=["id"], filesystem=filesystem)["id"])
        except pyarrow.ArrowInvalid:
            filesystem.delete_file(file.path)
    chunks = [chunk for ids in found for chunk in ids.chunks]
    return pyarrow.concat_arrays(chunks) if chunks else pyarrow.array([])


def main() -> None:
    """Answer what has no answer yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--input", help="Parquet files; without it, sums")
    parser.add_argument("--output", default="answers", help="their directory (answers)")
    parser.add_argument("--model", default=TINY, help="directory of a checkpoint, or its name")
    parser.add_argument("--engines", type=int, default=1, help="(1); fewer than CPUs")
    parser.add_argument("--gpus", type=int, help="of each engine, the model is split over (1)")
    args = parser.parse_args()
    output = args.output if "://" in args.output else str(Path(args.output).resolve())
    if args.input is None:
        args.input = f"{output}-input"
        write_sums(args.input)

    finished = ray.put(finished_ids(output))

    def unfinished(table: pyarrow.Table) -> pyarrow.Table:
        done = compute.is_in(table["id"], ray.get(finished))
        return table.filter(compute.invert(done))

    rows = ray.data.read_parquet(args.input).map_batches(unfinished, batch_format="pyarrow")
    gpus = args.gpus if args.gpus is not None else int("GPU" in ray.cluster_resources())
    answers = rows.repartition(target_num_rows_per_block=ROWS).map_batches(
        RayGenerate,
        fn_constructor_kwargs={
            "model": args.model,
            "id_column": "id",
            "chat": args.model != TINY,
            "sampling_params": {"temperature": 0, "max_tokens": 256},
            "tensor_parallel_size": max(1, gpus),
        },
        batch_format="pyarrow",  # columns keep their types where all their values are missing
        batch_size=ROWS,
        compute=ray.data.ActorPoolStrategy(
            size=args.engines, max_concurrent_calls_per_actor=NUM_TASKS
        ),
        num_gpus=gpus,
    )
    answers.write_parquet(output)
    written = finished_ids(output)
    print(f"{len(written)} rows are in {output}")


if __name__ == "__main__":
    main()
