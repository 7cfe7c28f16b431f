//! Completion of commands and file names in the chat's line editor.
//!
//! Invariant: only commands are completed, never questions.

use super::chat::{COMMANDS, FILE_COMMANDS};
use rustyline::completion::{Completer, FilenameCompleter, Pair};
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::validate::Validator;
use rustyline::{Context, Helper};

/// The line editor's helper.
#[derive(Default)]
pub struct CommandCompleter {
    files: FilenameCompleter,
}

impl Completer for CommandCompleter {
    type Candidate = Pair;

    fn complete(&self, line: &str, at: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<Pair>)> {
        let before = &line[..at];
        match before.split_once(char::is_whitespace) {
            Some((command, _)) if FILE_COMMANDS.contains(&command) => self.files.complete_path(line, at),
            None if before.starts_with('/') => {
                let known = COMMANDS.iter().filter(|command| command.starts_with(before));
                let pair = |command: &&str| Pair {
                    display: (*command).to_owned(),
                    replacement: (*command).to_owned(),
                };
                Ok((0, known.map(pair).collect()))
            }
            _ => Ok((at, Vec::new())),
        }
    }
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
        let found = CommandCompleter::default().complete(line, line.len(), &Context::new(&history)).unwrap();
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
        let file = folder.write("talk.json", b"{}").display().to_string();
        let begun = file.strip_suffix("lk.json").unwrap();
        assert_eq!(complete(&format!("/load {begun}")).1, std::slice::from_ref(&file));
        assert_eq!(complete(&format!("/system {begun}")).1, Vec::<String>::new());
    }
}
