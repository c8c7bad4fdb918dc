"""Conversations that chat templates are tried on: every role, tools, documents, an open last turn, hostile texts."""

import datetime

NOW = datetime.datetime(2026, 2, 3, 4, 5, 6)

_SYSTEM = {"role": "system", "content": "  Be brief.\n"}
_USER = {"role": "user", "content": "What is 37 + 25?\n"}
_ANSWER = {"role": "assistant", "content": ' 62 <ok> & "so on" \U0001f600 '}
_THANKS = {"role": "user", "content": "\u4f60\u597d, and\t3 > 2?"}
_REASONED = {"role": "assistant", "content": "<think>\nadd them\n</think>\n\nIt is 62."}
_CALL = {"type": "function", "id": "a1b2c3d4e", "function": {"name": "add", "arguments": {"a": 37, "b": "25 \u00e9 <"}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "name": "add", "tool_call_id": "a1b2c3d4e", "content": '{"sum": 62}'}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": 'Adds "two" numbers & more: \u00e9',
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "first"},
                    "b": {"type": "string", "enum": ["1", "<2>"]},
                },
                "required": ["a"],
            },
        },
    }
]
DOCUMENTS = [{"title": "Sums", "text": "37 + 25 is <62>."}, {"title": "Other", "text": "No."}]

CASES = {
    "one turn": {"messages": [_USER]},
    "system": {"messages": [_SYSTEM, _USER]},
    "many turns": {"messages": [_SYSTEM, _USER, _ANSWER, _THANKS]},
    "no header": {"messages": [_USER, _ANSWER], "add_generation_prompt": False},
    "thinking": {"messages": [_USER, _REASONED, _THANKS]},
    "thinking last": {"messages": [_USER, _REASONED], "add_generation_prompt": False},
    "reasoning apart": {
        "messages": [_USER, {"role": "assistant", "content": "62", "reasoning_content": "add\n"}, _THANKS],
    },
    "continued": {
        "messages": [_USER, {"role": "assistant", "content": "It is "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "tools": {"messages": [_SYSTEM, _USER], "tools": TOOLS},
    "tool result": {"messages": [_USER, _CALLING, _RESULT], "tools": TOOLS},
    "after a tool": {"messages": [_SYSTEM, _USER, _CALLING, _RESULT, _ANSWER, _THANKS], "tools": TOOLS},
    "documents": {"messages": [_USER], "documents": DOCUMENTS},
    "no thinking": {"messages": [_USER], "variables": {"enable_thinking": False}},
}
