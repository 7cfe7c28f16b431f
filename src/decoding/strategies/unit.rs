//! The three forms of a strategy, and the row that describes one in the table.

use super::history::History;
use super::params::{Param, ParamError, Values, Vocabulary};
use mainstem_kernels::candidates::Candidates;
use mainstem_kernels::random::uniform;
use std::fmt::Debug;

/// A row of the table: a strategy with its parameters.
#[derive(Debug)]
pub struct Strategy {
    /// Name in `samplers`, or in `strategy` if the place is [`Place::Named`].
    pub name: &'static str,
    /// Other names that are accepted.
    pub aliases: &'static [&'static str],
    pub place: Place,
    /// Parameters: of the request, or of `strategy_params` if the place is [`Place::Named`].
    pub params: &'static [Param],
    /// One sentence for the documentation.
    pub summary: &'static str,
    /// Builds the unit, or nothing if its parameters switch it off.
    pub build: fn(&Values, &dyn Vocabulary) -> Result<Option<Unit>, ParamError>,
}

/// The part of sampling that a strategy belongs to. Parts run in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Always runs first, in the order of the table.
    First,
    /// Changes logits. `samplers` may reorder these among themselves.
    Edit,
    /// Runs after all other edits, which it may undo.
    Last,
    /// Changes or removes candidates. `samplers` may reorder these among themselves.
    Filter,
    /// Replaces all filters but the temperature, if its parameters switch it on.
    Instead,
    /// Replaces all filters but the temperature, if `strategy` names it.
    Named,
}

/// A strategy, ready to run.
#[derive(Debug)]
pub enum Unit {
    Edit(Box<dyn Edit>),
    Filter(Box<dyn Filter>),
    Choose(Box<dyn Choose>),
}

/// A change of raw logits.
pub trait Edit: Debug + Send + Sync {
    /// Changes the logits (vocabulary) of the token that follows `history`. Negative infinity forbids a
    /// token. Edits that leave no token are ignored as a whole.
    fn edit(&self, logits: &mut [f32], history: &History, scratch: &mut EditScratch);
}

/// A change of the candidates.
pub trait Filter: Debug + Send + Sync {
    /// Removes candidates or scales their values. At least one candidate stays.
    fn filter(&self, candidates: &mut Candidates<'_>, context: &Context<'_>);
}

/// A choice of the token.
pub trait Choose: Debug + Send + Sync {
    /// Returns the registers at the beginning of a sequence.
    fn begin(&self) -> Registers {
        Registers::default()
    }

    /// Returns a candidate, and sets the registers to their values after this choice. The caller keeps them
    /// only if the token is accepted.
    fn choose(&self, candidates: &mut Candidates<'_>, context: &Context<'_>, state: &mut Registers) -> u32;
}

/// The numbers that a chooser keeps for a sequence, apart from its tokens. Each chooser says what they mean.
pub type Registers = [f64; 2];

/// The facts that filters and choosers may depend on, besides the candidates.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    pub history: &'a History,
    pub seed: u64,
    /// Position of the token to be chosen.
    pub position: u64,
}

/// Streams of random numbers, one for each decision that a strategy makes beside the draw.
pub mod stream {
    /// Whether XTC acts.
    pub const XTC: u32 = 1;
    /// Whether randomised FSD draws.
    pub const RANDOM_FSD: u32 = 2;
    /// Whether a draft is accepted.
    pub const ACCEPTANCE: u32 = 3;
}

impl Context<'_> {
    /// Returns a uniform number in [0, 1) of one of the [`stream`]s.
    pub fn uniform(&self, stream: u32) -> f32 {
        uniform(self.seed, self.position, stream)
    }
}

/// Buffers of edits, which keep their memory from row to row.
#[derive(Debug, Default)]
pub struct EditScratch {
    /// A number per token of the vocabulary, all 0 between two edits.
    pub marks: Vec<u32>,
    /// A number per token of the history.
    pub lengths: Vec<u32>,
}
