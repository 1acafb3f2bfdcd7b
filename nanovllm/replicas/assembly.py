"""Assembly of an engine around replicas that have started."""

from functools import partial

from nanovllm.config import Config
from nanovllm.engine.assembly import Entrance, Parts
from nanovllm.replicas.memory import ReplicaMemory
from nanovllm.replicas.messages import Facts
from nanovllm.replicas.remote_request import remote
from nanovllm.replicas.replicated_core import ReplicatedCore
from nanovllm.replicas.supervisor import Replicas


def assemble(replicas: Replicas, facts: Facts, config: Config, entrance: Entrance) -> Parts:
    """Parts of an engine whose requests replicas compute.

    Args:
        replicas: processes, which have started.
        facts: facts that hold for all of them.
        config: options of the engine.
        entrance: checks of requests, and their limits.
    """
    # Of many short sequences, which have as many blocks of each kind.
    pool_tokens = facts.num_blocks * config.kvcache_block_size
    core = ReplicatedCore(replicas, config, entrance.max_model_len, facts.max_num_seqs, pool_tokens)
    return Parts(
        core=core,
        intake=entrance.intake,
        make=partial(remote, entrance.intake),
        describe=facts.describe,
        max_model_len=entrance.max_model_len,
        num_blocks=facts.num_blocks,
        own=None,
        memory=ReplicaMemory(replicas, facts.expected),
        remarks=(f"{config.data_parallel_size} replicas",),
    )
