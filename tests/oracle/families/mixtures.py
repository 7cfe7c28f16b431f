"""Decoders with experts for which transformers has classes: config.json as in their repositories, with small sizes."""

import transformers as hf

from .case import BF16, Case
from .llama_kin import llama_words

MIXTRAL = llama_words(
    "mixtral",
    "MixtralForCausalLM",
    attention_dropout=0.0,
    intermediate_size=24,
    num_experts_per_tok=2,
    num_local_experts=5,
    output_router_logits=False,
    rope_theta=1000000.0,
    router_aux_loss_coef=0.02,
    sliding_window=None,
)
QWEN2_MOE = llama_words(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    attention_dropout=0.0,
    decoder_sparse_step=2,
    intermediate_size=40,
    max_window_layers=4,
    mlp_only_layers=[3],
    moe_intermediate_size=16,
    norm_topk_prob=False,
    num_experts=4,
    num_experts_per_tok=2,
    num_hidden_layers=4,
    output_router_logits=False,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    router_aux_loss_coef=0.001,
    shared_expert_intermediate_size=24,
    sliding_window=32768,
    use_sliding_window=False,
)
QWEN3_MOE = llama_words(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    attention_bias=False,
    attention_dropout=0.0,
    decoder_sparse_step=1,
    head_dim=12,
    max_window_layers=2,
    mlp_only_layers=[],
    moe_intermediate_size=16,
    norm_topk_prob=True,
    num_experts=6,
    num_experts_per_tok=3,
    output_router_logits=False,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=1000000.0,
    router_aux_loss_coef=0.001,
    sliding_window=None,
    use_sliding_window=False,
)
DOTS1 = llama_words(
    "dots1",
    "Dots1ForCausalLM",
    attention_bias=False,
    attention_dropout=0.0,
    first_k_dense_replace=1,
    max_window_layers=62,
    moe_intermediate_size=16,
    moe_layer_freq=1,
    n_group=1,
    n_routed_experts=4,
    n_shared_experts=2,
    norm_topk_prob=True,
    num_experts_per_tok=2,
    num_hidden_layers=3,
    rope_scaling=None,
    routed_scaling_factor=2.5,
    scoring_func="noaux_tc",
    sliding_window=None,
    topk_group=1,
)

CASES = [
    Case("mixtral", hf.MixtralForCausalLM, MIXTRAL, dtype=BF16,
         blocks="experts in every layer, softmax over the selected ones; w1, w2, w3 under block_sparse_moe",
         matters={"num_experts_per_tok": 3}),
    Case("qwen2_moe", hf.Qwen2MoeForCausalLM, QWEN2_MOE, dtype=BF16,
         blocks="experts in layer 1 only, by decoder_sparse_step and mlp_only_layers; a shared expert with its own "
         "gate, no renormalization, bias on q, k and v",
         matters={"num_experts_per_tok": 3, "norm_topk_prob": True}),
    Case("qwen3_moe", hf.Qwen3MoeForCausalLM, QWEN3_MOE, dtype=BF16,
         blocks="renormalized expert scores, RMS norm of each q and k head, separate head_dim",
         matters={"num_experts_per_tok": 2, "norm_topk_prob": False}),
    Case("dots1", hf.Dots1ForCausalLM, DOTS1, dtype=BF16,
         blocks="sigmoid scores, renormalized and scaled; shared experts combined into one without a gate; a dense "
         "first layer; RMS norm of each q and k head; one group, and a correction bias of zeros in the file",
         matters={"num_experts_per_tok": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0}),
]  # fmt: skip
