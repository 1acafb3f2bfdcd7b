"""What an `LLMEngine` is made of, by the options: an engine in this process, or replicas of one."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import Core
from nanovllm.engine.engine_core import EngineCore
from nanovllm.engine.executor import Executor
from nanovllm.engine.intake import CheckedRequest, Intake
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.remote_request import remote
from nanovllm.engine.replica_messages import Facts
from nanovllm.engine.replicas import Replicas
from nanovllm.engine.replicated_core import ReplicatedCore
from nanovllm.engine.request import Listener
from nanovllm.engine.scheduler import Scheduler
from nanovllm.sampling_params import SamplingParams


class Parts(NamedTuple):
    """An engine that has started.

    Attributes:
        core: computes requests.
        intake: checks what callers pass.
        make: the request that was checked, with a pooling and a listener, for the core.
        describe: what took effect, see `ModelRunner.describe`.
        max_model_len: the most tokens of prompt and output, also by the pool.
        eos_token_ids: tokens that end a text.
        num_blocks: of the KV pool (with replicas of the smallest).
        own: the scheduler and the model of this process; None with replicas, which have theirs.
    """

    core: Core[Any]
    intake: Intake
    make: Callable[[CheckedRequest, str | None, Listener | None], Any]
    describe: Callable[[], dict[str, Any]]
    max_model_len: int
    eos_token_ids: set[int]
    num_blocks: int
    own: tuple[Scheduler, ModelRunner] | None


def assemble(
    executor: Executor | Replicas,
    started: ModelRunner | Facts,
    config: Config,
    model_config: ModelConfig,
    tokenizer: Any,
    default: SamplingParams,
) -> Parts:
    """Put the rest before what computes.

    Args:
        executor: started.
        started: what its start has given.
        config: the engine's options.
        model_config: the checkpoint's facts.
        tokenizer: of transformers, None if the checkpoint has none.
        default: sampling parameters of requests without.
    """
    eos_token_ids = set(model_config.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos_token_ids.add(tokenizer.eos_token_id)
    pool_tokens = started.num_blocks * config.kvcache_block_size
    max_model_len = min(started.max_model_len, pool_tokens)
    intake = Intake(
        tokenizer,
        model_config.vocab_size,
        eos_token_ids,
        default,
        max_model_len=started.max_model_len,
        pool_tokens=pool_tokens,
        block_size=config.kvcache_block_size,
        seed=config.seed,
    )
    facts = max_model_len, eos_token_ids, started.num_blocks
    if isinstance(executor, Replicas):
        core = ReplicatedCore(executor, config, max_model_len, pool_tokens)
        return Parts(core, intake, partial(remote, intake), started.describe, *facts, None)
    assert isinstance(started, ModelRunner)
    scheduler = Scheduler(
        BlockManager(
            started.num_blocks,
            config.kvcache_block_size,
            config.enable_prefix_caching,
            model_config.window,
        ),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        mixed_steps=config.mixed_steps,
    )
    overlap = started.device.type == "cuda" if config.overlap is None else config.overlap
    engine = EngineCore(executor, scheduler, lookahead=int(overlap))
    return Parts(engine, intake, intake.make, started.describe, *facts, (scheduler, started))
