//! Completion of commands and file names in the chat's line editor.
//!
//! Invariant: only commands are completed, never questions.

use super::chat::{COMMANDS, FILE_COMMANDS};
use rustyline::completion::{Completer, Pair};
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::validate::Validator;
use rustyline::{Context, Helper};

/// The line editor's helper.
pub struct CommandCompleter;

impl Completer for CommandCompleter {
    type Candidate = Pair;

    fn complete(&self, line: &str, at: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<Pair>)> {
        let before = &line[..at];
        match before.split_once(char::is_whitespace) {
            Some((command, path)) if FILE_COMMANDS.contains(&command) => {
                let path = path.trim_start();
                Ok((at - path.len(), files(path)))
            }
            None if before.starts_with('/') => {
                let known = COMMANDS.iter().filter(|command| command.starts_with(before));
                Ok((0, known.map(|command| pair(command, command)).collect()))
            }
            _ => Ok((at, Vec::new())),
        }
    }
}

fn pair(shown: &str, whole: &str) -> Pair {
    Pair { display: shown.to_owned(), replacement: whole.to_owned() }
}

/// Returns the files and folders whose paths begin with `begun`, sorted. Nothing is escaped, because commands
/// take names as they are.
fn files(begun: &str) -> Vec<Pair> {
    let at = begun.rfind('/').map_or(0, |slash| slash + 1);
    let (folder, name) = begun.split_at(at);
    let entries = std::fs::read_dir(if folder.is_empty() { "." } else { folder });
    let found = entries.into_iter().flatten().flatten().filter_map(|entry| {
        let file = entry.file_name().into_string().ok()?;
        let end = if entry.path().is_dir() { "/" } else { "" };
        let is_hidden = file.starts_with('.') && name.is_empty();
        (file.starts_with(name) && !is_hidden).then(|| format!("{file}{end}"))
    });
    let mut found: Vec<String> = found.collect();
    found.sort();
    found.iter().map(|file| pair(file, &format!("{folder}{file}"))).collect()
}

impl Hinter for CommandCompleter {
    type Hint = String;
}

// The prompt's colour, as the default has it.
impl Highlighter for CommandCompleter {}

impl Validator for CommandCompleter {}

impl Helper for CommandCompleter {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;
    use rustyline::history::DefaultHistory;

    fn complete(line: &str) -> (usize, Vec<String>) {
        let history = DefaultHistory::new();
        let found = CommandCompleter.complete(line, line.len(), &Context::new(&history)).unwrap();
        (found.0, found.1.into_iter().map(|pair| pair.replacement).collect())
    }

    #[test]
    fn commands_and_their_files_are_completed_and_questions_are_not() {
        assert_eq!(
            complete("/s"),
            (0, vec!["/save".into(), "/set".into(), "/stats".into(), "/system".into()])
        );
        assert_eq!(complete("/x"), (0, vec![]));
        assert_eq!(complete("re"), (2, vec![]));
        let folder = Scratch::new();
        let file = folder.write("my talk=1.json", b"{}").display().to_string();
        let begun = file.strip_suffix("lk=1.json").unwrap();
        assert_eq!(complete(&format!("/load {begun}")).1, std::slice::from_ref(&file));
        assert_eq!(complete(&format!("/system {begun}")).1, Vec::<String>::new());
    }
}
