"""The ends of sequences: by a stop token or text, by length, or by an error. Imports no torch."""

from collections.abc import Collection

from nanovllm.engine.sequence import End, Sequence

NOT_NUMBERS = (
    "the model computed NaN for this request, so it has no next token: the checkpoint's weights "
    "are broken, or values overflow their dtype (the maximum of float16 is 65,504: try "
    'dtype="bfloat16" or "float32")'
)


def end_of(
    seq: Sequence, token_id: int, eos_token_ids: Collection[int], max_model_len: int
) -> End | None:
    """The end of a sequence with its newest token; None: it goes on. Its text gets the token.

    Args:
        seq: sequence, which has the token already.
        token_id: newest token.
        eos_token_ids: tokens that end a text.
        max_model_len: maximum number of tokens of prompt and completion.
    """
    params, text = seq.sampling_params, seq.detokenizer
    num_generated = seq.num_known_tokens - seq.num_prompt_tokens
    end = None
    if num_generated >= params.min_tokens:
        end = _by_token(seq, token_id, eos_token_ids)
    if text is not None and (end is None or params.include_stop_str_in_output):
        looks = num_generated > params.min_tokens and end is None
        stop = text.append(token_id, may_stop=looks)
        if stop is not None:
            end = End("stop", stop)
    is_full = num_generated == seq.max_tokens or seq.num_known_tokens == max_model_len
    if end is None and is_full:
        end = End("length")
    if text is not None and end is not None:
        text.finish()
    return end


def failure_of(seq: Sequence) -> End:
    """The end of a sequence by NaN, with the tokens that it has."""
    if seq.detokenizer is not None:
        seq.detokenizer.finish()
    return End("error", error=NOT_NUMBERS)


def _by_token(seq: Sequence, token_id: int, eos_token_ids: Collection[int]) -> End | None:
    params = seq.sampling_params
    if token_id in eos_token_ids and not params.ignore_eos:
        breaks_off = seq.grammar is not None and seq.grammar.is_incomplete
        return End("length" if breaks_off else "stop", is_by_token=True)
    if token_id in (params.stop_token_ids or ()):
        return End("stop", token_id, is_by_token=True)
    return None
