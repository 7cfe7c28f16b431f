//! Values that are computed once per process: results of the reference backend, and test inputs that all
//! backends share.
//!
//! One process compares backends of many instruction sets and numbers of threads with the reference backend,
//! which is the slowest of them.
//! Invariant: a key names everything that its value depends on, and no value depends on the backend under
//! test.

use super::rig::RowResults;
use mainstem_kernels::quant::QuantType;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Memoized values by key. A caller that asks for a value in progress waits for it.
pub(super) struct Memo<K, T> {
    values: OnceLock<Mutex<HashMap<K, MemoCell<T>>>>,
}

type MemoCell<T> = Arc<OnceLock<Arc<T>>>;

/// Numbers computed by the reference backend, by operation and inputs.
pub(super) static ORACLE_VALUES: Memo<String, Vec<f32>> = Memo::new();
/// Results of the reference backend by row.
pub(super) static ORACLE_ROWS: Memo<String, RowResults> = Memo::new();
/// Quantized values, by format and the bits of the values.
pub(super) static QUANTIZED: Memo<(QuantType, Vec<u32>), Vec<u8>> = Memo::new();
/// Cosines and sines of RoPE (positions, dims / 2, 2), by positions, dims and the bits of the base.
pub(super) static ROPE_TABLES: Memo<(usize, usize, u64), Vec<f32>> = Memo::new();

impl<K: Eq + Hash, T> Memo<K, T> {
    pub(super) const fn new() -> Memo<K, T> {
        Memo { values: OnceLock::new() }
    }

    /// Returns the value for a key, and computes it if it is new.
    pub(super) fn get(&self, key: K, compute: impl FnOnce() -> T) -> Arc<T> {
        let values = self.values.get_or_init(Mutex::default);
        let value = values.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default().clone();
        value.get_or_init(|| Arc::new(compute())).clone()
    }
}
