//! Conversations in files: the messages of a chat request, as JSON.
//!
//! Invariant: a file that is no conversation is neither read nor replaced.

use super::super::client::{Dialog, Turn};
use super::super::tool_calls::{ToolCall, ToolRound};
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

/// The longest file that is read as a conversation, in bytes.
const BYTES_MAX: u64 = 64 << 20;

#[derive(Serialize, Deserialize)]
struct SavedDialog {
    messages: Vec<Message>,
}

#[derive(Serialize, Deserialize)]
struct Message {
    role: Role,
    /// Text; none beside calls.
    #[serde(default)]
    content: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
    /// The call that this is the result of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Role {
    System,
    User,
    Assistant,
    Tool,
}

impl Message {
    fn new(role: Role, content: &str) -> Message {
        Message { role, content: Some(content.to_owned()), tool_calls: Vec::new(), tool_call_id: None }
    }
}

/// Writes a conversation to a file, which may be an earlier conversation. Fails if it is anything else, or
/// cannot be written; then it is as before.
pub fn save(file: &Path, dialog: &Dialog) -> Result<()> {
    let system = dialog.system.iter().map(|text| Message::new(Role::System, text));
    let mut messages: Vec<Message> = system.collect();
    for Turn { question, rounds, answer } in &dialog.turns {
        messages.push(Message::new(Role::User, question));
        for ToolRound { content, calls, results } in rounds {
            messages.push(Message { tool_calls: calls.clone(), ..Message::new(Role::Assistant, content) });
            messages.extend(calls.iter().zip(results).map(|(call, result)| Message {
                tool_call_id: Some(call.id.clone()),
                ..Message::new(Role::Tool, result)
            }));
        }
        messages.extend((!answer.is_empty()).then(|| Message::new(Role::Assistant, answer)));
    }
    ensure!(!messages.is_empty(), "there is no conversation to save");
    match file.try_exists() {
        Ok(false) => {}
        _ => _ = load(file).context("it exists, and only conversations are replaced")?,
    }
    let mut unfinished = file.as_os_str().to_owned();
    unfinished.push(format!(".{}.tmp", std::process::id()));
    let json = serde_json::to_vec_pretty(&SavedDialog { messages })?;
    let written = fs::write(&unfinished, json).and_then(|()| fs::rename(&unfinished, file));
    if written.is_err() {
        // What was written of it, if anything.
        let _ = fs::remove_file(&unfinished);
    }
    written.with_context(|| format!("cannot write {}", file.display()))
}

/// Reads a conversation. Fails if the file cannot be read, or is none.
pub fn load(file: &Path) -> Result<Dialog> {
    let read = || -> Result<Dialog> {
        ensure!(file.metadata()?.len() <= BYTES_MAX, "it is longer than {} MiB", BYTES_MAX >> 20);
        let SavedDialog { messages } = serde_json::from_slice(&fs::read(file)?).map_err(|error| {
            anyhow::anyhow!(error)
                .context("it is not a conversation ({\"messages\": [{\"role\", \"content\"}]})")
        })?;
        dialog(messages)
    };
    read().with_context(|| format!("cannot read {}", file.display()))
}

/// Returns the conversation of messages. Fails if they are not questions and answers in turn, with calls and
/// their results between them.
fn dialog(messages: Vec<Message>) -> Result<Dialog> {
    let mut dialog = Dialog::default();
    for (at, message) in messages.into_iter().enumerate() {
        let Message { role, content, tool_calls: calls, tool_call_id: id } = message;
        let is_calling = role == Role::Assistant && !calls.is_empty();
        ensure!(content.is_some() || is_calling, "messages[{at}].content is missing");
        ensure!(calls.is_empty() || is_calling, "messages[{at}].tool_calls: only answers have calls");
        ensure!(id.is_none() || role == Role::Tool, "messages[{at}].tool_call_id: only results have one");
        let content = content.unwrap_or_default();
        let turn = dialog.turns.last_mut();
        let is_waiting = turn.as_ref().is_some_and(|turn| has_open_calls(turn));
        match (role, turn) {
            (Role::System, None) if dialog.system.is_none() => dialog.system = Some(content),
            (Role::User, _) if !is_waiting => dialog.ask(content),
            (Role::Assistant, Some(turn)) if !is_waiting && turn.answer.is_empty() => {
                match calls.is_empty() {
                    true => turn.answer = content,
                    false => turn.rounds.push(ToolRound { content, calls, results: Vec::new() }),
                }
            }
            (Role::Tool, Some(turn)) if is_waiting => {
                let round = turn.rounds.last_mut().context("there are no calls")?;
                let call = &round.calls[round.results.len()];
                ensure!(
                    id.as_ref() == Some(&call.id),
                    "messages[{at}].tool_call_id: it should be {:?}",
                    call.id
                );
                round.results.push(content);
            }
            _ => bail!(
                "messages[{at}]: an answer follows a question, results follow calls, and a system prompt \
                 comes first"
            ),
        }
    }
    ensure!(!dialog.turns.last().is_some_and(has_open_calls), "messages: the last calls have no results");
    Ok(dialog)
}

/// Whether calls of a turn have no results yet.
fn has_open_calls(turn: &Turn) -> bool {
    turn.rounds.last().is_some_and(|round| round.results.len() < round.calls.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    #[test]
    fn a_saved_conversation_is_the_same_when_it_is_loaded() {
        let folder = Scratch::new();
        let file = folder.path().join("chat.json");
        let mut dialog = Dialog { system: Some("Be \"brief\".\n".into()), ..Dialog::default() };
        dialog.ask("one");
        dialog.turns[0].answer = "1".into();
        for question in ["unanswered", "last"] {
            dialog.ask(question);
            save(&file, &dialog).unwrap();
            assert_eq!(load(&file).unwrap(), dialog);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn other_files_are_neither_read_nor_replaced() {
        let folder = Scratch::new();
        let file = folder.path().join("notes.txt");
        let mut dialog = Dialog::default();
        assert!(save(&file, &dialog).unwrap_err().to_string().contains("no conversation"));
        dialog.ask("one");
        let orders = r#"{"messages": [{"role": "assistant", "content": "1"}]}"#;
        let call = r#"{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "tool_calls":
            [{"id": "a", "function": {"name": "f", "arguments": ""}}]}"#;
        let (open, other) = (
            format!("{call}]}}"),
            format!(r#"{call}, {{"role": "tool", "tool_call_id": "b", "content": "2"}}]}}"#),
        );
        let result = r#"{"messages": [{"role": "tool", "content": ""}]}"#;
        let empty = r#"{"messages": [{"role": "user"}]}"#;
        let lost = r#"{"messages": [{"role": "user", "content": "1", "tool_call_id": "a"}]}"#;
        for text in ["my notes", "{}", orders, result, empty, lost, &open, &other] {
            fs::write(&file, text).unwrap();
            let error = format!("{:#}", load(&file).unwrap_err());
            assert!(error.contains("notes.txt"), "{error}");
            save(&file, &dialog).unwrap_err();
            assert_eq!(fs::read_to_string(&file).unwrap(), text);
        }
        let missing = format!("{:#}", load(&folder.path().join("none")).unwrap_err());
        assert!(missing.contains("none") && missing.contains("No such file"), "{missing}");
        save(&folder.path().join("no/folder"), &dialog).unwrap_err();
    }
}
