//! Beam search of one request: which beams continue, which end, and when the search is over.
//!
//! The rules are those of `_beam_search` in Hugging Face transformers 5 (generation/utils.py), for
//! decoder-only models and for encoder-decoders:
//!
//! - A candidate is a live beam with one more token; its sum is the beam's sum of log-probabilities plus the
//!   token's, in F32. Candidates are ordered by their sums.
//! - Of the best `width` candidates, those that end (with an end token, or at the maximum length) become
//!   hypotheses, with the score sum / length^`length_penalty`. The length counts generated tokens, including
//!   the end token. Candidates that end behind the best `width` are dropped.
//! - The best `width` of all candidates that do not end are the live beams of the next step.
//! - The best `width` hypotheses are kept. When there are that many, [`EarlyStopping`] decides whether the
//!   search is over.
//!
//! transformers looks at (end tokens + 1) * `width` candidates of all beams together. This is enough to find
//! the two sets above, as are the best `width` + end tokens of each beam, which is what a search asks for.
//! Where sums are equal, the lower beam comes first, then the order of its row; where scores are equal, the
//! earlier hypothesis, then the larger sum. transformers leaves ties open.
//!
//! A step takes O(c log c) time for c = live beams * candidates per beam, and stores at most 2 * `width`
//! tokens of 12 bytes each. No tokens are copied: beams are chains of parents.
//!
//! Invariant: live beams are in the order of their sums, hypotheses in that of their scores, and there are at
//! most `width` of each.

#[cfg(test)]
mod tests;

use super::strategies::ParamError;
use serde_json::Value as Json;

/// The node that stands for the prompt, at which every chain of parents ends.
const ROOT: u32 = 0;

/// When a search with `width` hypotheses is over: the parameter `early_stopping` of transformers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EarlyStopping {
    /// `false`: when the best live beam, with its present length, scores no better than the worst hypothesis.
    /// With a positive `length_penalty`, longer sequences might still have become better.
    #[default]
    Estimate,
    /// `true`: at once.
    Immediate,
    /// `"never"`: when no live beam can become better than the worst hypothesis. With a positive
    /// `length_penalty`, the best live beam is scored with the maximum length.
    Never,
}

impl EarlyStopping {
    /// Returns the value of `early_stopping` in a request: `false`, `true` or `"never"`. The error names it.
    pub fn parse(json: &Json) -> Result<EarlyStopping, ParamError> {
        match json {
            Json::Bool(false) => Ok(EarlyStopping::Estimate),
            Json::Bool(true) => Ok(EarlyStopping::Immediate),
            Json::String(text) if text == "never" => Ok(EarlyStopping::Never),
            _ => Err(ParamError::new("early_stopping", "must be false, true or \"never\"")),
        }
    }
}

/// Parameters of a beam search.
#[derive(Clone, Debug)]
pub struct BeamParams {
    /// Number of beams, and of hypotheses in the result (`beam_width`).
    pub width: usize,
    /// Maximum number of tokens of a hypothesis.
    pub max_tokens: u32,
    /// Until a beam has this many tokens, candidates with an end token are dropped. The log-probabilities of
    /// the others stay as they are.
    pub min_tokens: u32,
    /// Exponent of the length that sums are divided by: 0 compares sums; positive numbers favor long
    /// sequences, because sums are negative.
    pub length_penalty: f64,
    pub early_stopping: EarlyStopping,
    /// Tokens that end a hypothesis: the model's end-of-sequence tokens, unless they are ignored, and the
    /// request's stop tokens.
    pub end_tokens: Vec<u32>,
    /// Number of the last prompt tokens that count in the length of `length_penalty`: 1 if the prompt of an
    /// encoder-decoder ends with a forced BOS, which transformers generates itself; otherwise 0.
    pub forced_tokens: u32,
}

impl BeamParams {
    /// Returns whether this is an end token. They are sorted.
    fn is_end(&self, token: u32) -> bool {
        self.end_tokens.binary_search(&token).is_ok()
    }
}

/// A live beam of the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewBeam {
    /// The beam that it continues: an index into the live beams of the last step.
    pub parent: u32,
    /// The token to append to the parent's tokens.
    pub token: u32,
}

/// The result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BeamStep<'a> {
    /// The live beams of the next step, at least one. A parent may occur several times, or not at all.
    Continue(&'a [NewBeam]),
    /// The search is over.
    Done,
}

/// A sequence that the search found.
#[derive(Clone, Debug, PartialEq)]
pub struct Hypothesis {
    /// Generated tokens, including the end token if there is one.
    pub tokens: Vec<u32>,
    /// The log-probability of each token, as the rows had it.
    pub logprobs: Vec<f32>,
    /// Sum of the log-probabilities, divided by the length to the power of `length_penalty`.
    pub score: f32,
}

/// A token of a beam, and the chain of those before it.
#[derive(Clone, Copy, Debug)]
struct Node {
    parent: u32,
    token: u32,
    logprob: f32,
}

/// A live beam: its last token, and its sum of log-probabilities.
#[derive(Clone, Copy, Debug)]
struct Beam {
    node: u32,
    sum: f32,
}

/// A live beam with one more token.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    beam: u32,
    token: u32,
    logprob: f32,
    sum: f32,
}

/// A sequence that has ended.
#[derive(Clone, Copy, Debug)]
struct Ended {
    node: u32,
    score: f32,
}

/// The state of a beam search.
#[derive(Debug)]
pub struct BeamSearch {
    params: BeamParams,
    /// Tokens of each live beam.
    generated: u32,
    done: bool,
    nodes: Vec<Node>,
    live: Vec<Beam>,
    /// Best first.
    ended: Vec<Ended>,
    /// The result of the last step.
    next: Vec<NewBeam>,
    /// Buffers of a step.
    candidates: Vec<Candidate>,
    next_live: Vec<Beam>,
}

impl BeamSearch {
    /// Creates a search with one live beam, the prompt. The error names the parameter as requests spell it.
    pub fn new(mut params: BeamParams) -> Result<BeamSearch, ParamError> {
        let refuse = |name, rest: String| Err(ParamError::new(name, rest));
        let BeamParams { width, max_tokens, length_penalty, forced_tokens, .. } = params;
        if width == 0 {
            return refuse("beam_width", "is 0 but must be at least 1".to_owned());
        }
        if max_tokens == 0 {
            return refuse("max_tokens", "is 0 but must be at least 1".to_owned());
        }
        // All divisors lie between 1 and this one, so scores are never NaN.
        let longest = f64::from(max_tokens) + f64::from(forced_tokens);
        if !length_penalty.is_finite() || !(longest.powf(length_penalty) as f32).is_normal() {
            let rest = format!(
                "is {length_penalty} but must be so that {longest}, the maximum length, to this power is \
                 within the range of 32-bit numbers"
            );
            return refuse("length_penalty", rest);
        }
        params.end_tokens.sort_unstable();
        params.end_tokens.dedup();
        Ok(BeamSearch {
            params,
            generated: 0,
            done: false,
            nodes: vec![Node { parent: ROOT, token: 0, logprob: 0.0 }],
            live: vec![Beam { node: ROOT, sum: 0.0 }],
            ended: Vec::new(),
            next: Vec::new(),
            candidates: Vec::new(),
            next_live: Vec::new(),
        })
    }

    /// Returns how many of its most likely tokens a row must have, if the vocabulary has that many.
    pub fn candidates_per_beam(&self) -> usize {
        self.params.width + self.params.end_tokens.len()
    }

    /// Returns the number of live beams, and of the rows that the next step takes: 1 at first, then `width`,
    /// unless there are not that many tokens to continue with.
    pub fn live_beams(&self) -> usize {
        self.live.len()
    }

    /// Takes a step: `rows` are the most likely tokens of each live beam, most likely first, in the order of
    /// the beams, with their log-probabilities (of the logits before temperature and filters). Tokens with a
    /// log-probability of negative infinity or NaN are never taken. After the end of the search, nothing
    /// changes any more.
    pub fn advance<'r>(&mut self, rows: impl IntoIterator<Item = &'r [(u32, f32)]>) -> BeamStep<'_> {
        if self.done {
            return BeamStep::Done;
        }
        self.collect(rows);
        self.generated += 1;
        let at_limit = self.generated >= self.params.max_tokens;
        self.next.clear();
        self.next_live.clear();
        for rank in 0..self.candidates.len() {
            let candidate = self.candidates[rank];
            if at_limit || self.params.is_end(candidate.token) {
                if rank < self.params.width {
                    self.end(candidate);
                }
            } else if self.next.len() < self.params.width {
                let node = self.append(candidate);
                self.next_live.push(Beam { node, sum: candidate.sum });
                self.next.push(NewBeam { parent: candidate.beam, token: candidate.token });
            }
        }
        std::mem::swap(&mut self.live, &mut self.next_live);
        self.done = self.is_over();
        if self.done { BeamStep::Done } else { BeamStep::Continue(&self.next) }
    }

    /// Returns the hypotheses, best first: `width` of them after the end of the search, or fewer if too many
    /// tokens were impossible.
    pub fn finish(self) -> Vec<Hypothesis> {
        self.ended.iter().map(|ended| self.hypothesis(ended)).collect()
    }

    /// Fills `candidates` with the candidates of all rows, best first.
    fn collect<'r>(&mut self, rows: impl IntoIterator<Item = &'r [(u32, f32)]>) {
        let ends_are_dropped = self.generated < self.params.min_tokens;
        let per_beam = self.candidates_per_beam();
        self.candidates.clear();
        let mut count = 0;
        for ((beam, live), row) in (0..).zip(&self.live).zip(rows) {
            count += 1;
            for &(token, logprob) in row.iter().take(per_beam) {
                let is_dropped = ends_are_dropped && self.params.is_end(token);
                let sum = live.sum + logprob;
                if sum > f32::NEG_INFINITY && !is_dropped {
                    self.candidates.push(Candidate { beam, token, logprob, sum });
                }
            }
        }
        debug_assert_eq!(count, self.live.len(), "a row for each live beam");
        // Stable, so that ties are decided as documented.
        self.candidates.sort_by(|a, b| b.sum.total_cmp(&a.sum));
    }

    /// Stores a candidate's token, and returns its node.
    fn append(&mut self, candidate: Candidate) -> u32 {
        let Candidate { beam, token, logprob, .. } = candidate;
        self.nodes.push(Node { parent: self.live[beam as usize].node, token, logprob });
        (self.nodes.len() - 1) as u32
    }

    /// Adds a candidate to the hypotheses if it is among the best.
    fn end(&mut self, candidate: Candidate) {
        let score = candidate.sum / self.divisor(self.generated);
        let place = self.ended.partition_point(|ended| ended.score >= score);
        if place < self.params.width {
            let node = self.append(candidate);
            self.ended.truncate(self.params.width - 1);
            self.ended.insert(place, Ended { node, score });
        }
    }

    /// Returns what the sum of a sequence with this many generated tokens is divided by. Computed as
    /// transformers does: the power in F64, rounded to F32.
    fn divisor(&self, generated: u32) -> f32 {
        let len = f64::from(generated) + f64::from(self.params.forced_tokens);
        len.powf(self.params.length_penalty) as f32
    }

    /// Returns whether the search is over after a step.
    fn is_over(&self) -> bool {
        let Some(best) = self.live.first() else { return true };
        let worst = match self.ended.last() {
            Some(worst) if self.ended.len() == self.params.width => worst.score,
            _ => return false,
        };
        let len = match self.params.early_stopping {
            EarlyStopping::Immediate => return true,
            EarlyStopping::Never if self.params.length_penalty > 0.0 => self.params.max_tokens,
            EarlyStopping::Never | EarlyStopping::Estimate => self.generated,
        };
        best.sum / self.divisor(len) <= worst
    }

    fn hypothesis(&self, ended: &Ended) -> Hypothesis {
        let mut chain = Vec::new();
        let mut at = ended.node;
        while at != ROOT {
            let node = &self.nodes[at as usize];
            chain.push((node.token, node.logprob));
            at = node.parent;
        }
        let (tokens, logprobs) = chain.into_iter().rev().unzip();
        Hypothesis { tokens, logprobs, score: ended.score }
    }
}
