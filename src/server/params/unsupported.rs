//! Parameters of OpenAI and of other servers that are known here and not supported.
//!
//! Invariant: each is accepted only with values that leave the answer as it is; those with any value only
//! advise the server or its operator.

use crate::server::fields::{NoOpValue, UnsupportedParams};

/// Unsupported parameters of both text generation APIs.
pub(super) const UNSUPPORTED: UnsupportedParams = &[
    // Advice.
    ("user", NoOpValue::Any),
    ("metadata", NoOpValue::Any),
    ("safety_identifier", NoOpValue::Any),
    ("prompt_cache_key", NoOpValue::Any),
    ("prompt_cache_retention", NoOpValue::Any),
    ("store", NoOpValue::Any),
    ("reasoning_effort", NoOpValue::Any),
    ("verbosity", NoOpValue::Any),
    ("prediction", NoOpValue::Any),
    ("cache_prompt", NoOpValue::Any),
    ("n_cache_reuse", NoOpValue::Any),
    ("id_slot", NoOpValue::Any),
    ("request_id", NoOpValue::Any),
    ("stream_interval", NoOpValue::Any),
    ("speculative.n_min", NoOpValue::Any),
    ("speculative.p_min", NoOpValue::Any),
    // What to keep of a prompt that is too long: no prompt is ever cut.
    ("n_keep", NoOpValue::Any),
    ("n_discard", NoOpValue::Any),
    // vLLM.
    ("spaces_between_special_tokens", NoOpValue::Bool(true)),
    ("detokenize", NoOpValue::Bool(true)),
    ("prompt_embeds", NoOpValue::Empty),
    ("logprob_token_ids", NoOpValue::Empty),
    ("logits_processors", NoOpValue::Empty),
    ("repetition_detection", NoOpValue::OnlyNull),
    ("watermarking", NoOpValue::OnlyNull),
    ("kv_transfer_params", NoOpValue::Empty),
    ("vllm_xargs", NoOpValue::Empty),
    ("extra_args", NoOpValue::Empty),
    // llama.cpp.
    ("min_keep", NoOpValue::AtMost(1.0)),
    ("n_indent", NoOpValue::AtMost(0.0)),
    ("n_cmpl", NoOpValue::Number(1.0)),
    ("t_max_prompt_ms", NoOpValue::AtMost(0.0)),
    ("t_max_predict_ms", NoOpValue::AtMost(0.0)),
    ("adaptive_target", NoOpValue::AtMost(-1.0)),
    ("adaptive_decay", NoOpValue::Any),
    ("post_sampling_probs", NoOpValue::Bool(false)),
    ("return_tokens", NoOpValue::Bool(false)),
    ("return_progress", NoOpValue::Bool(false)),
    ("response_fields", NoOpValue::Empty),
    ("verbose", NoOpValue::Bool(false)),
    ("penalize_nl", NoOpValue::Bool(false)),
    ("lora", NoOpValue::Empty),
    ("image_data", NoOpValue::Empty),
    // SGLang.
    ("regex", NoOpValue::OnlyNull),
    ("ebnf", NoOpValue::OnlyNull),
    ("stop_regex", NoOpValue::Empty),
    ("no_stop_trim", NoOpValue::Bool(false)),
    ("lora_path", NoOpValue::OnlyNull),
    ("custom_logit_processor", NoOpValue::OnlyNull),
    ("custom_params", NoOpValue::Empty),
];

/// Unsupported parameters of the chat API only.
pub(super) const UNSUPPORTED_CHAT: UnsupportedParams = &[
    ("functions", NoOpValue::Empty),
    ("function_call", NoOpValue::Texts(&["none"])),
    ("modalities", NoOpValue::Texts(&["text"])),
    ("audio", NoOpValue::OnlyNull),
    ("web_search_options", NoOpValue::OnlyNull),
    ("chat_template", NoOpValue::OnlyNull),
    ("documents", NoOpValue::Empty),
    ("media_io_kwargs", NoOpValue::Empty),
    ("mm_processor_kwargs", NoOpValue::Empty),
    ("echo", NoOpValue::Bool(false)),
    ("truncate_prompt_tokens", NoOpValue::OnlyNull),
    ("add_special_tokens", NoOpValue::Bool(false)),
    ("n_probs", NoOpValue::AtMost(0.0)),
    ("parse_tool_calls", NoOpValue::Bool(true)),
    ("reasoning_format", NoOpValue::Texts(&["auto", "deepseek"])),
    ("reasoning_budget_tokens", NoOpValue::AtMost(-1.0)),
    ("thinking_budget_tokens", NoOpValue::AtMost(-1.0)),
    ("thinking_forced_open", NoOpValue::Bool(false)),
];
