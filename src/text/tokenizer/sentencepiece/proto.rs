//! Protocol buffer messages of a sentencepiece model, restricted to the fields that affect encoding.
//!
//! Invariant: field numbers and defaults are those of sentencepiece_model.proto.

use prost::Message;

/// A sentencepiece model file.
#[derive(Clone, PartialEq, Message)]
pub struct ModelProto {
    #[prost(message, repeated, tag = "1")]
    pub pieces: Vec<PieceProto>,
    #[prost(message, optional, tag = "2")]
    pub trainer_spec: Option<TrainerSpec>,
    #[prost(message, optional, tag = "3")]
    pub normalizer_spec: Option<NormalizerSpec>,
}

/// A piece of the vocabulary.
#[derive(Clone, PartialEq, Message)]
pub struct PieceProto {
    #[prost(string, optional, tag = "1")]
    pub piece: Option<String>,
    #[prost(float, optional, tag = "2")]
    pub score: Option<f32>,
    /// Number of the `PieceKind`. Default: 1.
    #[prost(int32, optional, tag = "3")]
    pub kind: Option<i32>,
}

/// Training parameters of the model.
#[derive(Clone, PartialEq, Message)]
pub struct TrainerSpec {
    /// 1 is unigram, 2 is BPE, 3 is words, 4 is characters. Default: 1.
    #[prost(int32, optional, tag = "3")]
    pub model_type: Option<i32>,
    #[prost(bool, optional, tag = "24")]
    pub treat_whitespace_as_suffix: Option<bool>,
    /// Id of BOS; -1 for none. Default: 1.
    #[prost(int32, optional, tag = "41")]
    pub bos_id: Option<i32>,
    /// Id of EOS; -1 for none. Default: 2.
    #[prost(int32, optional, tag = "42")]
    pub eos_id: Option<i32>,
}

/// Normalization parameters. The switches default to true.
#[derive(Clone, PartialEq, Message)]
pub struct NormalizerSpec {
    #[prost(bytes = "vec", optional, tag = "2")]
    pub precompiled_charsmap: Option<Vec<u8>>,
    #[prost(bool, optional, tag = "3")]
    pub add_dummy_prefix: Option<bool>,
    #[prost(bool, optional, tag = "4")]
    pub remove_extra_whitespaces: Option<bool>,
    #[prost(bool, optional, tag = "5")]
    pub escape_whitespaces: Option<bool>,
}
