"""Evaluate a model with lm-evaluation-harness (`pip install ".[lm-eval]"`), through an adapter."""

import argparse

from datasets import Dataset
from lm_eval import simple_evaluate, tasks, utils
from lm_eval.api.model import TemplateLM

from nanovllm import LLM, TINY, SamplingParams

SUMS = [{"sum": f"{a}+218=", "all": [str(a + i) for i in (208, 218, 219)]} for a in range(99, 299)]
TASK = {"task": "sums", "custom_dataset": lambda **_: {"test": Dataset.from_list(SUMS)}}
TASK |= {"test_split": "test", "output_type": "multiple_choice", "target_delimiter": ""}
TASK |= {"doc_to_text": "{{sum}}", "doc_to_choice": "all", "doc_to_target": "{{1}}"}


class Adapter(TemplateLM):  # the harness gives it all requests of a kind at once
    eot_token_id = prefix_token_id = 0  # those of the model are set below

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self.llm, self.tokenizer = llm, llm.get_tokenizer()
        self.eot_token_id, bos = self.tokenizer.eos_token_id, self.tokenizer.bos_token_id
        self.prefix_token_id = self.eot_token_id if bos is None else bos
        self.longest = llm.max_model_len - 1  # tokens: `score` needs room for one more

    def tok_encode(self, string: str, **how: bool) -> list[int]:
        return self.tokenizer.encode(string, **how)

    def _loglikelihood_tokens(self, requests: list, **_: object) -> list[tuple[float, bool]]:
        scores = self.llm.score([(ids + answer)[-self.longest :] for _, ids, answer in requests])
        ends = zip(scores, (-len(answer) for _, _, answer in requests), strict=True)
        return [(sum(score.logprobs[i:]), max(score.ranks[i:]) == 1) for score, i in ends]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        totals = []
        for ids in [self.tok_encode(request.args[0]) for request in requests]:
            pairs = utils.get_rolling_token_windows(ids, self.prefix_token_id, self.longest - 1, 1)
            parts = [(None, *utils.make_disjoint_window(pair)) for pair in pairs]
            totals.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(parts)))
        return totals

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        prompts, params = [], []
        for text, how in [request.args for request in requests]:
            temperature = how.get("temperature", 0) if how.get("do_sample", True) else 0
            limit, stop = how.get("max_gen_toks", 256), how.get("until")
            params.append(SamplingParams(temperature, limit, stop=stop))
            prompts.append(self.tok_encode(text)[-max(self.longest // 2, self.longest - limit) :])
        return [output.outputs[0].text for output in self.llm.generate(prompts, params)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=TINY, help="directory of a checkpoint, or its name")
    parser.add_argument("tasks", nargs="*", default=[TASK], help="of the harness (sums, above)")
    args = parser.parse_args()
    known = tasks.TaskManager(include_defaults=args.tasks != [TASK])  # reads thousands of files
    adapter = Adapter(LLM(args.model, max_model_len=None))
    print(utils.make_table(simple_evaluate(adapter, tasks=args.tasks, task_manager=known)))
