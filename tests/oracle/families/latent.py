"""Decoders with multi-head latent attention: config.json as in their repositories, with small sizes."""

import transformers as hf

from .case import BF16, Case
from .llama_kin import llama_words
from .rope import reserve

YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 4,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 32,
    "type": "yarn",
}
LATENT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "kv_lora_rank": 16,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "rms_norm_eps": 1e-2,  # the inner norms have 1e-6
    "v_head_dim": 12,
}
DEEPSEEK_V2 = llama_words(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    aux_loss_alpha=0.001,
    ep_size=1,
    first_k_dense_replace=1,
    moe_intermediate_size=16,
    moe_layer_freq=1,
    n_group=4,
    n_routed_experts=8,
    n_shared_experts=2,
    norm_topk_prob=False,
    num_experts_per_tok=3,
    pretraining_tp=1,
    rope_scaling=YARN,
    routed_scaling_factor=1.5,
    scoring_func="softmax",
    seq_aux=True,
    topk_group=2,
    topk_method="group_limited_greedy",
    **LATENT,
)
DEEPSEEK_V2_LITE = DEEPSEEK_V2 | {
    "n_group": 1,
    "n_routed_experts": 5,
    "q_lora_rank": None,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
}
DEEPSEEK_V3 = llama_words(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    ep_size=1,
    first_k_dense_replace=1,
    moe_intermediate_size=16,
    moe_layer_freq=1,
    n_group=4,
    n_routed_experts=8,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_experts_per_tok=3,
    num_nextn_predict_layers=1,
    rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_group=2,
    topk_method="noaux_tc",
    **LATENT,
)
MINICPM3 = llama_words(
    "minicpm3",
    "MiniCPM3ForCausalLM",
    dim_model_base=10,
    num_hidden_layers=3,
    rope_scaling={
        "long_factor": [1.3, 2.1, 3.4],
        "original_max_position_embeddings": 32,
        "short_factor": [1.1, 1.2, 1.7],
        "type": "longrope",
    },
    scale_depth=1.4,
    scale_emb=12,
    **LATENT | {"rms_norm_eps": 1e-5},
)
for key in ("tie_word_embeddings", "rope_theta"):
    del MINICPM3[key]

CASES = [
    Case("deepseek_v2", hf.DeepseekV2ForCausalLM, DEEPSEEK_V2, dtype=BF16,
         blocks="latent attention with low-rank queries; interleaved RoPE; YaRN with factors of the scores; inner norms "
         "with an epsilon of their own; a dense first layer, then softmax scores among the best "
         "of four groups, by their largest score, scaled; shared experts",
         matters={"topk_group": 4, "rope_scaling": YARN | {"mscale": 2.0, "mscale_all_dim": 2.0}, "routed_scaling_factor": 1.0}),
    Case("deepseek_v2_lite", hf.DeepseekV2ForCausalLM, DEEPSEEK_V2_LITE,
         blocks="latent attention with queries of full rank; YaRN with different factors of rotations and scores",
         matters={"num_experts_per_tok": 2}),
    Case("deepseek_v3", hf.DeepseekV3ForCausalLM, DEEPSEEK_V3, dtype=BF16,
         blocks="latent attention with low-rank queries; interleaved RoPE; YaRN; a dense first layer, then sigmoid scores "
         "with a correction that selects experts among the best of four groups; a shared expert",
         random_buffers=("e_score_correction_bias",),
         matters={"topk_group": 4, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "rope_interleave": False}),
    Case("minicpm3", hf.MiniCPM3ForCausalLM, MINICPM3, dtype=BF16, reserve=reserve, std=0.3,
         embedding_std=0.15, means={"model.norm.weight": 10.0},
         blocks="latent attention in dense layers; RoPE in halves with LongRoPE; scaled embeddings, residuals and logits; "
         "a tied head",
         matters={"scale_depth": 1.2, "scale_emb": 10, "dim_model_base": 9}),
]  # fmt: skip
