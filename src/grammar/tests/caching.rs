//! The cache of grammars.

use super::vocabularies::TOY;
use crate::{Form, GrammarCache, Limits, Spec};
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Barrier};

fn spec(text: &str) -> Spec {
    Spec::new(Form::Regex(text.into()))
}

#[test]
fn equal_specifications_share_a_grammar_and_the_oldest_is_dropped() {
    let cache = GrammarCache::new(TOY.clone(), Limits::default(), 2, usize::MAX);
    assert!(cache.cached(&spec("a")).is_none());
    let first = cache.get(spec("a")).unwrap();
    cache.get(spec("b")).unwrap();
    assert!(Arc::ptr_eq(&first, &cache.get(spec("a")).unwrap()));
    cache.get(spec("c")).unwrap();
    assert_eq!(cache.size().0, 2);
    assert!(cache.cached(&spec("b")).is_none() && cache.cached(&spec("a")).is_some());
    let spaces = Spec::with_spaces(spec("a").form().clone(), true);
    assert!(cache.cached(&spaces).is_none());
}

#[test]
fn memory_is_bounded_and_refusals_are_kept() {
    let cache = GrammarCache::new(TOY.clone(), Limits::default(), 100, 1);
    cache.get(spec("a")).unwrap();
    cache.get(spec("b")).unwrap();
    assert_eq!(cache.size().0, 1);
    let refused = cache.get(spec("(")).unwrap_err();
    assert_eq!(cache.cached(&spec("(")).unwrap().unwrap_err(), refused);
    let long = "a".repeat(Limits::default().text_bytes + 1);
    assert!(cache.get(spec(&long)).is_err());
    assert!(cache.cached(&spec(&long)).is_none());
}

/// Only a call that compiles has a time.
#[test]
fn a_grammar_from_the_cache_took_no_time() {
    let cache = GrammarCache::new(TOY.clone(), Limits::default(), 10, usize::MAX);
    for text in ["a", "("] {
        let (first, time) = cache.get_timed(spec(text));
        assert!(time.is_some(), "{text}");
        let (second, time) = cache.get_timed(spec(text));
        assert_eq!((first.is_ok(), second.is_ok(), time), (text == "a", text == "a", None));
    }
    let long = "a".repeat(Limits::default().text_bytes + 1);
    assert!(cache.get_timed(spec(&long)).1.is_some());
}

/// A look-up holds the lock of the cache, so it does not read a long text to hash it.
#[test]
fn a_specification_is_hashed_once() {
    struct Counting(usize);
    impl Hasher for Counting {
        fn write(&mut self, bytes: &[u8]) {
            self.0 += bytes.len();
        }

        fn finish(&self) -> u64 {
            0
        }
    }
    let mut counting = Counting(0);
    spec(&"a".repeat(1 << 20)).hash(&mut counting);
    assert_eq!(counting.0, size_of::<u64>());
}

#[test]
fn requests_at_the_same_time_get_the_same_grammar() {
    let cache = GrammarCache::new(TOY.clone(), Limits::default(), 10, usize::MAX);
    let barrier = Barrier::new(4);
    let get = || {
        barrier.wait();
        cache.get(spec("[a-z]{1,50}@[a-z]{1,50}")).unwrap()
    };
    let all = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(get)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(all.iter().all(|grammar| Arc::ptr_eq(grammar, &all[0])));
}
