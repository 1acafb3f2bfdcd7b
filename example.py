"""Generate text: `python example.py` with the embedded checkpoint, or another with `--model`."""

import argparse

from nanovllm import LLM, TINY, SamplingParams

# What the embedded checkpoint has learnt: it is two megabytes small.
TINY_PROMPTS = ["127+345=", "reverse: hello =", "count from 17:", "introduce yourself"]
PROMPTS = ["introduce yourself", "list all prime numbers within 100"]


def main() -> None:
    """Complete some prompts and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="directory of a checkpoint, or its name on the hub")
    parser.add_argument("prompts", nargs="*", help="your own prompts")
    args = parser.parse_args()

    with LLM(args.model or TINY) as llm:
        prompts = args.prompts or (PROMPTS if args.model else TINY_PROMPTS + PROMPTS[1:])
        temperature, max_tokens = (0.6, 256) if args.model else (0.0, 200)
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        if args.model and getattr(llm.get_tokenizer(), "chat_template", None):
            conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = llm.chat(conversations, params)
        else:
            outputs = llm.generate(prompts, params)
        for prompt, output in zip(prompts, outputs, strict=True):
            print(f"\nPrompt:     {prompt}\nCompletion: {output.outputs[0].text}")


if __name__ == "__main__":
    main()
