"""What a job must fulfil to run on an engine; the same for every engine."""

from __future__ import annotations

from services.contract.errors import RequestError
from services.contract.job import Job


def check_fits(job: Job, *, context_length: int, vocab_size: int) -> None:
    """Raises RequestError unless prompt and at least one token fit the context and every id is in the vocabulary."""
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


def max_new_tokens(job: Job, context_length: int) -> int:
    """Tokens a sample may have: max_tokens, or what the context leaves."""
    return min(job.sampling.max_tokens, context_length - len(job.prompt_ids))
