//! Terminal input and output: the line editor with its history, colours and Ctrl-C; and plain output if
//! stdout is not a terminal.
//!
//! Invariant: only escape sequences of this program are written, and only to terminals.

use super::chat::{Console, Input, PromptMark};
use super::client::Chunk;
use super::completer::CommandCompleter;
use super::exchange::Screen;
use crate::cli::escape::visible;
use crate::telemetry;
use actix::Arbiter;
use anyhow::{Context, Result};
use futures_util::future::LocalBoxFuture;
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Config, Editor};
use std::fs::{DirBuilder, OpenOptions};
use std::future::pending;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

const HISTORY_ENTRIES_MAX: usize = 1000;

/// Receiver of Ctrl-C outside the line editor, or of other signals as well.
pub struct Interrupts(UnboundedReceiver<()>);

impl Interrupts {
    /// Starts to listen to Ctrl-C. From then on it does not end the process.
    pub fn listen() -> Result<Interrupts> {
        Interrupts::listen_to(&[SignalKind::interrupt()])
    }

    /// Starts to listen to these signals. From then on they do not end the process.
    pub fn listen_to(kinds: &[SignalKind]) -> Result<Interrupts> {
        let (sender, receiver) = unbounded_channel();
        // On a separate thread: the line editor blocks this one, and signals that arrive meanwhile must not
        // be delayed to the next answer.
        let thread = Arbiter::new();
        for kind in kinds {
            let mut signal = signal(*kind).context("cannot listen for signals")?;
            let sender = sender.clone();
            thread.spawn(async move { while signal.recv().await.is_some() && sender.send(()).is_ok() {} });
        }
        Ok(Interrupts(receiver))
    }

    /// Waits for the next Ctrl-C.
    pub async fn next(&mut self) {
        if self.0.recv().await.is_none() {
            pending().await
        }
    }

    /// Discards signals that arrived while there was nothing to interrupt.
    fn forget(&mut self) {
        while self.0.try_recv().is_ok() {}
    }
}

/// Output of answers to stdout.
pub struct Output {
    pub format: AnswerFormat,
    is_terminal: bool,
    interrupts: Interrupts,
}

/// Format in which answers are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerFormat {
    Text,
    /// The API's JSON, one object per line.
    Json,
}

impl Output {
    /// Creates an output to stdout.
    pub fn new(form: AnswerFormat, interrupts: Interrupts) -> Output {
        Output { format: form, is_terminal: io::stdout().is_terminal(), interrupts }
    }

    /// Ends the last line of `text`, if it is not ended yet.
    pub fn end_line(&mut self, text: &str) -> io::Result<()> {
        match self.format == AnswerFormat::Text && !text.is_empty() && !text.ends_with('\n') {
            true => self.line(""),
            false => Ok(()),
        }
    }

    /// Prints a line of a model, without control characters on a terminal.
    pub fn shown_line(&mut self, line: &str) -> io::Result<()> {
        match self.is_terminal {
            true => self.line(&visible(line)),
            false => self.line(line),
        }
    }

    /// Prints a line.
    pub fn line(&mut self, line: &str) -> io::Result<()> {
        writeln!(io::stdout(), "{line}")
    }
}

impl Screen for Output {
    fn show(&mut self, chunk: &Chunk) -> io::Result<()> {
        match self.format {
            AnswerFormat::Json => return self.line(&chunk.json),
            AnswerFormat::Text if self.is_terminal => write!(io::stdout(), "{}", visible(&chunk.text))?,
            AnswerFormat::Text => write!(io::stdout(), "{}", chunk.text)?,
        }
        io::stdout().flush()
    }

    fn note(&mut self, text: &str) {
        note(text);
    }

    fn interrupted(&mut self) -> LocalBoxFuture<'_, ()> {
        Box::pin(self.interrupts.next())
    }
}

/// An interactive terminal with a line editor.
pub struct Terminal {
    output: Output,
    editor: Editor<CommandCompleter, FileHistory>,
    /// History file; `None` keeps entries for this conversation only.
    history: Option<PathBuf>,
}

impl Terminal {
    /// Creates a terminal. If the history file cannot be opened, a note is shown and entries are not saved.
    pub fn new(output: Output, history: Option<PathBuf>) -> Result<Terminal> {
        let config = Config::builder()
            .max_history_size(HISTORY_ENTRIES_MAX)
            .and_then(|config| config.history_ignore_dups(true))
            .context("cannot set up the line editor")?
            .build();
        let mut editor = Editor::with_config(config).context("cannot set up the line editor")?;
        editor.set_helper(Some(CommandCompleter));
        let mut terminal = Terminal { output, editor, history };
        if let Some(file) = terminal.history.take() {
            match terminal.open_history(&file) {
                Ok(()) => terminal.history = Some(file),
                Err(error) => terminal.note(&format!("cannot save history in {}: {error:#}", file.display())),
            }
        }
        Ok(terminal)
    }

    fn open_history(&mut self, file: &Path) -> Result<()> {
        create_private_file(file)?;
        Ok(self.editor.load_history(file)?)
    }
}

impl Screen for Terminal {
    fn show(&mut self, chunk: &Chunk) -> io::Result<()> {
        self.output.show(chunk)
    }

    fn note(&mut self, text: &str) {
        self.output.note(text);
    }

    fn interrupted(&mut self) -> LocalBoxFuture<'_, ()> {
        self.output.interrupted()
    }
}

impl Console for Terminal {
    fn read(&mut self, mark: PromptMark) -> io::Result<Input> {
        let mark = match mark {
            PromptMark::Question => "> ",
            PromptMark::Continued => ". ",
            PromptMark::Result => "= ",
        };
        let line = self.editor.readline(&(mark, paint(CYAN, mark, true)));
        self.output.interrupts.forget();
        match line {
            Ok(line) => Ok(Input::Line(line)),
            Err(ReadlineError::Interrupted) => Ok(Input::Interrupt),
            Err(ReadlineError::Eof) => Ok(Input::End),
            Err(ReadlineError::Io(error)) => Err(error),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    fn remember(&mut self, entry: &str) {
        // History is a convenience: a full disk does not end the conversation.
        let _ = self.editor.add_history_entry(entry);
        if let Some(file) = &self.history {
            let _ = self.editor.append_history(file);
        }
    }

    fn end_answer(&mut self, text: &str) -> io::Result<()> {
        self.output.end_line(text)
    }
}

/// Creates a file if it does not exist, with its folder, and restricts access to the user.
fn create_private_file(file: &Path) -> Result<()> {
    if let Some(folder) = file.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(file)?;
    Ok(file.set_permissions(PermissionsExt::from_mode(0o600))?)
}

/// Returns the path of the history file in the user's state folder; `None` if no such folder is known.
pub fn history_file() -> Option<PathBuf> {
    let folder = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = folder("XDG_STATE_HOME").or_else(|| Some(folder("HOME")?.join(".local/state")))?;
    Some(state.join("mainstem/history"))
}

/// Prints a note to stderr, after the log. Errors are ignored, because stderr may be closed.
pub fn note(text: &str) {
    telemetry::flush_log();
    let _ = writeln!(io::stderr(), "{}", paint(DIM, text, io::stderr().is_terminal()));
}

const DIM: &str = "2";
const CYAN: &str = "36";

/// Adds a style to text if it goes to a terminal with colours.
fn paint(style: &str, text: &str, is_terminal: bool) -> String {
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_plain = set("NO_COLOR") || std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    if is_terminal && !is_plain { format!("\x1b[{style}m{text}\x1b[0m") } else { text.to_string() }
}
