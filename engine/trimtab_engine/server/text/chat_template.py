"""Chat templates: messages → prompt text, with the sandbox, settings and extras that transformers gives templates.

Made by the server from the model's files, used by the chat and tokenize routes. A contract test holds the result equal
to `apply_chat_template` of transformers, which this process must not import (it takes seconds and hundreds of MB). A
template comes with a model and is therefore foreign code: it runs in jinja's immutable sandbox and sees plain data only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from trimtab_engine.errors import ModelLoadError, RequestError

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; serving passes it through."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Namespace(jinja2.utils.Namespace):
    """jinja's `namespace()` without underscore attributes, which lead to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    # A function, so that templates do not get at the class and its methods.
    return dict(*args, **kwargs)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML, which would change prompts.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    # Local time without zone, as in transformers: templates print a date for the model to read.
    return datetime.now().strftime(pattern)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _dict
    environment.globals["namespace"] = _Namespace
    return environment


class ChatTemplate:
    """A compiled chat template with the special tokens that it may mention (`bos_token`, `eos_token`, …)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelLoadError when the template does not compile."""
        self._source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise ModelLoadError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Prompt text. `messages` are plain JSON objects; keys that are null count as absent.

        `extra` are the caller's `chat_template_kwargs`. Raises RequestError when the template refuses the messages
        (roles must alternate, unknown role) or does not get what it needs: the conversation is the caller's.
        """
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if not chat:
            raise RequestError("messages: [] is not allowed; at least one message", param="messages")
        if clash := _RESERVED & set(extra or ()):
            raise RequestError(
                f"chat_template_kwargs.{min(clash)} is not allowed; the name is taken by the request itself",
                param="chat_template_kwargs",
            )
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message: true is not allowed together with add_generation_prompt: true",
                    param="continue_final_message",
                )
            chat[-1] = _tagged(chat[-1])
        variables = {**self._special_tokens, **(extra or {})}
        try:
            text = self._template.render(
                messages=chat,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        # A template is a program over the caller's data: whatever it trips over, the caller must hear of it.
        except (
            jinja2.exceptions.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
        ) as error:
            raise RequestError(
                f"messages: the model's chat template refused them: {error}", param="messages"
            ) from error
        return _untagged(text) if continue_final_message else text


def _tagged(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a tag at its end, by which its end is found again in the rendered text."""
    content = message.get("content")
    if not isinstance(content, str):
        raise RequestError(
            "continue_final_message: the final message has no text content to continue", param="messages"
        )
    return {**message, "content": content + _CONTINUE_TAG}


def _untagged(text: str) -> str:
    position = text.rfind(_CONTINUE_TAG.strip())
    if position < 0:
        raise RequestError(
            "continue_final_message: the model's chat template drops the end of the final message",
            param="messages",
        )
    # A template that trims its messages has taken the tag's space away: then trailing space before it goes too.
    if text.startswith(_CONTINUE_TAG, position):
        return text[:position]
    return text[:position].rstrip()
