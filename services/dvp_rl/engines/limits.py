"""Requirements that a job must meet to run on any engine."""

from __future__ import annotations

from dvp_rl.contract.errors import RequestError
from dvp_rl.contract.job import MAX_GROUP_TOKENS, Job


def check_fits(job: Job, *, context_length: int, vocab_size: int) -> None:
    """Raises RequestError unless the prompt and at least one new token fit the context, every id is in the vocabulary
    and the group is not too large."""
    length = len(job.prompt_ids)
    if length + 1 > context_length:
        raise RequestError(
            f"prompt_ids: {length} tokens and at least one new one exceed the context of {context_length} tokens; "
            f"at most {context_length - 1} allowed",
            [{"field": "prompt_ids", "value": length, "allowed": f"1 to {context_length - 1} tokens"}],
        )
    largest = int(job.prompt_ids.max())
    if largest >= vocab_size:
        raise RequestError(
            f"prompt_ids: token id {largest} is outside the vocabulary, allowed are 0 to {vocab_size - 1}; "
            "was the prompt encoded with another model's tokenizer?",
            [{"field": "prompt_ids", "value": largest, "allowed": f"0 to {vocab_size - 1}"}],
        )

    check_size(job, context_length)


def check_size(job: Job, context_length: int, at: str = "") -> None:
    """Raises RequestError if the samples could have more than MAX_GROUP_TOKENS tokens together. `at`: where the client
    gave n."""
    longest = max_new_tokens(job, context_length)
    if job.n * longest > MAX_GROUP_TOKENS:
        most = f"{MAX_GROUP_TOKENS // longest} samples of up to {longest} tokens, {MAX_GROUP_TOKENS} together"
        raise RequestError.at(f"{at}n", job.n, f"at most {most}; a lower max_tokens allows more")


def max_new_tokens(job: Job, context_length: int) -> int:
    """Maximum number of new tokens per sample: max_tokens, or fewer if the context leaves less room."""
    return min(job.sampling.max_tokens, context_length - len(job.prompt_ids))
