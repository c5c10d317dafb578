"""The tokenizer, chat template and sampling defaults that a GGUF file holds.

Vocabularies of two kinds are served: byte-level BPE (`gpt2`), and BPE over SentencePiece's spelling
(`llama`). The keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Each kind of text
splitting (`tokenizer.ggml.pre`) is done as the models' own tokenizers do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvloom.exec.gguf.header import GgufHeader
from kvloom.exec.huggingface import PreTrainedTokenizerFast
from kvloom.types.errors import ConfigError
from kvloom.types.request import SamplingDefaults

_CONTROL, _USER, _BYTE = 3, 4, 6  # of `tokenizer.ggml.token_type`
_SPECIAL: Final = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}

_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How a byte-level vocabulary's texts are normalised and split."""

    regex: str | None
    """The pattern of the pieces into which texts are split; None stands for GPT-2's own."""
    composed: bool = False
    """Whether texts are brought to Unicode's form C before."""
    whole: bool = False
    """Whether a word that is a token is taken whole, whatever the merges would make of it."""
    begins: bool = False
    """Whether a text begins with the token `bos` if the file does not say so."""
    digits: bool = False
    """Whether each digit stands alone."""


_GPT2: Final = _Splitting(None)
_LLAMA3: Final = _Splitting(
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
    whole=True,
    begins=True,
)
_QWEN2: Final = _Splitting(
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}", composed=True
)
_TEKKEN: Final = _Splitting(
    rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}", whole=True, begins=True
)
_DIGITS: Final = _Splitting(None, digits=True)
_SPLITTINGS: Final[Mapping[str, _Splitting]] = {
    **dict.fromkeys(("gpt-2", "gpt2", "mpt", "olmo", "jais"), _GPT2),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    "tekken": _TEKKEN,
}


def read_tokenizer(header: GgufHeader) -> PreTrainedTokenizerFast:
    """Returns the file's tokenizer, with its chat template. Raises ConfigError if it cannot be read."""
    kind = header.text("tokenizer.ggml.model")
    builders: dict[str | None, Callable[[_Vocabulary], Tokenizer]] = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
    }
    if kind not in builders:
        said = "has no tokenizer" if kind is None else f"has a tokenizer of the kind {kind[:40]!r}"
        raise ConfigError(f"its file {said}; {' or '.join(map(repr, builders))} is right")
    vocabulary = _Vocabulary(header)
    try:
        tokenizer = builders[kind](vocabulary)
    except ConfigError:
        raise
    except Exception as error:  # what the tokenizers' library raises is a bare Exception
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"its tokenizer cannot be read: {reason}") from error
    tokenizer.add_special_tokens(vocabulary.added(_CONTROL))
    tokenizer.add_tokens(vocabulary.added(_USER))
    special = {f"{name}_token": vocabulary.special(key) for key, name in _SPECIAL.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        add_bos_token=vocabulary.adds("bos", kind == "llama" or vocabulary.splitting().begins),
        add_eos_token=vocabulary.adds("eos", False),
        chat_template=header.text("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in special.items() if token is not None},
    )


def read_sampling(header: GgufHeader) -> SamplingDefaults:
    """Returns the file's defaults for sampling. Raises ConfigError."""
    names = {
        "temperature": "temp",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "repetition_penalty": "penalty_repeat",
    }
    said = {name: header.number(f"general.sampling.{key}") for name, key in names.items()}
    try:
        return msgspec.convert({k: v for k, v in said.items() if v is not None}, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ConfigError(f"its general.sampling: {error}") from error


class _Vocabulary:
    """The tokens, and the file's lists about them."""

    def __init__(self, header: GgufHeader) -> None:
        """Raises ConfigError if lists that belong together have other lengths."""
        self._header = header
        tokens = header.texts("tokenizer.ggml.tokens")
        embedding = header.tensors["token_embd.weight"]
        if not tokens or len(tokens) > embedding.shape[0]:
            raise ConfigError(
                f"its vocabulary has {len(tokens or ()):,} tokens, and its embedding {embedding.shape[0]:,}"
            )
        self.tokens = tokens
        self.kinds = self._beside("token_type") or [1] * len(tokens)
        self.scores = self._beside("scores")
        self.ids = {token: index for index, token in enumerate(tokens)}

    def _beside(self, key: str) -> Sequence[float] | None:
        found = self._header.numbers(f"tokenizer.ggml.{key}")
        if found is not None and len(found) != len(self.tokens):
            raise ConfigError(
                f"its tokenizer.ggml.{key} has {len(found):,} entries, and its vocabulary "
                f"{len(self.tokens):,}"
            )
        return found

    def merges(self) -> list[tuple[str, str]]:
        """Returns the merges, best first. Raises ConfigError if the file has none, or one that is no pair of
        tokens."""
        texts = self._header.texts("tokenizer.ggml.merges")
        if texts is not None:
            return [self._pair(text) for text in texts]
        if self.scores is None:
            raise ConfigError("its tokenizer has neither merges nor scores")
        return self._merges_by_score(self.scores)

    def _pair(self, text: str) -> tuple[str, str]:
        for at in (index for index, letter in enumerate(text) if letter == " " and index):
            left, right = text[:at], text[at + 1 :]
            if left in self.ids and right in self.ids and left + right in self.ids:
                return left, right
        raise ConfigError(f"its tokenizer has the merge {text[:60]!r}, which is no pair of its tokens")

    def _merges_by_score(self, scores: Sequence[float]) -> list[tuple[str, str]]:
        """Returns the pairs that make tokens, as SentencePiece joins them: the best score first, and equal
        scores in transformers' order."""
        found: list[tuple[float, int, int, str, str]] = []
        for token, score in zip(self.tokens, scores, strict=True):
            halves = ((token[:at], token[at:]) for at in range(1, len(token)))
            pairs = [pair for pair in halves if pair[0] in self.ids and pair[1] in self.ids]
            pairs.sort(key=lambda pair: (self.ids[pair[0]], self.ids[pair[1]]))
            found += [(score, len(left), len(right), left, right) for left, right in pairs]
        found.sort(key=lambda one: one[:3], reverse=True)
        return [one[3:] for one in found]

    def added(self, kind: int) -> list[AddedToken]:
        """Returns the tokens of a kind, which are looked for in the text itself."""
        alike = (token for token, one in zip(self.tokens, self.kinds, strict=True) if one == kind and token)
        return [AddedToken(token, normalized=False, special=kind == _CONTROL) for token in alike]

    def special(self, name: str) -> str | None:
        """Returns the special token of this part (as `bos` or `eos`), or None if there is none. Raises
        ConfigError for one beyond the vocabulary."""
        key = f"tokenizer.ggml.{name}_token_id"
        token = self._header.count(key)
        if token is not None and token >= len(self.tokens):
            raise ConfigError(f"its {key} is {token:,}, and its vocabulary has {len(self.tokens):,} tokens")
        return None if token is None else self.tokens[token]

    def adds(self, name: str, default: bool) -> bool:
        said = self._header.count(f"tokenizer.ggml.add_{name}_token")
        wanted = default if said is None else bool(said)
        return wanted and self.special(name) is not None

    def splitting(self) -> _Splitting:
        """Returns how texts are split. Raises ConfigError for a way that is unknown."""
        name = self._header.text("tokenizer.ggml.pre")
        found = _SPLITTINGS.get(name or "")
        if found is None:
            said = "missing" if name is None else repr(name[:40])
            right = ", ".join(_SPLITTINGS)
            raise ConfigError(f"its tokenizer.ggml.pre, how texts are split, is {said}; {right} are right")
        return found

    def spaced(self) -> bool:
        """Returns whether a text begins as if a space stood before it."""
        said = self._header.count("tokenizer.ggml.add_space_prefix")
        return said is None or bool(said)


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    splitting = vocabulary.splitting()
    model = models.BPE(vocabulary.ids, vocabulary.merges(), ignore_merges=splitting.whole)
    tokenizer = Tokenizer(model)
    if splitting.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*_splits(splitting)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _splits(splitting: _Splitting) -> Iterator[Any]:
    if splitting.digits:
        yield pre_tokenizers.Digits(individual_digits=True)
    if splitting.regex is not None:
        yield pre_tokenizers.Split(Regex(splitting.regex), behavior="isolated")
    yield pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.regex is None)


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    unknown = vocabulary.special("unknown")
    bytes_there = _BYTE in vocabulary.kinds
    model = models.BPE(
        vocabulary.ids, vocabulary.merges(), unk_token=unknown, fuse_unk=True, byte_fallback=bytes_there
    )
    tokenizer = Tokenizer(model)
    spaced = vocabulary.spaced()
    scheme = "first" if spaced else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(" ", 1, 0)] if spaced else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
