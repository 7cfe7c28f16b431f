//! A table of what llama.cpp's converter does to each model family.

use super::converted::{Conversion, Converted, in_blocks, in_pairs};
use serde_json::json;

type Names = &'static [(&'static str, &'static str)];

/// Tensor names common to most families.
const LLAMA: Names = &[
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.layers.{i}.input_layernorm", "blk.{i}.attn_norm"),
    ("model.layers.{i}.self_attn.q_proj", "blk.{i}.attn_q"),
    ("model.layers.{i}.self_attn.k_proj", "blk.{i}.attn_k"),
    ("model.layers.{i}.self_attn.v_proj", "blk.{i}.attn_v"),
    ("model.layers.{i}.self_attn.o_proj", "blk.{i}.attn_output"),
    ("model.layers.{i}.self_attn.q_norm", "blk.{i}.attn_q_norm"),
    ("model.layers.{i}.self_attn.k_norm", "blk.{i}.attn_k_norm"),
    ("model.layers.{i}.post_attention_layernorm", "blk.{i}.ffn_norm"),
    ("model.layers.{i}.mlp.gate_proj", "blk.{i}.ffn_gate"),
    ("model.layers.{i}.mlp.up_proj", "blk.{i}.ffn_up"),
    ("model.layers.{i}.mlp.down_proj", "blk.{i}.ffn_down"),
];

const SANDWICH: Names = &[
    ("model.layers.{i}.post_attention_layernorm", "blk.{i}.post_attention_norm"),
    ("model.layers.{i}.pre_feedforward_layernorm", "blk.{i}.ffn_norm"),
    ("model.layers.{i}.post_feedforward_layernorm", "blk.{i}.post_ffw_norm"),
];

const EXPERTS: Names = &[
    ("model.layers.{i}.block_sparse_moe.gate", "blk.{i}.ffn_gate_inp"),
    ("model.layers.{i}.block_sparse_moe.experts.{e}.w1", "blk.{i}.ffn_gate.{e}"),
    ("model.layers.{i}.block_sparse_moe.experts.{e}.w2", "blk.{i}.ffn_down.{e}"),
    ("model.layers.{i}.block_sparse_moe.experts.{e}.w3", "blk.{i}.ffn_up.{e}"),
    ("model.layers.{i}.mlp.gate", "blk.{i}.ffn_gate_inp"),
    ("model.layers.{i}.mlp.experts.{e}.gate_proj", "blk.{i}.ffn_gate.{e}"),
    ("model.layers.{i}.mlp.experts.{e}.up_proj", "blk.{i}.ffn_up.{e}"),
    ("model.layers.{i}.mlp.experts.{e}.down_proj", "blk.{i}.ffn_down.{e}"),
    ("model.layers.{i}.mlp.shared_expert.gate_proj", "blk.{i}.ffn_gate_shexp"),
    ("model.layers.{i}.mlp.shared_expert.up_proj", "blk.{i}.ffn_up_shexp"),
    ("model.layers.{i}.mlp.shared_expert.down_proj", "blk.{i}.ffn_down_shexp"),
    ("model.layers.{i}.mlp.shared_expert_gate", "blk.{i}.ffn_gate_inp_shexp"),
];

const LATENT: Names = &[
    ("model.layers.{i}.self_attn.q_a_proj", "blk.{i}.attn_q_a"),
    ("model.layers.{i}.self_attn.q_a_layernorm", "blk.{i}.attn_q_a_norm"),
    ("model.layers.{i}.self_attn.q_b_proj", "blk.{i}.attn_q_b"),
    ("model.layers.{i}.self_attn.kv_a_proj_with_mqa", "blk.{i}.attn_kv_a_mqa"),
    ("model.layers.{i}.self_attn.kv_a_layernorm", "blk.{i}.attn_kv_a_norm"),
    ("model.layers.{i}.self_attn.kv_b_proj", "blk.{i}.attn_kv_b"),
    ("model.layers.{i}.mlp.shared_experts.gate_proj", "blk.{i}.ffn_gate_shexp"),
    ("model.layers.{i}.mlp.shared_experts.up_proj", "blk.{i}.ffn_up_shexp"),
    ("model.layers.{i}.mlp.shared_experts.down_proj", "blk.{i}.ffn_down_shexp"),
];

const LATENT_KEYS: Names = &[
    ("attention.q_lora_rank", "q_lora_rank"),
    ("attention.kv_lora_rank", "kv_lora_rank"),
    ("rope.dimension_count", "qk_rope_head_dim"),
    ("rope.freq_base", "rope_theta"),
    ("leading_dense_block_count", "first_k_dense_replace"),
    ("expert_count", "n_routed_experts"),
    ("expert_shared_count", "n_shared_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_weights_norm", "norm_topk_prob"),
];

const PHI: Names = &[
    ("model.final_layernorm", "output_norm"),
    ("model.layers.{i}.self_attn.dense", "blk.{i}.attn_output"),
    ("model.layers.{i}.self_attn.qkv_proj", "blk.{i}.attn_qkv"),
    ("model.layers.{i}.mlp.fc1", "blk.{i}.ffn_up"),
    ("model.layers.{i}.mlp.fc2", "blk.{i}.ffn_down"),
    ("model.layers.{i}.mlp.gate_up_proj", "blk.{i}.ffn_up"),
];

/// Names of families with two norms, of which the first is the MLP's.
const FALCON: Names = &[("h.{i}.ln_mlp", "blk.{i}.attn_norm"), ("h.{i}.ln_attn", "blk.{i}.attn_norm_2")];

const BLOOM: Names = &[
    ("word_embeddings", "token_embd"),
    ("word_embeddings_layernorm", "token_embd_norm"),
    ("ln_f", "output_norm"),
    ("lm_head", "output"),
    ("h.{i}.input_layernorm", "blk.{i}.attn_norm"),
    ("h.{i}.self_attention.query_key_value", "blk.{i}.attn_qkv"),
    ("h.{i}.self_attention.dense", "blk.{i}.attn_output"),
    ("h.{i}.post_attention_layernorm", "blk.{i}.ffn_norm"),
    ("h.{i}.mlp.dense_h_to_4h", "blk.{i}.ffn_up"),
    ("h.{i}.mlp.dense_4h_to_h", "blk.{i}.ffn_down"),
];

const GPT2: Names = &[
    ("wte", "token_embd"),
    ("wpe", "position_embd"),
    ("ln_f", "output_norm"),
    ("h.{i}.ln_1", "blk.{i}.attn_norm"),
    ("h.{i}.attn.c_attn", "blk.{i}.attn_qkv"),
    ("h.{i}.attn.c_proj", "blk.{i}.attn_output"),
    ("h.{i}.ln_2", "blk.{i}.ffn_norm"),
    ("h.{i}.mlp.c_fc", "blk.{i}.ffn_up"),
    ("h.{i}.mlp.c_proj", "blk.{i}.ffn_down"),
];

const GPT_NEOX: Names = &[
    ("embed_in", "token_embd"),
    ("embed_out", "output"),
    ("final_layer_norm", "output_norm"),
    ("layers.{i}.input_layernorm", "blk.{i}.attn_norm"),
    ("layers.{i}.attention.query_key_value", "blk.{i}.attn_qkv"),
    ("layers.{i}.attention.dense", "blk.{i}.attn_output"),
    ("layers.{i}.post_attention_layernorm", "blk.{i}.ffn_norm"),
    ("layers.{i}.mlp.dense_h_to_4h", "blk.{i}.ffn_up"),
    ("layers.{i}.mlp.dense_4h_to_h", "blk.{i}.ffn_down"),
];

const BERT: Names = &[
    ("embeddings.word_embeddings", "token_embd"),
    ("embeddings.position_embeddings", "position_embd"),
    ("embeddings.token_type_embeddings", "token_types"),
    ("embeddings.LayerNorm", "token_embd_norm"),
    ("encoder.layer.{i}.attention.self.query", "blk.{i}.attn_q"),
    ("encoder.layer.{i}.attention.self.key", "blk.{i}.attn_k"),
    ("encoder.layer.{i}.attention.self.value", "blk.{i}.attn_v"),
    ("encoder.layer.{i}.attention.output.dense", "blk.{i}.attn_output"),
    ("encoder.layer.{i}.attention.output.LayerNorm", "blk.{i}.attn_output_norm"),
    ("encoder.layer.{i}.intermediate.dense", "blk.{i}.ffn_up"),
    ("encoder.layer.{i}.output.dense", "blk.{i}.ffn_down"),
    ("encoder.layer.{i}.output.LayerNorm", "blk.{i}.layer_output_norm"),
];

const T5: Names = &[
    ("shared", "token_embd"),
    ("lm_head", "output"),
    ("encoder.final_layer_norm", "enc.output_norm"),
    ("encoder.block.{i}.layer.0.layer_norm", "enc.blk.{i}.attn_norm"),
    ("encoder.block.{i}.layer.0.SelfAttention.q", "enc.blk.{i}.attn_q"),
    ("encoder.block.{i}.layer.0.SelfAttention.k", "enc.blk.{i}.attn_k"),
    ("encoder.block.{i}.layer.0.SelfAttention.v", "enc.blk.{i}.attn_v"),
    ("encoder.block.{i}.layer.0.SelfAttention.o", "enc.blk.{i}.attn_o"),
    ("encoder.block.{i}.layer.0.SelfAttention.relative_attention_bias", "enc.blk.{i}.attn_rel_b"),
    ("encoder.block.{i}.layer.1.layer_norm", "enc.blk.{i}.ffn_norm"),
    ("encoder.block.{i}.layer.1.DenseReluDense.wi", "enc.blk.{i}.ffn_up"),
    ("encoder.block.{i}.layer.1.DenseReluDense.wi_0", "enc.blk.{i}.ffn_gate"),
    ("encoder.block.{i}.layer.1.DenseReluDense.wi_1", "enc.blk.{i}.ffn_up"),
    ("encoder.block.{i}.layer.1.DenseReluDense.wo", "enc.blk.{i}.ffn_down"),
    ("decoder.final_layer_norm", "dec.output_norm"),
    ("decoder.block.{i}.layer.0.layer_norm", "dec.blk.{i}.attn_norm"),
    ("decoder.block.{i}.layer.0.SelfAttention.q", "dec.blk.{i}.attn_q"),
    ("decoder.block.{i}.layer.0.SelfAttention.k", "dec.blk.{i}.attn_k"),
    ("decoder.block.{i}.layer.0.SelfAttention.v", "dec.blk.{i}.attn_v"),
    ("decoder.block.{i}.layer.0.SelfAttention.o", "dec.blk.{i}.attn_o"),
    ("decoder.block.{i}.layer.0.SelfAttention.relative_attention_bias", "dec.blk.{i}.attn_rel_b"),
    ("decoder.block.{i}.layer.1.layer_norm", "dec.blk.{i}.cross_attn_norm"),
    ("decoder.block.{i}.layer.1.EncDecAttention.q", "dec.blk.{i}.cross_attn_q"),
    ("decoder.block.{i}.layer.1.EncDecAttention.k", "dec.blk.{i}.cross_attn_k"),
    ("decoder.block.{i}.layer.1.EncDecAttention.v", "dec.blk.{i}.cross_attn_v"),
    ("decoder.block.{i}.layer.1.EncDecAttention.o", "dec.blk.{i}.cross_attn_o"),
    ("decoder.block.{i}.layer.1.EncDecAttention.relative_attention_bias", "dec.blk.{i}.cross_attn_rel_b"),
    ("decoder.block.{i}.layer.2.layer_norm", "dec.blk.{i}.ffn_norm"),
    ("decoder.block.{i}.layer.2.DenseReluDense.wi", "dec.blk.{i}.ffn_up"),
    ("decoder.block.{i}.layer.2.DenseReluDense.wi_0", "dec.blk.{i}.ffn_gate"),
    ("decoder.block.{i}.layer.2.DenseReluDense.wi_1", "dec.blk.{i}.ffn_up"),
    ("decoder.block.{i}.layer.2.DenseReluDense.wo", "dec.blk.{i}.ffn_down"),
];

const T5_KEYS: Names = &[
    ("context_length", "n_positions"),
    ("embedding_length", "d_model"),
    ("feed_forward_length", "d_ff"),
    ("block_count", "num_layers"),
    ("decoder_block_count", "num_decoder_layers"),
    ("attention.head_count", "num_heads"),
    ("attention.key_length", "d_kv"),
    ("attention.value_length", "d_kv"),
    ("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
    ("attention.relative_buckets_count", "relative_attention_num_buckets"),
    ("decoder_start_token_id", "decoder_start_token_id"),
];

const BLOOM_KEYS: Names =
    &[("embedding_length", "n_embed"), ("block_count", "n_layer"), ("attention.head_count", "n_head")];

const EXPERT_KEYS: Names = &[
    ("expert_count", "num_local_experts"),
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ("rope.freq_base", "rope_theta"),
];

const THETA: Names = &[("rope.freq_base", "rope_theta")];

fn nothing(_: &mut Converted) {}

fn mixtral(model: &mut Converted) {
    older_mixtral(model);
    model.stack_experts();
}

/// Experts as written by old versions of the converter, each as a separate tensor.
pub fn older_mixtral(model: &mut Converted) {
    let [heads, kv_heads] = ["num_attention_heads", "num_key_value_heads"].map(|key| model.size(key));
    let dim = model.size("hidden_size") / heads;
    model.reorder("attn_q", &in_pairs(heads, dim));
    model.reorder("attn_k", &in_pairs(kv_heads, dim));
    model.set("rope.dimension_count", &json!(dim));
}

/// Keys and values of heads as in older files.
pub fn older_deepseek(model: &mut Converted) {
    model.stack_experts();
    let keys = model.size("qk_nope_head_dim") + model.size("qk_rope_head_dim");
    model.set("attention.key_length", &json!(keys));
    model.set("attention.value_length", &json!(model.size("v_head_dim")));
    let scale = model.config["routed_scaling_factor"].as_f64().expect("a number");
    model.file.set_f32("deepseek2.expert_weights_scale", scale as f32);
    let corrections: Vec<String> =
        model.tensors.keys().filter(|name| name.ends_with("e_score_correction_bias")).cloned().collect();
    for name in corrections {
        let tensor = model.tensors.remove(&name).expect("it is there");
        let (stem, _) = name.split_once("ffn_gate_inp").expect("it is the router's");
        model.tensors.insert(format!("{stem}exp_probs_b.bias"), tensor);
        model.set("expert_gating_func", &json!(2));
    }
    if model.config["topk_method"] != "greedy" {
        model.set("expert_group_count", &model.config["n_group"].clone());
        model.set("expert_group_used_count", &model.config["topk_group"].clone());
    }
    let rope = model.config["rope_scaling"].clone();
    if let Some(all) = rope["mscale_all_dim"].as_f64() {
        model.file.set_string("deepseek2.rope.scaling.type", "yarn");
        model.set("rope.scaling.factor", &rope["factor"]);
        model.set("rope.scaling.original_context_length", &rope["original_max_position_embeddings"]);
        model.file.set_f32("deepseek2.rope.scaling.yarn_log_multiplier", (0.1 * all) as f32);
    }
}

/// The sizes of the cache are under the usual keys, and the two parts of `kv_b` are apart.
fn deepseek(model: &mut Converted) {
    older_deepseek(model);
    let [nope, rope, value, rank, heads] =
        ["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "num_attention_heads"]
            .map(|key| model.size(key));
    for (key, size) in [
        ("attention.head_count_kv", 1),
        ("attention.key_length", rank + rope),
        ("attention.value_length", rank),
        ("attention.key_length_mla", nope + rope),
        ("attention.value_length_mla", value),
    ] {
        model.set(key, &json!(size));
    }
    for layer in 0..model.size("num_hidden_layers") {
        let name = |part: &str| format!("blk.{layer}.attn_{part}.weight");
        let both = model.tensors.remove(&name("kv_b")).expect("each layer has it");
        let (keys, values) = both.divided(heads, nope);
        model.tensors.insert(name("k_b"), keys);
        model.tensors.insert(name("v_b"), values);
    }
}

fn gemma(model: &mut Converted) {
    model.ending("norm.weight").for_each(|norm| norm.add(1.0));
}

/// GGUF has no `query_pre_attn_scalar`: files are for a head's width, and what is between the two goes
/// into the queries.
fn gemma2(model: &mut Converted) {
    let between = query_scale(model);
    gemma(model);
    model.ending(".attn_q.weight").for_each(|queries| queries.scale(between));
}

fn gemma3(model: &mut Converted) {
    let between = query_scale(model);
    gemma(model);
    model.ending(".attn_q_norm.weight").for_each(|norm| norm.scale(between));
}

fn query_scale(model: &Converted) -> f32 {
    (model.size("head_dim") as f32 / model.size("query_pre_attn_scalar") as f32).sqrt()
}

fn phi2(model: &mut Converted) {
    let share = model.config["partial_rotary_factor"].as_f64().expect("a number");
    let dims = (share * model.size("hidden_size") as f64) as usize / model.size("num_attention_heads");
    model.set("rope.dimension_count", &json!(dims));
}

fn phi3(model: &mut Converted) {
    let dims = model.size("hidden_size") / model.size("num_attention_heads");
    model.set("rope.dimension_count", &json!(dims));
}

fn long_phi3(model: &mut Converted) {
    phi3(model);
    let [reach, original] =
        ["max_position_embeddings", "original_max_position_embeddings"].map(|key| model.size(key) as f64);
    let factor = (1.0 + (reach / original).ln() / original.ln()).sqrt();
    model.set("rope.scaling.attn_factor", &json!(factor));
    add_factors(model);
}

/// Adds the tensors with the factors of longrope.
fn add_factors(model: &mut Converted) {
    for (name, key) in [("long", "long_factor"), ("short", "short_factor")] {
        let factors: Vec<f32> =
            serde_json::from_value(model.config["rope_scaling"][key].clone()).expect("a list");
        model.add_vector(&format!("rope_factors_{name}.weight"), factors);
    }
}

fn falcon(model: &mut Converted) {
    let (hidden, heads) = (model.size("hidden_size"), model.size("num_attention_heads"));
    let groups = model.config["num_kv_heads"].as_u64().unwrap_or(1) as usize;
    model.reorder("attn_qkv", &in_blocks(groups, heads / groups, hidden / heads));
    model.set("context_length", &json!(2048));
    model.set("feed_forward_length", &json!(4 * hidden));
    model.set("attention.head_count_kv", &json!(groups));
    model.file.set_string("falcon.tensor_data_layout", "jploski");
}

fn bloom(model: &mut Converted) {
    let key = |names: [&str; 2]| {
        names.into_iter().find_map(|name| model.config[name].as_u64()).expect("it is there")
    };
    let (hidden, heads) = (key(["hidden_size", "n_embed"]), key(["n_head", "num_attention_heads"]));
    model.reorder("attn_qkv", &in_blocks(heads as usize, 1, (hidden / heads) as usize));
    // Configurations of real models have it.
    model.set("context_length", &json!(2048));
    model.set("feed_forward_length", &json!(4 * hidden));
    model.set("attention.head_count_kv", &json!(heads));
}

fn gpt2(model: &mut Converted) {
    for name in ["attn_qkv", "attn_output", "ffn_up", "ffn_down"] {
        model.ending(&format!(".{name}.weight")).for_each(|matrix| matrix.transpose());
    }
    let hidden = model.size("n_embd");
    model.set("feed_forward_length", &json!(4 * hidden));
}

fn gpt_neox(model: &mut Converted) {
    let (hidden, heads) = (model.size("hidden_size"), model.size("num_attention_heads"));
    model.reorder("attn_qkv", &in_blocks(heads, 1, hidden / heads));
    let share = model.config["rotary_pct"].as_f64().expect("a number");
    model.set("rope.dimension_count", &json!((share * (hidden / heads) as f64) as usize));
    let is_parallel = model.config["use_parallel_residual"].as_bool().unwrap_or(true);
    model.set("use_parallel_residual", &json!(is_parallel));
}

fn bert(model: &mut Converted) {
    model.file.set_u32("tokenizer.ggml.token_type_count", model.size("type_vocab_size") as u32);
    model.file.set_bool("bert.attention.causal", false);
}

const fn conversion(fixture: &'static str, architecture: &'static str) -> Conversion {
    Conversion { fixture, architecture, names: &[LLAMA], keys: THETA, change: nothing }
}

/// Every decoder with recorded answers.
pub const DECODERS: &[Conversion] = &[
    conversion("qwen2", "qwen2"),
    conversion("qwen3", "qwen3"),
    Conversion {
        names: &[EXPERTS, LLAMA],
        keys: EXPERT_KEYS,
        change: Converted::stack_experts,
        ..conversion("qwen3_moe", "qwen3moe")
    },
    Conversion {
        names: &[EXPERTS, LLAMA],
        keys: EXPERT_KEYS,
        change: mixtral,
        ..conversion("mixtral", "llama")
    },
    Conversion { change: older_deepseek, ..latent("deepseek_v2") },
    latent("deepseek_v3"),
    Conversion { keys: &[], change: gemma, ..conversion("gemma", "gemma") },
    Conversion {
        names: &[SANDWICH, LLAMA],
        keys: &[
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
            ("attention.sliding_window", "sliding_window"),
        ],
        change: gemma2,
        ..conversion("gemma2", "gemma2")
    },
    Conversion {
        names: &[SANDWICH, LLAMA],
        keys: &[
            ("rope.freq_base", "rope_theta"),
            ("rope.freq_base_swa", "rope_local_base_freq"),
            ("attention.sliding_window", "sliding_window"),
        ],
        change: gemma3,
        ..conversion("gemma3", "gemma3")
    },
    Conversion { names: &[PHI, LLAMA], keys: &[], change: phi2, ..conversion("phi", "phi2") },
    Conversion { change: phi3, ..long_phi3_of("phi3") },
    long_phi3_of("phi3_longrope"),
    Conversion { names: &[FALCON, BLOOM], keys: &[], change: falcon, ..conversion("falcon_7b", "falcon") },
    Conversion { names: &[FALCON, BLOOM], keys: &[], change: falcon, ..conversion("falcon_40b", "falcon") },
    Conversion { names: &[BLOOM], keys: BLOOM_KEYS, change: bloom, ..conversion("bloom", "bloom") },
    Conversion { names: &[BLOOM], keys: BLOOM_KEYS, change: bloom, ..conversion("bloom_heads6", "bloom") },
    Conversion {
        names: &[GPT2],
        keys: &[
            ("context_length", "n_ctx"),
            ("embedding_length", "n_embd"),
            ("block_count", "n_layer"),
            ("attention.head_count", "n_head"),
        ],
        change: gpt2,
        ..conversion("gpt2", "gpt2")
    },
    Conversion { names: &[GPT_NEOX], keys: &[], change: gpt_neox, ..conversion("gpt_neox", "gptneox") },
    // Some programs that write GGUF include the base.
    Conversion {
        names: &[GPT_NEOX],
        keys: &[("rope.freq_base", "rotary_emb_base")],
        change: gpt_neox,
        ..conversion("gpt_neox_sequential", "gptneox")
    },
    Conversion {
        keys: THETA,
        change: |model| {
            model.file.set_string("qwen2.rope.scaling.type", "yarn");
            model.set("rope.scaling.factor", &model.config["rope_scaling"]["factor"].clone());
            let original = model.config["rope_scaling"]["original_max_position_embeddings"].clone();
            model.set("rope.scaling.original_context_length", &original);
        },
        ..conversion("yarn", "qwen2")
    },
];

/// Models that are compared tensor by tensor with their directories.
pub const OTHERS: &[Conversion] = &[
    Conversion {
        change: |model| {
            let dims = model.size("qk_nope_head_dim") + model.size("qk_rope_head_dim");
            model.set("attention.key_length", &json!(dims));
            model.set("attention.value_length", &json!(model.size("v_head_dim")));
            add_factors(model);
        },
        architecture: "minicpm3",
        ..latent("minicpm3")
    },
    latent("deepseek_v2_lite"),
    Conversion { names: &[BERT], keys: &[], change: bert, ..conversion("bert", "bert") },
    Conversion { names: &[T5], keys: T5_KEYS, ..conversion("t5", "t5") },
    Conversion { names: &[T5], keys: T5_KEYS, ..conversion("flan_t5", "t5") },
    Conversion {
        names: &[EXPERTS, LLAMA],
        keys: EXPERT_KEYS,
        change: Converted::stack_experts,
        ..conversion("qwen2_moe", "qwen2moe")
    },
];

const fn latent(fixture: &'static str) -> Conversion {
    Conversion {
        names: &[LATENT, EXPERTS, LLAMA],
        keys: LATENT_KEYS,
        change: deepseek,
        ..conversion(fixture, "deepseek2")
    }
}

const fn long_phi3_of(fixture: &'static str) -> Conversion {
    Conversion {
        names: &[PHI, LLAMA],
        keys: &[
            ("rope.freq_base", "rope_theta"),
            ("rope.scaling.original_context_length", "original_max_position_embeddings"),
            ("attention.sliding_window", "sliding_window"),
        ],
        change: long_phi3,
        ..conversion(fixture, "phi3")
    }
}
