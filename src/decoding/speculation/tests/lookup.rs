//! Prompt lookup, against a scan of all tokens.

use crate::decoding::speculation::PromptLookup;
use mainstem_kernels::random::uniform;
use std::sync::Arc;

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

/// Returns the lookup of a text whose prompt is indexed, and whose first `prompt` tokens are the prompt.
fn lookup(tokens: &[u32], prompt: usize, lengths: (usize, usize), hash_bits: u64) -> PromptLookup {
    let (prompt, generated) = tokens.split_at(prompt);
    let mut lookup = PromptLookup::with_hash_bits(lengths.0..=lengths.1, prompt.into(), hash_bits);
    let indexed: usize = (0..prompt.len() + 1).map(|_| lookup.index_prompt(7)).sum();
    assert_eq!(indexed, prompt.len());
    generated.iter().for_each(|&token| lookup.push(token));
    lookup
}

fn propose(lookup: &PromptLookup, count: usize) -> Vec<u32> {
    let mut drafts = vec![99];
    assert_eq!(lookup.propose(count, &mut drafts), drafts.len() - 1);
    drafts.split_off(1)
}

/// Returns a text, parts of which repeat.
fn text(case: u64, len: usize) -> Vec<u32> {
    let kinds = [2.0, 5.0, 30.0][case as usize % 3];
    let mut tokens: Vec<u32> = Vec::new();
    for i in 0..len as u64 {
        let copied = (i > 20 && uniform(case, i / 15, 1) < 0.5).then(|| tokens[i as usize - 17]);
        tokens.push(copied.unwrap_or((uniform(case, i, 0) * kinds) as u32));
    }
    tokens
}

#[test]
fn proposals_are_those_of_a_scan() {
    for case in 0..60u64 {
        let lengths = [(1, 3), (2, 4), (1, 1), (3, 3), (2, 9), (4, 2)][case as usize % 6];
        let tokens = text(case, 120);
        let mut found = 0;
        for prompt in [0, 1, 30, 77, 120] {
            for len in prompt..=tokens.len() {
                let tokens = &tokens[..len];
                // The prompt is indexed at any time.
                let lookup = lookup(tokens, prompt, lengths, u64::MAX);
                let drafts = propose(&lookup, len % 7);
                assert_eq!(drafts, scan(tokens, lengths.0, lengths.1, len % 7), "case {case}, {tokens:?}");
                found += drafts.len();
            }
        }
        assert!(found > 0 || lengths.0 > lengths.1);
    }
}

/// Also n-grams of different lengths have equal hashes here, and the longer one may be the whole text before.
#[test]
fn n_grams_with_equal_hashes_give_no_wrong_drafts() {
    for hash_bits in [0, 1, 7] {
        let mut found = 0;
        for case in 0..30 {
            let tokens = text(case, 60);
            for prompt in [0, 1, 20, 60] {
                for len in prompt..=tokens.len() {
                    let drafts = propose(&lookup(&tokens[..len], prompt, (1, 4), hash_bits), 1);
                    let Some(draft) = drafts.first() else { continue };
                    let pair = [tokens[len - 1], *draft];
                    assert!(tokens[..len].windows(2).any(|before| before == pair), "case {case}");
                    found += 1;
                }
            }
        }
        assert!(found > 100, "{found} with {hash_bits}");
    }
}

/// Answers of one prompt have one index. Catches a position that is indexed twice or never.
#[test]
fn a_prompt_is_indexed_once_for_all_its_answers() {
    let prompt: Arc<[u32]> = text(3, 100).into();
    let mut lookups = [(); 3].map(|()| PromptLookup::new(1..=3, prompt.clone()));
    let [first, rest @ ..] = &mut lookups;
    rest.iter_mut().for_each(|other| other.share_prompt(first));
    let limits = [11, 30, 0, 50, 40, 9];
    let indexed: Vec<usize> =
        limits.iter().zip((0..3).cycle()).map(|(limit, at)| lookups[at].index_prompt(*limit)).collect();
    assert_eq!(indexed, [11, 30, 0, 50, 9, 0]);
    for (lookup, token) in lookups.iter_mut().zip([prompt[50], prompt[60], 1000]) {
        let expected = scan(&[&prompt[..], &[token]].concat(), 1, 3, 4);
        lookup.push(token);
        assert_eq!(propose(lookup, 4), expected);
    }
    // Another prompt, even if it is equal, and other lengths have their own.
    for mut other in
        [PromptLookup::new(1..=3, prompt.to_vec().into()), PromptLookup::new(1..=4, prompt.clone())]
    {
        other.share_prompt(&lookups[0]);
        assert_eq!(other.index_prompt(usize::MAX), prompt.len());
    }
}

#[test]
fn examples() {
    let propose = |tokens: &[u32], count| propose(&lookup(tokens, tokens.len(), (1, 3), u64::MAX), count);
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
    let mut lookup = PromptLookup::new(1..=3, Arc::default());
    let mut drafts = Vec::new();
    for i in 0..100_000u32 {
        lookup.push((i % 1009).pow(2) % 50);
        drafts.clear();
        lookup.propose(4, &mut drafts);
    }
    assert_eq!(drafts.len(), 4);
}
