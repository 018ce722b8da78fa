"""Small chat templates in the manner of each family: its switches, its way to write calls, its prompt."""

from __future__ import annotations

from case_writers import CB, CE, DSML, SB, SE, SEP

_HEAD = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- if message.tool_calls %}@BEGIN@
{%- for call in message.tool_calls %}{% set call = call.function %}@CALL@{% endfor %}@END@
{%- endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
@PROMPT@{% endif %}"""
_ENABLED = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
_THINKING = "{% if thinking is defined and thinking %}<think>{% else %}</think>{% endif %}"
_VALUE = "{{ value if value is string else value | tojson }}"
_ITEMS = "{% for key, value in call.arguments.items() %}"


def _template(begin: str, call: str, end: str, prompt: str) -> str:
    template = _HEAD
    for place, part in (("@BEGIN@", begin), ("@CALL@", call), ("@END@", end), ("@PROMPT@", prompt)):
        # A line break behind a block would be trimmed.
        template = template.replace(place, part.replace("\n", "{{ '\\n' }}"))
    return template


TEMPLATES = {
    "deepseek_v3": _template(
        SB, f"{CB}function{SEP}{{{{ call.name + '\\n```json\\n' + call.arguments + '\\n```' }}}}{CE}", SE, ""
    ),
    "deepseek_v31": _template(SB, f"{CB}{{{{ call.name + '{SEP}' + call.arguments }}}}{CE}", SE, _THINKING),
    "deepseek_v32": _template(
        f"\n\n<{DSML}function_calls>",
        f'\n<{DSML}invoke name="{{{{ call.name }}}}">{_ITEMS}\n<{DSML}parameter name="{{{{ key }}}}" '
        f"string=\"{{{{ 'true' if value is string else 'false' }}}}\">{_VALUE}</{DSML}parameter>{{% endfor %}}"
        f"\n</{DSML}invoke>",
        f"\n</{DSML}function_calls>",
        _THINKING,
    ),
    "glm45": _template(
        "",
        "\n<tool_call>{{ call.name }}" + _ITEMS + "\n<arg_key>{{ key }}</arg_key>\n<arg_value>" + _VALUE
        + "</arg_value>{% endfor %}\n</tool_call>",
        "",
        _ENABLED,
    ),
    "minimax_m2": _template(
        "\n<minimax:tool_call>",
        '\n<invoke name="{{ call.name }}">' + _ITEMS + '\n<parameter name="{{ key }}">' + _VALUE
        + "</parameter>{% endfor %}\n</invoke>",
        "\n</minimax:tool_call>",
        "<think>\n",
    ),
    "mistral": _template(
        "{{ raise_exception('ids of nine characters') if message.tool_calls[0].id | length != 9 }}[TOOL_CALLS] [",
        "{{ ', ' if not loop.first }}"
        '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}',
        "]",
        "",
    ),
    "qwen3": _template(
        "",
        '\n<tool_call>\n{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>',
        "",
        _ENABLED,
    ),
    "qwen3_coder": _template(
        "",
        "\n<tool_call>\n<function={{ call.name }}>" + _ITEMS + "\n<parameter={{ key }}>\n" + _VALUE
        + "\n</parameter>{% endfor %}\n</function>\n</tool_call>",
        "",
        "",
    ),
}  # fmt: skip
TEMPLATES["glm47"] = "{% set keeps_thoughts = clear_thinking %}" + TEMPLATES["glm45"].replace("{{ '\\n' }}", "")
