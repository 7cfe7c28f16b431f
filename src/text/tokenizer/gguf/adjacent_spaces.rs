//! Added tokens that include adjacent spaces. GGUF files do not mark these tokens; they follow from the model
//! family.
//!
//! Invariant: a token includes the same spaces as in the tokenizer that the model was trained with.

use super::GgufVocabulary;
use tokenizers::AddedToken;

/// Added tokens of Phi 3 that do not include the following spaces.
const PHI3_PLAIN: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

/// Name of the mask token of RoBERTa-like models.
const MASK: &str = "<mask>";
/// Prefix of pre-tokenizer names that only RoBERTa-like models have.
const MASKING: &str = "jina-v2-";

impl GgufVocabulary {
    /// Sets whether an added token includes the spaces before and after it.
    pub(super) fn with_adjacent_spaces(&self, token: AddedToken) -> AddedToken {
        let strips_right = self.is_phi3() && !PHI3_PLAIN.contains(&token.content.as_str());
        let strips_left = self.is_like_roberta() && token.content == MASK;
        token.rstrip(strips_right).lstrip(strips_left)
    }

    /// Returns whether the model is Phi 3 or 3.5. Later models of the architecture have another kind of
    /// vocabulary.
    fn is_phi3(&self) -> bool {
        let name = self.name.as_deref().unwrap_or_default().to_lowercase();
        let is_named = ["phi-3", "phi3"].iter().any(|phi3| name.contains(phi3));
        self.model == "llama" && (is_named || self.architecture.as_deref() == Some("phi3"))
    }

    /// Returns whether the vocabulary is that of RoBERTa or XLM-RoBERTa, whose files name the architecture
    /// BERT, or is derived from them.
    fn is_like_roberta(&self) -> bool {
        let pre = self.pre.as_deref().unwrap_or_default();
        let is_bert = self.architecture.as_deref() == Some("bert") && self.model != "bert";
        is_bert || pre.starts_with(MASKING)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tokenizer::Tokenizer;
    use std::path::Path;

    const TOKENS: [&str; 10] =
        ["<unk>", "<s>", "</s>", "<|user|>", "<mask>", "a", " ", "\n", "\u{2581}a", "\u{2581}"];
    const USER: u32 = 3;
    const MASKED: u32 = 4;

    /// Returns a vocabulary of scored pieces, in which `</s>` and the mask are user-defined.
    fn vocabulary(model: &str) -> GgufVocabulary {
        GgufVocabulary {
            model: model.to_owned(),
            tokens: TOKENS.map(str::to_owned).into(),
            token_type: vec![2, 3, 4, 3, 4, 1, 1, 1, 1, 1],
            scores: vec![0.0; TOKENS.len()],
            add_bos_token: Some(false),
            add_eos_token: Some(false),
            add_space_prefix: Some(false),
            unknown_token_id: Some(0),
            ..GgufVocabulary::default()
        }
    }

    fn ids(vocabulary: &GgufVocabulary, text: &str) -> Vec<u32> {
        let tokenizer = Tokenizer::from_gguf(Path::new("m.gguf"), vocabulary).unwrap();
        tokenizer.encode(text, false).unwrap()
    }

    /// For special and user-defined tokens, whether the architecture or the name identifies Phi 3.
    #[test]
    fn tokens_of_phi3_include_the_following_spaces() {
        let plain = vocabulary("llama");
        let by_architecture = GgufVocabulary { architecture: Some("phi3".into()), ..plain.clone() };
        let by_name = GgufVocabulary { name: Some("Phi-3 mini".into()), ..plain.clone() };
        for (text, theirs, phi3s) in [
            ("<|user|>\n a", vec![USER, 7, 8], vec![USER, 5]),
            ("</s>\na", vec![2, 7, 5], vec![2, 5]),
            ("<s>\na", vec![1, 7, 5], vec![1, 7, 5]),
            ("a\n<|user|>", vec![5, 7, USER], vec![5, 7, USER]),
        ] {
            assert_eq!(ids(&plain, text), theirs, "{text:?}");
            assert_eq!(ids(&by_architecture, text), phi3s, "{text:?}");
            assert_eq!(ids(&by_name, text), phi3s, "{text:?}");
        }
    }

    #[test]
    fn masks_of_roberta_include_the_preceding_spaces() {
        let text = "a\n<mask>\na";
        let file = GgufVocabulary { architecture: Some("bert".into()), ..vocabulary("t5") };
        assert_eq!(ids(&file, text), [5, MASKED, 7, 5]);
        assert_eq!(ids(&vocabulary("t5"), text), [5, 7, MASKED, 7, 5]);
        let named = GgufVocabulary { pre: Some("jina-v2-de".into()), ..vocabulary("llama") };
        assert_eq!(ids(&named, text), [5, MASKED, 7, 5]);
    }
}
