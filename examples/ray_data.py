"""Answer the prompts of Parquet files with an engine on each GPU of a Ray cluster.

The input has the columns `id` and `prompt`. The same command again goes on: rows whose id is in the
output are not computed again. RAY_ADDRESS names the cluster; without it, Ray starts one here. It
needs `pip install ".[ray]"`.
"""

import argparse
from pathlib import Path

import pyarrow
import ray
from pyarrow import compute, fs, parquet

from nanovllm import TINY
from nanovllm.batch import RayGenerate

SUMS = [{"id": i, "prompt": f"{100 + 7 * i % 900}+{100 + 13 * i % 900}="} for i in range(1000)]
ROWS = 256  # of a task: computed again where a worker dies, and the size of a file of output


def finished_ids(directory: str) -> pyarrow.Array:
    """The ids of the rows in the output. A half-written file, left by a kill, is removed."""
    filesystem, root = fs.FileSystem.from_uri(directory)
    found: list[pyarrow.Array] = []
    for file in filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True)):
        if file.extension == "parquet":
            try:
                ids = parquet.read_table(file.path, columns=["id"], filesystem=filesystem)
                found += ids["id"].chunks
            except pyarrow.ArrowInvalid:
                filesystem.delete_file(file.path)
    return pyarrow.concat_arrays(found) if found else pyarrow.array([])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--input", help="Parquet files (a thousand sums)")
    parser.add_argument("--output", default="answers", help="their directory (answers)")
    parser.add_argument("--model", default=TINY, help="directory of a checkpoint, or its name")
    parser.add_argument("--engines", type=int, default=1, help="(1); fewer than CPUs")
    args = parser.parse_args()
    output = args.output if "://" in args.output else str(Path(args.output).resolve())

    rows = ray.data.read_parquet(args.input) if args.input else ray.data.from_items(SUMS)
    done = ray.put(finished_ids(output))
    new = rows.map_batches(
        lambda table: table.filter(compute.invert(compute.is_in(table["id"], ray.get(done)))),
        batch_format="pyarrow",
    )
    params = {"temperature": 0, "max_tokens": 256}
    new.repartition(target_num_rows_per_block=ROWS).map_batches(
        RayGenerate,
        fn_constructor_kwargs={"model": args.model, "chat": True, "sampling_params": params},
        batch_format="pyarrow",  # columns keep their types where all their values are missing
        batch_size=ROWS,
        compute=ray.data.ActorPoolStrategy(size=args.engines, max_concurrent_calls_per_actor=4),
        num_gpus=int("GPU" in ray.cluster_resources()),
    ).write_parquet(output)
    print(f"{len(finished_ids(output))} rows are in {output}")
