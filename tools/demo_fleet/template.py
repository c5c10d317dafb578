"""The special tokens and the chat templates."""

from __future__ import annotations

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT, TOOL = "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"
SPECIAL = [PAD, BOS, END, SYSTEM, USER, ASSISTANT, TOOL]
TOOL_MARKS = ["<tool_call>", "</tool_call>", "<tools>", "</tools>"]

_CONTENT = """\
{%- macro words(content) -%}
  {%- if content is string -%}
    {{- content | trim -}}
  {%- elif content -%}
    {%- for part in content -%}
      {%- if part.text is defined -%}{{- part.text | trim -}}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
"""

_PLAIN_TURN = """\
{%- for message in messages -%}
  {%- if message.role in ['system', 'developer'] -%}
    {{- '<|system|>' -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<|assistant|>' -}}
  {%- else -%}
    {{- '<|user|>' -}}
  {%- endif -%}
  {{- words(message.content) + '<|end|>' -}}
{%- endfor -%}
"""

_TOOL_HEAD = """\
{%- if tools -%}
  {{- '<|system|>' -}}
  {%- if messages and messages[0].role in ['system', 'developer'] -%}
    {{- words(messages[0].content) + '\\n' -}}
  {%- endif -%}
  {{- '<tools>' -}}
  {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
  {{- '\\n</tools><|end|>' -}}
{%- elif messages and messages[0].role in ['system', 'developer'] -%}
  {{- '<|system|>' + words(messages[0].content) + '<|end|>' -}}
{%- endif -%}
"""

_TOOL_TURN = """\
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|assistant|>' + words(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {%- set arguments = function.arguments -%}
      {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
      {{- arguments if arguments is string else (arguments | tojson) -}}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|end|>' -}}
  {%- elif message.role == 'tool' -%}
    {{- '<|tool|>' + words(message.content) + '<|end|>' -}}
  {%- elif message.role in ['system', 'developer'] -%}
    {%- if not loop.first -%}{{- '<|system|>' + words(message.content) + '<|end|>' -}}{%- endif -%}
  {%- else -%}
    {{- '<|user|>' + words(message.content) + '<|end|>' -}}
  {%- endif -%}
{%- endfor -%}
"""

_ASK = "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"

PLAIN_CHAT = _CONTENT + "{{- bos_token -}}" + _PLAIN_TURN + _ASK
TOOL_CHAT = _CONTENT + _TOOL_HEAD + _TOOL_TURN + _ASK
