"""Chat templates that write what the published templates of well-known models write, and a tokenizer for them.

The templates are this project's own. Every turn, prompt and tool call is, byte for byte, what the template of the named
model writes; only the sentences that present the tools to the model are shorter."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

_QWEN_TOOLS = (
    "{{ 'Tools:' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}"
    '{{ \'\\n\\nA call:\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>\' }}'
)
_QWEN_RESULT = (
    "{% if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
)
QWEN25 = (
    # Like Qwen/Qwen2.5-0.5B-Instruct: always a system turn; arguments through tojson.
    "{% set system = messages[0].content if messages[0].role == 'system' else "
    "'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}"
    "{{ '<|im_start|>system\\n' + system }}"
    "{% if tools %}{{ '\\n\\n' }}" + _QWEN_TOOLS + "{% endif %}{{ '<|im_end|>\\n' }}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}" + _QWEN_RESULT + "{% elif not (loop.first and m.role == 'system') %}"
    "{{ '<|im_start|>' + m.role }}{% if m.content or not m.tool_calls %}{{ '\\n' + m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    '{{ \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN3 = (
    # Like Qwen/Qwen3-0.6B: thoughts stay only after the last question, where a last turn without any gets an empty
    # block; arguments that are text are inserted as they are.
    "{% if tools %}{{ '<|im_start|>system\\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}"
    + _QWEN_TOOLS
    + "{{ '<|im_end|>\\n' }}"
    "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% set ns = namespace(question=messages | length - 1, found=false) %}"
    "{% for m in messages | reverse %}"
    "{% if not ns.found and m.role == 'user' and not "
    "(m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{% set ns.found = true %}{% set ns.question = loop.revindex0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m.content or '' %}"
    "{% if m.role == 'tool' %}" + _QWEN_RESULT + "{% elif m.role == 'assistant' %}"
    "{% set thoughts = '' %}"
    "{% if m.reasoning_content is string %}{% set thoughts = m.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{% endif %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.index0 > ns.question and (loop.last or thoughts) %}"
    "{{ '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
    "{% else %}{{ content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    "{% if content or not loop.first %}{{ '\\n' }}{% endif %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}{{ '}\\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% elif not (loop.first and m.role == 'system') %}"
    "{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)
_LLAMA_TURN = (
    "{% macro head(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{% endmacro %}{{ bos_token }}"
)
LLAMA3 = (
    # Like meta-llama/Meta-Llama-3-8B-Instruct: knows no tools.
    _LLAMA_TURN + "{% for m in messages %}{{ head(m.role) + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}"
)
LLAMA31 = (
    # Like meta-llama/Llama-3.1-8B-Instruct: always a system turn, tools in the first user turn, and one call per turn,
    # which replaces the turn's content.
    _LLAMA_TURN + "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
    "{{ head('system') }}{% if tools is not none %}{{ 'Environment: ipython\\n' }}{% endif %}"
    "{{ 'Cutting Knowledge Date: December 2023\\nToday Date: ' + (date_string or '26 Jul 2024') + '\\n\\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}{{ '<|eot_id|>' }}"
    "{% for m in turns %}"
    "{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one tool call per turn') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}"
    "{{ head('assistant') + '{\"name\": \"' + call.name + '\", \"parameters\": ' }}"
    "{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}"
    "{% elif m.role == 'tool' %}{{ head('ipython') }}{{ m.content | tojson }}{{ '<|eot_id|>' }}"
    "{% else %}{{ head(m.role) }}"
    "{% if loop.first and tools is not none %}"
    '{{ \'Answer by {"name": name, "parameters": object} to call one of these.\\n\\n\' }}'
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}"
    "{% endif %}{{ m.content | trim + '<|eot_id|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}"
)
GEMMA = (
    # Like google/gemma-2-2b-it: no system turn, no tools, roles in turns.
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim }}"
    "{{ '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
MISTRAL = (
    # Like mistralai/Mistral-Nemo-Instruct-2407: roles take turns, calls as one list with ids of nine characters, tools
    # before the last question, nothing before the assistant's text.
    "{{ bos_token }}{% set ns = namespace(question=-1, asks=true) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}"
    "{% if m.role not in ('system', 'tool') and not m.tool_calls %}"
    "{% if (m.role == 'user') != ns.asks %}{{ raise_exception('roles must take turns') }}{% endif %}"
    "{% set ns.asks = not ns.asks %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.question %}"
    "{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST]' }}"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}"
    "{{ m.content + '[/INST]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS][' }}"
    "{% for call in m.tool_calls %}"
    "{% if call.id is undefined or call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "{{ (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}{{ ', ' if not loop.last }}"
    "{% endfor %}{{ ']' + eos_token }}"
    "{% elif m.role == 'assistant' %}{{ m.content + eos_token }}"
    "{% elif m.role == 'tool' %}"
    "{{ '[TOOL_RESULTS]{\"content\": ' + m.content + ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Chat:
    template: str
    bos: str | None
    end: str
    """Token that ends a turn: the tokenizer's eos_token."""


CHATS = {
    "qwen25": Chat(QWEN25, None, "<|im_end|>"),
    "qwen3": Chat(QWEN3, None, "<|im_end|>"),
    "llama3": Chat(LLAMA3, "<|begin_of_text|>", "<|eot_id|>"),
    "llama31": Chat(LLAMA31, "<|begin_of_text|>", "<|eot_id|>"),
    "gemma": Chat(GEMMA, "<bos>", "<end_of_turn>"),
    "mistral": Chat(MISTRAL, "<s>", "</s>"),
}
SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens of their own that decoding keeps, as in Qwen3."""
MERGES = (
    *(("Ġ", "t"), ("h", "e"), ("i", "n"), ("e", "r"), ("t", "o"), ("o", "l"), ("Ġt", "he"), ("to", "ol")),
    *((":", "Ġ"), ('"', ":"), ('"', "}")),
)
"""Some cross the borders of JSON. What the pre-tokenizer splits never meets."""


def make_chat_tokenizer(chat: Chat, *, vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with all 256 bytes, a few merges and the special tokens of every template here.

    Padded to `vocab_size` with words `w<id>` that text never encodes to. Raises ValueError for a smaller one than the
    tokens need.
    """
    tokens = [*sorted(ByteLevel.alphabet()), *("".join(merge) for merge in MERGES)]
    room = vocab_size - len(SPECIALS) - len(PLAIN)
    if room < len(tokens):
        raise ValueError(f"vocab_size {vocab_size}: must be at least {vocab_size - room + len(tokens)}")
    tokens += [f"w{i}" for i in range(len(tokens), room)]
    core = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(MERGES)))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    core.decoder = ByteLevelDecoder()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=chat.bos,
        eos_token=chat.end,
        pad_token="<|endoftext|>",
        chat_template=chat.template,
    )
