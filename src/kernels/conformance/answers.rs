//! What is computed once in a process: the oracle's answers, and whatever else is the same for every backend.
//!
//! Backends of many instruction sets and numbers of threads are compared with the oracle in one process, and it is the
//! slowest of them.
//! Invariant: a question names all that its answer follows from, and nothing a backend did enters an answer.

use super::rig::Answers;
use crate::quant::QuantType;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Answers by question. Who asks what is being computed waits for it.
pub(super) struct Once<K, T> {
    answers: OnceLock<Mutex<HashMap<K, Answer<T>>>>,
}

type Answer<T> = Arc<OnceLock<Arc<T>>>;

/// Of the oracle: numbers by what was computed of what.
pub(super) static NUMBERS: Once<String, Vec<f32>> = Once::new();
/// Of the oracle: results of rows.
pub(super) static ROWS: Once<String, Answers> = Once::new();
/// Codes of values, by their bits.
pub(super) static CODES: Once<(QuantType, Vec<u32>), Vec<u8>> = Once::new();
/// Angles' cosines and sines: (positions, dims / 2, 2), by positions, dims and the base's bits.
pub(super) static ANGLES: Once<(usize, usize, u64), Vec<f32>> = Once::new();

impl<K: Eq + Hash, T> Once<K, T> {
    pub(super) const fn new() -> Once<K, T> {
        Once { answers: OnceLock::new() }
    }

    pub(super) fn get(&self, question: K, answer: impl FnOnce() -> T) -> Arc<T> {
        let answers = self.answers.get_or_init(Mutex::default);
        let place =
            answers.lock().unwrap_or_else(PoisonError::into_inner).entry(question).or_default().clone();
        place.get_or_init(|| Arc::new(answer())).clone()
    }
}
