//! Compiled grammars by specification.
//!
//! Invariant: a specification is compiled once at a time, however many requests have it, and nobody waits
//! for the compilation of another specification.

use crate::{Grammar, GrammarError, Limits, Spec, Vocabulary};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Memory of an entry without its texts and its grammar, estimated in bytes.
const ENTRY: usize = 500;

type Compiled = Result<Arc<Grammar>, GrammarError>;

/// Compiles specifications and keeps the grammars that were used last, refusals included.
pub struct GrammarCache {
    vocabulary: Arc<Vocabulary>,
    limits: Limits,
    entries_max: usize,
    bytes_max: usize,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    by_spec: HashMap<Arc<Spec>, Entry>,
    /// Counts uses, to order them.
    clock: u64,
}

/// A specification that is compiled or being compiled.
struct Entry {
    compiled: Arc<OnceLock<Compiled>>,
    last_used: u64,
}

impl Entry {
    /// Returns about how many bytes the entry takes; none while it is being compiled.
    fn bytes(&self, spec: &Spec) -> usize {
        match self.compiled.get() {
            Some(Ok(grammar)) => grammar.bytes() + spec.bytes() + ENTRY,
            Some(Err(_)) => spec.bytes() + ENTRY,
            None => 0,
        }
    }
}

impl GrammarCache {
    /// Creates an empty cache of at most `entries_max` grammars that take about `bytes_max` bytes. At least
    /// one is kept.
    pub fn new(
        vocabulary: Arc<Vocabulary>,
        limits: Limits,
        entries_max: usize,
        bytes_max: usize,
    ) -> GrammarCache {
        GrammarCache { vocabulary, limits, entries_max, bytes_max, entries: Mutex::default() }
    }

    /// Returns the grammar of a specification. Compiles it on the calling thread if it is not cached, or
    /// waits while another thread does. Fails as [`Grammar::compile`].
    pub fn get(&self, spec: Spec) -> Compiled {
        self.get_timed(spec).0
    }

    /// Returns the grammar of a specification as [`Self::get`], and how long this call compiled, refusals
    /// included; `None` if it did not.
    pub fn get_timed(&self, spec: Spec) -> (Compiled, Option<Duration>) {
        let mut time = None;
        let mut compile = |spec: &Spec| {
            let begin = Instant::now();
            let compiled = Grammar::compile(spec, &self.vocabulary, &self.limits).map(Arc::new);
            time = Some(begin.elapsed());
            compiled
        };
        if spec.bytes() > self.limits.text_bytes {
            // A text that is too long is refused without keeping it.
            return (compile(&spec), time);
        }
        let spec = Arc::new(spec);
        let entry = self.use_entry(&spec);
        if let Some(compiled) = entry.get() {
            return (compiled.clone(), None);
        }
        let compiled = entry.get_or_init(|| compile(&spec)).clone();
        self.evict();
        (compiled, time)
    }

    /// Returns the grammar of a specification if it is cached, without waiting; `None` if it must be
    /// compiled.
    pub fn cached(&self, spec: &Spec) -> Option<Compiled> {
        let mut entries = self.lock();
        entries.clock += 1;
        let now = entries.clock;
        let entry = entries.by_spec.get_mut(spec)?;
        entry.last_used = now;
        entry.compiled.get().cloned()
    }

    /// Returns the vocabulary that grammars are compiled for.
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// Returns the number of entries, and about how many bytes they take.
    pub fn size(&self) -> (usize, usize) {
        let entries = self.lock();
        let bytes = entries.by_spec.iter().map(|(spec, entry)| entry.bytes(spec)).sum();
        (entries.by_spec.len(), bytes)
    }

    fn use_entry(&self, spec: &Arc<Spec>) -> Arc<OnceLock<Compiled>> {
        let mut entries = self.lock();
        entries.clock += 1;
        let now = entries.clock;
        let new = || Entry { compiled: Arc::default(), last_used: now };
        let entry = entries.by_spec.entry(spec.clone()).or_insert_with(new);
        entry.last_used = now;
        entry.compiled.clone()
    }

    /// Drops the entries used longest ago until the rest is within the bounds. Entries that are being
    /// compiled stay.
    fn evict(&self) {
        let mut entries = self.lock();
        let mut compiled: Vec<_> =
            entries.by_spec.iter().filter(|(_, entry)| entry.compiled.get().is_some()).collect();
        compiled.sort_by_key(|(_, entry)| std::cmp::Reverse(entry.last_used));
        let mut total = 0;
        let mut dropped = Vec::new();
        for (place, (spec, entry)) in compiled.into_iter().enumerate() {
            total += entry.bytes(spec);
            if place > 0 && (place >= self.entries_max || total > self.bytes_max) {
                dropped.push(spec.clone());
            }
        }
        for spec in dropped {
            entries.by_spec.remove(&spec);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for GrammarCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GrammarCache({} entries)", self.lock().by_spec.len())
    }
}
