//! Tokenizer classes of transformers: the files of a vocabulary alone do not determine how it is used.
//!
//! Invariant: a class with behaviour that is not implemented is `Other`, never silently treated as a known
//! one.

use std::fmt;

/// Tokenizer class of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Class {
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
    /// A class that is not known here, with its name.
    Other(String),
}

/// For each class, its names in transformers, and the model types that use it if a folder names no class.
static NAMES: [(Class, &[&str], &[&str]); 14] = [
    (
        Class::Gpt2,
        &["GPT2Tokenizer", "CodeGenTokenizer"],
        &["gpt2", "gpt_bigcode", "gpt_neo", "gptj", "codegen", "opt", "starcoder2"],
    ),
    (
        Class::Roberta,
        &["RobertaTokenizer", "BartTokenizer", "LEDTokenizer", "LongformerTokenizer", "MvpTokenizer"],
        &["roberta", "bart", "led", "longformer", "mvp", "xmod"],
    ),
    (
        Class::Qwen2,
        &["Qwen2Tokenizer"],
        &["qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe"],
    ),
    (Class::Qwen, &["QWenTokenizer"], &["qwen"]),
    (
        Class::Bert,
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
        Class::Llama,
        &["LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer"],
        &["llama", "mistral", "mixtral", "gemma", "gemma2", "gemma3", "gemma3_text", "phi3"],
    ),
    (Class::T5, &["T5Tokenizer", "MT5Tokenizer"], &["t5", "mt5", "umt5", "longt5", "switch_transformers"]),
    (
        Class::XlmRoberta,
        &["XLMRobertaTokenizer", "LayoutXLMTokenizer"],
        &["xlm-roberta", "xlm-roberta-xl", "layoutxlm"],
    ),
    (Class::MBart, &["MBartTokenizer"], &["mbart"]),
    (Class::MBart50, &["MBart50Tokenizer"], &[]),
    (Class::Nllb, &["NllbTokenizer"], &["nllb-moe"]),
    (Class::M2m100, &["M2M100Tokenizer"], &["m2m_100"]),
    (Class::Xglm, &["XGLMTokenizer"], &["xglm"]),
    (Class::ChatGlm, &["ChatGLMTokenizer"], &["chatglm"]),
];

impl Class {
    /// Returns the class with this name in transformers, without the suffix "Fast".
    pub fn named(name: &str) -> Class {
        let known = NAMES.iter().find(|(_, names, _)| names.contains(&name));
        known.map_or_else(|| Class::Other(name.to_owned()), |(class, ..)| class.clone())
    }

    /// Returns the class of a model type.
    pub fn of_model(kind: &str) -> Option<Class> {
        NAMES.iter().find(|(_, _, kinds)| kinds.contains(&kind)).map(|(class, ..)| class.clone())
    }

    /// Returns whether the mask token includes the spaces before it.
    pub fn mask_takes_spaces(&self) -> bool {
        use Class::{M2m100, MBart, MBart50, Nllb, Roberta, XlmRoberta};
        matches!(self, Roberta | XlmRoberta | MBart | MBart50 | Nllb | M2m100)
    }

    /// Returns the class's default token for a role, such as `bos_token`.
    pub fn token(&self, role: &str) -> Option<&'static str> {
        let tokens: &[(&str, &str)] = match self {
            Class::Gpt2 => &[("bos_token", "<|endoftext|>"), ("eos_token", "<|endoftext|>")],
            Class::Qwen2 | Class::Qwen => &[("eos_token", "<|endoftext|>"), ("pad_token", "<|endoftext|>")],
            Class::Bert => &[
                ("unk_token", "[UNK]"),
                ("sep_token", "[SEP]"),
                ("pad_token", "[PAD]"),
                ("cls_token", "[CLS]"),
                ("mask_token", "[MASK]"),
            ],
            Class::T5 => &[("eos_token", "</s>"), ("unk_token", "<unk>"), ("pad_token", "<pad>")],
            Class::Llama | Class::ChatGlm | Class::Other(_) => &[],
            Class::Roberta
            | Class::XlmRoberta
            | Class::MBart
            | Class::MBart50
            | Class::Nllb
            | Class::M2m100
            | Class::Xglm => &[
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
impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Class::Other(name) => f.write_str(name),
            class => {
                let known = NAMES.iter().find(|(known, ..)| known == class);
                f.write_str(known.map_or("", |(_, names, _)| names[0]))
            }
        }
    }
}
