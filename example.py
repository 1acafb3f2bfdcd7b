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
        tokenizer = llm.get_tokenizer()
        texts = prompts
        if args.model and tokenizer is not None and tokenizer.chat_template:
            texts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": prompt}],
                    tokenize=False,
                    add_generation_prompt=True,
                )
                for prompt in prompts
            ]
        temperature, max_tokens = (0.6, 256) if args.model else (0.0, 200)
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        for prompt, output in zip(prompts, llm.generate(texts, params), strict=True):
            print(f"\nPrompt:     {prompt}\nCompletion: {output.outputs[0].text}")


if __name__ == "__main__":
    main()
