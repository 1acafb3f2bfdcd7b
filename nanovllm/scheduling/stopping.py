"""The ends of sequences: by a stop token or text, by length, or by an error. Imports no torch."""

from collections.abc import Collection

from nanovllm.engine.sequence import Sequence

NOT_NUMBERS = (
    "the model computed NaN for this request, so it has no next token: the checkpoint's weights "
    "are broken, or values overflow their dtype (the maximum of float16 is 65,504: try "
    'dtype="bfloat16" or "float32")'
)


def ends(seq: Sequence, token_id: int, eos_token_ids: Collection[int], max_model_len: int) -> bool:
    """Whether a sequence ends with its newest token. If so, set its finish and stop reason.

    Args:
        seq: sequence, which has the token already.
        token_id: newest token.
        eos_token_ids: tokens that end a text.
        max_model_len: maximum number of tokens of prompt and completion.
    """
    params, text = seq.sampling_params, seq.detokenizer
    num_generated = seq.num_known_tokens - seq.num_prompt_tokens
    if num_generated >= params.min_tokens:
        _stop_at_token(seq, token_id, eos_token_ids)
    if text is not None and (seq.finish_reason is None or params.include_stop_str_in_output):
        looks = num_generated > params.min_tokens and seq.finish_reason is None
        stop = text.append(token_id, may_stop=looks)
        if stop is not None:
            seq.finish_reason, seq.stop_reason = "stop", stop
    if seq.finish_reason is None and (
        num_generated == seq.max_tokens or seq.num_known_tokens == max_model_len
    ):
        seq.finish_reason = "length"
    if text is not None and seq.finish_reason is not None:
        text.finish()
    return seq.finish_reason is not None


def fail(seq: Sequence, error: str) -> None:
    """End a sequence by an error, with the tokens that it has."""
    seq.finish_reason, seq.error = "error", error
    if seq.detokenizer is not None:
        seq.detokenizer.finish()


def _stop_at_token(seq: Sequence, token_id: int, eos_token_ids: Collection[int]) -> None:
    params = seq.sampling_params
    if token_id in eos_token_ids and not params.ignore_eos:
        seq.finish_reason = "stop"
    elif token_id in (params.stop_token_ids or ()):
        seq.finish_reason, seq.stop_reason = "stop", token_id
