//! Parameters of strategies: their kinds, defaults and bounds, and the values that a request gives them.
//!
//! Invariant: a [`Values`] holds checked values only.

use std::borrow::Cow;
use std::fmt;

/// A parameter of a strategy.
#[derive(Debug)]
pub struct Param {
    pub name: &'static str,
    /// Other names that are accepted.
    pub aliases: &'static [&'static str],
    pub kind: Kind,
    /// A phrase for the documentation.
    pub doc: &'static str,
}

/// The type of a parameter, with its default and bounds.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Float {
        default: f64,
        bounds: Bounds,
    },
    Integer {
        default: i64,
        min: i64,
        max: i64,
    },
    /// One of these texts; the first is the default.
    Choice(&'static [&'static str]),
    /// A list of token ids, empty by default.
    Tokens,
    /// A list of texts or of lists of token ids, empty by default.
    Sequences,
    /// A list of texts.
    Texts(&'static [&'static str]),
    /// Biases: an object from token ids or texts to numbers, or a list of such pairs. Empty by default.
    Biases,
}

/// The bounds of a number, which also hold for its F32. NaN and infinities are never within them.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub min: f64,
    /// Whether `min` itself is allowed.
    pub with_min: bool,
    /// The largest allowed number; infinity for none.
    pub max: f64,
    /// Whether `max` itself is allowed.
    pub with_max: bool,
}

impl Bounds {
    /// From `min` to `max`, both allowed.
    pub const fn within(min: f64, max: f64) -> Bounds {
        Bounds { min, with_min: true, max, with_max: true }
    }

    /// Above `min` and at most `max`.
    pub const fn above(min: f64, max: f64) -> Bounds {
        Bounds { min, with_min: false, max, with_max: true }
    }

    /// At least `min` and below `max`.
    pub const fn below(min: f64, max: f64) -> Bounds {
        Bounds { min, with_min: true, max, with_max: false }
    }

    /// Returns whether a number is finite and within the bounds, and also its F32, which is what is used.
    pub fn contain(&self, value: f64) -> bool {
        let single = value as f32;
        single.is_finite() && self.surround(value) && self.surround(single.into())
    }

    /// Returns whether a number is within the bounds, whatever its F32 is.
    pub fn surround(&self, value: f64) -> bool {
        let above = value > self.min || (self.with_min && value == self.min);
        let below = value < self.max || (self.with_max && value == self.max);
        above && below
    }
}

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let low = if self.with_min { "at least" } else { "above" };
        let high = if self.with_max { "at most" } else { "below" };
        match (self.min, self.max) {
            (min, f64::INFINITY) => write!(f, "finite and {low} {min}"),
            (min, max) if self.with_min && self.with_max => write!(f, "from {min} to {max}"),
            (min, max) => write!(f, "{low} {min} and {high} {max}"),
        }
    }
}

impl Param {
    /// A number.
    pub const fn float(name: &'static str, default: f64, bounds: Bounds, doc: &'static str) -> Param {
        Param { name, aliases: &[], kind: Kind::Float { default, bounds }, doc }
    }

    /// A whole number from `min` to `max`.
    pub const fn integer(name: &'static str, default: i64, min: i64, max: i64, doc: &'static str) -> Param {
        Param { name, aliases: &[], kind: Kind::Integer { default, min, max }, doc }
    }

    /// A parameter of another kind.
    pub const fn list(name: &'static str, kind: Kind, doc: &'static str) -> Param {
        Param { name, aliases: &[], kind, doc }
    }

    /// Adds other names.
    pub const fn or(mut self, aliases: &'static [&'static str]) -> Param {
        self.aliases = aliases;
        self
    }

    /// Returns whether this is one of the parameter's names.
    pub fn is_named(&self, name: &str) -> bool {
        self.name == name || self.aliases.contains(&name)
    }
}

/// The reason for which a parameter is refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ParamError {
    /// Name of the parameter, as the request spells it.
    pub param: String,
    /// A sentence with the name, the value and its bounds.
    pub message: String,
}

impl ParamError {
    /// Creates an error whose message begins with the parameter's name.
    pub fn new(param: &str, rest: impl fmt::Display) -> ParamError {
        ParamError { param: param.to_owned(), message: format!("{param} {rest}") }
    }

    /// Returns the message without the parameter's name, with which it begins.
    pub fn rest(&self) -> &str {
        self.message.strip_prefix(&self.param).unwrap_or(&self.message).trim_start()
    }
}

/// A model's vocabulary, with what parameters need to know of the model and of the rest of a request.
pub trait Vocabulary {
    /// Returns the number of logits of a row.
    fn size(&self) -> usize;

    /// Returns the tokens that end this request: the model's, unless they are ignored, and the request's.
    fn end_tokens(&self) -> Cow<'_, [u32]>;

    /// Returns the ids of a text, without special tokens.
    fn encode(&self, text: &str) -> Vec<u32>;

    /// Returns the tokens whose text contains `text`.
    fn tokens_with(&self, text: &str) -> Vec<u32>;

    /// Returns the token that begins the model's thinking, and those that end it, if it has them.
    fn thinking(&self) -> Option<(u32, Cow<'_, [u32]>)> {
        None
    }
}

/// A vocabulary for checks of parameters where no model is known: it has every token id, every text is a
/// token, and no token contains a text.
#[derive(Clone, Copy, Debug)]
pub struct AnyVocabulary;

impl Vocabulary for AnyVocabulary {
    fn size(&self) -> usize {
        u32::MAX as usize
    }

    fn end_tokens(&self) -> Cow<'_, [u32]> {
        Cow::Borrowed(&[])
    }

    fn encode(&self, _: &str) -> Vec<u32> {
        vec![0]
    }

    fn tokens_with(&self, _: &str) -> Vec<u32> {
        Vec::new()
    }

    fn thinking(&self) -> Option<(u32, Cow<'_, [u32]>)> {
        Some((0, Cow::Borrowed(&[0])))
    }
}

/// The value of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Float(f64),
    Integer(i64),
    Text(String),
    Tokens(Vec<u32>),
    Sequences(Vec<Vec<u32>>),
    Texts(Vec<String>),
    Biases(Vec<(u32, f32)>),
}

/// The values of parameters, by name; those that are not given have their defaults.
#[derive(Clone, Debug, Default)]
pub struct Values {
    given: Vec<(&'static str, Value)>,
}

impl Values {
    /// Sets a value, and returns the former one if it was given.
    pub fn set(&mut self, param: &Param, value: Value) -> Option<Value> {
        match self.given.iter_mut().find(|(name, _)| *name == param.name) {
            Some((_, given)) => Some(std::mem::replace(given, value)),
            None => {
                self.given.push((param.name, value));
                None
            }
        }
    }

    /// Returns the value that was given.
    pub fn get(&self, param: &Param) -> Option<&Value> {
        self.given.iter().find(|(name, _)| *name == param.name).map(|(_, value)| value)
    }

    /// Returns the values given here or, where there are none, in `others`.
    pub fn or(&self, others: &Values) -> Values {
        let mut merged = self.clone();
        for (name, value) in &others.given {
            if !merged.given.iter().any(|(given, _)| given == name) {
                merged.given.push((name, value.clone()));
            }
        }
        merged
    }

    /// Returns the value of a [`Kind::Float`].
    pub fn float(&self, param: &Param) -> f32 {
        match (self.get(param), param.kind) {
            (Some(Value::Float(value)), _) => *value as f32,
            (_, Kind::Float { default, .. }) => default as f32,
            _ => f32::NAN,
        }
    }

    /// Returns the value of a [`Kind::Integer`].
    pub fn integer(&self, param: &Param) -> i64 {
        match (self.get(param), param.kind) {
            (Some(Value::Integer(value)), _) => *value,
            (_, Kind::Integer { default, .. }) => default,
            _ => 0,
        }
    }

    /// Returns the value of a [`Kind::Integer`] that is not negative, or 0.
    pub fn count(&self, param: &Param) -> usize {
        usize::try_from(self.integer(param)).unwrap_or(0)
    }

    /// Returns the value of a [`Kind::Choice`].
    pub fn text(&self, param: &Param) -> &str {
        match (self.get(param), param.kind) {
            (Some(Value::Text(value)), _) => value,
            (_, Kind::Choice(choices)) => choices.first().copied().unwrap_or_default(),
            _ => "",
        }
    }

    /// Returns the value of a [`Kind::Tokens`].
    pub fn tokens(&self, param: &Param) -> &[u32] {
        if let Some(Value::Tokens(value)) = self.get(param) { value } else { &[] }
    }

    /// Returns the value of a [`Kind::Sequences`].
    pub fn sequences(&self, param: &Param) -> &[Vec<u32>] {
        if let Some(Value::Sequences(value)) = self.get(param) { value } else { &[] }
    }

    /// Returns the value of a [`Kind::Biases`].
    pub fn biases(&self, param: &Param) -> &[(u32, f32)] {
        if let Some(Value::Biases(value)) = self.get(param) { value } else { &[] }
    }

    /// Returns the value of a [`Kind::Texts`].
    pub fn texts(&self, param: &Param) -> Vec<String> {
        match (self.get(param), param.kind) {
            (Some(Value::Texts(value)), _) => value.clone(),
            (_, Kind::Texts(texts)) => texts.iter().map(|&text| text.to_owned()).collect(),
            _ => Vec::new(),
        }
    }
}
