//! The specifications that ship with the program, and the families that need no config.json to say theirs.
//!
//! Invariant: they are the files of `specs/`, all of them; a test holds the two against each other.

/// What checkpoints of llama2.c would have as `model_type`.
pub const LLAMA2C: &str = "llama2c";

/// What models of random numbers would have.
pub const SYNTHETIC: &str = "llama";

macro_rules! shipped {
    ($($name:literal,)*) => {
        /// Every one: (file name, text).
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
    "falcon",
    "gemma",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "gptj",
    "internlm",
    "internlm2",
    "llama2c",
    "m2m_100",
    "minicpm",
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
