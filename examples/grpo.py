"""Teach a model by reinforcement (GRPO): nanovllm generates, plain PyTorch learns.

python examples/grpo.py
"""

import argparse
import random
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from nanovllm import LLM, TINY, SamplingParams


def reward(text: str) -> float:
    """The share of a text's characters that are even digits, in place of your own reward."""
    return sum(c in "02468" for c in text) / max(len(text), 1)


def main() -> None:
    """Print how the mean reward of 16 prompts with 8 samples each rises."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=TINY, help="directory of a checkpoint, or its name")
    parser.add_argument("--steps", type=int, default=12, help="updates of the weights (12)")
    args = parser.parse_args()
    device, rng = "cuda" if torch.cuda.is_available() else "cpu", random.Random(0)
    policy: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.to(device).parameters(), lr=3e-4)
    params = SamplingParams(n=8, max_tokens=16, logprobs=0)

    with LLM(args.model, enable_sleep_mode=True, gpu_memory_utilization=0.5) as llm:
        for step in range(args.steps):
            prompts = [f"{rng.randint(10, 99)} and " for _ in range(16)]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            llm.sleep(level=2)  # the GPU's memory is for learning
            rewards = torch.tensor([[reward(c.text) for c in o.outputs] for o in outputs])
            advantages = (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)
            rows = [(o.prompt_token_ids, c) for o in outputs for c in o.outputs]
            ids = pad_sequence([torch.tensor(p + c.token_ids) for p, c in rows], True).to(device)
            new = policy(ids).logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None])
            losses = []
            for row, (prompt, c), a in zip(new, rows, advantages.flatten().tolist(), strict=True):
                places = zip(c.logprobs or [], c.token_ids, strict=True)
                old = torch.tensor([place[token].logprob for place, token in places], device=device)
                ratio = (row[len(prompt) - 1 :, 0][: len(old)] - old).exp()
                losses.append(-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).mean())
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()

            llm.wake_up(tags=["weights"])
            llm.update_weights(policy.state_dict())
            llm.wake_up(tags=["kv_cache"])
            print(f"step {step:2}: mean reward {rewards.mean():.2f}", flush=True)


if __name__ == "__main__":
    main()
