"""What is wrong with a request, before anything is made for it."""

from __future__ import annotations

from kvloom.core.errors import BadRequest, PromptTooLong
from kvloom.core.request import ModelCard, StartGenerate


def check_prompt(prompt: list[int], card: ModelCard) -> None:
    """Raises PromptTooLong, or BadRequest for a token that the model does not have."""
    if len(prompt) > card.context_length:
        raise PromptTooLong(
            f"the prompt has {len(prompt)} tokens, and {card.name} holds {card.context_length} in all",
            param="prompt",
        )
    if max(prompt, default=0) >= card.vocab_size:
        raise BadRequest(
            f"prompt token {max(prompt)} is not in {card.name}'s vocabulary of {card.vocab_size}",
            param="prompt",
        )


def check_request(body: StartGenerate, card: ModelCard) -> None:
    """As `check_prompt`; a request wants room for a token more."""
    check_prompt(body.prompt, card)
    if len(body.prompt) >= card.context_length:
        raise PromptTooLong(
            f"the prompt has {len(body.prompt)} tokens, and {card.name} holds {card.context_length} in all",
            param="prompt",
        )
    _check_made(body, card)
    for param in ("logit_bias", "stop_token_ids"):
        for token in getattr(body.sampling, param):
            if not 0 <= token < card.vocab_size:
                raise BadRequest(
                    f"{param}: token {token} is outside the vocabulary of {card.vocab_size}", param=param
                )


def _check_made(body: StartGenerate, card: ModelCard) -> None:
    choices = [made.choice for made in body.made]
    if len(set(choices)) < len(choices) or max(choices, default=0) >= body.n:
        raise BadRequest(f"made: choices {choices} of {body.n}; each once at most is right", param="made")
    longest = max((len(made.tokens) for made in body.made), default=0)
    if longest > body.sampling.max_tokens or len(body.prompt) + longest > card.context_length:
        raise BadRequest(
            f"made: a choice has {longest} tokens after a prompt of {len(body.prompt)}; max_tokens is "
            f"{body.sampling.max_tokens}, and {card.name} holds {card.context_length} in all",
            param="made",
        )
    if max((token for made in body.made for token in made.tokens), default=0) >= card.vocab_size:
        raise BadRequest(
            f"made: a token is not in {card.name}'s vocabulary of {card.vocab_size}", param="made"
        )
    if longest and body.sampling.prompt_logprobs is not None:
        raise BadRequest(
            "made: choices with tokens have told the prompt's log-probabilities; leave prompt_logprobs out",
            param="made",
        )
