"""Puts replicas before what calls them, once they have started."""

from functools import partial

from nanovllm.config import Config
from nanovllm.engine.assembly import Entrance, Parts
from nanovllm.replicas.messages import Facts
from nanovllm.replicas.remote_request import remote
from nanovllm.replicas.replicas import Replicas
from nanovllm.replicas.replicated_core import ReplicatedCore


def assemble(replicas: Replicas, facts: Facts, config: Config, entrance: Entrance) -> Parts:
    """An engine whose requests replicas compute.

    Args:
        replicas: started.
        facts: of all of them.
        config: the engine's options.
        entrance: of the engine.
    """
    core = ReplicatedCore(replicas, config, entrance.max_model_len, entrance.pool_tokens)
    return Parts(
        core=core,
        intake=entrance.intake,
        make=partial(remote, entrance.intake),
        describe=facts.describe,
        max_model_len=entrance.max_model_len,
        num_blocks=facts.num_blocks,
        own=None,
        remarks=(f"{config.data_parallel_size} replicas",),
    )
