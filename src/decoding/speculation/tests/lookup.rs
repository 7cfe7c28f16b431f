//! Prompt lookup, against a scan of all tokens.

use crate::decoding::speculation::PromptLookup;
use mainstem_kernels::random::uniform;

/// The drafts that a scan finds.
fn scan(tokens: &[u32], shortest: usize, longest: usize, count: usize) -> Vec<u32> {
    let len = tokens.len();
    for n in (shortest..=longest.min(len)).rev() {
        let earlier = (n..len).rev().find(|&end| tokens[end - n..end] == tokens[len - n..]);
        if let Some(at) = earlier {
            let mut text = tokens.to_vec();
            for i in at..at + count {
                text.push(text[i]);
            }
            return text.split_off(len);
        }
    }
    Vec::new()
}

#[test]
fn proposals_are_those_of_a_scan() {
    for case in 0..60u64 {
        let (shortest, longest) = [(1, 3), (2, 4), (1, 1), (3, 3), (2, 9), (4, 2)][case as usize % 6];
        let kinds = [2.0, 5.0, 30.0][case as usize % 3];
        let mut lookup = PromptLookup::new(shortest..=longest);
        let mut tokens = Vec::new();
        let mut found = 0;
        for i in 0..120 {
            // Some parts of the text repeat.
            let copied = (i > 20 && uniform(case, i / 15, 1) < 0.5).then(|| tokens[i as usize - 17]);
            let token = copied.unwrap_or((uniform(case, i, 0) * kinds) as u32);
            tokens.push(token);
            lookup.extend(&[token]);
            let count = (i % 7) as usize;
            let mut drafts = vec![99];
            assert_eq!(lookup.propose(count, &mut drafts), drafts.len() - 1);
            assert_eq!(drafts[1..], scan(&tokens, shortest, longest, count), "case {case}, {tokens:?}");
            found += drafts.len() - 1;
        }
        let whole = tokens.chunks(50).fold(PromptLookup::new(shortest..=longest), |mut lookup, chunk| {
            lookup.extend(chunk);
            lookup
        });
        assert_eq!(whole.tokens(), lookup.tokens());
        let proposed = |lookup: &PromptLookup| {
            let mut drafts = Vec::new();
            lookup.propose(5, &mut drafts);
            drafts
        };
        assert_eq!(proposed(&whole), proposed(&lookup));
        assert!(found > 0 || shortest > longest);
    }
}

#[test]
fn examples() {
    let propose = |tokens: &[u32], count| {
        let mut lookup = PromptLookup::new(1..=3);
        lookup.extend(tokens);
        let mut drafts = Vec::new();
        lookup.propose(count, &mut drafts);
        drafts
    };
    assert_eq!(propose(&[1, 2, 3, 4, 9, 2, 3], 2), [4, 9], "after the longest n-gram");
    assert_eq!(propose(&[1, 5, 1, 6, 1], 1), [6], "after its last occurrence");
    assert_eq!(propose(&[7, 7], 3), [7, 7, 7], "a repetition goes on");
    assert_eq!(propose(&[4, 5, 6, 4, 5, 6], 5), [4, 5, 6, 4, 5]);
    assert_eq!(propose(&[1, 2, 3], 4), [0; 0]);
    assert_eq!(propose(&[], 4), [0; 0]);
}

/// A scan of each step would take minutes.
#[test]
fn the_cost_of_a_token_does_not_grow_with_the_text() {
    let mut lookup = PromptLookup::new(1..=3);
    let mut drafts = Vec::new();
    for i in 0..100_000u32 {
        lookup.extend(&[(i % 1009).pow(2) % 50]);
        drafts.clear();
        lookup.propose(4, &mut drafts);
    }
    assert_eq!(lookup.tokens().len(), 100_000);
}
