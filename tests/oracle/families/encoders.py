"""Encoder-only families: config.json as in their repositories, with small sizes."""

import transformers as hf

from . import leftovers
from .case import BF16, BOS, EOS, F16, Case, Layout


def without(words: dict, *keys: str) -> dict:
    return {key: value for key, value in words.items() if key not in keys}


BERT = {
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 40,
    "model_type": "bert",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 97,
}
BERT_GAMMA = BERT | {"hidden_act": "gelu_new", "num_attention_heads": 2, "type_vocab_size": 3}
ROBERTA = {
    "architectures": ["RobertaForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 42,
    "model_type": "roberta",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 97,
}
XLM_ROBERTA = ROBERTA | {
    "architectures": ["XLMRobertaModel"],
    "classifier_dropout": None,
    "model_type": "xlm-roberta",
    "output_past": True,
    "position_embedding_type": "absolute",
    "transformers_version": "4.26.1",
    "use_cache": True,
}
MODERNBERT = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "cls_token_id": 1,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "eos_token_id": 2,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "hidden_size": 32,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "layer_norm_eps": 1e-5,
    "local_attention": 8,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-5,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "pad_token_id": 3,
    "position_embedding_type": "absolute",
    "sep_token_id": 2,
    "tie_word_embeddings": True,
    "transformers_version": "4.47.0.dev0",
    "vocab_size": 96,
}
ELECTRA = without(BERT, "position_embedding_type") | {
    "architectures": ["ElectraForMaskedLM"],
    "embedding_size": 20,
    "model_type": "electra",
    "summary_activation": "gelu",
    "summary_last_dropout": 0.1,
    "summary_type": "first",
    "summary_use_proj": True,
}
ELECTRA_SAME = ELECTRA | {"architectures": ["ElectraForPreTraining"], "embedding_size": 32}
ALBERT = without(BERT, "gradient_checkpointing", "position_embedding_type", "use_cache") | {
    "architectures": ["AlbertForMaskedLM"],
    "attention_probs_dropout_prob": 0,
    "bos_token_id": 2,
    "classifier_dropout_prob": 0.1,
    "down_scale_factor": 1,
    "embedding_size": 20,
    "eos_token_id": 3,
    "gap_size": 0,
    "hidden_act": "gelu_new",
    "hidden_dropout_prob": 0,
    "inner_group_num": 1,
    "model_type": "albert",
    "net_structure_type": 0,
    "num_hidden_groups": 1,
    "num_hidden_layers": 3,
    "num_memory_blocks": 0,
}
ALBERT_GROUPS = ALBERT | {"inner_group_num": 2, "num_hidden_groups": 2, "num_hidden_layers": 3}
DISTILBERT = {
    "activation": "gelu",
    "architectures": ["DistilBertForMaskedLM"],
    "attention_dropout": 0.1,
    "dim": 32,
    "dropout": 0.1,
    "hidden_dim": 48,
    "initializer_range": 0.02,
    "max_position_embeddings": 40,
    "model_type": "distilbert",
    "n_heads": 4,
    "n_layers": 2,
    "pad_token_id": 0,
    "qa_dropout": 0.1,
    "seq_classif_dropout": 0.2,
    "sinusoidal_pos_embds": False,
    "tie_weights_": True,
    "transformers_version": "4.10.0.dev0",
    "vocab_size": 97,
}
MPNET = without(ROBERTA, "type_vocab_size") | {
    "architectures": ["MPNetForMaskedLM"],
    "layer_norm_eps": 1e-5,
    "model_type": "mpnet",
    "relative_attention_num_buckets": 32,
}
MEGATRON_BERT = BERT | {"architectures": ["MegatronBertForMaskedLM"], "model_type": "megatron-bert"}
PRE_ROBERTA = ROBERTA | {
    "architectures": ["RobertaPreLayerNormForMaskedLM"],
    "classifier_dropout": None,
    "model_type": "roberta-prelayernorm",
    "position_embedding_type": "absolute",
    "use_cache": True,
}
XLM_ROBERTA_XL = PRE_ROBERTA | {"architectures": ["XLMRobertaXLForMaskedLM"], "model_type": "xlm-roberta-xl"}
CAMEMBERT = ROBERTA | {"architectures": ["CamembertForMaskedLM"], "model_type": "camembert"}
DATA2VEC = PRE_ROBERTA | {"architectures": ["Data2VecTextForMaskedLM"], "model_type": "data2vec-text"}
ROFORMER = without(BERT, "position_embedding_type") | {
    "architectures": ["RoFormerForMaskedLM"],
    "embedding_size": 24,
    "model_type": "roformer",
    "rotary_value": False,
}
DEBERTA_V3 = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "layer_norm_eps": 1e-7,
    "legacy": False,
    "max_position_embeddings": 40,
    "max_relative_positions": -1,
    "model_type": "deberta-v2",
    "norm_rel_ebd": "layer_norm",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "position_buckets": 8,
    "relative_attention": True,
    "share_att_key": True,
    "type_vocab_size": 0,
    "vocab_size": 97,
}
DEBERTA_V2 = DEBERTA_V3 | {
    "embedding_size": 20,
    "legacy": True,
    "max_relative_positions": 12,
    "norm_rel_ebd": "none",
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": -1,
    "share_att_key": False,
}
SENTENCES = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ],
    "sentence_bert_config.json": {"max_seq_length": 40, "do_lower_case": False},
    "1_Pooling/config.json": {
        "word_embedding_dimension": 32,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    },
}
OLD_NORMS = ((r"LayerNorm\.weight$", "LayerNorm.gamma"), (r"LayerNorm\.bias$", "LayerNorm.beta"))
BERT_HEAD = {"cls.predictions.transform.LayerNorm.weight": 3.0}  # separates the logits of its tied decoder
HEARING = {"attention": 2.0}  # makes the prediction for a mask depend on the words around it

CASES = [
    Case("bert", hf.BertForMaskedLM, BERT, kind="encoder", dtype_key=None, starts=(BOS,), source_end=(EOS,),
         neutral=r"key\.bias", means=BERT_HEAD, gains=HEARING,
         blocks="post-norm, learned positions, token types, embedding norm, erf GELU, mask head with transform, "
         "tied decoder with bias; pooler, next-sentence head and position_ids in the file",
         layout=Layout(extra=leftovers.bert_pretraining),
         matters={"hidden_act": "gelu_new", "layer_norm_eps": 1e-2}),
    Case("bert_gamma", hf.BertForMaskedLM, BERT_GAMMA, kind="encoder", dtype=F16, starts=(BOS,), source_end=(EOS,),
         neutral=r"key\.bias", dtype_key=None, means=BERT_HEAD, gains=HEARING,
         blocks="the same with norms named gamma and beta, the tied decoder again in the file, tanh GELU",
         layout=Layout(names=OLD_NORMS, copies=(
             ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
             ("cls.predictions.bias", "cls.predictions.decoder.bias"))),
         matters={"hidden_act": "gelu"}),
    Case("roberta", hf.RobertaForMaskedLM, ROBERTA, kind="encoder", dtype=F16, starts=(0,), source_end=(2,),
         neutral=r"key\.bias", dtype_key=None, means={"lm_head.layer_norm.weight": 3.0}, gains=HEARING,
         blocks="positions from pad_token_id + 1, one token type, mask head under lm_head with its own bias",
         layout=Layout(extra=leftovers.roberta_positions, copies=(
             ("roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"),)),
         matters={"layer_norm_eps": 1e-2, "hidden_act": "gelu_new"}),
    Case("xlm_roberta", hf.XLMRobertaModel, XLM_ROBERTA, kind="encoder", dtype=F16, starts=(0,), source_end=(2,),
         neutral=r"key\.bias|pooler", gains=HEARING, pool=True, files=SENTENCES,
         blocks="no mask head, tensor names without prefix; mean pooling and normalization from "
         "sentence-transformers files; an unused pooler in the file",
         matters={"layer_norm_eps": 1e-2}),
    Case("modernbert", hf.ModernBertForMaskedLM, MODERNBERT, kind="encoder", dtype=BF16, starts=(1,), source_end=(2,),
         blocks="every third layer global, the others within 4 tokens on either side, a theta for each kind, gated "
         "GELU with both halves in Wi, norms without bias, no first norm in layer 0, mask head with norm and decoder "
         "bias",
         matters={"local_attention": 10, "global_attn_every_n_layers": 2, "local_rope_theta": 1000.0,
                  "global_rope_theta": 10000.0, "hidden_activation": "gelu_new"}),
    Case("electra", hf.ElectraForMaskedLM, ELECTRA, kind="encoder", dtype=F16, starts=(BOS,), source_end=(EOS,),
         neutral=r"key\.bias", dtype_key=None, means={"generator_predictions.LayerNorm.weight": 3.0}, gains=HEARING,
         blocks="positions, token types and norm at the width of the embedding, before it is projected; a mask head "
         "that projects back",
         matters={"layer_norm_eps": 1e-2, "hidden_act": "gelu_new"}),
    Case("electra_base", hf.ElectraModel, ELECTRA_SAME, kind="encoder", dtype=BF16, starts=(BOS,), source_end=(EOS,),
         neutral=r"key\.bias", gains=HEARING, pool=True, files=SENTENCES,
         blocks="the same with an embedding as wide as the layers, without a head",
         matters={"layer_norm_eps": 1e-2}),
    Case("albert", hf.AlbertForMaskedLM, ALBERT, kind="encoder", dtype=F16, starts=(BOS,), source_end=(EOS,),
         neutral=r"key\.bias|pooler|sop_classifier", dtype_key=None, means={"predictions.LayerNorm.weight": 3.0},
         gains=HEARING,
         blocks="three layers with the same weights; positions, token types and norm at the width of the embedding, "
         "before it is projected; a mask head that projects back",
         matters={"layer_norm_eps": 1e-2, "hidden_act": "gelu", "num_hidden_layers": 2}),
    Case("albert_groups", hf.AlbertForMaskedLM, ALBERT_GROUPS, kind="encoder", dtype=F16, starts=(BOS,),
         source_end=(EOS,), neutral=r"query|key|pooler|sop_classifier", dtype_key=None,
         means={"predictions.LayerNorm.weight": 3.0}, gains=HEARING,
         blocks="the same with six layers in two groups, in each of which layers with two sets of weights take turns",
         matters={"num_hidden_layers": 4}),
    Case("distilbert", hf.DistilBertForMaskedLM, DISTILBERT, kind="encoder", dtype=F16, starts=(BOS,),
         source_end=(EOS,), neutral=r"k_lin\.bias", dtype_key=None, means={"vocab_layer_norm.weight": 3.0},
         gains=HEARING,
         blocks="BERT without token types, with its own tensor names and keys",
         matters={"activation": "relu"}),
    Case("mpnet", hf.MPNetForMaskedLM, MPNET, kind="encoder", dtype=F16, starts=(0,), source_end=(2,),
         neutral=r"k\.bias", dtype_key=None, means={"lm_head.layer_norm.weight": 3.0},
         gains=HEARING | {"relative_attention_bias": 3},
         blocks="learned positions from 2, and relative position biases that all layers share",
         matters={"layer_norm_eps": 1e-2}),
    Case("megatron_bert", hf.MegatronBertForMaskedLM, MEGATRON_BERT, kind="encoder", dtype=F16, starts=(BOS,),
         source_end=(EOS,), neutral=r"key\.bias", means=BERT_HEAD, gains=HEARING,
         blocks="BERT with pre-norm and a final norm, and no norm of the embeddings",
         matters={"layer_norm_eps": 1e-2}),
    Case("roberta_prelayernorm", hf.RobertaPreLayerNormForMaskedLM, PRE_ROBERTA, kind="encoder", dtype=F16,
         starts=(0,), source_end=(2,), neutral=r"key\.bias", means={"lm_head.layer_norm.weight": 3.0}, gains=HEARING,
         blocks="RoBERTa with pre-norm and a final norm",
         matters={"layer_norm_eps": 1e-2}),
    Case("xlm_roberta_xl", hf.XLMRobertaXLForMaskedLM, XLM_ROBERTA_XL, kind="encoder", dtype=BF16, starts=(0,),
         source_end=(2,), neutral=r"key\.bias", means={"lm_head.layer_norm.weight": 3.0}, gains=HEARING,
         blocks="the same without a norm of the embeddings",
         matters={"layer_norm_eps": 1e-2}),
    Case("camembert", hf.CamembertForMaskedLM, CAMEMBERT, kind="encoder", dtype=F16, starts=(0,), source_end=(2,),
         neutral=r"key\.bias", dtype_key=None, means={"lm_head.layer_norm.weight": 3.0}, gains=HEARING,
         blocks="RoBERTa with another model_type",
         matters={"layer_norm_eps": 1e-2}),
    Case("data2vec_text", hf.Data2VecTextForMaskedLM, DATA2VEC, kind="encoder", dtype=F16, starts=(0,),
         source_end=(2,), neutral=r"key\.bias", means={"lm_head.layer_norm.weight": 3.0}, gains=HEARING,
         blocks="RoBERTa with another model_type and prefix",
         matters={"layer_norm_eps": 1e-2}),
    Case("roformer", hf.RoFormerForMaskedLM, ROFORMER, kind="encoder", starts=(BOS,), source_end=(EOS,),
         neutral=r"key\.bias", dtype_key=None, means=BERT_HEAD, gains=HEARING,
         blocks="interleaved RoPE in a bidirectional encoder, norm at the width of the embedding; a table of sines in "
         "the file",
         matters={"layer_norm_eps": 1e-2}),
    Case("deberta_v3", hf.DebertaV2ForMaskedLM, DEBERTA_V3, kind="encoder", dtype=F16, starts=(BOS,),
         source_end=(EOS,), dtype_key=None, means={"lm_predictions.lm_head.LayerNorm.weight": 3.0}, gains=HEARING,
         blocks="disentangled attention: logarithmic buckets of distances, whose normalized vectors the layer's own "
         "queries and keys project; a mask head under lm_predictions; an unused discriminator's head in the file",
         layout=Layout(extra=leftovers.deberta_discriminator),
         matters={"max_position_embeddings": 60, "pos_att_type": "c2p", "layer_norm_eps": 1e-2}),
    Case("deberta_v2", hf.DebertaV2ForMaskedLM, DEBERTA_V2, kind="encoder", dtype=BF16, starts=(BOS,),
         source_end=(EOS,), neutral=r"pos_key_proj\.bias", means=BERT_HEAD, gains=HEARING,
         blocks="the same with a bucket for each distance up to 12 and projections of their own, and a narrower "
         "embedding",
         matters={"layer_norm_eps": 1e-2, "hidden_act": "gelu_new"}),
]  # fmt: skip
