//! The cache of grammars.

use super::vocabularies::TOY;
use crate::{Form, GrammarCache, Limits, Spec};
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
    let spaces = Spec { json_spaces: true, ..spec("a") };
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
