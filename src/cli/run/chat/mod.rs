//! Chat at a terminal. An entry is a question or, after a slash, a command.
//!
//! Invariant: each request contains the conversation as shown. The received part of an interrupted or failed
//! answer is part of it; an answer without any text does not replace an earlier one.

use super::client::{Client, Dialect, Dialog, Turn};
use super::exchange::{self, AnswerEnd, Screen};
use super::settings;
use super::tool_calls::{ToolCall, ToolRound};
use crate::cli::escape::visible;
use std::io;
use std::path::{Path, PathBuf};

mod saved;

/// Interactive input and output.
pub trait Console: Screen {
    /// Waits for a line.
    fn read(&mut self, mark: PromptMark) -> io::Result<Input>;

    /// Adds an entry to the line editor's history.
    fn remember(&mut self, entry: &str);

    /// Ends an answer's last line.
    fn end_answer(&mut self, text: &str) -> io::Result<()>;
}

/// The prompt mark before an input line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptMark {
    Question,
    /// The line is the result of a tool call.
    Result,
    /// The line continues one that ended with a backslash, or is in a quoted block.
    Continued,
}

/// An input of the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    Line(String),
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-D.
    End,
}

/// A chat command, entered after a slash.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Command {
    Help,
    Clear,
    System(Option<String>),
    Retry,
    Stats(bool),
    Settings,
    Set { name: String, value: String },
    Save(PathBuf),
    Load(PathBuf),
    Reasoning(bool),
    Tools,
    Exit,
}

/// The commands that can be completed.
pub const COMMANDS: [&str; 13] = [
    "/clear",
    "/exit",
    "/help",
    "/load",
    "/quit",
    "/reasoning",
    "/regenerate",
    "/retry",
    "/save",
    "/set",
    "/stats",
    "/system",
    "/tools",
];

/// The commands before the name of a file.
pub const FILE_COMMANDS: [&str; 2] = ["/load", "/save"];

/// An entry of the user, read to its end.
enum Entry {
    /// A question or a command.
    Text(String),
    /// A question in quotes, which is never a command.
    Quoted(String),
    /// Anything but text.
    Other(Input),
}

/// The quotes before and after a question of several lines.
const QUOTES: &str = "\"\"\"";

/// Whether the chat continues with another line or ends.
#[derive(PartialEq, Eq)]
enum ChatFlow {
    Continue,
    Exit,
}

const HINT: &str = "Ctrl-D or /exit ends the chat";

/// An interactive chat.
pub struct Chat<'a> {
    pub client: Client,
    pub dialog: Dialog,
    pub console: &'a mut dyn Console,
    /// Whether to show token count and speed after each answer.
    pub stats: bool,
    /// Whether to show the model's reasoning.
    pub reasoning: bool,
}

impl Chat<'_> {
    /// Processes entries until the user ends the chat or the terminal is closed.
    pub async fn run(&mut self) -> io::Result<()> {
        while self.process_entry().await? == ChatFlow::Continue {}
        Ok(())
    }

    /// Reads one entry, and answers it or runs its command.
    async fn process_entry(&mut self) -> io::Result<ChatFlow> {
        let (entry, command) = match self.read_entry(PromptMark::Question)? {
            Entry::Text(entry) | Entry::Quoted(entry) if entry.trim().is_empty() => {
                return Ok(ChatFlow::Continue);
            }
            Entry::Text(entry) => {
                let command = Command::parse(&entry);
                (entry, command)
            }
            Entry::Quoted(entry) => (entry, Ok(None)),
            Entry::Other(Input::End) => return Ok(ChatFlow::Exit),
            Entry::Other(_) => {
                self.console.note(HINT);
                return Ok(ChatFlow::Continue);
            }
        };
        self.console.remember(&entry);
        match command {
            Ok(None) => {
                self.dialog.ask(entry);
                self.answer().await?;
            }
            Ok(Some(command)) => return self.run_command(command).await,
            Err(message) => self.console.note(&message),
        }
        Ok(ChatFlow::Continue)
    }

    /// Reads an entry: a line and the lines that continue it, or all lines between quotes.
    fn read_entry(&mut self, first: PromptMark) -> io::Result<Entry> {
        let (mut lines, mut mark, mut is_quoted) = (String::new(), first, false);
        loop {
            let line = match self.console.read(mark)? {
                Input::Line(line) => line,
                other => return Ok(Entry::Other(other)),
            };
            let mut rest = line.as_str();
            if let Some(quoted) = line.strip_prefix(QUOTES).filter(|_| mark != PromptMark::Continued) {
                (rest, is_quoted) = (quoted, true);
            }
            let continued = rest.strip_suffix(if is_quoted { QUOTES } else { "\\" });
            match (is_quoted, continued) {
                (true, Some(last)) => return Ok(Entry::Quoted((lines + last).trim_matches('\n').to_owned())),
                (true, None) => lines = lines + rest + "\n",
                (false, Some(line)) => lines = lines + line + "\n",
                (false, None) => return Ok(Entry::Text(lines + rest)),
            }
            mark = PromptMark::Continued;
        }
    }

    /// Answers the last question, with the results of the tools that the model calls. Without any text, the
    /// earlier answer stays, and so do results that have no answer yet.
    async fn answer(&mut self) -> io::Result<()> {
        let turn = self.dialog.turns.last_mut().expect("a question was asked; anything else is a bug");
        let before = turn.clone();
        if !before.answer.is_empty() {
            *turn = Turn::new(before.question.clone());
        }
        loop {
            let (content, calls) = self.answer_once().await?;
            let results = self.read_results(&calls)?;
            let turn = self.dialog.turns.last_mut().expect("only the answer changes; this is a bug");
            match results {
                Some(results) => turn.rounds.push(ToolRound { content, calls, results }),
                None => {
                    if !content.is_empty() {
                        turn.answer = content;
                    } else if !before.answer.is_empty() {
                        *turn = before;
                    }
                    return Ok(());
                }
            }
        }
    }

    /// Reads the results of calls; `None` if there are no calls, or if the user gives none for one of them.
    fn read_results(&mut self, calls: &[ToolCall]) -> io::Result<Option<Vec<String>>> {
        let mut results = Vec::new();
        for call in calls {
            self.console.note(&visible(&call.describe()));
            match self.read_entry(PromptMark::Result)? {
                Entry::Text(result) | Entry::Quoted(result) if !result.trim().is_empty() => {
                    results.push(result)
                }
                _ => {
                    self.console.note("(there is no result, so the calls are left out)");
                    return Ok(None);
                }
            }
        }
        Ok(Some(results).filter(|results| !results.is_empty()))
    }

    /// Answers up to the end or to calls of tools. Returns the text and the calls.
    async fn answer_once(&mut self) -> io::Result<(String, Vec<ToolCall>)> {
        let outcome = exchange::answer(&mut self.client, &self.dialog, self.console, self.reasoning).await?;
        self.console.end_answer(&outcome.text)?;
        match outcome.ending {
            AnswerEnd::Complete => {}
            AnswerEnd::Cut => self.console.note("(the answer reached its maximum number of tokens)"),
            AnswerEnd::Interrupted => self.console.note("(stopped)"),
            AnswerEnd::Failed(failure) => self.console.note(&format!("error: {failure}")),
        }
        if let Some(stats) = outcome.stats.filter(|_| self.stats) {
            self.console.note(&stats);
        }
        Ok((outcome.answer, outcome.calls))
    }

    async fn run_command(&mut self, command: Command) -> io::Result<ChatFlow> {
        match command {
            Command::Help => self.console.note(&help()),
            Command::Clear => {
                self.dialog.turns.clear();
                self.console.note("the conversation was cleared");
            }
            Command::System(_) if self.client.dialect == Dialect::Raw => {
                self.console.note("/system needs a model with a chat template");
            }
            Command::System(text) => self.dialog.system = text,
            Command::Retry if self.dialog.turns.is_empty() => {
                self.console.note("there is no question to retry")
            }
            Command::Retry => self.answer().await?,
            Command::Stats(on) => self.stats = on,
            Command::Settings => self.console.note(&self.client.settings.describe()),
            Command::Set { name, value } => {
                if let Err(message) = self.client.settings.set(&name, &value) {
                    self.console.note(&message);
                }
            }
            Command::Tools => self.console.note(&match &self.client.settings.tool_names()[..] {
                [] => "there are no tools; /set tools FILE sets them".to_owned(),
                names => names.join(", "),
            }),
            Command::Reasoning(on) => self.reasoning = on,
            Command::Save(file) => self.save(&file),
            Command::Load(file) => self.load(&file),
            Command::Exit => return Ok(ChatFlow::Exit),
        }
        Ok(ChatFlow::Continue)
    }

    /// Saves the conversation.
    fn save(&mut self, file: &Path) {
        match saved::save(file, &self.dialog) {
            Ok(()) => self.console.note(&format!("saved in {}", file.display())),
            Err(error) => self.console.note(&format!("not saved: {error:#}")),
        }
    }

    /// Continues a saved conversation in place of the current one, which is kept if that fails.
    fn load(&mut self, file: &Path) {
        match saved::load(file) {
            Ok(dialog) if dialog.system.is_some() && self.client.dialect == Dialect::Raw => {
                self.console.note("not loaded: a system prompt needs a model with a chat template");
            }
            Ok(dialog) => {
                self.console.note(&format!("loaded, with {} questions", dialog.turns.len()));
                self.dialog = dialog;
            }
            Err(error) => self.console.note(&format!("{error:#}")),
        }
    }
}

impl Command {
    /// Parses a command; `None` for a question. An unknown command is an error.
    fn parse(entry: &str) -> Result<Option<Command>, String> {
        let Some(line) = entry.strip_prefix('/') else { return Ok(None) };
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        Ok(Some(match (name, rest) {
            ("help" | "?", "") => Command::Help,
            ("clear", "") => Command::Clear,
            ("system", "") => Command::System(None),
            ("system", text) => Command::System(Some(text.to_string())),
            ("retry" | "regenerate", "") => Command::Retry,
            ("stats", "on") => Command::Stats(true),
            ("stats", "off") => Command::Stats(false),
            ("reasoning", "on") => Command::Reasoning(true),
            ("reasoning", "off") => Command::Reasoning(false),
            ("save" | "load", "") => return Err(format!("usage: /{name} FILE")),
            ("save", file) => Command::Save(file.into()),
            ("load", file) => Command::Load(file.into()),
            ("set", "") => Command::Settings,
            ("set", pair) => match pair.split_once(char::is_whitespace) {
                Some((name, value)) => {
                    Command::Set { name: name.to_string(), value: value.trim().to_string() }
                }
                None => return Err(format!("usage: /set {pair} VALUE; 'default' resets it")),
            },
            ("tools", "") => Command::Tools,
            ("exit" | "quit" | "bye", "") => Command::Exit,
            _ => return Err(format!("there is no command '{entry}'; /help lists them")),
        }))
    }
}

fn help() -> String {
    format!(
        "/system TEXT     set the system prompt; without TEXT, remove it\n\
         /retry           answer the last question again\n\
         /clear           clear the conversation\n\
         /set NAME VALUE  set {},\n\
         \x20                or a parameter of docs/sampling.md; 'default' resets it\n\
         /set json_schema FILE, /set grammar FILE\n\
         \x20                answer in this form; a schema can also be given as JSON text\n\
         /set tools FILE  set the tools that the model may call; you enter the results after =\n\
         /tools           list them\n\
         /set             show the settings\n\
         /reasoning on|off  show the model's reasoning, or only that there is some\n\
         /save FILE       save the conversation as JSON\n\
         /load FILE       continue a saved conversation\n\
         /stats on|off    show token count and speed after each answer\n\
         /exit            or Ctrl-D: end the chat\n\
         Ctrl-C stops an answer. A backslash at the end of a line continues it on the next;\n\
         \x20                lines between \"\"\" and \"\"\" are one question.\n\
         A line that begins with a space is never a command.",
        settings::names()
    )
}

#[cfg(test)]
mod tests;
