//! Separation of the model's reasoning from its answer.
//!
//! Invariant: reasoning is at the beginning of the output only; later markers are text of the answer.

/// A format of reasoning.
#[derive(Debug)]
pub struct ReasoningFormat {
    /// Name, as in vLLM.
    pub name: &'static str,
    /// Other names, mostly those of vLLM.
    pub aliases: &'static [&'static str],
    pub(super) syntax: ReasoningSyntax,
    /// Texts that a chat template for this format contains: one of them.
    signatures: &'static [&'static str],
}

/// Syntax of reasoning.
#[derive(Debug)]
pub(super) enum ReasoningSyntax {
    Marked {
        open: &'static [&'static str],
        close: &'static [&'static str],
    },
    /// A channel of Harmony messages.
    Harmony,
}

/// All formats. A chat template has the first one whose signature it contains.
static REASONING_FORMATS: &[ReasoningFormat] = &[
    ReasoningFormat {
        name: "openai_gptoss",
        aliases: &["harmony", "gpt_oss"],
        syntax: ReasoningSyntax::Harmony,
        signatures: &["<|channel|>"],
    },
    ReasoningFormat {
        name: "mistral",
        aliases: &["magistral"],
        syntax: ReasoningSyntax::Marked { open: &["[THINK]"], close: &["[/THINK]"] },
        signatures: &["[THINK]"],
    },
    ReasoningFormat {
        name: "cohere",
        aliases: &["cohere_command3"],
        syntax: ReasoningSyntax::Marked { open: &["<|START_THINKING|>"], close: &["<|END_THINKING|>"] },
        signatures: &["<|START_THINKING|>"],
    },
    ReasoningFormat {
        name: "granite",
        aliases: &[],
        syntax: ReasoningSyntax::Marked {
            open: &["Here is my thought process:", "Here's my thought process:"],
            close: &["Here is my response:", "Here's my response:"],
        },
        signatures: &["Here is my thought process:"],
    },
    ReasoningFormat {
        name: "deepseek_r1",
        aliases: &["qwen3", "deepseek_v3", "think"],
        syntax: ReasoningSyntax::Marked { open: &["<think>"], close: &["</think>"] },
        signatures: &["<think>", "</think>"],
    },
];

impl ReasoningFormat {
    /// Returns the format with this name or alias.
    pub fn named(name: &str) -> Option<&'static ReasoningFormat> {
        REASONING_FORMATS.iter().find(|format| format.name == name || format.aliases.contains(&name))
    }

    /// Returns the names of all formats, without aliases.
    pub fn names() -> impl Iterator<Item = &'static str> {
        REASONING_FORMATS.iter().map(|format| format.name)
    }

    /// Detects the format from the source of a chat template. `None` if the template has no reasoning.
    pub fn detect(template: &str) -> Option<&'static ReasoningFormat> {
        let contains = |text: &&str| template.contains(*text);
        REASONING_FORMATS.iter().find(|format| format.signatures.iter().any(contains))
    }

    /// Returns the markers that the parser must see, as [`CallFormat::markers`](super::CallFormat::markers)
    /// does.
    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        let [open, close]: [&[&str]; 2] = match self.syntax {
            ReasoningSyntax::Marked { open, close } => [open, close],
            ReasoningSyntax::Harmony => [super::harmony::MARKERS, &[]],
        };
        open.iter().chain(close).copied()
    }

    /// Returns the markers around reasoning: alternatives of the one before it, and of the one after it.
    /// `None` if reasoning is a part of a larger format.
    pub fn delimiters(&self) -> Option<(&'static [&'static str], &'static [&'static str])> {
        match self.syntax {
            ReasoningSyntax::Marked { open, close } => Some((open, close)),
            ReasoningSyntax::Harmony => None,
        }
    }

    /// Returns whether the model's output after this rendered prompt begins within reasoning. `is_continued`
    /// is set if the prompt ends with a message that the model continues.
    pub fn starts_inside(&self, prompt: &str, is_continued: bool) -> bool {
        let ReasoningSyntax::Marked { open, close } = self.syntax else { return false };
        if !is_continued {
            let prompt = prompt.trim_end();
            return open.iter().any(|marker| prompt.ends_with(marker));
        }
        let last = |markers: &[&str]| markers.iter().filter_map(|marker| prompt.rfind(marker)).max();
        last(open) > last(close)
    }
}

/// A character, classified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Reasoning(char),
    /// A character of the rest of the output.
    Rest(char),
}

/// Reader of reasoning at the beginning of an output.
#[derive(Debug)]
pub(super) struct ReasoningReader {
    open: &'static [&'static str],
    close: &'static [&'static str],
    stage: Stage,
    /// Characters that may be the beginning of a marker.
    held: String,
    /// White space that is dropped before a marker.
    space: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// At the beginning of the output. Some models repeat the opening marker that ends the prompt.
    Beginning {
        is_inside: bool,
    },
    /// Before the first character of reasoning that is not white space.
    InsideBlank,
    Inside,
    /// Before the first character of the rest that is not white space.
    AfterBlank,
    Rest,
}

impl ReasoningReader {
    pub(super) fn new(
        open: &'static [&'static str],
        close: &'static [&'static str],
        is_inside: bool,
    ) -> ReasoningReader {
        let stage = Stage::Beginning { is_inside };
        ReasoningReader { open, close, stage, held: String::new(), space: String::new() }
    }

    /// Reads the next character and calls `piece` with characters whose place is known.
    pub(super) fn push(&mut self, c: char, piece: &mut impl FnMut(Piece)) {
        match self.stage {
            Stage::Rest => piece(Piece::Rest(c)),
            Stage::AfterBlank if c.is_whitespace() => {}
            Stage::AfterBlank => {
                self.stage = Stage::Rest;
                piece(Piece::Rest(c));
            }
            Stage::Beginning { .. } | Stage::InsideBlank | Stage::Inside => {
                self.held.push(c);
                self.search(piece);
            }
        }
    }

    /// Returns what is held back at the end of the output.
    pub(super) fn finish(&mut self, piece: &mut impl FnMut(Piece)) {
        let make = match self.stage {
            Stage::Beginning { is_inside: false } => Piece::Rest,
            _ => Piece::Reasoning,
        };
        let text = std::mem::take(&mut self.space) + &std::mem::take(&mut self.held);
        text.chars().for_each(|c| piece(make(c)));
    }

    /// Searches the held characters for a marker, and returns those that are not the beginning of one.
    fn search(&mut self, piece: &mut impl FnMut(Piece)) {
        while let Some(first) = self.held.chars().next() {
            let is_beginning = matches!(self.stage, Stage::Beginning { .. });
            let held = self.held.as_str();
            if is_beginning && self.open.contains(&held) {
                self.stage = Stage::InsideBlank;
            } else if self.is_within() && self.close.contains(&held) {
                self.stage = Stage::AfterBlank;
            } else if self.may_be_marker() {
                return;
            } else {
                self.held.remove(0);
                self.character(first, piece);
                if self.stage == Stage::Rest {
                    std::mem::take(&mut self.held).chars().for_each(|c| piece(Piece::Rest(c)));
                }
                continue;
            }
            self.held.clear();
            self.space.clear();
        }
    }

    /// Returns whether the next character is one of reasoning, unless a marker begins with it.
    fn is_within(&self) -> bool {
        matches!(self.stage, Stage::Beginning { is_inside: true } | Stage::InsideBlank | Stage::Inside)
    }

    fn may_be_marker(&self) -> bool {
        let begins = |markers: &[&str]| markers.iter().any(|marker| marker.starts_with(self.held.as_str()));
        (matches!(self.stage, Stage::Beginning { .. }) && begins(self.open))
            || (self.is_within() && begins(self.close))
    }

    /// Reads a character that is not part of a marker.
    fn character(&mut self, c: char, piece: &mut impl FnMut(Piece)) {
        if c.is_whitespace() {
            if self.stage != Stage::InsideBlank {
                self.space.push(c);
            }
            return;
        }
        let is_within = self.is_within();
        // White space at the beginning of reasoning is part of the marker in the prompt.
        if self.stage == (Stage::Beginning { is_inside: true }) {
            self.space.clear();
        }
        self.stage = if is_within { Stage::Inside } else { Stage::Rest };
        let make = if is_within { Piece::Reasoning } else { Piece::Rest };
        std::mem::take(&mut self.space).chars().chain([c]).for_each(|c| piece(make(c)));
    }
}
