"""Folders of the demo model, its special tokens, and the sizes of both models.

Invariant: the draft model shares the tokenizer of the main model, so its folder contains none.
"""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig

ASSETS = Path(__file__).resolve().parents[2] / "assets"
MAIN = ASSETS / "demo"
DRAFT = ASSETS / "demo-draft"

BEGIN, END = "<|begin|>", "<|end|>"
SPECIALS = [BEGIN, END, "<|system|>", "<|user|>", "<|assistant|>"]
BEGIN_ID, END_ID = 0, 1
VOCABULARY = 2048
CONTEXT = 1024
ROPE_THETA = 10000.0

CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}"
    "{%- if tools %}"
    "{{- '<|system|>You can call these functions:\\n' }}"
    "{%- for tool in tools %}"
    "{%- set properties = (tool.function.parameters or {}).properties or {} %}"
    "{{- tool.function.name + '(' + (properties | join(', ')) + ')' }}"
    "{{- (': ' + tool.function.description if tool.function.description else '') + '\\n' }}"
    "{%- endfor %}"
    '{{- \'To call one, answer with {"name": its name, "arguments": {its arguments}}.<|end|>\' }}'
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- set role = 'user' if message['role'] == 'tool' else message['role'] %}"
    "{%- if role not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('the demo model knows only the roles system, user, assistant and tool') }}"
    "{%- endif %}"
    "{{- '<|' + role + '|>' + ((message['content'] or '') | trim) }}"
    "{%- for call in message['tool_calls'] or [] %}"
    '{{- \'{"name": "\' + call.function.name + \'", "arguments": \' + (call.function.arguments | tojson) + \'}\' }}'
    "{%- endfor %}"
    "{{- '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
GENERATION = {
    "bos_token_id": BEGIN_ID,
    "do_sample": True,
    "eos_token_id": END_ID,
    "temperature": 0.7,
    "top_p": 0.95,
}


def config(hidden: int, layers: int, head_dim: int, ffn: int) -> LlamaConfig:
    """Returns the configuration of a Llama with four query heads, two KV heads and tied embeddings."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_theta=ROPE_THETA,
        tie_word_embeddings=True,
        bos_token_id=BEGIN_ID,
        eos_token_id=END_ID,
        pad_token_id=None,
    )


CONFIGS = {
    MAIN: config(hidden=256, layers=4, head_dim=64, ffn=768),
    DRAFT: config(hidden=128, layers=2, head_dim=32, ffn=160),
}
