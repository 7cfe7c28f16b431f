//! Conversations in files: the messages of a chat request, as JSON.
//!
//! Invariant: a file that is no conversation is neither read nor replaced.

use super::super::client::{Dialog, Turn};
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
    content: String,
}

#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Role {
    System,
    User,
    Assistant,
}

/// Writes a conversation to a file, which may be an earlier conversation. Fails if it is anything else, or
/// cannot be written; then it is as before.
pub fn save(file: &Path, dialog: &Dialog) -> Result<()> {
    let message = |role, content: &String| Message { role, content: content.clone() };
    let mut messages: Vec<Message> = dialog.system.iter().map(|text| message(Role::System, text)).collect();
    for Turn { question, answer } in &dialog.turns {
        messages.push(message(Role::User, question));
        messages.extend((!answer.is_empty()).then(|| message(Role::Assistant, answer)));
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

/// Returns the conversation of messages. Fails if they are not questions and answers in turn.
fn dialog(messages: Vec<Message>) -> Result<Dialog> {
    let (mut dialog, mut before) = (Dialog::default(), None);
    for (at, Message { role, content }) in messages.into_iter().enumerate() {
        match (role, before) {
            (Role::System, None) => dialog.system = Some(content),
            (Role::User, _) => dialog.ask(content),
            (Role::Assistant, Some(Role::User)) => {
                dialog.turns.iter_mut().last().context("there is no question")?.answer = content;
            }
            _ => bail!("messages[{at}]: an answer follows a question, and a system prompt comes first"),
        }
        before = Some(role);
    }
    Ok(dialog)
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
        for text in ["my notes", "{}", orders, r#"{"messages": [{"role": "tool", "content": ""}]}"#] {
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
