//! The candidates of one row: the tokens that filters have left, with their scaled logits. The samplers of
//! the CPU and of the host both draw from them.
//!
//! At first every token of the vocabulary is a candidate, in one dense array. The first filter that removes
//! candidates lists those that stay. They are put in order only as far as a filter needs it: what a filter
//! keeps is found by selection, with sums of integer weights that do not depend on the order.
//!
//! Invariant: at least one candidate stays; nothing is allocated once the buffers have grown.

mod passes;
mod prefix;

use crate::batch::lowest_allowed;
use crate::cpu::simd::Level;
use crate::random::token_words;
use crate::reference::draw::{Best, WEIGHT_BITS, exp, weight};
use passes::{DrawFromAll, TotalWeight, WeightBuckets};
use prefix::{Bucket, bucket, last_bucket, weighted_prefix};

/// Number of listed candidates from which the random words of the whole vocabulary are computed for a draw.
const MANY: usize = 1024;

/// Candidates that are behind the first by more than this have weight 0 and are never drawn.
const NEGLIGIBLE: f32 = 28.0;

/// Memory of the candidates of one row, which is kept from row to row.
#[derive(Debug)]
pub struct Buffers {
    /// Values of the whole vocabulary.
    pub values: Vec<f32>,
    keys: Vec<u64>,
    others: Vec<u64>,
    level: Level,
}

impl Default for Buffers {
    /// Creates buffers without memory, for the best instruction set of this CPU.
    fn default() -> Buffers {
        Buffers { values: Vec::new(), keys: Vec::new(), others: Vec::new(), level: Level::best() }
    }
}

impl Buffers {
    /// Creates buffers of empty lists. If both have capacity for a vocabulary, that is enough for all
    /// operations but [`Candidates::keep_fraction_by`] and [`Candidates::keep_while_by`].
    pub(crate) fn of_lists(values: Vec<f32>, keys: Vec<u64>, level: Level) -> Buffers {
        Buffers { values, keys, others: Vec::new(), level }
    }

    /// Allocates memory for a vocabulary of this size and all operations, unless there is enough.
    pub fn reserve(&mut self, vocab: usize) {
        for keys in [&mut self.keys, &mut self.others] {
            keys.clear();
            keys.reserve(vocab);
        }
    }

    /// Sets the values to the logits of a row (vocabulary), and to negative infinity where they are NaN or a
    /// mask does not allow the token. Returns the lowest id that the mask allows; `None` if it allows no
    /// token of the vocabulary.
    pub fn load(&mut self, logits: &[f32], mask: Option<&[u32]>) -> Option<u32> {
        self.values.clear();
        self.values.extend(logits.iter().map(|&logit| nan_to_lowest(logit)));
        let Some(mask) = mask else { return Some(0) };
        self.forbid(mask);
        lowest_allowed(mask, logits.len())
    }

    /// Sets the values of the tokens that a mask does not allow to negative infinity. Tokens beyond the mask
    /// are not allowed.
    pub fn forbid(&mut self, mask: &[u32]) {
        for (i, values) in self.values.chunks_mut(32).enumerate() {
            let word = mask.get(i).copied().unwrap_or(0);
            if word != u32::MAX {
                let allow = |(bit, value): (usize, &mut f32)| {
                    *value = if word >> bit & 1 == 1 { *value } else { f32::NEG_INFINITY };
                };
                values.iter_mut().enumerate().for_each(allow);
            }
        }
    }
}

/// The candidates of one row. Each has a value: its logit, divided by the temperature once that was applied.
#[derive(Debug)]
pub struct Candidates<'a> {
    /// Values of the vocabulary; those of removed tokens have no meaning.
    values: &'a mut [f32],
    /// The listed candidates: the value, mapped so that the largest comes first, << 32 | id.
    keys: &'a mut Vec<u64>,
    others: &'a mut Vec<u64>,
    /// Whether the candidates are those in `keys`, or else the whole vocabulary.
    listed: bool,
    /// Number of the first keys that are in order.
    sorted: usize,
    /// The largest value.
    largest: f32,
    level: Level,
}

impl<'a> Candidates<'a> {
    /// Makes a candidate of every token, with the values of the buffers, none of which may be NaN.
    pub fn new(buffers: &'a mut Buffers) -> Candidates<'a> {
        let Buffers { values, keys, others, level } = buffers;
        let largest = largest(values);
        keys.clear();
        Candidates { values, keys, others, listed: false, sorted: 0, largest, level: *level }
    }

    /// Returns the number of candidates that can be drawn: those above negative infinity.
    pub fn count(&self) -> usize {
        let mut count = 0;
        self.visit(|_, value| count += usize::from(value > f32::NEG_INFINITY));
        count
    }

    /// Returns the largest value.
    pub fn largest(&self) -> f32 {
        self.largest
    }

    /// Returns the value of a candidate.
    pub fn value(&self, id: u32) -> f32 {
        self.values[id as usize]
    }

    /// Returns the most likely candidate, the lowest id on ties.
    pub fn most_likely(&self) -> u32 {
        if self.listed {
            let first = self.keys.iter().min().expect("one candidate stays; this is a bug");
            return *first as u32;
        }
        let id = self.values.iter().position(|&value| value == self.largest);
        id.unwrap_or(0) as u32
    }

    /// Calls `visit` with the id and the value of each candidate, in an order that filters determine.
    pub fn visit(&self, mut visit: impl FnMut(u32, f32)) {
        if self.listed {
            self.keys.iter().for_each(|&key| visit(key as u32, value_of(key)));
        } else {
            self.values.iter().enumerate().for_each(|(id, &value)| visit(id as u32, value));
        }
    }

    /// Returns the sum of all weights, in units of 2^-30 of the largest.
    pub fn total_weight(&self) -> u64 {
        let largest = self.largest;
        if self.listed {
            return self.keys.iter().map(|&key| weight(value_of(key) - largest)).sum();
        }
        self.level.run(TotalWeight { values: self.values, largest })
    }

    /// Returns the sum of all weights, in units of the largest.
    pub fn total(&self) -> f64 {
        self.total_weight() as f64 / (1u64 << WEIGHT_BITS) as f64
    }

    /// Returns the entropy of the candidates' probabilities, in nats.
    pub fn entropy(&self) -> f64 {
        let largest = self.largest;
        // The logarithm is limited, so that no zero is multiplied by infinity.
        let logarithm = |value: f32| (value - largest).max(-99.0);
        let e = |value: f32| f64::from(exp(value - largest));
        let weighted = |value: f32| f64::from(exp(value - largest) * logarithm(value));
        let (total, weighted): (f64, f64) = match self.listed {
            true => (
                self.keys.iter().map(|&key| e(value_of(key))).sum(),
                self.keys.iter().map(|&key| weighted(value_of(key))).sum(),
            ),
            false => (sum_in_lanes(self.values, e), sum_in_lanes(self.values, weighted)),
        };
        total.ln() - weighted / total
    }

    /// Divides all values by a temperature. If that leaves no finite value, only the most likely candidate
    /// stays.
    pub fn divide_by(&mut self, temperature: f32) {
        if !(self.largest / temperature).is_finite() {
            return self.keep_most_likely();
        }
        self.largest /= temperature;
        if !self.listed {
            self.values.iter_mut().for_each(|value| *value /= temperature);
            return;
        }
        for key in &mut *self.keys {
            let id = *key as u32;
            let value = &mut self.values[id as usize];
            *value /= temperature;
            *key = key_of(*value, id);
        }
        // Values that have become equal are no longer in the order of their ids.
        self.sorted = 0;
    }

    /// Removes all but the most likely candidate.
    pub fn keep_most_likely(&mut self) {
        let id = self.most_likely();
        let key = key_of(self.values[id as usize], id);
        self.keys.clear();
        self.keys.push(key);
        (self.listed, self.sorted) = (true, 1);
    }

    /// Keeps the `n` most likely candidates, at least one.
    pub fn keep_first(&mut self, n: usize) {
        let n = n.max(1);
        if !self.listed {
            self.list_first(n);
        }
        if n < self.keys.len() {
            if n > self.sorted {
                self.keys.select_nth_unstable(n - 1);
                self.sorted = 0;
            }
            self.keys.truncate(n);
        }
    }

    /// Keeps the shortest prefix of the candidates, most likely first, whose weights sum up to `fraction` of
    /// all; at least one.
    pub fn keep_fraction(&mut self, fraction: f32) {
        let largest = self.largest;
        let behind = |key| largest - value_of(key);
        let weight_of = |key| weight(-behind(key));
        let (end, enough) = if self.listed {
            let enough = f64::from(fraction) * self.total_weight() as f64;
            (last_bucket(self.keys, behind, weight_of, enough), enough)
        } else {
            self.level.run(WeightBuckets { values: self.values, largest, fraction })
        };
        self.list_where(|value| bucket(largest - value) <= end.number);
        let len = weighted_prefix(self.keys, behind, weight_of, end, enough);
        self.keys.truncate(len);
        self.sorted = 0;
    }

    /// Keeps the shortest prefix of the candidates by `order`, lowest first, ties by id, whose weights sum up
    /// to `fraction` of all; at least one. `order` gets a value minus the largest, and returns a number that
    /// is not negative.
    pub fn keep_fraction_by(&mut self, fraction: f32, order: impl Fn(f32) -> f32) {
        let enough = f64::from(fraction) * self.total_weight() as f64;
        let end = self.key_by(order, enough);
        let weight_of = |key: u64| weight(self.values[key as u32 as usize] - self.largest);
        let order = |key: u64| f32::from_bits((key >> 32) as u32);
        let len = weighted_prefix(self.others, order, weight_of, end, enough);
        self.keep_others(len);
    }

    /// Keeps the first candidate by `order`, lowest first, ties by id, and further ones up to the first that
    /// `keep` refuses by its weight. `order` is as in [`Self::keep_fraction_by`].
    pub fn keep_while_by(&mut self, order: impl Fn(f32) -> f32, mut keep: impl FnMut(u64) -> bool) {
        self.key_by(order, f64::INFINITY);
        self.others.sort_unstable();
        let weight_of = |&key: &u64| weight(self.values[key as u32 as usize] - self.largest);
        let further = self.others[1..].iter().map(weight_of).take_while(|&weight| keep(weight)).count();
        self.keep_others(1 + further);
    }

    /// Writes keys by `order` to the other buffer: those of all candidates, except some that come after the
    /// first ones whose weights sum up to `enough`. Returns the bucket in which they do.
    fn key_by(&mut self, order: impl Fn(f32) -> f32, enough: f64) -> Bucket {
        let key = |order: f32, id: u32| u64::from(order.to_bits()) << 32 | u64::from(id);
        let relative = |value: f32| value - self.largest;
        let order_of = |value: f32| order(relative(value));
        let weight_of = |value: f32| weight(relative(value));
        self.others.clear();
        if self.listed {
            let order_of = |listed| order_of(value_of(listed));
            self.others.extend(self.keys.iter().map(|&listed| key(order_of(listed), listed as u32)));
            return last_bucket(self.keys, order_of, |listed| weight_of(value_of(listed)), enough);
        }
        let end = last_bucket(self.values, order_of, weight_of, enough);
        let near = (0..).zip(&*self.values).filter(|&(_, &value)| bucket(order_of(value)) <= end.number);
        self.others.extend(near.map(|(id, &value)| key(order_of(value), id)));
        self.listed = true;
        end
    }

    /// Makes the first `len` keys of the other buffer the candidates.
    fn keep_others(&mut self, len: usize) {
        self.keys.clear();
        let ids = self.others[..len].iter().map(|&key| key as u32);
        self.keys.extend(ids.map(|id| key_of(self.values[id as usize], id)));
        self.sorted = 0;
        self.largest = self.keys.iter().min().map_or(self.largest, |&key| value_of(key));
    }

    /// Keeps the candidates of whose value minus the largest `keep` approves; the most likely one if there is
    /// none.
    pub fn retain(&mut self, keep: impl Fn(f32) -> bool) {
        let first = self.most_likely();
        let first = key_of(self.values[first as usize], first);
        let largest = self.largest;
        if self.listed {
            self.keys.retain(|&key| keep(value_of(key) - largest));
        } else {
            let kept = self.values.iter().enumerate().filter(|&(_, &value)| keep(value - largest));
            self.keys.extend(kept.map(|(id, &value)| key_of(value, id as u32)));
            self.listed = true;
        }
        if self.keys.is_empty() {
            self.keys.push(first);
        }
        self.sorted = 0;
        self.largest = self.keys.iter().min().map_or(largest, |&key| value_of(key));
    }

    /// Keeps the candidates of at least this fraction of the largest probability.
    pub fn keep_likely(&mut self, fraction: f32) {
        // Most candidates are far below the limit, and need no exponential function.
        let near = fraction.ln() - 0.01;
        self.retain(|x| x >= near && exp(x) >= fraction);
    }

    /// Removes the candidates that come before the one with this value and id. All others stay, as a
    /// temperature may follow.
    pub fn remove_before(&mut self, value: f32, id: u32) {
        self.list_where(|v| v <= value && v > f32::NEG_INFINITY);
        let first = key_of(value, id);
        self.keys.retain(|&key| key >= first);
        self.sorted = 0;
        self.largest = value;
    }

    /// Puts the first `n` candidates in order, and returns them as (id, value), most likely first. Candidates
    /// of weight 0 may be missing.
    pub fn first(&mut self, n: usize) -> impl ExactSizeIterator<Item = (u32, f32)> + '_ {
        self.list_from(self.largest - NEGLIGIBLE);
        let n = n.min(self.keys.len());
        if n > self.sorted {
            if n < self.keys.len() {
                self.keys.select_nth_unstable(n - 1);
            }
            self.keys[..n].sort_unstable();
            self.sorted = n;
        }
        self.keys[..n].iter().map(|&key| (key as u32, value_of(key)))
    }

    /// Draws a candidate with the noise of a seed and a position, as the definition of the draw says.
    pub fn draw(&mut self, seed: u64, position: u64) -> u32 {
        let first = self.most_likely();
        if self.listed && self.keys.len() >= MANY {
            self.values.fill(f32::NEG_INFINITY);
            self.keys.iter().for_each(|&key| self.values[key as u32 as usize] = value_of(key));
        }
        if !self.listed || self.keys.len() >= MANY {
            return self.level.run(DrawFromAll { values: self.values, first, seed, position });
        }
        let mut best = Best::new(first, self.largest, seed, position);
        for (id, value) in self.keys.iter().map(|&key| (key as u32, value_of(key))) {
            if best.may_lose_to(value) {
                best.offer(id, value, token_words(seed, position, id / 4)[id as usize % 4]);
            }
        }
        best.id
    }

    /// Lists the `n` most likely candidates and perhaps others of the whole vocabulary.
    fn list_first(&mut self, n: usize) {
        let capacity = n.saturating_mul(4).max(256);
        // Later tokens of the same value come after those that are listed.
        let mut threshold = None;
        let may_be_first = |value: f32, threshold: Option<f32>| threshold.is_none_or(|least| value > least);
        self.listed = true;
        for (start, chunk) in (0..).step_by(16).zip(self.values.chunks(16)) {
            if !chunk.iter().fold(false, |any, &value| any | may_be_first(value, threshold)) {
                continue;
            }
            let above = (start..).zip(chunk).filter(|&(_, &value)| may_be_first(value, threshold));
            self.keys.extend(above.map(|(id, &value)| key_of(value, id)));
            if self.keys.len() >= capacity {
                let (_, last, _) = self.keys.select_nth_unstable(n - 1);
                threshold = Some(value_of(*last));
                self.keys.truncate(n);
            }
        }
    }

    /// Lists the candidates of at least this value, unless they are listed already.
    fn list_from(&mut self, value: f32) {
        self.list_where(|v| v >= value);
        if self.keys.is_empty() {
            let id = self.values.iter().position(|&value| value == self.largest).unwrap_or(0) as u32;
            self.keys.push(key_of(self.largest, id));
        }
    }

    /// Lists the candidates of whose value `keep` approves, unless they are listed already.
    fn list_where(&mut self, keep: impl Fn(f32) -> bool) {
        if self.listed {
            return;
        }
        for (start, chunk) in (0..).step_by(16).zip(self.values.chunks(16)) {
            if chunk.iter().fold(false, |any, &value| any | keep(value)) {
                let kept = (start..).zip(chunk).filter(|&(_, &value)| keep(value));
                self.keys.extend(kept.map(|(id, &value)| key_of(value, id)));
            }
        }
        self.listed = true;
    }
}

/// Returns the key of a candidate: ascends as values descend, then by id.
fn key_of(value: f32, id: u32) -> u64 {
    // The sum maps -0.0 to 0.0.
    let bits = (value + 0.0).to_bits();
    let descending = if bits >> 31 == 1 { bits } else { !bits & (u32::MAX >> 1) };
    u64::from(descending) << 32 | u64::from(id)
}

/// Returns the value in a key.
fn value_of(key: u64) -> f32 {
    let bits = (key >> 32) as u32;
    f32::from_bits(if bits >> 31 == 1 { bits } else { !bits & (u32::MAX >> 1) })
}

/// Returns the sum of a term of each value, computed in lanes, so that it vectorizes.
fn sum_in_lanes<T>(values: &[f32], term: impl Fn(f32) -> T) -> T
where
    T: Copy + Default + std::ops::AddAssign + std::iter::Sum,
{
    let mut lanes = [T::default(); 16];
    let (chunks, rest) = values.as_chunks::<16>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane += term(value);
        }
    }
    rest.iter().map(|&value| term(value)).chain(lanes).sum()
}

/// Returns the largest value, computed in lanes, so that it vectorizes. NaN counts as negative infinity.
pub fn largest(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (chunks, rest) = values.as_chunks::<16>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    rest.iter().chain(&lanes).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// Replaces NaN by negative infinity.
#[inline]
pub fn nan_to_lowest(value: f32) -> f32 {
    if value.is_nan() { f32::NEG_INFINITY } else { value }
}
