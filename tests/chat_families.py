"""Chat templates that behave as those of model families of 2024 to 2026 do, in few lines of our own.

Each keeps what is difficult in its family: which turns lose their thoughts, what the generation prompt begins,
where tools stand, how calls are written, what ends a turn. ``⟪`` and ``⟫`` stand around what the model writes:
``tagged`` makes ``{% generation %}`` of them, with which transformers tells the assistant's tokens, and
``untagged`` drops them.
"""

# ruff: noqa: E501
from __future__ import annotations

from typing import Any

Message = dict[str, Any]
_LOOP = "{% for m in messages %}"
_END = "{% endfor %}"
# Sets ``thought`` and ``said`` of an answer, whose thoughts are in a field of their own or in the content.
_SPLIT = (
    "{% set said = m.content or '' %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)
_LAST_QUERY = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_HERMES_CALLS = (
    '{% for call in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}}"
    "\n</tool_call>{% endfor %}"
)
_XML_CALLS = (
    "{% for call in m.tool_calls or [] %}\n<function={{ call.function.name }}>{% for key, value in "
    "call.function.arguments.items() %}\n<parameter={{ key }}>\n{{ value }}\n</parameter>{% endfor %}"
    "\n</function>{% endfor %}"
)
_TOOLS = "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}"


def _chatml(answer: str, *, system: str = "", prompt: str = "", sets: str = "", role: str = "m.role") -> str:
    """Return a template of <|im_start|> and <|im_end|>, in which ``answer`` is what an answer becomes."""
    head = (
        "{% set first = messages[0].content if messages[0].role == 'system' else '" + system + "' %}"
        "{% if first or tools %}<|im_start|>system\n{{ first }}{% if tools %}" + _TOOLS + "{% endif %}"
        "<|im_end|>\n{% endif %}"
    )
    return (
        sets
        + head
        + _LOOP
        + "{% if m.role == 'assistant' %}<|im_start|>assistant\n"
        + answer
        + "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "<|im_end|>\n{% elif m.role != 'system' %}<|im_start|>{{ " + role + " }}\n{{ m.content }}<|im_end|>\n"
        "{% endif %}"
        + _END
        + "{% if add_generation_prompt %}<|im_start|>assistant\n"
        + prompt
        + "{% endif %}"
    )


_KEEPS_LAST = "{% if loop.index0 > ns.last and (loop.last or thought) %}"
_NO_THINK = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
_QWEN_2_5 = "⟪{{ m.content }}" + _HERMES_CALLS + "<|im_end|>\n⟫"
_QWEN_3 = (
    _SPLIT
    + "⟪"
    + _KEEPS_LAST
    + "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}"
    + _HERMES_CALLS
    + "<|im_end|>\n⟫"
)
_OPEN_THINK = (  # the generation prompt begins the thought, so answers do not
    _SPLIT + "{% if loop.index0 > ns.last %}<think>\n{% endif %}⟪{% if loop.index0 > ns.last %}{{ thought }}"
    "\n</think>\n\n{% endif %}{{ said }}" + _XML_CALLS + "<|im_end|>\n⟫"
)
_ALWAYS_OPEN = (
    _SPLIT
    + "{% set open = loop.index0 > ns.last and thought %}{% if open %}<think>\n{% endif %}⟪{% if open %}"
    "{{ thought }}\n</think>{% else %}<think></think>{% endif %}{{ said }}" + _XML_CALLS + "<|im_end|>\n⟫"
)


def _llama(begin: str, end: str, eot: str, *, date: str = "") -> str:
    head = "{{ bos_token }}{% set last = messages | length %}"
    system = (
        begin + "system" + end + "\n\n" + date + "{{ messages[0].content if messages[0].role == 'system' }}"
    )
    calls = (
        '{% for call in m.tool_calls %}{"name": "{{ call.function.name }}", "parameters": '
        "{{ call.function.arguments | tojson }}}{% endfor %}"
    )
    return (
        head
        + system
        + "{% if tools %}Tools:"
        + _TOOLS
        + "{% endif %}"
        + eot
        + _LOOP
        + "{% if m.role == 'assistant' %}"
        + begin
        + "assistant"
        + end
        + "\n\n⟪{% if m.tool_calls %}"
        + calls
        + "{% else %}{{ m.content | trim }}{% endif %}"
        + eot
        + "⟫{% elif m.role == 'tool' %}"
        + begin
        + "ipython"
        + end
        + "\n\n{{ m.content | tojson }}"
        + eot
        + "{% elif m.role != 'system' %}"
        + begin
        + "{{ m.role }}"
        + end
        + "\n\n{{ m.content | trim }}"
        + eot
        + "{% endif %}"
        + _END
        + "{% if add_generation_prompt %}"
        + begin
        + "assistant"
        + end
        + "\n\n{% endif %}"
    )


_HARMONY = (
    "<|start|>system<|message|>Date: {{ today or '2026-01-01' }}<|end|>"
    "{% if tools or messages[0].role == 'system' %}<|start|>developer<|message|>"
    "{{ messages[0].content if messages[0].role == 'system' }}{% if tools %}" + _TOOLS + "{% endif %}<|end|>"
    "{% endif %}" + _LOOP + "{% if m.role == 'assistant' %}{% set later = namespace(final=false) %}"
    "{% for n in messages[loop.index:] %}{% if n.role == 'assistant' and not n.tool_calls %}"
    "{% set later.final = true %}{% endif %}{% endfor %}<|start|>assistant⟪{% if m.tool_calls %}"
    "{% if m.thinking and not later.final %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "<|start|>assistant{% endif %} to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json"
    "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% elif loop.last %}"
    "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
    "<|channel|>final<|message|>{{ m.content }}<|return|>{% else %}<|channel|>final<|message|>{{ m.content }}"
    "<|end|>{% endif %}⟫{% elif m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|message|>"
    "{{ m.content | tojson }}<|end|>{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% endif %}" + _END + "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_DEEPSEEK_CALLS = (
    "{% for call in m.tool_calls or [] %}{{ '<|call|>' + call.function.name + '\n```json\n' + "
    "call.function.arguments + '\n```' }}{% endfor %}"
)


def _deepseek(answer: str, prompt: str) -> str:
    return (
        "{{ bos_token }}"
        + _LOOP
        + "{% if m.role == 'system' %}{{ m.content }}{% endif %}"
        + _END
        + _LOOP
        + "{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'tool' %}<|output|>{{ m.content }}"
        "<|endoutput|>{% elif m.role == 'assistant' %}"
        + _SPLIT
        + "<|Assistant|>"
        + answer
        + "{% endif %}"
        + _END
        + "{% if add_generation_prompt %}<|Assistant|>"
        + prompt
        + "{% endif %}"
    )


_TEXT = "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}"


def _gemma(begin: str, end: str, thought: str) -> str:
    return (
        "{{ bos_token }}"
        + _LAST_QUERY
        + _LOOP
        + "{% if m.role == 'assistant' %}"
        + begin
        + "model\n⟪"
        + thought
        + "{% if m.content %}"
        + _TEXT
        + "{% endif %}{% for call in m.tool_calls or [] %}<|call|>"
        "{{ call.function.name }}{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }}"
        "{% endfor %}{% endfor %}" + end + "\n⟫{% elif m.role != 'system' %}" + begin + "user\n"
        "{% if loop.index0 <= 1 and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
        "{% if loop.first and tools %}"
        + _TOOLS
        + "{% endif %}"
        + _TEXT
        + end
        + "\n{% endif %}"
        + _END
        + "{% if add_generation_prompt %}"
        + begin
        + "model\n{% endif %}"
    )


_MISTRAL = (
    "{{ bos_token }}" + _LAST_QUERY + _LOOP + "{% if m.role == 'system' %}[SYSTEM]{{ m.content }}[/SYSTEM]"
    "{% elif m.role == 'user' %}{% if tools and loop.index0 == ns.last %}[TOOLS]{{ tools | tojson }}[/TOOLS]"
    "{% endif %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
    "{% else %}⟪{% if m.tool_calls %}[CALLS]{% for call in m.tool_calls %}{{ call.function | tojson }}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}{{ eos_token }}⟫{% endif %}" + _END
)
_GLM = (
    "<|sop|>{% if tools %}<|system|>"
    + _TOOLS
    + "{% endif %}"
    + _LAST_QUERY
    + _LOOP
    + "{% set follows = not loop.first and messages[loop.index0 - 1].role == 'assistant' %}"
    "{% if m.role == 'assistant' %}"
    + _SPLIT
    + "<|assistant|>⟪{{ '\n' }}<think>{% if loop.index0 > ns.last %}{{ thought }}"
    "{% endif %}</think>{% if said.strip() %}\n{{ said.strip() }}{% endif %}{% for call in m.tool_calls or [] %}"
    "\n{{ call.function.name }}{% for key, value in call.function.arguments.items() %}\n<key>{{ key }}</key>"
    "<value>{{ value }}</value>{% endfor %}{% endfor %}{% if not loop.last %}"
    "{{ '<|observation|>' if m.tool_calls else '<|user|>' }}{% endif %}⟫{% elif m.role == 'system' %}<|system|>"
    "\n{{ m.content }}{% else %}{% if not follows %}{{ '<|observation|>' if m.role == 'tool' else '<|user|>' }}"
    "{% endif %}\n{{ m.content }}{% endif %}"
    + _END
    + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_KIMI = (
    "{% if tools %}<|im_system|>tools<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    + _LOOP
    + "{% if m.role == 'assistant' %}"
    + _SPLIT
    + "<|im_assistant|>assistant<|im_middle|>⟪<think>{% if loop.last %}"
    "{{ thought }}{% endif %}</think>{{ said }}{% if m.tool_calls %}<|calls|>{% for call in m.tool_calls %}"
    "<|call|>{{ call.id }}<|args|>{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}{% endfor %}<|endcalls|>{% endif %}<|im_end|>⟫"
    "{% else %}<|im_{{ m.role }}|>{{ m.name or m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endif %}"
    + _END
    + "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
_EXAONE = (
    _LAST_QUERY
    + "{% if tools %}[|system|]"
    + _TOOLS
    + "[|endofturn|]\n{% endif %}"
    + _LOOP
    + "{% if m.role == 'assistant' %}"
    + _SPLIT
    + "[|assistant|]\n<think>\n⟪{% if thought and loop.index0 > ns.last %}"
    "{{ thought }}{% endif %}\n</think>\n\n{{ said }}"
    + _HERMES_CALLS
    + "[|endofturn|]\n⟫{% else %}[|{{ m.role }}|]\n"
    "{{ m.content }}[|endofturn|]\n{% endif %}"
    + _END
    + "{% if add_generation_prompt %}[|assistant|]\n<think>\n{% endif %}"
)
_PHI = (
    _LOOP + "<|im_start|>{{ m.role }}<|im_sep|>{% if m.role == 'system' and tools %}" + _TOOLS + "{% endif %}"
    "{% if m.role == 'assistant' %}⟪{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<|im_end|>⟫"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}"
    + _END
    + "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)
_GRANITE = (
    "{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% if documents %}<|start_of_role|>documents<|end_of_role|>{% for each in documents %}{{ each.title }}: "
    "{{ each.text }}\n{% endfor %}<|end|>\n{% endif %}"
    + _LOOP
    + "<|start_of_role|>{{ m.role }}<|end_of_role|>"
    "{% if m.role == 'assistant' %}⟪{{ m.content }}{% if m.tool_calls %}<|tool_call|>{{ m.tool_calls | tojson }}"
    "{% endif %}<|end|>\n⟫{% else %}{{ m.content }}<|end|>\n{% endif %}"
    + _END
    + "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
_HYPERCLOVA = (
    "<|im_start|>tool_list\n{{ tools | tojson if tools }}<|im_end|>\n"
    + _LAST_QUERY
    + _LOOP
    + "{% if m.role == 'assistant' %}"
    + _SPLIT
    + "<|im_start|>assistant⟪{% if thought and loop.index0 > ns.last %}"
    "/think\n{{ thought }}<|im_end|>\n<|im_start|>assistant{% endif %}\n{{ said }}{% if m.tool_calls %} -> tool\n"
    "{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n⟫{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}" + _END + "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)

FAMILIES = {
    "Llama 3.1": _llama("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", date="Date: {{ date_string or '26 Jul 2024' }}\n"),
    "Llama 4": _llama("<|header_start|>", "<|header_end|>", "<|eot|>"),
    "Kanana": _llama("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "Qwen 2.5": _chatml(_QWEN_2_5, system="You are a model."),
    "Qwen 3": _chatml(_QWEN_3, sets=_LAST_QUERY, prompt=_NO_THINK),
    "Qwen 3.5": _chatml(_OPEN_THINK, sets=_LAST_QUERY, prompt="<think>\n"),
    "Nemotron": _chatml(_ALWAYS_OPEN, sets=_LAST_QUERY, prompt="<think>\n"),
    "OLMo": _chatml("⟪{{ m.content }}" + _XML_CALLS + "{{ '<|im_end|>' if not loop.last else eos_token }}⟫{{ '\n' if not loop.last }}"),
    "SmolLM3": _chatml(_QWEN_3, sets=_LAST_QUERY, system="Reasoning Mode: /think"),
    "A.X": _chatml(_QWEN_2_5, role="m.role | upper"),
    "Solar": _chatml(_QWEN_3, sets=_LAST_QUERY),
    "gpt-oss": _HARMONY,
    "DeepSeek V3": _deepseek("⟪{{ said }}" + _DEEPSEEK_CALLS + "{{ eos_token }}⟫", ""),
    "DeepSeek R1": _deepseek("⟪{{ said }}" + _DEEPSEEK_CALLS + "{{ eos_token }}⟫", "<think>\n"),
    "Gemma 3": _gemma("<|start_of_turn|>", "<|end_of_turn|>", ""),
    "Gemma 4": _gemma("<|turn|>", "<|endturn|>", "{% if m.reasoning_content and loop.index0 > ns.last %}<|channel|>thought\n{{ m.reasoning_content }}<|endchannel|>{% endif %}"),
    "Mistral": _MISTRAL,
    "GLM": _GLM,
    "Kimi": _KIMI,
    "EXAONE 4": _EXAONE,
    "HyperCLOVA X": _HYPERCLOVA,
    "Phi": _PHI,
    "Granite": _GRANITE,
}  # fmt: skip
CONTROL = (
    "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|im_middle|>", "<|im_system|>", "<|im_user|>", "<|im_tool|>",
    "<|im_assistant|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|header_start|>",
    "<|header_end|>", "<|eot|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>",
    "<|User|>", "<|Assistant|>", "<|output|>", "<|endoutput|>", "<|start_of_turn|>", "<|end_of_turn|>",
    "<|turn|>", "<|endturn|>", "<|endchannel|>", "[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[CALLS]", "<|sop|>",
    "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|calls|>", "<|endcalls|>", "<|args|>",
    "[|user|]", "[|assistant|]", "[|endofturn|]", "<|start_of_role|>", "<|end_of_role|>",
)  # fmt: skip


def untagged(template: str) -> str:
    return template.replace("⟪", "").replace("⟫", "")


def tagged(template: str) -> str:
    return template.replace("⟪", "{% generation %}").replace("⟫", "{% endgeneration %}")


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city: 도시의 날씨",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "도시"}},
            },
        },
    }
]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _answer(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def _asks(city: Any, **more: Any) -> list[Message]:
    call = {"name": "get_weather", "arguments": {"city": city}}
    calls = [{"id": "call00001", "type": "function", "function": call}]
    result = {
        "role": "tool",
        "name": "get_weather",
        "tool_call_id": "call00001",
        "content": f"12 C in {city}",
    }
    return [_answer("", tool_calls=calls, **more), result]


def _thinks(text: str) -> dict[str, str]:
    return {"reasoning_content": text}


_HAN = "\u1112\u1161\u11ab\u1100\u1173\u11af"  # decomposed
RECORDS: list[dict[str, Any]] = [
    {"messages": [_user("Hi?"), _answer("Hello.")]},
    {"messages": [_user("Hi?"), _answer("Hello."), _user("And?"), _answer("More of it.")]},
    {"messages": [{"role": "system", "content": "Be brief."}, _user("Hi?"), _answer("Yes."), _user("No?"), _answer("No.")]},
    {"messages": [_user(f"{_HAN} 물어요?"), _answer(f"{_HAN} 답."), _user("뷁 또?"), _answer("쀍쀍 🙂 끝.")]},
    {
        "messages": [
            _user("Why?"), _answer("So.", **_thinks("Since A.")), _user("Then?"), _answer("Nil.", **_thinks("It ends.")),
        ]
    },
    {
        "messages": [
            _user("Why?"), _answer("<think>\nSince A.\n</think>\n\nSo."), _user("Then?"),
            _answer("<think>\nIt ends.\n</think>\n\nNil."),
        ]
    },
    {"messages": [_user("Weather?"), *_asks("서울"), _answer("It is 12.")], "tools": TOOLS},
    {
        "messages": [
            _user("Weather?"), *_asks("Seoul", **_thinks("Ask.")), _answer("Warm.", **_thinks("Told.")),
            _user("부산?"), *_asks("부산", **_thinks("Again.")), _answer("Cold.", **_thinks("Told again.")),
        ],
        "tools": TOOLS,
    },
    {
        "messages": [
            _user("Weather?"), *_asks(1), *_asks(2), _answer("Warm.", **_thinks("Told.")), _user("Why?"), _answer("So."),
        ],
        "tools": TOOLS,
    },
]  # fmt: skip
