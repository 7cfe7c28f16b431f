"""Decoders for which transformers has no class, computed by a class of another family that has the same blocks.

The `note` of each case names the class. If the blocks differ in one respect, the class is changed slightly, below the
table.
"""

import transformers as hf

from . import changes, leftovers, packing
from .case import BF16, F16, Case, Layout
from .llama_kin import llama_words


def baichuan(architecture: str, **words) -> dict:
    plain = llama_words(
        "baichuan", architecture, pad_token_id=0, rms_norm_eps=1e-6, transformers_version="4.29.2"
    )
    return {k: v for k, v in plain.items() if k not in ("num_key_value_heads", "rope_theta")} | words


BAICHUAN_7B = baichuan("BaiChuanForCausalLM")
BAICHUAN_13B = baichuan(
    "BaichuanForCausalLM",
    gradient_checkpointing=False,
    hidden_size=36,
    model_max_length=128,
    num_attention_heads=6,
)
del BAICHUAN_13B["max_position_embeddings"]
BAICHUAN2 = baichuan(
    "BaichuanForCausalLM", model_max_length=128, tokenizer_class="BaichuanTokenizer", z_loss_weight=0
)
BAICHUAN2_13B = BAICHUAN_13B | {"tokenizer_class": "BaichuanTokenizer", "z_loss_weight": 0}
CHATGLM2 = {
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["ChatGLMModel"],
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "eos_token_id": 2,
    "ffn_hidden_size": 40,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "hidden_size": 32,
    "kv_channels": 8,
    "layernorm_epsilon": 1e-5,
    "model_type": "chatglm",
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 4,
    "num_layers": 2,
    "original_rope": True,
    "pad_token_id": 0,
    "padded_vocab_size": 100,
    "post_layer_norm": True,
    "quantization_bit": 0,
    "rmsnorm": True,
    "seq_length": 128,
    "tie_word_embeddings": False,
    "transformers_version": "4.27.1",
    "use_cache": True,
}
INTERNLM = llama_words(
    "internlm",
    "InternLMForCausalLM",
    bias=True,
    pad_token_id=2,
    rms_norm_eps=1e-6,
    transformers_version="4.29.2",
)
for key in ("num_key_value_heads", "rope_theta"):
    del INTERNLM[key]
INTERNLM2 = llama_words(
    "internlm2",
    "InternLM2ForCausalLM",
    attn_implementation="eager",
    bias=False,
    pad_token_id=2,
    rope_scaling={"factor": 2.0, "type": "dynamic"},
    rope_theta=1000000,
)
DEEPSEEK = llama_words(
    "deepseek",
    "DeepseekForCausalLM",
    attention_bias=False,
    attention_dropout=0.0,
    aux_loss_alpha=0.001,
    first_k_dense_replace=1,
    intermediate_size=40,
    moe_intermediate_size=12,
    moe_layer_freq=2,
    n_routed_experts=5,
    n_shared_experts=2,
    norm_topk_prob=False,
    num_experts_per_tok=3,
    num_hidden_layers=4,
    num_key_value_heads=4,
    pretraining_tp=1,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    scoring_func="softmax",
    seq_aux=True,
)
MINICPM = llama_words(
    "minicpm",
    "MiniCPMForCausalLM",
    dim_model_base=10,
    num_hidden_layers=3,
    rope_scaling=None,
    scale_depth=1.4,
    scale_emb=12,
)
for key in ("tie_word_embeddings", "rope_theta"):
    del MINICPM[key]
ORION = llama_words(
    "orion",
    "OrionForCausalLM",
    attention_bias=False,
    max_sequence_length=128,
    num_key_value_heads=4,
    pad_token_id=0,
    pretraining_tp=1,
    rope_scaling=None,
)
XVERSE = llama_words(
    "xverse",
    "XverseForCausalLM",
    bos_token_id=2,
    eos_token_id=3,
    max_tokenizer_truncation=100,
    pad_token_id=1,
    rms_norm_eps=1e-6,
)
for key in ("num_key_value_heads", "rope_theta"):
    del XVERSE[key]


def as_llama(config: dict) -> dict:
    return config | {"attention_bias": config.get("bias", False)}


def as_glm(config: dict) -> dict:
    return {
        "attention_bias": config["add_qkv_bias"],
        "eos_token_id": config["eos_token_id"],
        "head_dim": config["kv_channels"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["ffn_hidden_size"],
        "max_position_embeddings": config["seq_length"],
        "num_attention_heads": config["num_attention_heads"],
        "num_hidden_layers": config["num_layers"],
        "num_key_value_heads": config["multi_query_group_num"],
        "pad_token_id": config["pad_token_id"],
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": config["layernorm_epsilon"],
        "vocab_size": config["padded_vocab_size"],
    }


def as_qwen2_moe(config: dict) -> dict:
    first, every = config["first_k_dense_replace"], config["moe_layer_freq"]
    return config | {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(config["num_hidden_layers"]) if i < first or i % every != 0],
        "num_experts": config["n_routed_experts"],
        "qkv_bias": False,
        "shared_expert_intermediate_size": config["n_shared_experts"] * config["moe_intermediate_size"],
    }


def as_granite(config: dict) -> dict:
    return config | {
        "attention_multiplier": (config["hidden_size"] / config["num_attention_heads"]) ** -0.5,
        "embedding_multiplier": config["scale_emb"],
        "logits_scaling": config["hidden_size"] / config["dim_model_base"],
        "residual_multiplier": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        "tie_word_embeddings": True,
    }


LLAMA_BLOCKS = "the blocks of LlamaForCausalLM"
UNIT_ROWS = {
    "means": {"model.norm.weight": 3.0}
}  # rows of the head have length 1, whatever the scale of its weights

CASES = [
    Case("baichuan_7b", hf.LlamaForCausalLM, BAICHUAN_7B, dtype=F16, settings=as_llama, note=LLAMA_BLOCKS,
         blocks="q, k, v concatenated in W_pack, no keys for RoPE or KV heads; rotary tables in the file",
         layout=Layout(reshape=packing.w_pack, extra=leftovers.rotary_tables)),
    Case("baichuan_13b", hf.LlamaForCausalLM, BAICHUAN_13B, settings=as_llama,
         patch=changes.alibi, note=LLAMA_BLOCKS + " with ALiBi and no rotation",
         blocks="W_pack, and ALiBi for a number of heads that is not a power of two; distinguished from 7B by the "
         "spelling of the architecture and the absence of max_position_embeddings",
         layout=Layout(reshape=packing.w_pack)),
    Case("baichuan2", hf.LlamaForCausalLM, BAICHUAN2, dtype=F16, settings=as_llama, **UNIT_ROWS,
         patch=changes.unit_head, note=LLAMA_BLOCKS + " with a head whose rows are normalised",
         blocks="W_pack, RoPE, head rows divided by their length; distinguished from the first generation by "
         "z_loss_weight",
         layout=Layout(reshape=packing.w_pack)),
    Case("baichuan2_13b", hf.LlamaForCausalLM, BAICHUAN2_13B, dtype=F16, settings=as_llama, **UNIT_ROWS,
         patch=changes.alibi_and_unit_head, note=LLAMA_BLOCKS + " with ALiBi, no rotation and a normalised head",
         blocks="W_pack, ALiBi and the normalized head",
         layout=Layout(reshape=packing.w_pack)),
    Case("chatglm2", hf.GlmForCausalLM, CHATGLM2, settings=as_glm,
         note="the blocks of GlmForCausalLM",
         blocks="interleaved RoPE over half the head, q, k, v concatenated with bias, gate and up in one, its own "
         "tensor names and keys, a table of frequencies in the file",
         layout=Layout(reshape=packing.chatglm, names=packing.CHATGLM_NAMES, extra=leftovers.chatglm_table)),
    Case("internlm", hf.LlamaForCausalLM, INTERNLM, settings=as_llama, note=LLAMA_BLOCKS,
         blocks="bias for q, k, v and o, none in the MLP",
         layout=Layout(extra=leftovers.rotary_tables),
         matters={"rms_norm_eps": 1e-2}),
    Case("internlm2", hf.LlamaForCausalLM, INTERNLM2, dtype=BF16, settings=as_llama, note=LLAMA_BLOCKS,
         blocks="q, k, v fused per KV group in wqkv, its own tensor names, dynamic NTK whose length is never "
         "reached",
         layout=Layout(reshape=packing.wqkv, names=packing.INTERNLM2_NAMES),
         matters={"rope_theta": 1e4}),
    Case("deepseek_moe", hf.Qwen2MoeForCausalLM, DEEPSEEK, dtype=BF16, settings=as_qwen2_moe,
         patch=changes.open_shared_gate,
         note="the blocks of Qwen2MoeForCausalLM with the gate of the shared expert held open",
         blocks="experts in layer 2 only, by first_k_dense_replace and moe_layer_freq; shared experts combined "
         "into one without a gate; softmax over all, no renormalization",
         layout=Layout(names=((r"\.shared_expert\.", ".shared_experts."),)),
         matters={"norm_topk_prob": True, "num_experts_per_tok": 2}),
    Case("minicpm", hf.GraniteForCausalLM, MINICPM, dtype=BF16, settings=as_granite, std=0.3,
         embedding_std=0.15, means={"model.norm.weight": 10.0},
         note="the blocks of GraniteForCausalLM, its multipliers from scale_emb, scale_depth and dim_model_base",
         blocks="scaled embedding, residual branches times scale_depth / sqrt(layers), logits divided by hidden / "
         "dim_model_base, tied without a key for it",
         matters={"scale_emb": 10, "scale_depth": 1.2, "dim_model_base": 9}),
    Case("orion", hf.LlamaForCausalLM, ORION, settings=as_llama, patch=changes.layer_norms,
         note=LLAMA_BLOCKS + " with LayerNorm in place of RMS",
         blocks="LayerNorm with bias, its epsilon under rms_norm_eps",
         matters={"rms_norm_eps": 1e-2}),
    Case("xverse", hf.LlamaForCausalLM, XVERSE, settings=as_llama, starts=(2,), note=LLAMA_BLOCKS,
         blocks="Llama with another model_type and other special ids",
         matters={"rms_norm_eps": 1e-2}),
]  # fmt: skip
