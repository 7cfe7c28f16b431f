"""Decoders derived from Llama for which transformers has classes: config.json as in their repositories, with small
sizes."""

import transformers as hf

from .case import BF16, F16, Case
from .rope import reserve


def llama_words(model_type: str, architecture: str, **words) -> dict:
    """Returns the keys that most families have in common with Llama."""
    return {
        "architectures": [architecture],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "model_type": model_type,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.41.2",
        "use_cache": True,
        "vocab_size": 96,
    } | words


MISTRAL = llama_words("mistral", "MistralForCausalLM", sliding_window=8, num_hidden_layers=3)
QWEN2 = llama_words(
    "qwen2",
    "Qwen2ForCausalLM",
    attention_dropout=0.0,
    max_window_layers=1,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    sliding_window=8,
    use_sliding_window=False,
)
QWEN3 = llama_words(
    "qwen3",
    "Qwen3ForCausalLM",
    attention_bias=False,
    attention_dropout=0.0,
    head_dim=12,
    max_window_layers=2,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=None,
    tie_word_embeddings=True,
    use_sliding_window=False,
)
PHI3 = llama_words(
    "phi3",
    "Phi3ForCausalLM",
    attention_bias=False,
    attention_dropout=0.0,
    embd_pdrop=0.0,
    original_max_position_embeddings=128,
    pad_token_id=2,
    resid_pdrop=0.0,
    rope_scaling=None,
    sliding_window=11,
)
PHI3_LONGROPE = PHI3 | {
    "original_max_position_embeddings": 32,
    "rope_scaling": {
        "long_factor": [1.0, 1.3, 2.1, 4.0],
        "short_factor": [1.0, 1.05, 1.2, 1.5],
        "type": "longrope",
    },
    "sliding_window": 262144,
}
APERTUS = llama_words(
    "apertus",
    "ApertusForCausalLM",
    attention_bias=False,
    attention_dropout=0.0,
    hidden_act="xielu",
    mlp_bias=False,
    pad_token_id=3,
    post_norm=False,
    qk_norm=True,
    rope_scaling={
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    },
    rope_theta=12000000,
)
SMOLLM3 = llama_words(
    "smollm3",
    "SmolLM3ForCausalLM",
    attention_bias=False,
    attention_dropout=0.0,
    layer_types=["full_attention"] * 4,
    max_window_layers=28,
    mlp_bias=False,
    no_rope_layer_interval=4,
    no_rope_layers=[1, 1, 0, 1],
    num_hidden_layers=4,
    pad_token_id=3,
    pretraining_tp=2,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=5000000.0,
    sliding_window=None,
    tie_word_embeddings=True,
    use_sliding_window=False,
)
YARN = QWEN2 | {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32, "type": "yarn"},
    "rope_theta": 10000.0,
    "sliding_window": 131072,
}
YARN_LLAMA = llama_words(
    "llama",
    "LlamaForCausalLM",
    num_attention_heads=2,
    num_key_value_heads=2,
    rope_scaling={
        "attention_factor": 1.4,
        "beta_fast": 4,
        "beta_slow": 0.5,
        "factor": 3.0,
        "finetuned": True,
        "original_max_position_embeddings": 40,
        "type": "yarn",
    },
)
DYNAMIC_NTK = llama_words(
    "llama",
    "LlamaForCausalLM",
    max_position_embeddings=32,
    rope_scaling={"factor": 2.0, "type": "dynamic"},
)
STABLELM = llama_words(
    "stablelm",
    "StableLmForCausalLM",
    bos_token_id=0,
    eos_token_id=0,
    hidden_size=48,
    layer_norm_eps=1e-5,
    partial_rotary_factor=0.34,
    qk_layernorm=False,
    rope_theta=10000,
    use_parallel_residual=False,
    use_qkv_bias=True,
)
del STABLELM["rms_norm_eps"]
STARCODER2 = {
    "architectures": ["Starcoder2ForCausalLM"],
    "attention_dropout": 0.1,
    "attention_softmax_in_fp32": True,
    "bos_token_id": 0,
    "embedding_dropout": 0.1,
    "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "initializer_range": 0.018042,
    "intermediate_size": 64,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 128,
    "mlp_type": "default",
    "model_type": "starcoder2",
    "norm_epsilon": 1e-5,
    "norm_type": "layer_norm",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "residual_dropout": 0.1,
    "rope_theta": 999999.4420358813,
    "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True,
    "sliding_window": 10,
    "transformers_version": "4.37.0.dev0",
    "use_bias": True,
    "use_cache": True,
    "vocab_size": 96,
}
GEMMA = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 12,
    "hidden_act": "gelu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "model_type": "gemma",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "transformers_version": "4.38.0.dev0",
    "use_cache": True,
    "vocab_size": 96,
}
GEMMA2 = GEMMA | {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 3.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 6.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "model_type": "gemma2",
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 7,
    "sliding_window": 8,
}
GEMMA3 = GEMMA2 | {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "model_type": "gemma3_text",
    "intermediate_size": 24,
    "num_hidden_layers": 7,
    "num_key_value_heads": 1,
    "rope_local_base_freq": 100,
    "rope_theta": 10000,
    "sliding_window": 8,
    "sliding_window_pattern": 6,
}
for words in (GEMMA2, GEMMA3):
    del words["rope_scaling"]
del GEMMA3["hidden_act"]

OFFSET_NORMS = {"norm_mean": 0.0, "embedding_std": 0.1, "means": {"model.norm.weight": 5.0}, "starts": (2,)}
SMALL_TIED = {"embedding_std": 0.15, "means": {"model.norm.weight": 3.0}}

CASES = [
    Case("mistral", hf.MistralForCausalLM, MISTRAL, dtype=BF16,
         blocks="a sliding window in every layer",
         matters={"sliding_window": 9, "rope_theta": 5e3}),
    Case("qwen2", hf.Qwen2ForCausalLM, QWEN2, dtype=BF16,
         blocks="bias on q, k and v only; a sliding window that is disabled",
         matters={"rope_theta": 5e3, "use_sliding_window": True}),
    Case("qwen2_window", hf.Qwen2ForCausalLM, QWEN2 | {"use_sliding_window": True}, dtype=BF16,
         blocks="a sliding window from layer max_window_layers on",
         matters={"use_sliding_window": False, "max_window_layers": 0, "sliding_window": 9}),
    Case("qwen3", hf.Qwen3ForCausalLM, QWEN3, **SMALL_TIED,
         blocks="RMS norm of each q and k head, separate head_dim, tied head",
         matters={"rope_theta": 1e4}),
    Case("gemma", hf.GemmaForCausalLM, GEMMA, **OFFSET_NORMS,
         blocks="norm offset 1, embedding scaled by sqrt(hidden), tanh GELU although hidden_act is gelu, one KV "
         "head, separate head_dim, tied by default",
         matters={"hidden_act": "silu"}),
    Case("gemma2", hf.Gemma2ForCausalLM, GEMMA2, dtype=BF16, **OFFSET_NORMS,
         blocks="sandwich norms with offset 1, softcaps of scores and logits, a sliding window in every second "
         "layer, a separate attention scale",
         matters={"sliding_window": 9, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 7.0,
                  "query_pre_attn_scalar": 9, "hidden_activation": "gelu"}),
    Case("gemma3", hf.Gemma3ForCausalLM, GEMMA3, dtype=BF16, **OFFSET_NORMS,
         blocks="five layers with a sliding window and a separate theta, then one without a window; q and k norms "
         "with offset 1",
         matters={"sliding_window": 9, "sliding_window_pattern": 3, "rope_local_base_freq": 200, "rope_theta": 2e4,
                  "query_pre_attn_scalar": 9}),
    Case("phi3", hf.Phi3ForCausalLM, PHI3, dtype=BF16,
         blocks="q, k, v in one matrix, gate and up in one, a sliding window",
         matters={"sliding_window": 12}),
    Case("phi3_longrope", hf.Phi3ForCausalLM, PHI3_LONGROPE, dtype=BF16, reserve=reserve,
         blocks="longrope with short and long factors and the scale derived from both lengths",
         matters={"max_position_embeddings": 256}),
    Case("apertus", hf.ApertusForCausalLM, APERTUS, dtype=BF16, random_buffers=("beta",),
         blocks="xIELU, with learned numbers in each layer, in an MLP without a gate; RMS norm of each q and k head",
         matters={"rope_theta": 5e3}),
    Case("smollm3", hf.SmolLM3ForCausalLM, SMOLLM3, dtype=BF16, **SMALL_TIED,
         blocks="a layer without RoPE, given by a list that differs from the interval; tied head",
         matters={"no_rope_layers": [1, 1, 1, 0]}),
    Case("yarn", hf.Qwen2ForCausalLM, YARN, dtype=F16,
         blocks="YaRN with the attention factor derived from its factor",
         matters={"rope_scaling": None}),
    Case("yarn_attention_factor", hf.LlamaForCausalLM, YARN_LLAMA,
         blocks="YaRN with attention factor and both betas given",
         matters={"rope_scaling": YARN_LLAMA["rope_scaling"] | {"attention_factor": 1.2}}),
    Case("dynamic_ntk", hf.LlamaForCausalLM, DYNAMIC_NTK, reserve=reserve,
         blocks="dynamic NTK: theta depends on the reserved length",
         matters={"rope_scaling": {"factor": 3.0, "type": "dynamic"}, "max_position_embeddings": 33}),
    Case("stablelm", hf.StableLmForCausalLM, STABLELM, starts=(0,),
         blocks="LayerNorm with bias around a gated MLP, partial RoPE, bias on q, k and v",
         matters={"partial_rotary_factor": 0.5}),
    Case("starcoder2", hf.Starcoder2ForCausalLM, STARCODER2, dtype=BF16, starts=(0,), embedding_std=0.15,
         means={"model.norm.weight": 6.0},
         blocks="LayerNorm, ungated tanh-GELU MLP, bias everywhere, a sliding window, a fractional theta, tied by "
         "default",
         matters={"sliding_window": 11, "hidden_act": "gelu"}),
]  # fmt: skip
