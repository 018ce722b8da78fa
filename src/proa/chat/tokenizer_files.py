"""Where a model's tokenizer, special tokens and chat template stand: in its directory, or else in a GGUF file."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from proa.chat.templates import read_template_source, special_token_names
from proa.chat.tiktoken_tokenizer import TiktokenTokenizer
from proa.chat.tokenizer import Tokenizer

if TYPE_CHECKING:
    from proa.chat.gguf_vocabulary import GgufVocabulary

__all__ = ["TokenizerFiles"]


class TokenizerFiles:
    """The files of one model.

    Args:
        model_path: the checkpoint directory: tokenizer.json, else tiktoken.model, else a GGUF model in it.
        expert_path: where routed experts are read from; a GGUF model there is the last place looked into.
    """

    def __init__(self, model_path: Path, expert_path: Path | None = None) -> None:
        self._model_path = model_path
        self._expert_path = expert_path

    def tokenizer(self, template: str = "") -> Tokenizer | TiktokenTokenizer:
        """The tokenizer. Added tokens named in the chat `template` are control tokens too.

        Raises:
            CheckpointError: missing or damaged files.
            UnsupportedError: a tokenizer proa does not have.
        """
        if self._vocabulary is not None:
            return self._vocabulary.tokenizer(template)
        if (self._model_path / "tiktoken.model").exists() and not self._has_json:
            return TiktokenTokenizer.load(self._model_path)
        return Tokenizer.load(self._model_path, template=template)

    def template_source(self, override: Path | None = None) -> str | None:
        """The chat template: `override`, else the directory's, else the GGUF file's. CheckpointError as above."""
        source = read_template_source(self._model_path, override)
        return self._vocabulary.template if source is None and self._vocabulary is not None else source

    def special_tokens(self) -> dict[str, str]:
        """`bos_token` and its like, by role."""
        given = special_token_names(self._model_path)
        return given if self._vocabulary is None else {**self._vocabulary.special_tokens, **given}

    @property
    def _has_json(self) -> bool:
        return (self._model_path / "tokenizer.json").exists()

    @cached_property
    def _vocabulary(self) -> GgufVocabulary | None:
        if self._has_json or (self._model_path / "tiktoken.model").exists():
            return None
        from proa.chat.gguf_vocabulary import GgufVocabulary  # numpy: not before it is needed
        from proa.gguf.model import GgufModel

        for place in (self._model_path, self._expert_path):
            if place is not None and (place.suffix == ".gguf" or any(place.glob("*.gguf"))):
                model = GgufModel.open(place)
                return GgufVocabulary.read(model.metadata, model.path.name)
        return None
