"""Everything textual about the served model, loaded from its files once the engine is ready (`AppState.text`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab_engine.model_files import ModelFiles
from trimtab_engine.server.text.chat_template import ChatTemplate
from trimtab_engine.server.text.tokenizer import Tokenizer

# generation_config.json's names; what a model's makers recommend is the default of a request that says nothing.
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ModelText:
    """Tokenizer, chat template (None: the model has none, chat is refused) and the model's own sampling defaults."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, files: ModelFiles) -> ModelText:
        """Read tokenizer and template; raises ModelLoadError naming the file. Takes up to a second for big vocabularies."""
        tokens = {"bos_token": files.bos_token, "eos_token": files.eos_token}
        template = None
        if files.chat_template is not None:
            template = ChatTemplate(
                files.chat_template, {name: token for name, token in tokens.items() if token is not None}
            )
        defaults = {
            name: value
            for name in _SAMPLING_DEFAULTS
            if isinstance(value := files.generation_config.get(name), int | float)
        }
        return cls(Tokenizer.from_file(files.tokenizer_json), template, defaults)
