//! DRY: a penalty that grows with the length of the repetition which a token would continue.

use super::history::History;
use super::params::{Bounds, Kind, Param, ParamError, Values, Vocabulary};
use super::unit::{Edit, EditScratch, Place, Strategy, Unit};

const MULTIPLIER: Param = Param::float(
    "dry_multiplier",
    0.0,
    Bounds::within(0.0, f64::INFINITY),
    "penalty of a repetition of the allowed length; 0: off",
);
const BASE: Param = Param::float(
    "dry_base",
    1.75,
    Bounds::within(1.0, f64::INFINITY),
    "growth of the penalty with each further token",
);
const ALLOWED_LENGTH: Param = Param::integer(
    "dry_allowed_length",
    2,
    1,
    i32::MAX as i64,
    "length of a repetition from which its continuation is penalized",
);
const LAST_N: Param = Param::integer(
    "dry_penalty_last_n",
    -1,
    -1,
    i32::MAX as i64,
    "number of last tokens to look at; -1: all, 0: off",
);
const BREAKERS: Param = Param::list(
    "dry_sequence_breakers",
    Kind::Texts(&["\n", ":", "\"", "*"]),
    "texts that end a repetition: tokens that contain one are part of none",
);

/// The row of the table.
pub const STRATEGY: Strategy = Strategy {
    name: "dry",
    aliases: &[],
    place: Place::Edit,
    params: &[MULTIPLIER, BASE, ALLOWED_LENGTH, LAST_N, BREAKERS],
    summary: "If the last n tokens have occurred before, and n is at least `dry_allowed_length`, subtracts \
              `dry_multiplier` * `dry_base`^(n - `dry_allowed_length`) from the logit of each token that \
              followed; the longest such n of a token counts.",
    build,
};

/// The penalties of a request.
#[derive(Debug)]
struct Dry {
    multiplier: f32,
    base: f32,
    allowed_length: u32,
    last_n: i64,
    /// Tokens that end a repetition, in order.
    breakers: Vec<u32>,
}

fn build(values: &Values, vocabulary: &dyn Vocabulary) -> Result<Option<Unit>, ParamError> {
    let (multiplier, last_n) = (values.float(&MULTIPLIER), values.integer(&LAST_N));
    if multiplier == 0.0 || last_n == 0 {
        return Ok(None);
    }
    // Many texts may share most tokens of the vocabulary, so the tokens are marked instead of collected.
    let mut marks = Vec::new();
    for id in values.texts(&BREAKERS).iter().flat_map(|text| vocabulary.tokens_with(text)) {
        marks.resize(marks.len().max(id as usize + 1), false);
        marks[id as usize] = true;
    }
    let breakers = (0..).zip(marks).filter(|(_, mark)| *mark).map(|(id, _)| id).collect();
    let (base, allowed_length) = (values.float(&BASE), values.count(&ALLOWED_LENGTH) as u32);
    Ok(Some(Unit::Edit(Box::new(Dry { multiplier, base, allowed_length, last_n, breakers }))))
}

impl Edit for Dry {
    fn edit(&self, logits: &mut [f32], history: &History, scratch: &mut EditScratch) {
        let (tokens, _) = history.last(self.last_n);
        let breaks = |token: &u32| self.breakers.binary_search(token).is_ok();
        let longest = tokens.iter().rev().take_while(|token| !breaks(token)).count() as u32;
        if longest < self.allowed_length {
            return;
        }
        let EditScratch { marks, lengths } = scratch;
        matches(tokens, lengths);
        // The mark of a token is the length of the longest repetition that it continues.
        let ends = |i: usize| (tokens[tokens.len() - i], lengths[i].min(longest));
        let long = || (1..tokens.len()).map(ends).filter(|&(_, length)| length >= self.allowed_length);
        for (token, length) in long() {
            if let Some(mark) = marks.get_mut(token as usize) {
                *mark = (*mark).max(length);
            }
        }
        for (token, _) in long() {
            let Some(mark) = marks.get_mut(token as usize) else { continue };
            let length = std::mem::take(mark);
            if length > 0 {
                let further = (length - self.allowed_length) as f32;
                logits[token as usize] -= self.multiplier * self.base.powf(further);
            }
        }
    }
}

/// Sets `lengths[i]`, for i from 1, to the number of tokens that end `tokens` and also stand before the last
/// `i` tokens: the Z-function of the reversed list. Linear in the number of tokens.
pub(super) fn matches(tokens: &[u32], lengths: &mut Vec<u32>) {
    let n = tokens.len();
    let reversed = |i: usize| tokens[n - 1 - i];
    lengths.clear();
    lengths.resize(n, 0);
    // The match that reaches farthest: it starts at `left` and ends before `right`.
    let (mut left, mut right) = (0, 0);
    for i in 1..n {
        let mut length = if i < right { (lengths[i - left] as usize).min(right - i) } else { 0 };
        while i + length < n && reversed(length) == reversed(i + length) {
            length += 1;
        }
        lengths[i] = length as u32;
        if i + length > right {
            (left, right) = (i, i + length);
        }
    }
}
