"""The glue for TRL that docs/weights.md shows, under TRL's own trainer."""

import inspect
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import TINY

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs" / "weights.md"
NOT_INSTALLED = "not installed: pip install trl"
EVEN = "02468"
TEMPERATURE = 1.5


@pytest.fixture(scope="module")
def glue() -> dict[str, Any]:
    """Names of the page's script."""
    pytest.importorskip("trl", reason=NOT_INSTALLED)
    [block] = re.findall(
        r"^```python title=\"Needs trl.*?\n(.*?)^```$", PAGE.read_text(), re.M | re.S
    )
    names: dict[str, Any] = {"__name__": "glue"}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(c in EVEN for c in text) / max(len(text), 1) for text in completions]


def logprobs_of(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Log-probabilities of an answer's tokens at the trainer's temperature: [n] float32."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    places = (logits.float() / TEMPERATURE).log_softmax(-1)
    return places.gather(1, torch.tensor(answer)[:, None])[:, 0]


def test_the_reward_rises_under_trl(glue: dict[str, Any], tmp_path: Path) -> None:
    """Each step rolls out by the weights of the step before it, whose log-probabilities at the
    trainer's temperature come with the answers.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    versions, errors = [], []

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        found = glue["rollout"](prompts, trainer)
        versions.append(glue["llm"].weight_version)
        own = logprobs_of(trainer.model, found["prompt_ids"][0], found["completion_ids"][0])
        errors.append((torch.tensor(found["logprobs"][0]) - own).abs().mean().item())
        return found

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(TINY),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=16,
            temperature=TEMPERATURE,
            max_steps=12,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"{i} and " for i in range(10, 100)] * 2}),
        processing_class=AutoTokenizer.from_pretrained(TINY),
        rollout_func=rollout,
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert versions == list(range(12)) and len(rewards) == 12
    assert rewards[0] < 0.4 and rewards[-1] > 0.9
    assert max(errors) < 0.05, errors  # rounding, in bfloat16


def test_the_transfer_is_trls(glue: dict[str, Any]) -> None:
    """By the protocol's own methods, with weights that come one by one."""
    from transformers import AutoModelForCausalLM

    protocol = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer")
    wanted = {
        name: list(inspect.signature(method).parameters)
        for name, method in vars(protocol.WeightTransferProtocol).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    transfer, llm = glue["WeightTransfer"](), glue["llm"]
    found = {
        name: list(inspect.signature(getattr(type(transfer), name)).parameters) for name in wanted
    }
    assert found == wanted and len(wanted) == 5
    versions = [llm.weight_version]
    model = AutoModelForCausalLM.from_pretrained(TINY)
    transfer.init_weight_transfer()
    with ThreadPoolExecutor(1) as rollouts:  # which go on meanwhile
        answers = [rollouts.submit(llm.generate, ["127+345="], use_tqdm=False) for _ in range(9)]
        for _ in range(3):
            transfer.pause()
            transfer.send_weights(model.named_parameters())
            transfer.resume()
            versions.append(llm.weight_version)
    transfer.destroy()
    assert len(set(versions)) == 4
    assert all(answer.result()[0].finished for answer in answers)
    [output] = llm.generate(["127+345="], use_tqdm=False)
    assert output.outputs[0].text == "472"
