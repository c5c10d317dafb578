"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvloom.api.tokenizer import Tokenizer
from kvloom.types.request import TokenEvent, TokenLogprob

LOWEST = -9999.0  # OpenAI's stand-in for a probability of nothing; JSON has no infinity


def chat_logprobs(tokens: Iterable[TokenEvent], tokenizer: Tokenizer, top: int) -> list[dict[str, Any]]:
    content = []
    for event in tokens:
        known = event.logprob or TokenLogprob(LOWEST)
        entry = _chat_entry(event.token, known.logprob, tokenizer)
        entry["top_logprobs"] = [_chat_entry(token, value, tokenizer) for token, value in known.top[:top]]
        content.append(entry)
    return content


def _chat_entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token)
    text = spelled.decode("utf-8", "replace")
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(spelled)}


class CompletionLogprobs:
    """Grows with a choice's tokens; `take` gives what has come since the last time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0
        self._entries: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add_prompt(self, prompt: Sequence[int], logprobs: Sequence[TokenLogprob], *, hidden: int = 0) -> None:
        """The first token has nothing before it, so nothing is known of it. The first `hidden` are not told:
        they are not in the text that is shown."""
        for at, token in enumerate(prompt):
            if at >= hidden:
                self._add(token, logprobs[at - 1] if 0 < at <= len(logprobs) else None)

    def add(self, tokens: Iterable[TokenEvent]) -> None:
        for event in tokens:
            self._add(event.token, event.logprob)

    def take(self) -> dict[str, Any]:
        entries, self._entries = self._entries, []
        return {
            "tokens": [entry[0] for entry in entries],
            "token_logprobs": [entry[1] for entry in entries],
            "top_logprobs": [entry[2] for entry in entries],
            "text_offset": [entry[3] for entry in entries],
        }

    def _add(self, token: int, known: TokenLogprob | None) -> None:
        text = self._tokenizer.token_text(token)
        if known is None:
            self._entries.append((text, None, None, self._offset))
        else:
            # The drawn token is always among them, even where it is not one of the best.
            best = {self._tokenizer.token_text(one): max(value, LOWEST) for one, value in known.top}
            best.setdefault(text, max(known.logprob, LOWEST))
            self._entries.append((text, max(known.logprob, LOWEST), best, self._offset))
        self._offset += len(text)
