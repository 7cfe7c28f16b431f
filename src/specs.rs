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
    "baichuan",
    "bart",
    "bert",
    "bloom",
    "chatglm",
    "deepseek_moe",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3",
    "glm4_moe",
    "gpt2",
    "gpt_neox",
    "gptj",
    "internlm",
    "internlm2",
    "llama2c",
    "m2m_100",
    "minicpm",
    "minicpm3",
    "mistral",
    "mixtral",
    "modernbert",
    "opt",
    "orion",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "roberta",
    "smollm3",
    "stablelm",
    "starcoder2",
    "t5",
}
