//! Tokenizer classes of transformers: the files of a vocabulary alone do not determine how it is used.
//!
//! Invariant: a class with behaviour that is not implemented is `Other`, never silently treated as a known
//! one.

use std::fmt;

/// Tokenizer class of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerClass {
    Gpt2,
    Roberta,
    Qwen2,
    /// The first Qwen, with a tiktoken rank file.
    Qwen,
    Bert,
    Llama,
    T5,
    XlmRoberta,
    MBart,
    MBart50,
    Nllb,
    M2m100,
    Xglm,
    ChatGlm,
    DebertaV2,
    Camembert,
    Albert,
    /// A class that is not known here, with its name.
    Other(String),
}

/// For each class, its names in transformers, and the model types that use it if a folder names no class.
static NAMES: [(TokenizerClass, &[&str], &[&str]); 17] = [
    (
        TokenizerClass::Gpt2,
        &["GPT2Tokenizer", "CodeGenTokenizer"],
        &["gpt2", "gpt_bigcode", "gpt_neo", "gptj", "codegen", "opt", "starcoder2"],
    ),
    (
        TokenizerClass::Roberta,
        &["RobertaTokenizer", "BartTokenizer", "LEDTokenizer", "LongformerTokenizer", "MvpTokenizer"],
        &["roberta", "bart", "led", "longformer", "mvp", "xmod"],
    ),
    (
        TokenizerClass::Qwen2,
        &["Qwen2Tokenizer"],
        &["qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe"],
    ),
    (TokenizerClass::Qwen, &["QWenTokenizer"], &["qwen"]),
    (
        TokenizerClass::Bert,
        &[
            "BertTokenizer",
            "ConvBertTokenizer",
            "DistilBertTokenizer",
            "DPRContextEncoderTokenizer",
            "DPRQuestionEncoderTokenizer",
            "DPRReaderTokenizer",
            "ElectraTokenizer",
            "LayoutLMTokenizer",
            "LxmertTokenizer",
            "MobileBertTokenizer",
            "RetriBertTokenizer",
            "SqueezeBertTokenizer",
        ],
        &[
            "bert",
            "convbert",
            "distilbert",
            "dpr",
            "electra",
            "layoutlm",
            "lxmert",
            "mobilebert",
            "squeezebert",
        ],
    ),
    (
        TokenizerClass::Llama,
        &["LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer"],
        &["llama", "mistral", "mixtral", "gemma", "gemma2", "gemma3", "gemma3_text", "phi3"],
    ),
    (
        TokenizerClass::T5,
        &["T5Tokenizer", "MT5Tokenizer"],
        &["t5", "mt5", "umt5", "longt5", "switch_transformers"],
    ),
    (
        TokenizerClass::XlmRoberta,
        &["XLMRobertaTokenizer", "LayoutXLMTokenizer"],
        &["xlm-roberta", "xlm-roberta-xl", "layoutxlm"],
    ),
    (TokenizerClass::MBart, &["MBartTokenizer"], &["mbart"]),
    (TokenizerClass::MBart50, &["MBart50Tokenizer"], &[]),
    (TokenizerClass::Nllb, &["NllbTokenizer"], &["nllb-moe"]),
    (TokenizerClass::M2m100, &["M2M100Tokenizer"], &["m2m_100"]),
    (TokenizerClass::Xglm, &["XGLMTokenizer"], &["xglm"]),
    (TokenizerClass::ChatGlm, &["ChatGLMTokenizer"], &["chatglm"]),
    (TokenizerClass::DebertaV2, &["DebertaV2Tokenizer"], &["deberta-v2"]),
    (TokenizerClass::Camembert, &["CamembertTokenizer"], &["camembert"]),
    (TokenizerClass::Albert, &["AlbertTokenizer"], &["albert"]),
];

impl TokenizerClass {
    /// Returns the class with this name in transformers, without the suffix "Fast".
    pub fn from_name(name: &str) -> TokenizerClass {
        let known = NAMES.iter().find(|(_, names, _)| names.contains(&name));
        known.map_or_else(|| TokenizerClass::Other(name.to_owned()), |(class, ..)| class.clone())
    }

    /// Returns the class of a model type.
    pub fn for_model_type(kind: &str) -> Option<TokenizerClass> {
        NAMES.iter().find(|(_, _, kinds)| kinds.contains(&kind)).map(|(class, ..)| class.clone())
    }

    /// Returns whether the mask token includes the spaces before it.
    pub fn mask_takes_spaces(&self) -> bool {
        use TokenizerClass::{Camembert, M2m100, MBart, MBart50, Nllb, Roberta, XlmRoberta};
        matches!(self, Roberta | XlmRoberta | Camembert | MBart | MBart50 | Nllb | M2m100)
    }

    /// Returns the class's default token for a role, such as `bos_token`.
    pub fn default_token(&self, role: &str) -> Option<&'static str> {
        let tokens: &[(&str, &str)] = match self {
            TokenizerClass::Gpt2 => &[("bos_token", "<|endoftext|>"), ("eos_token", "<|endoftext|>")],
            TokenizerClass::Qwen2 | TokenizerClass::Qwen => {
                &[("eos_token", "<|endoftext|>"), ("pad_token", "<|endoftext|>")]
            }
            TokenizerClass::Bert => &[
                ("unk_token", "[UNK]"),
                ("sep_token", "[SEP]"),
                ("pad_token", "[PAD]"),
                ("cls_token", "[CLS]"),
                ("mask_token", "[MASK]"),
            ],
            TokenizerClass::DebertaV2 => &[
                ("bos_token", "[CLS]"),
                ("eos_token", "[SEP]"),
                ("unk_token", "[UNK]"),
                ("sep_token", "[SEP]"),
                ("pad_token", "[PAD]"),
                ("cls_token", "[CLS]"),
                ("mask_token", "[MASK]"),
            ],
            TokenizerClass::Albert => &[
                ("bos_token", "[CLS]"),
                ("eos_token", "[SEP]"),
                ("unk_token", "<unk>"),
                ("sep_token", "[SEP]"),
                ("pad_token", "<pad>"),
                ("cls_token", "[CLS]"),
                ("mask_token", "[MASK]"),
            ],
            TokenizerClass::T5 => &[("eos_token", "</s>"), ("unk_token", "<unk>"), ("pad_token", "<pad>")],
            TokenizerClass::Llama | TokenizerClass::ChatGlm | TokenizerClass::Other(_) => &[],
            TokenizerClass::Roberta
            | TokenizerClass::XlmRoberta
            | TokenizerClass::MBart
            | TokenizerClass::MBart50
            | TokenizerClass::Nllb
            | TokenizerClass::M2m100
            | TokenizerClass::Xglm
            | TokenizerClass::Camembert => &[
                ("bos_token", "<s>"),
                ("eos_token", "</s>"),
                ("unk_token", "<unk>"),
                ("sep_token", "</s>"),
                ("pad_token", "<pad>"),
                ("cls_token", "<s>"),
                ("mask_token", "<mask>"),
            ],
        };
        tokens.iter().find(|(known, _)| *known == role).map(|(_, token)| *token)
    }
}

/// Writes the first of the class's names in transformers.
impl fmt::Display for TokenizerClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TokenizerClass::Other(name) => f.write_str(name),
            class => {
                let known = NAMES.iter().find(|(known, ..)| known == class);
                f.write_str(known.map_or("", |(_, names, _)| names[0]))
            }
        }
    }
}
