"""Puts an engine together once what computes has started."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import Core
from nanovllm.engine.engine_core import EngineCore
from nanovllm.engine.executor import Executor
from nanovllm.engine.kv_pool import KVCachePool
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.ranks.processes import WorkerError
from nanovllm.recurrent.snapshots import SnapshotBlockManager
from nanovllm.requests.intake import Intake
from nanovllm.requests.request import CheckedRequest, Listener
from nanovllm.sampling.structured_output import GrammarCompiler
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.encoder_cache import EncoderCache
from nanovllm.updates.memory import Memory, RankMemory
from nanovllm.windows.sliding_blocks import make_block_manager


class AnyExecutor(Protocol):
    """Runs steps, in this process or elsewhere.

    Attributes:
        is_broken: whether an error has left it unusable.
        failure: death of a process that ends it, once that is noticed; any thread may ask.
    """

    is_broken: bool

    @property
    def failure(self) -> WorkerError | None: ...

    def launch(self) -> None:
        """Start other processes. Does not wait for them."""

    def close(self) -> None:
        """End them, and give memory back."""


class Parts(NamedTuple):
    """An engine that has started.

    Attributes:
        core: core that computes requests.
        intake: intake, which checks what callers pass.
        make: the request that was checked, with a pooling and a listener, for the core.
        describe: configuration that took effect, see `ModelRunner.describe`.
        max_model_len: the most tokens of prompt and output, also by the pool.
        num_blocks: number of KV blocks (of several engines, in the smallest pool).
        own: the scheduler and the model of this process; None where others have them.
        memory: memory of all ranks, for updates and sleep.
        remarks: further facts for `repr`, in short.
    """

    core: Core[Any]
    intake: Intake
    make: Callable[[CheckedRequest, str | None, Listener | None], Any]
    describe: Callable[[], dict[str, Any]]
    max_model_len: int
    num_blocks: int
    own: tuple[Scheduler, ModelRunner] | None
    memory: Memory
    remarks: tuple[str, ...] = ()


class Entrance(NamedTuple):
    """The way in for requests.

    Attributes:
        intake: intake, which checks what callers pass.
        eos_token_ids: tokens that end a text.
        max_model_len: the most tokens of prompt and output, also by the pool.
        pool_tokens: number of tokens of the longest sequence that the KV pool holds, alone.
    """

    intake: Intake
    eos_token_ids: set[int]
    max_model_len: int
    pool_tokens: int


def make_entrance(
    max_model_len: int,
    pool_tokens: int,
    config: Config,
    model_config: ModelConfig,
    tokenizer: Any,
    eos_token_ids: set[int],
    default: SamplingParams,
    grammars: GrammarCompiler,
) -> Entrance:
    """The entrance of an engine.

    Args:
        max_model_len: the most tokens of prompt and output, by the model and the options.
        pool_tokens: number of tokens of the longest sequence that the KV pool holds, alone.
        config: the engine's options.
        model_config: the checkpoint's facts.
        tokenizer: tokenizer of transformers; None if the checkpoint has none.
        eos_token_ids: tokens that end a text.
        default: sampling parameters of requests without.
        grammars: compiler of the forms of structured outputs.
    """
    intake = Intake(
        tokenizer,
        model_config.vocab_size,
        eos_token_ids,
        default,
        grammars,
        max_model_len=max_model_len,
        pool_tokens=pool_tokens,
        block_size=config.kvcache_block_size,
        seed=config.seed,
        logprobs_mode=config.logprobs_mode,
    )
    return Entrance(intake, eos_token_ids, min(max_model_len, pool_tokens), pool_tokens)


def _make_block_manager(config: Config, pool: KVCachePool, num_blocks: int) -> BlockManager:
    """The manager of a pool's blocks, and of its snapshots."""
    block_size, caching = config.kvcache_block_size, config.enable_prefix_caching
    if not pool.sequence_bytes:
        return make_block_manager(num_blocks, block_size, caching, pool.kinds)
    assert len(pool.kinds) == 1 and not pool.kinds[0].window, "states beside layers that slide"
    return SnapshotBlockManager(num_blocks, block_size, pool.snapshot_rows)


def assemble(executor: Executor, runner: ModelRunner, config: Config, entrance: Entrance) -> Parts:
    """An engine of this process.

    Args:
        executor: executor, started.
        runner: rank 0 of it.
        config: the engine's options.
        entrance: way in for its requests.
    """
    pool, num_blocks = runner.built.pool, runner.built.num_blocks
    encoder = runner.built.encoder
    scheduler = Scheduler(
        _make_block_manager(config, pool, num_blocks),
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=entrance.max_model_len,
        eos_token_ids=entrance.eos_token_ids,
        mixed_steps=config.mixed_steps,
        keeps_states=pool.sequence_bytes > 0,
        images=EncoderCache(None if encoder is None else encoder.facts),
    )
    overlap = runner.built.device.type == "cuda" if config.overlap is None else config.overlap
    return Parts(
        core=EngineCore(executor, scheduler, lookahead=int(overlap)),
        intake=entrance.intake,
        make=entrance.intake.make,
        describe=runner.describe,
        max_model_len=entrance.max_model_len,
        num_blocks=num_blocks,
        own=(scheduler, runner),
        memory=RankMemory(executor, runner, config.tensor_parallel_size),
    )
