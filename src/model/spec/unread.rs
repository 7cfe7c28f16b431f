//! Finds the keys of a model's config.json that nothing reads. A key that changes what is computed and is not
//! read would be answered wrongly, without a word.
//!
//! Invariant: a key passes without a word only if a value is read from it, the specification names it, or it
//! is known to change nothing.

use super::formula;
use super::words::ActivationName;
use crate::formats::HubConfig;
use crate::model::provenance::{Origin, SourcedValue};
use anyhow::{Result, bail};
use serde_json::Value as Json;
use std::collections::{BTreeMap, BTreeSet};

/// The keys of config.json that a specification file names, each with whether a formula does.
pub type NamedKeys = BTreeMap<String, bool>;

/// Returns all keys of config.json that a specification names, in lookups, formulas, conditions, and the
/// lists of supported values and of ignored keys.
pub fn named_keys(specification: &toml::Table) -> NamedKeys {
    let mut named = NamedKeys::new();
    collect(specification, &mut named);
    named
}

fn collect(table: &toml::Table, named: &mut NamedKeys) {
    for (name, value) in table {
        match (name.as_str(), value) {
            ("key" | "ignored_keys", toml::Value::String(key)) => _ = named.entry(key.clone()).or_default(),
            ("key" | "ignored_keys", toml::Value::Array(keys)) => {
                let keys = keys.iter().filter_map(toml::Value::as_str);
                keys.for_each(|key| _ = named.entry(key.to_owned()).or_default());
            }
            ("formula", toml::Value::String(text)) => {
                let keys = formula::names(text).into_iter().filter(|name| !name.starts_with('$'));
                named.extend(keys.map(|key| (key, true)));
            }
            ("supported_values" | "neutral", toml::Value::Table(keys)) => {
                keys.keys().for_each(|key| _ = named.entry(key.clone()).or_default());
            }
            ("cases", _) => {}
            (_, toml::Value::Table(inner)) => collect(inner, named),
            (_, toml::Value::Array(items)) => {
                items.iter().filter_map(toml::Value::as_table).for_each(|item| collect(item, named));
            }
            _ => {}
        }
    }
}

/// Returns the keys of `config` that neither the specification `file` names nor `values` come from, except
/// those that are known to change nothing. Fails if one of them changes what is computed, unless it has a
/// value with which it does not, and if one is spelt nearly like a key that the specification names and that
/// the configuration lacks.
pub fn check(
    file: &str,
    named: &NamedKeys,
    config: &HubConfig,
    values: &[SourcedValue],
) -> Result<Vec<String>> {
    let read = sources(values);
    let heads: BTreeSet<&str> = named.keys().map(|key| outer(key)).collect();
    let is_read = |key: &&str| {
        let as_written = config.source_keys(key);
        heads.contains(key) || as_written.iter().any(|key| read.contains(outer(key)))
    };
    let unread = config.keys().filter(|key| !is_read(key) && !changes_nothing(key));
    let unread: Vec<&str> = unread.collect();
    for key in &unread {
        if let Some(wanted) = misspelt(key, named, config) {
            bail!(config.key_error(
                key,
                format_args!("nothing reads it, and {file} names '{wanted}', which is missing; is that it?")
            ));
        }
        if let Some(value) = config.get(key).filter(|value| !is_neutral(key, value, config, values)) {
            bail!(config.key_error(
                key,
                format_args!(
                    "{value} changes what is computed, but {file} does not read it; read it there, or add it \
                     to the list 'ignored_keys' there if the model's own code ignores it"
                )
            ));
        }
    }
    let unknown = unread.into_iter().filter(|key| !is_known(key));
    Ok(unknown.map(|key| config.file_key(key)).collect())
}

/// Returns the outermost components of the keys that values come from.
fn sources(values: &[SourcedValue]) -> BTreeSet<&str> {
    let keys = values.iter().flat_map(|sourced| match &sourced.origin {
        Origin::Config(keys) => keys.as_slice(),
        _ => &[],
    });
    let mut read: BTreeSet<&str> = keys.flat_map(|key| [key.as_str(), outer(key)]).collect();
    if read.iter().any(|key| key.ends_with(".rope_theta")) {
        // The inner key goes first, and the outer one repeats it.
        read.insert("rope_theta");
    }
    if read.contains("rope_scaling") || read.contains("rope_parameters") {
        read.extend(["original_max_position_embeddings", "max_position_embeddings"]);
    }
    read
}

fn outer(key: &str) -> &str {
    key.split('.').next().unwrap_or(key)
}

/// Returns the key that the specification names and the configuration lacks, and that differs from `key` by
/// at most two letters.
fn misspelt<'n>(key: &str, named: &'n NamedKeys, config: &HubConfig) -> Option<&'n str> {
    let absent = named.keys().filter(|wanted| wanted.len() > 6 && config.at(wanted).is_none());
    absent.map(String::as_str).find(|wanted| strsim::damerau_levenshtein(wanted, key) <= 2)
}

/// Whether a key changes nothing that is computed, by its name: records of training, how to compute, defaults
/// of sampling, and what the names and shapes of tensors show anyway.
fn changes_nothing(key: &str) -> bool {
    let starts = [
        "_",
        "summary_",
        "pooler_",
        "classifier_",
        "initializer_",
        "output_",
        "init_",
        "task_",
        "tokenizer_",
    ];
    let parts = ["dropout", "pdrop", "layerdrop", "aux_loss", "z_loss", "_token_id", "_tokens_id"];
    starts.iter().any(|start| key.starts_with(start))
        || parts.iter().any(|part| key.contains(part))
        || NEUTRAL_KEYS.contains(&key)
}

/// Whether a key is known to change what is computed with some values.
fn is_known(key: &str) -> bool {
    MEANINGFUL.iter().any(|(known, _)| *known == key) || MIRRORED.iter().any(|(keys, _)| keys.contains(&key))
}

/// Whether the value of an unread key changes nothing: it is not a key that is known to, or has the value
/// without effect, or the one that the specification has anyway.
fn is_neutral(key: &str, value: &Json, config: &HubConfig, values: &[SourcedValue]) -> bool {
    let neutral = MEANINGFUL.iter().find(|(known, _)| *known == key).map(|(_, neutral)| *neutral);
    let neutral: Vec<Json> =
        serde_json::from_str(neutral.unwrap_or("[]")).expect("a list of values; this is a bug");
    let is_equal = |known: &Json| match (known.as_f64(), value.as_f64()) {
        (Some(known), Some(value)) => known == value,
        _ => known == value,
    };
    !is_known(key)
        || neutral.iter().any(is_equal)
        || mirrors(key, value, values)
        || match key {
            "layer_types" => all_equal(value, "full_attention"),
            "sliding_window" => is_without_window(value, config),
            "max_window_layers" => {
                config.get("sliding_window").is_none_or(|value| is_without_window(value, config))
            }
            _ => false,
        }
}

/// Whether a model with this sliding window has no layer that sees less than the context.
fn is_without_window(window: &Json, config: &HubConfig) -> bool {
    let context = config.get("max_position_embeddings").and_then(Json::as_u64);
    config.get("use_sliding_window") == Some(&Json::Bool(false))
        || window.as_u64().zip(context).is_some_and(|(window, context)| window >= context)
}

fn all_equal(list: &Json, word: &str) -> bool {
    list.as_array().is_some_and(|entries| entries.iter().all(|entry| entry == word))
}

/// Whether a value that the specification has, wherever it comes from, is that of the unread key. A key of a
/// block that the model does not have, such as a head, says nothing, unless it implies the block.
fn mirrors(key: &str, value: &Json, values: &[SourcedValue]) -> bool {
    let activation = |value: &Json| serde_json::from_value::<ActivationName>(value.clone()).ok();
    let is_equal = |ours: &Json| match (ours.as_f64(), value.as_f64()) {
        (Some(ours), Some(value)) => (ours - value).abs() <= 1e-6 * value.abs(),
        _ => ours == value || activation(ours).is_some_and(|ours| activation(value) == Some(ours)),
    };
    let implies_block = MEANINGFUL.iter().any(|(known, _)| *known == key);
    MIRRORED.iter().filter(|(keys, _)| keys.contains(&key)).any(|(_, ours)| {
        let own = |it: &&SourcedValue| {
            it.key.trim_start_matches("encoder.").trim_start_matches("decoder.") == *ours
        };
        let mut ours = values.iter().filter(own).peekable();
        ours.peek().is_none() && !implies_block || ours.any(|it| is_equal(&it.value))
    })
}

/// Keys of config.json that say what a value of the specification says, which may be fixed there.
const MIRRORED: [(&[&str], &str); 10] = [
    (&["num_attention_heads", "n_head", "num_heads", "n_heads"], "attention.heads"),
    (&["num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num"], "attention.kv_heads"),
    (&["head_dim", "kv_channels", "d_kv", "query_pre_attn_scalar"], "attention.head_dim"),
    (&["num_experts_per_tok", "moe_topk", "moe_top_k"], "moe.top_k"),
    (
        &[
            "rms_norm_eps",
            "layer_norm_eps",
            "layer_norm_epsilon",
            "norm_eps",
            "norm_epsilon",
            "layernorm_epsilon",
        ],
        "norm.eps",
    ),
    (&["hidden_act", "hidden_activation", "activation_function", "activation"], "mlp.activation"),
    (&["rope_theta", "rotary_emb_base"], "position.theta"),
    (&["sliding_window"], "attention.window"),
    (&["rotary_dim"], "position.dims"),
    (&["tie_word_embeddings"], "head.tied"),
];

/// Keys of config.json that change what is computed, each with the values, as a JSON list, with which they do
/// not.
const MEANINGFUL: [(&str, &str); 81] = [
    ("alibi", "[false]"),
    ("alibi_bias_max", "[8]"),
    ("apply_residual_connection_post_layernorm", "[false]"),
    ("attention_chunk_size", "[]"),
    ("attention_layers", "[]"),
    ("attention_multiplier", "[]"),
    ("attention_types", "[]"),
    ("attn_config", "[]"),
    ("attn_logit_softcapping", "[0]"),
    ("attn_temperature_tuning", "[0, false]"),
    ("clip_qkv", "[]"),
    ("decoder_sparse_step", "[1]"),
    ("dim_model_base", "[]"),
    ("do_layer_norm_before", "[true]"),
    ("embedding_multiplier", "[1]"),
    ("embedding_scale", "[1]"),
    ("ffn_config", "[]"),
    ("final_logit_softcapping", "[0]"),
    ("global_rope_theta", "[]"),
    ("hybrid_override_pattern", "[]"),
    ("is_causal", "[true]"),
    ("kv_lora_rank", "[]"),
    ("layer_types", "[[]]"),
    ("lm_head_multiplier", "[1]"),
    ("local_rope_theta", "[]"),
    ("logit_cap", "[0]"),
    ("logit_scale", "[1]"),
    ("logits_scale", "[1]"),
    ("logits_scaling", "[1]"),
    ("mamba_d_state", "[]"),
    ("max_window_layers", "[]"),
    ("mlp_only_layers", "[[]]"),
    ("moe_layer_freq", "[1]"),
    ("mrope_section", "[]"),
    ("mup_attn_multiplier", "[]"),
    ("mup_embedding_multiplier", "[1]"),
    ("mup_width_multiplier", "[1]"),
    ("n_group", "[0, 1]"),
    ("no_rope_layer_interval", "[0]"),
    ("no_rope_layers", "[[]]"),
    ("norm_topk_prob", "[false]"),
    ("normalize_before", "[true]"),
    ("parallel_attn", "[false]"),
    ("partial_rotary_factor", "[1]"),
    ("position_embedding_type", "[\"absolute\"]"),
    ("q_lora_rank", "[]"),
    ("qk_layernorm", "[false]"),
    ("qk_norm", "[false]"),
    ("query_pre_attn_scalar", "[]"),
    ("relative_attention_max_distance", "[]"),
    ("relative_attention_num_buckets", "[]"),
    ("residual_multiplier", "[1]"),
    ("rope_interleave", "[false]"),
    ("rope_interleaved", "[false]"),
    ("rope_local_base_freq", "[]"),
    ("rope_parameters", "[]"),
    ("rope_pct", "[]"),
    ("rope_ratio", "[1]"),
    ("rope_scaling", "[]"),
    ("rope_theta", "[]"),
    ("rotary_dim", "[]"),
    ("rotary_emb_base", "[]"),
    ("rotary_interleaved", "[false]"),
    ("rotary_pct", "[1]"),
    ("routed_scaling_factor", "[1]"),
    ("scale_attn_by_inverse_layer_idx", "[false]"),
    ("scale_attn_weights", "[true]"),
    ("scale_depth", "[]"),
    ("scale_emb", "[1]"),
    ("scale_embedding", "[false]"),
    ("scoring_func", "[\"softmax\"]"),
    ("sliding_window", "[0]"),
    ("ssm_cfg", "[]"),
    ("swiglu_limit", "[]"),
    ("topk_group", "[0, 1]"),
    ("use_alibi", "[false]"),
    ("use_bidirectional_attention", "[false]"),
    ("use_parallel_residual", "[false]"),
    ("use_qk_layernorm", "[false]"),
    ("use_qk_norm", "[false]"),
    ("use_sliding_window", "[false]"),
];

/// Keys of config.json that change nothing that is computed. Sizes and biases are among them where tensors
/// have them too: a model whose tensors are not those of its specification is refused.
const NEUTRAL_KEYS: [&str; 109] = [
    "apply_query_key_layer_scaling",
    "architectures",
    "attention_bias",
    "attention_softmax_in_fp32",
    "attn_implementation",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bias",
    "bias_dropout_fusion",
    "cache_implementation",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "deterministic_flash_attn",
    "directionality",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "ep_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "fp32_residual_connection",
    "gradient_checkpointing",
    "hidden_size",
    "id2label",
    "initial_context_length",
    "input_jitter_noise",
    "intermediate_size",
    "is_decoder",
    "is_encoder_decoder",
    "is_original_qwen3_reranker",
    "keys_to_ignore_at_inference",
    "kv_cache",
    "label2id",
    "language",
    "length_penalty",
    "masked_softmax_fusion",
    "max_length",
    "max_new_tokens",
    "max_position_embeddings",
    "max_sequence_length",
    "max_tokenizer_truncation",
    "min_length",
    "mlp_bias",
    "model_max_length",
    "model_type",
    "moe_norm_min",
    "n_ctx",
    "n_embd",
    "n_layer",
    "n_positions",
    "n_special",
    "name",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_hidden_layers",
    "num_labels",
    "num_layers",
    "num_nextn_predict_layers",
    "num_return_sequences",
    "original_max_position_embeddings",
    "padded_vocab_size",
    "padding_idx",
    "pre_seq_len",
    "predict_special_tokens",
    "prefix",
    "prefix_projection",
    "pretraining_tp",
    "problem_type",
    "pruned_heads",
    "quantization_config",
    "reference_compile",
    "remove_invalid_values",
    "reorder_and_upcast_attn",
    "repad_logits_with_grad",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "router_jitter_noise",
    "sbert_ce_default_activation_function",
    "scale_attention_softmax_in_fp32",
    "sentence_transformers",
    "sep_token",
    "seq_aux",
    "seq_length",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "slow_but_exact",
    "sparse_pred_ignore_index",
    "sparse_prediction",
    "suppress_tokens",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "unsloth_version",
    "use_cache",
    "vocab_size",
];
