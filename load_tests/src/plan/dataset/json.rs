//! Parses prompts from JSON: a list of entries, or one entry per line.
//!
//! Invariant: only one entry of a list at a time is held as a JSON value.

use std::fmt;

use anyhow::Context;
use serde::{
    Deserialize, Deserializer,
    de::{Error, SeqAccess, Visitor},
};
use serde_json::{Map, Value};

use super::{DatasetEntry, RecordedAnswer};
use crate::plan::{files::json_lines, lengths::LENGTH_MAX};

/// Parses the entries of a JSON list.
pub(super) fn list(content: &str) -> anyhow::Result<Vec<DatasetEntry>> {
    let List(entries) = serde_json::from_str(content)?;
    Ok(entries)
}

/// Parses one entry per line.
pub(super) fn lines(content: &str) -> anyhow::Result<Vec<DatasetEntry>> {
    let mut entries = Vec::new();
    for line in json_lines(content) {
        let (number, value) = line?;
        let found = entry(value).map_err(anyhow::Error::msg);
        entries.extend(found.with_context(|| format!("line {number}"))?);
    }
    Ok(entries)
}

struct List(Vec<DatasetEntry>);

impl<'de> Deserialize<'de> for List {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ListVisitor)
    }
}

struct ListVisitor;

impl<'de> Visitor<'de> for ListVisitor {
    type Value = List;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of conversations")
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut values: S) -> Result<List, S::Error> {
        let mut entries = Vec::new();
        let mut number = 0;
        while let Some(value) = values.next_element()? {
            number += 1;
            entries.extend(entry(value).map_err(|error| Error::custom(format!("entry {number}: {error}")))?);
        }
        Ok(List(entries))
    }
}

/// Parses an entry. Returns `None` for a conversation that does not begin with a human turn and an answer to
/// it.
fn entry(value: Value) -> Result<Option<DatasetEntry>, String> {
    let Value::Object(mut fields) = value else { return Err("expected an object".into()) };
    let found = if let Some(prompt) = fields.remove("prompt") {
        Some(DatasetEntry { prompt: text(prompt, "prompt")?, answer: answer(fields)? })
    } else if let Some(turns) = fields.remove("conversations") {
        conversation(turns, "from", "value")
    } else {
        fields.remove("messages").and_then(|turns| conversation(turns, "role", "content"))
    };
    Ok(found.filter(|entry| !entry.prompt.is_empty()))
}

/// Parses the answer, or its length, given along with a prompt.
fn answer(mut fields: Map<String, Value>) -> Result<RecordedAnswer, String> {
    for name in ["output_len", "output_tokens"] {
        if let Some(tokens) = fields.get(name).filter(|tokens| !tokens.is_null()) {
            let tokens = tokens.as_u64().filter(|&tokens| tokens <= u64::from(LENGTH_MAX));
            let refused = || format!("{name} is not a number of tokens up to {LENGTH_MAX}");
            return tokens.map(|tokens| RecordedAnswer::Tokens(tokens as u32)).ok_or_else(refused);
        }
    }
    match fields.remove("completion") {
        None | Some(Value::Null) => Ok(RecordedAnswer::None),
        Some(completion) => Ok(RecordedAnswer::Text(text(completion, "completion")?)),
    }
}

fn text(value: Value, name: &str) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text),
        _ => Err(format!("{name} is not a string")),
    }
}

/// Returns the first two turns after any system turns, if they are of a human and of a model.
fn conversation(turns: Value, speaker: &str, content: &str) -> Option<DatasetEntry> {
    let Value::Array(turns) = turns else { return None };
    let mut turns = turns.into_iter().map(|mut turn| {
        let (speaker, content) =
            (turn.get_mut(speaker).map(Value::take), turn.get_mut(content).map(Value::take));
        (speaker.unwrap_or_default(), content.unwrap_or_default())
    });
    let (speaker, prompt) = turns.find(|(speaker, _)| speaker != "system")?;
    let (answerer, answer) = turns.next()?;
    match (speaker.as_str()?, answerer.as_str()?, prompt, answer) {
        ("human" | "user", "gpt" | "assistant", Value::String(prompt), Value::String(answer)) => {
            Some(DatasetEntry { prompt, answer: RecordedAnswer::Text(answer) })
        }
        _ => None,
    }
}
