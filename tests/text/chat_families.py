# ruff: noqa: E501 - templates are written as their families write them, in long lines
"""Chat templates with the structure of published families', in our own words, and a tokenizer that spells ids out.

Each shows what its family's template does: where the system message goes, how tools, calls and results are written, which
Jinja it needs. (The published ones themselves are rendered in tests/reference/test_published_templates.py.)
"""

from collections.abc import Sequence

_CHATML = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")

_LLAMA31 = """
{{- bos_token }}
{%- if not date is defined %}
    {%- if strftime_now is defined %}{%- set date = strftime_now("%d %b %Y") %}{%- else %}{%- set date = "none" %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today: " + date + "\\n\\n" + system + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- set first = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {{- "Functions:\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- elif message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_QWEN25 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
{%- else %}
    {%- set system = 'You are helpful.' %}
{%- endif %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>" }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' ~ (tool_call.arguments | tojson) ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_QWEN3 = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_question=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last_question = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_question and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' }}
            {{- tool_call.function | tojson(sort_keys=true) }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not loop.first or message.role == 'user' %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

_MISTRAL = """
{%- set rest = messages %}
{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}
    {%- set rest = messages[1:] %}
{%- endif %}
{%- set questions = rest | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == questions[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- for key, value in tool.function.items() if key != "return" %}
                    {{- '"' + key + '": ' }}{{- value | tojson if value is not string else '"' + value + '"' }}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system is defined %}
            {{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("call ids have 9 characters") }}
            {%- endif %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {{- ', "id": "' + tool_call.id + '"}' }}
        {%- endfor %}
        {{- "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("unknown role") }}
    {%- endif %}
{%- endfor %}
"""

_GEMMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\n\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("turns must alternate") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\n' }}
{%- endif -%}
"""

_SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nA small model.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|><|end|>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)

_DEEPSEEK = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(after_tool=false, system='') %}{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{% set ns.system = message['content'] %}{%- endif %}{%- endfor %}"
    "{{ bos_token }}{{ ns.system }}{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{%- set ns.after_tool = false -%}{{ '<\uff5cUser\uff5c>' + message['content'] }}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['tool_calls'] %}"
    "{{ '<\uff5cAssistant\uff5c><\uff5ctool\u2581calls\u2581begin\uff5c>' }}{%- for tool in message['tool_calls'] %}"
    "{{ tool['type'] + '<\uff5ctool\u2581sep\uff5c>' + tool['function']['name'] + '\\n```json\\n' }}"
    "{{ tool['function']['arguments'] | tojson }}{{ '\\n```' }}{%- endfor %}{{ '<\uff5ctool\u2581calls\u2581end\uff5c>' }}"
    "{%- elif message['role'] == 'assistant' %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{%- if ns.after_tool %}{{ content }}{%- else %}{{ '<\uff5cAssistant\uff5c>' + content }}{%- endif %}"
    "{{ '<\uff5cend\u2581of\u2581sentence\uff5c>' }}{%- endif %}"
    "{%- if message['role'] == 'tool' %}{%- set ns.after_tool = true -%}"
    "{{ '<\uff5ctool\u2581output\u2581begin\uff5c>' + message['content'] + '<\uff5ctool\u2581output\u2581end\uff5c>' }}{%- endif %}"
    "{%- endfor -%}{% if add_generation_prompt and not ns.after_tool %}{{ '<\uff5cAssistant\uff5c><think>\\n' }}{% endif %}"
)

# Documents, JSON in ASCII with its own separators, marked assistant turns, a loop left early, a macro.
_COMMAND = """
{%- macro turn(role, text) -%}
<|START|><|{{ role }}|>{{ text }}<|END|>
{%- endmacro -%}
{{ bos_token }}
{%- if documents %}
    {%- for document in documents %}
        {{- turn('SYSTEM', document | tojson(ensure_ascii=true, separators=(',', ':'))) }}
    {%- endfor %}
{%- endif %}
{%- for tool in tools or [] %}
    {{- turn('SYSTEM', tool.function.description | tojson(ensure_ascii=true)) }}
    {%- break %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ turn('CHATBOT', message.content) }}{% endgeneration %}
    {%- elif message.role == 'tool' %}
        {%- continue %}
    {%- else %}
        {{- turn(message.role | upper, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|START|><|CHATBOT|>{% endif %}
"""

# name -> (template, special tokens: begin, end, others)
TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "llama3.1": (
        _LLAMA31,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
    ),
    "qwen2.5": (_QWEN25, _CHATML),
    "qwen3": (_QWEN3, _CHATML),
    "mistral": (
        _MISTRAL,
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
    ),
    "gemma": (_GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")),
    "smollm2": (_SMOLLM2, _CHATML),
    "phi": (
        _PHI,
        ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>", "<|end|>"),
    ),
    "deepseek": (
        _DEEPSEEK,
        (
            *("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>"),
            *("<\uff5cAssistant\uff5c>", "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581sep\uff5c>"),
            *("<\uff5ctool\u2581calls\u2581end\uff5c>", "<\uff5ctool\u2581output\u2581begin\uff5c>"),
            "<\uff5ctool\u2581output\u2581end\uff5c>",
        ),
    ),
    "command": (_COMMAND, ("<BOS>", "<EOS>", "<|START|>", "<|END|>", "<|SYSTEM|>", "<|USER|>", "<|CHATBOT|>")),
}  # fmt: skip


class Spelled:
    """A tokenizer of a template and special tokens (begin and end first) whose ids are not encoded: `parts` keeps them."""

    bos_id, eos_id, adds_bos = 0, 1, True  # it would begin every text by itself

    def __init__(self, template: str, specials: Sequence[str]):
        self.chat_template = template
        self.special_tokens = {name: i for i, name in enumerate(specials)}

    def token_id(self, special: str) -> int:
        return self.special_tokens[special]

    def encode_parts(self, parts: Sequence[str | int]) -> list[str | int]:
        return [part for part in parts if part != ""]

    def spell(self, parts: Sequence[str | int]) -> str:
        names = list(self.special_tokens)
        return "".join(part if isinstance(part, str) else names[part] for part in parts)
