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

shipped! {
    "llama",
    "albert",
    "arcee",
    "baichuan",
    "bart",
    "bert",
    "biogpt",
    "blenderbot",
    "bloom",
    "chatglm",
    "cohere",
    "cohere2",
    "deepseek_moe",
    "distilbert",
    "electra",
    "ernie4_5",
    "exaone4",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3",
    "glm",
    "glm4",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "granite",
    "helium",
    "hunyuan",
    "internlm",
    "internlm2",
    "llama2c",
    "m2m_100",
    "marian",
    "mbart",
    "megatron_bert",
    "minicpm",
    "mistral",
    "mixtral",
    "modernbert",
    "mpnet",
    "mpt",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "openelm",
    "opt",
    "orion",
    "pegasus",
    "persimmon",
    "phi",
    "phi3",
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
