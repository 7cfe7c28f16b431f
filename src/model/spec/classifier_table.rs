//! The table of a classifier in a specification file, as written.
//!
//! Invariant: every value is optional; without them, a model has a classifier if its configuration says so.

use super::setting::Setting;
use super::table_macro::table;
use super::words::{ActivationName, ClassifierKind, ClassifierPooling};
use schemars::JsonSchema;
use serde::Deserialize;

table! {
    /// The classifier, which maps hidden states to scores of labels. It has the biases that the files have.
    ClassifierTable {
        /// The kind of classifier. Default: by config.json's `architectures`, `sequence` if a name there ends
        /// with `ForSequenceClassification`, `token` for `ForTokenClassification`, and otherwise `none`.
        kind: Setting<ClassifierKind>,
        /// Sequence: the hidden state that is classified. Default: `first` in an encoder and `last` in a
        /// decoder.
        pooling: Setting<ClassifierPooling>,
        /// Whether a linear layer and an activation precede the classifier's matrix. Default: false.
        dense: Setting<bool>,
        /// Whether they do in a classifier of tokens, too. Default: false.
        dense_tokens: Setting<bool>,
        /// Activation of that layer. Default: `tanh`.
        activation: Setting<ActivationName>,
        /// Whether a norm follows the activation. Default: false.
        norm: Setting<bool>,
    }
}
