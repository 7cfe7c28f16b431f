//! The conversation at a terminal: what the user types is a question or, behind a slash, a command.
//!
//! Invariant: what is sent is what was said. An answer that was stopped or broke off counts as far as it
//! came; one that has not begun replaces none.

use super::client::{Client, Dialect, Dialog};
use super::exchange::{self, Ending, Screen};
use super::settings;
use std::io;

/// Where the user sits.
pub trait Console: Screen {
    /// Waits for a line.
    fn read(&mut self, mark: Mark) -> io::Result<Input>;

    /// Keeps an entry for the line editor's history.
    fn remember(&mut self, entry: &str);

    /// Ends an answer's last line.
    fn end_answer(&mut self, text: &str) -> io::Result<()>;
}

/// What stands before a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    Question,
    /// The line goes on where the one before ended with a backslash.
    Continued,
}

/// What the user did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    Line(String),
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-D.
    End,
}

/// A line behind a slash.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Command {
    Help,
    Clear,
    System(Option<String>),
    Retry,
    Stats(bool),
    Settings,
    Set { name: String, value: String },
    Exit,
}

/// Whether the conversation goes on.
#[derive(PartialEq, Eq)]
enum Next {
    Line,
    End,
}

const HINT: &str = "Ctrl-D or /exit ends the chat";

/// A conversation.
pub struct Chat<'a> {
    pub client: Client,
    pub dialog: Dialog,
    pub console: &'a mut dyn Console,
    /// Tell after each answer how fast it came.
    pub stats: bool,
}

impl Chat<'_> {
    /// Talks until the user ends it, or nobody is there any more.
    pub async fn run(&mut self) -> io::Result<()> {
        while self.turn().await? == Next::Line {}
        Ok(())
    }

    async fn turn(&mut self) -> io::Result<Next> {
        let entry = match self.entry()? {
            Input::Line(entry) if entry.trim().is_empty() => return Ok(Next::Line),
            Input::Line(entry) => entry,
            Input::Interrupt => {
                self.console.note(HINT);
                return Ok(Next::Line);
            }
            Input::End => return Ok(Next::End),
        };
        self.console.remember(&entry);
        match Command::parse(&entry) {
            Ok(None) => {
                self.dialog.ask(entry);
                self.answer().await?;
            }
            Ok(Some(command)) => return self.obey(command).await,
            Err(message) => self.console.note(&message),
        }
        Ok(Next::Line)
    }

    /// A line and those that continue it.
    fn entry(&mut self) -> io::Result<Input> {
        let mut lines = String::new();
        let mut mark = Mark::Question;
        loop {
            match self.console.read(mark)? {
                Input::Line(line) => match line.strip_suffix('\\') {
                    Some(line) => lines = lines + line + "\n",
                    None => return Ok(Input::Line(lines + &line)),
                },
                other => return Ok(other),
            }
            mark = Mark::Continued;
        }
    }

    /// Asks the last question.
    async fn answer(&mut self) -> io::Result<()> {
        let outcome = exchange::answer(&mut self.client, &self.dialog, self.console).await?;
        self.console.end_answer(&outcome.text)?;
        match outcome.ending {
            Ending::Complete => {}
            Ending::Cut => self.console.note("(the answer has reached its limit of tokens)"),
            Ending::Interrupted => self.console.note("(stopped)"),
            Ending::Failed(failure) => self.console.note(&format!("error: {failure}")),
        }
        if let Some(stats) = outcome.stats.filter(|_| self.stats) {
            self.console.note(&stats);
        }
        let turn = self.dialog.turns.last_mut().expect("a question was asked; anything else is a bug");
        if !outcome.text.is_empty() {
            turn.answer = outcome.text;
        }
        Ok(())
    }

    async fn obey(&mut self, command: Command) -> io::Result<Next> {
        match command {
            Command::Help => self.console.note(&help()),
            Command::Clear => {
                self.dialog.turns.clear();
                self.console.note("the conversation begins anew");
            }
            Command::System(_) if self.client.dialect == Dialect::Raw => {
                self.console.note("without a chat template there is nothing to tell the model");
            }
            Command::System(text) => self.dialog.system = text,
            Command::Retry if self.dialog.turns.is_empty() => self.console.note("there is no question yet"),
            Command::Retry => self.answer().await?,
            Command::Stats(on) => self.stats = on,
            Command::Settings => self.console.note(&self.client.settings.describe()),
            Command::Set { name, value } => {
                if let Err(message) = self.client.settings.set(&name, &value) {
                    self.console.note(&message);
                }
            }
            Command::Exit => return Ok(Next::End),
        }
        Ok(Next::Line)
    }
}

impl Command {
    /// The command that `entry` is; `None` for a question. What looks like a command and is none is an error.
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
            ("set", "") => Command::Settings,
            ("set", pair) => match pair.split_once(char::is_whitespace) {
                Some((name, value)) => {
                    Command::Set { name: name.to_string(), value: value.trim().to_string() }
                }
                None => return Err(format!("/set {pair} VALUE; 'default' takes a setting back")),
            },
            ("exit" | "quit" | "bye", "") => Command::Exit,
            _ => return Err(format!("there is no command '{entry}'; /help lists them")),
        }))
    }
}

fn help() -> String {
    format!(
        "/system TEXT     tell the model how to behave; without TEXT, no more\n\
         /retry           answer the last question again\n\
         /clear           forget what was said\n\
         /set NAME VALUE  {}; 'default' takes a setting back\n\
         /set             show the settings\n\
         /stats on|off    tell after each answer how fast it came\n\
         /exit            or Ctrl-D: end the chat\n\
         Ctrl-C stops an answer. A backslash at the end of a line continues it on the next.\n\
         A line that begins with a space is never a command.",
        settings::names()
    )
}

#[cfg(test)]
mod tests;
