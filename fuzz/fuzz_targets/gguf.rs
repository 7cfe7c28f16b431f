//! A whole GGUF file: its header, model configuration, vocabulary and chat template.

#![no_main]

use mainstem::cli::start;
use mainstem::formats::{ChatConfig, Checkpoint};
use mainstem::model::gguf::GgufTable;
use mainstem::model::spec::SpecFile;
use mainstem::model::{ModelRef, ModelSource};
use mainstem::text::{GgufVocabulary, Tokenizer};
use mainstem_fuzz::{file, read_all, round_trip};

mainstem_fuzz::target!(parse);

fn parse(bytes: &[u8]) {
    let path = file("model.gguf", bytes);
    let Ok((mut checkpoint, gguf)) = Checkpoint::open_gguf(&path) else { return };
    read_all(&checkpoint);
    let _ = ChatConfig::from_gguf(&gguf);
    if let Ok(Some(vocabulary)) = GgufVocabulary::from_file(&gguf)
        && let Ok(tokenizer) = Tokenizer::from_gguf(&path, &vocabulary)
    {
        round_trip(tokenizer);
    }
    let table = GgufTable::shipped();
    // An architecture that is not in the table is read with the specification for llama.
    let spec = table.specification(&gguf).or_else(|_| SpecFile::for_model_type("llama"));
    if spec.is_ok_and(|spec| table.config(&gguf, &mut checkpoint, &spec).is_ok())
        && let Ok(source) = ModelSource::open(&ModelRef::Path(path), None)
    {
        let _ = start::open_tokenizer(&source);
    }
}
