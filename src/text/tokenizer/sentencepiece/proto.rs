//! The protocol buffers of a sentencepiece model, as far as they bear on how text is cut.
//!
//! Invariant: numbers and defaults are those of sentencepiece_model.proto.

use prost::Message;

/// A whole file.
#[derive(Clone, PartialEq, Message)]
pub struct ModelProto {
    #[prost(message, repeated, tag = "1")]
    pub pieces: Vec<PieceProto>,
    #[prost(message, optional, tag = "2")]
    pub trainer_spec: Option<TrainerSpec>,
    #[prost(message, optional, tag = "3")]
    pub normalizer_spec: Option<NormalizerSpec>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PieceProto {
    #[prost(string, optional, tag = "1")]
    pub piece: Option<String>,
    #[prost(float, optional, tag = "2")]
    pub score: Option<f32>,
    /// Of the numbers in `PieceKind`; 1 if it is absent.
    #[prost(int32, optional, tag = "3")]
    pub kind: Option<i32>,
}

/// How the model was trained.
#[derive(Clone, PartialEq, Message)]
pub struct TrainerSpec {
    /// 1 is unigram, and so is an absent one; 2 is BPE, 3 words, 4 characters.
    #[prost(int32, optional, tag = "3")]
    pub model_type: Option<i32>,
    #[prost(bool, optional, tag = "24")]
    pub treat_whitespace_as_suffix: Option<bool>,
    /// 1 if it is absent, and -1 for none.
    #[prost(int32, optional, tag = "41")]
    pub bos_id: Option<i32>,
    /// 2 if it is absent, and -1 for none.
    #[prost(int32, optional, tag = "42")]
    pub eos_id: Option<i32>,
}

/// What is done to a text first. The switches are on if they are absent.
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
