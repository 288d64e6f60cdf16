"""Contract: our chat templates render what transformers' `apply_chat_template` renders, and fail as the caller's fault."""

from functools import cache
from typing import Any

import jinja2
import pytest

from support.tiny_models import CHAT_TEMPLATE, tiny_tokenizer
from trimtab_engine.errors import ModelLoadError, RequestError
from trimtab_engine.server.text.chat_template import ChatTemplate

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, multi_step_tool=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content|string + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
EXTRAS = (
    "{% set d = dict(a=1, b='<é>') %}{{ d | tojson }}{{ d | tojson(indent=2) }}\n"
    "    {% for message in messages %}\n"
    "    {% if message.get('name') is none or not message.name %}{% continue %}{% endif %}\n"
    "{% generation %}{{ message.name }}:{{ message.content|upper }}{% endgeneration %}\n"
    "    {% break %}\n"
    "    {% endfor %}\n"
)
TEMPLATES = {
    "smollm2": SMOLLM2,
    "llama3": LLAMA3,
    "qwen": QWEN,
    "mistral": MISTRAL,
    "tiny": CHAT_TEMPLATE,
    "extras": EXTRAS,
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

USER: dict[str, Any] = {"role": "user", "content": "What is 1 < 2 & 'é' 你好 🙂?"}
ASSISTANT: dict[str, Any] = {"role": "assistant", "content": "<think>hm</think>\n\nTrue.  "}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "three turns": [USER, ASSISTANT, {"role": "user", "content": "  Why?\n"}],
    "system first": [{"role": "system", "content": " Be brief. "}, USER],
    "null fields": [{**USER, "name": None, "tool_calls": None}],
    "a name": [{**USER, "name": "anna"}],
    "tool": [USER, ASSISTANT, {"role": "tool", "content": '{"t": 1}', "tool_call_id": "x"}],
    "unknown role": [{"role": "pirate", "content": "arr"}],
    "wrong order": [ASSISTANT, USER],
}


@cache
def theirs() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), **TOKENS)


def expected(template: str, chat: list[dict[str, Any]], **options: Any) -> str | None:
    """What transformers renders; None when it raises."""
    try:
        text: str = theirs().apply_chat_template(chat, chat_template=template, tokenize=False, **options)
    except (jinja2.exceptions.TemplateError, TypeError, ValueError):
        return None
    return text


def ours(template: str, chat: list[dict[str, Any]], **options: Any) -> str | None:
    try:
        return ChatTemplate(template, TOKENS).render(chat, **options)
    except RequestError:
        return None


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_renders_as_transformers_does(
    template: str, chat: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    want = expected(template, chat, add_generation_prompt=add_generation_prompt)
    assert ours(template, chat, add_generation_prompt=add_generation_prompt) == want


def test_the_comparison_sees_texts_and_refusals() -> None:
    # Guards the parametrised test above against comparing None with None throughout.
    results = {
        (t, c): expected(TEMPLATES[t], CHATS[c], add_generation_prompt=True) for t in TEMPLATES for c in CHATS
    }
    refused = {key for key, text in results.items() if text is None}
    assert refused == {
        ("mistral", "system first"),
        ("mistral", "tool"),
        ("mistral", "unknown role"),
        ("mistral", "wrong order"),
        ("tiny", "unknown role"),
    }


@pytest.mark.parametrize("template", [SMOLLM2, LLAMA3, QWEN], ids=["smollm2", "llama3", "qwen"])
@pytest.mark.parametrize("ending", ["The answer", "The answer is  "])
def test_a_continued_message_ends_as_transformers_ends_it(template: str, ending: str) -> None:
    chat = [USER, {"role": "assistant", "content": ending}]
    want = expected(template, chat, continue_final_message=True, add_generation_prompt=False)
    assert want is not None
    assert ours(template, chat, continue_final_message=True, add_generation_prompt=False) == want


def test_extra_variables_reach_the_template() -> None:
    want = expected(QWEN, [USER], add_generation_prompt=True, enable_thinking=False)
    assert ours(QWEN, [USER], extra={"enable_thinking": False}) == want
    assert want is not None
    assert want.endswith("</think>\n\n")


def test_extra_variables_may_not_replace_the_request() -> None:
    with pytest.raises(RequestError, match=r"chat_template_kwargs\.messages"):
        ChatTemplate(SMOLLM2, TOKENS).render([USER], extra={"messages": []})


def test_the_template_s_verdict_is_passed_on() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        ChatTemplate(MISTRAL, TOKENS).render([ASSISTANT])
    assert caught.value.param == "messages"


def test_a_message_without_content_is_the_callers_fault() -> None:
    with pytest.raises(RequestError):
        ChatTemplate(SMOLLM2, TOKENS).render([{"role": "user"}])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.fromkeys.__self__ }}",
        "{% set ns = namespace(__class__=1) %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
    ],
)
def test_a_hostile_template_gets_nowhere(attack: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(attack, TOKENS).render([USER])


def test_a_template_that_does_not_compile_names_its_line() -> None:
    with pytest.raises(ModelLoadError, match="line 2"):
        ChatTemplate("{{ a }}\n{% for %}", TOKENS)
