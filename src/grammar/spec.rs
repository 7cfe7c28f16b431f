//! Specifications: what an answer must be.

use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::sync::{Arc, LazyLock};

/// The hash function of specifications, with random keys: clients choose the texts.
static HASHING: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// The specification of an answer. Equal specifications compile to the same grammar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Of all else. A text may be long, so it is hashed once, where it is parsed.
    hash: u64,
    pub(crate) form: Form,
    pub(crate) json_spaces: bool,
}

impl Hash for Spec {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl Spec {
    /// Creates the specification of an answer with compact JSON. Takes time in proportion to the text.
    pub fn new(form: Form) -> Spec {
        Spec::with_spaces(form, false)
    }

    /// Creates the specification of an answer. With `json_spaces`, spaces and line breaks are allowed between
    /// the tokens of JSON. Without them JSON is compact, so that small models cannot go on writing spaces.
    pub fn with_spaces(form: Form, json_spaces: bool) -> Spec {
        Spec { hash: HASHING.hash_one((&form, json_spaces)), form, json_spaces }
    }

    /// Returns the form of the answer.
    pub fn form(&self) -> &Form {
        &self.form
    }

    /// Returns the specification of another form, with the same spaces in JSON.
    pub fn with_form(&self, form: Form) -> Spec {
        Spec::with_spaces(form, self.json_spaces)
    }

    /// Returns the size of the specification's text in bytes.
    pub fn bytes(&self) -> usize {
        self.form.bytes()
    }
}

/// The form of an answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// Any JSON object.
    JsonObject,
    /// JSON that satisfies this schema, given as JSON text; properties are written in the schema's order.
    JsonSchema(Arc<str>),
    /// Text of which all matches this regular expression, in the syntax of the crate `regex`, without
    /// look-around.
    Regex(Arc<str>),
    /// One of these strings.
    Choice(Arc<[String]>),
    /// Text that this grammar describes: GBNF if it has `::=`, Lark otherwise.
    Grammar(Arc<str>),
    /// Calls of functions, or another form with fixed text around it.
    Calls(Arc<Calls>),
}

impl Form {
    fn bytes(&self) -> usize {
        let pieces = |pieces: &[Piece]| pieces.iter().map(Piece::bytes).sum::<usize>();
        match self {
            Form::JsonObject => 0,
            Form::JsonSchema(text) | Form::Regex(text) | Form::Grammar(text) => text.len(),
            Form::Choice(choices) => choices.iter().map(|choice| choice.len() + 1).sum(),
            Form::Calls(all) => {
                let Calls { begin, calls, separator, end, .. } = &**all;
                let call = |call: &Call| pieces(&call.prefix) + call.body.bytes() + pieces(&call.suffix);
                calls.iter().map(call).sum::<usize>() + pieces(begin) + pieces(separator) + pieces(end)
            }
        }
    }
}

/// Calls of functions: `begin`, then `min` to `max` calls with `separator` between them, then `end`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Calls {
    pub begin: Vec<Piece>,
    /// The calls to choose from.
    pub calls: Vec<Call>,
    pub separator: Vec<Piece>,
    pub end: Vec<Piece>,
    /// Least number of calls, at least 1.
    pub min: u32,
    /// Largest number of calls, or no limit.
    pub max: Option<u32>,
}

/// One call: `prefix`, arguments, `suffix`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// Path of the body's schema in errors, such as `tools[2].function.parameters`; `$` for a schema that has
    /// no path of its own.
    pub place: String,
    pub prefix: Vec<Piece>,
    /// Form of the arguments, a JSON schema; any form but calls is supported.
    pub body: Form,
    pub suffix: Vec<Piece>,
}

/// A fixed piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Piece {
    Text(String),
    /// A token by id, such as a special token that begins calls.
    Token(u32),
    /// At least one character of any text, without special tokens. A token must follow: it ends the text.
    AnyText,
    /// These pieces, or nothing.
    Optional(Vec<Piece>),
}

impl Piece {
    fn bytes(&self) -> usize {
        match self {
            Piece::Text(text) => text.len(),
            Piece::Token(_) | Piece::AnyText => size_of::<u32>(),
            Piece::Optional(pieces) => pieces.iter().map(Piece::bytes).sum(),
        }
    }
}

/// Position in an output from which on a grammar applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConstraintStart {
    /// The first token.
    Immediately,
    /// The first token after this text: the prompt ends within reasoning, which the text closes. In the
    /// output, a special token stands for its name.
    After { marker: Arc<str> },
    /// The first token, unless that is `open`, which begins reasoning: then the first one after the text
    /// `close`.
    UnlessOpened { open: u32, close: Arc<str> },
}
