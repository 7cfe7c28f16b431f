"""Encoder-decoder families: config.json as in their repositories, with small sizes."""

import transformers as hf

from . import changes, leftovers
from .case import F16, Case, Layout

GERMAN = 6  # a forced BOS token

M2M100 = {
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["M2M100ForConditionalGeneration"],
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "d_model": 32,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "decoder_layerdrop": 0.05,
    "decoder_layers": 2,
    "decoder_start_token_id": 2,
    "dropout": 0.1,
    "early_stopping": True,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "encoder_layerdrop": 0.05,
    "encoder_layers": 2,
    "eos_token_id": 2,
    "gradient_checkpointing": False,
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "max_length": 200,
    "max_position_embeddings": 64,
    "model_type": "m2m_100",
    "num_beams": 5,
    "num_hidden_layers": 2,
    "pad_token_id": 1,
    "scale_embedding": True,
    "transformers_version": "4.4.0.dev0",
    "use_cache": True,
    "vocab_size": 97,
}
T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 48,
    "d_kv": 8,
    "d_model": 32,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-6,
    "model_type": "t5",
    "n_positions": 512,
    "num_heads": 4,
    "num_layers": 2,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 16,
    "vocab_size": 96,
}

FLAN_T5 = T5 | {
    "feed_forward_proj": "gated-gelu",
    "num_decoder_layers": 3,
    "relative_attention_max_distance": 20,
    "relative_attention_num_buckets": 10,
    "tie_word_embeddings": False,
    "transformers_version": "4.23.1",
    "use_cache": True,
}
NLLB = M2M100 | {
    "activation_function": "relu",
    "decoder_ffn_dim": 56,
    "decoder_layers": 3,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "num_hidden_layers": 1,
    "tokenizer_class": "NllbTokenizer",
    "transformers_version": "4.21.0.dev0",
}
BART = {
    "activation_dropout": 0.1,
    "activation_function": "gelu",
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "architectures": ["BartForConditionalGeneration"],
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "classif_dropout": 0.1,
    "classifier_dropout": 0.0,
    "d_model": 32,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 2,
    "decoder_start_token_id": 2,
    "dropout": 0.1,
    "early_stopping": True,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 2,
    "eos_token_id": 2,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "gradient_checkpointing": False,
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "max_position_embeddings": 60,
    "model_type": "bart",
    "no_repeat_ngram_size": 3,
    "normalize_before": False,
    "normalize_embedding": True,
    "num_beams": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 1,
    "scale_embedding": False,
    "transformers_version": "4.7.0.dev0",
    "use_cache": True,
    "vocab_size": 97,
}

SHARED = tuple(
    ("model.shared.weight", name)
    for name in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
)
# MLP weights large enough for an answer to depend on the last tokens.
LIVELY = {
    "embedding_std": 0.15,
    "gains": {"fc": 4, "attn": 1.5},
    "means": {"model.decoder.layer_norm.weight": 3.0},
}

CASES = [
    Case("m2m100", hf.M2M100ForConditionalGeneration, M2M100, kind="encoder-decoder", dtype=F16,
         starts=(2, GERMAN), source_end=(2,), dtype_key=None, **LIVELY, neutral=r"k_proj\.bias",
         blocks="cross-attention, pre-norm, sinusoidal positions from 2, scaled embedding, ReLU, one matrix for "
         "both embeddings and the head, in the file under all names",
         layout=Layout(copies=SHARED),
         matters={"scale_embedding": False, "activation_function": "gelu"}),
    Case("nllb", hf.M2M100ForConditionalGeneration, NLLB, kind="encoder-decoder", dtype=F16,
         starts=(2, GERMAN), source_end=(2,), **LIVELY, neutral=r"k_proj\.bias",
         blocks="the same with stacks of different depths and numbers of heads; the shared matrix under one name",
         matters={"scale_embedding": False}),
    Case("t5", hf.T5ForConditionalGeneration, T5, kind="encoder-decoder", dtype=F16, starts=(0,), source_end=(1,),
         dtype_key=None, std=0.2, embedding_std=0.5, gains={"DenseRelu": 4},
         means={"decoder.final_layer_norm.weight": 6.0},
         blocks="relative position buckets, unscaled attention scores, RMS norms, ungated ReLU MLP, tied head on a "
         "scaled hidden state; an unused table in the file",
         layout=Layout(extra=leftovers.t5_cross_table),
         matters={"relative_attention_max_distance": 30, "layer_norm_epsilon": 1e-2, "tie_word_embeddings": False}),
    Case("flan_t5", hf.T5ForConditionalGeneration, FLAN_T5, kind="encoder-decoder", dtype=F16, starts=(0,),
         source_end=(1,), dtype_key=None, std=0.2, embedding_std=0.5, gains={"DenseRelu": 4}, patch=changes.own_head,
         blocks="gated tanh GELU, a separate head on an unscaled hidden state, stacks of different depths",
         layout=Layout(copies=(("shared.weight", "encoder.embed_tokens.weight"),
                               ("shared.weight", "decoder.embed_tokens.weight"))),
         matters={"relative_attention_max_distance": 40, "feed_forward_proj": "gated-silu"}),
    Case("bart", hf.BartForConditionalGeneration, BART, kind="encoder-decoder", dtype=F16, starts=(2, 0),
         source_end=(2,), dtype_key=None, std=0.15, gains={"fc": 3, "embed_positions": 4}, neutral=r"k_proj\.bias",
         means={"model.decoder.layers.1.final_layer_norm.weight": 2.5},
         random_buffers=("final_logits_bias",),
         blocks="post-norm, learned positions with offset 2, embedding norm, erf GELU, final_logits_bias, forced "
         "BOS",
         layout=Layout(copies=SHARED),
         matters={"activation_function": "gelu_new", "scale_embedding": True}),
]  # fmt: skip
