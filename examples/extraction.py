"""Extract facts from texts as JSON of a given schema.

    pip install ".[structured-outputs]"
    python examples/extraction.py --model Qwen/Qwen3-0.6B

The embedded checkpoint, which is the default, cannot read: its answers have the form alone.
"""

import argparse
import json

from nanovllm import LLM, TINY, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "profession": {"enum": ["doctor", "engineer", "teacher", "other"]},
        "languages": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
    },
    "required": ["name", "age", "profession", "languages"],
    "additionalProperties": False,
    # Blanks as json.dumps has them: a small model may write nothing else until max_tokens.
    "x-guidance": {"whitespace_pattern": "", "item_separator": ", ", "key_separator": ": "},
}
TEXTS = [
    "Anna Weber, 34, teaches physics in Graz. She speaks German and Italian.",
    "At 61, Dr. Okafor still sees forty patients a day, in English, Igbo and Hausa.",
    "Li Na builds bridges. She is 29 and speaks Mandarin.",
]


def main() -> None:
    """Print an object for each text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=TINY, help="directory of a checkpoint, or its name")
    parser.add_argument("texts", nargs="*", default=TEXTS, help="your own texts")
    args = parser.parse_args()

    form = StructuredOutputsParams(json=SCHEMA)
    params = SamplingParams(temperature=0, max_tokens=256, structured_outputs=form)
    ask = f"Extract the person as JSON of this schema:\n{json.dumps(SCHEMA['properties'])}\n\n"
    conversations = [[{"role": "user", "content": ask + text}] for text in args.texts]
    with LLM(args.model) as llm:
        outputs = llm.chat(conversations, params, chat_template_kwargs={"enable_thinking": False})
    for text, output in zip(args.texts, outputs, strict=True):
        answer = output.outputs[0]
        if answer.finish_reason == "stop":  # else it is cut off, and no JSON
            print(json.loads(answer.text))
        else:
            print(f"cut off after {len(answer.token_ids)} tokens: {text!r}")


if __name__ == "__main__":
    main()
