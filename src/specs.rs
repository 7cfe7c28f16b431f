//! The specifications that ship with the program, and the model types of formats without a config.json.
//!
//! Invariant: these are all files of `specs/`; a test compares the two.

/// The `model_type` of llama2.c checkpoints.
pub const LLAMA2C: &str = "llama2c";

/// The `model_type` of synthetic models.
pub const SYNTHETIC: &str = "llama";

macro_rules! shipped {
    ($($name:literal,)*) => {
        /// All shipped specifications: (file name, text).
        pub const ALL: &[(&str, &str)] =
            &[$((concat!("specs/", $name, ".toml"), include_str!(concat!("../specs/", $name, ".toml"))),)*];
    };
}

/// Returns the file with a name of [`name_of`].
pub fn named(name: &str) -> Option<(&'static str, &'static str)> {
    ALL.iter().copied().find(|(file, _)| name_of(file) == name)
}

/// Returns the name of a file, by which others refer to it, such as `bert` of `specs/bert.toml`.
pub fn name_of(file: &str) -> &str {
    file.trim_start_matches("specs/").trim_end_matches(".toml")
}

shipped! {
    "llama",
    "albert",
    "apertus",
    "arcee",
    "baichuan",
    "bart",
    "bert",
    "biogpt",
    "blenderbot",
    "blenderbot_small",
    "bloom",
    "chatglm",
    "codegen",
    "cohere",
    "cohere2",
    "ctranslate2_transformer",
    "deberta_v2",
    "deepseek_moe",
    "distilbert",
    "electra",
    "ernie4_5",
    "exaone4",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "granite",
    "helium",
    "hunyuan",
    "hunyuan_moe",
    "granitemoe",
    "internlm",
    "internlm2",
    "llama2c",
    "llama4_text",
    "m2m_100",
    "marian",
    "mbart",
    "megatron_bert",
    "minicpm",
    "minicpm3",
    "minimax_m2",
    "mistral",
    "mixtral",
    "gpt_oss",
    "modernbert",
    "mpnet",
    "mpt",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "openelm",
    "olmoe",
    "opt",
    "orion",
    "pegasus",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "roberta",
    "roberta_prelayernorm",
    "roformer",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "t5",
    "umt5",
    "xglm",
}
