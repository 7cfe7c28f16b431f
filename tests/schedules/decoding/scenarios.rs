//! Scenarios of the host's part of sampling: draws and masks reach the rows that wait for them.

use super::host::{Constraint, HostPool, HostSequence};
use super::strategies::SamplingPlan;
use crate::late::LateInputs;
use crate::scenarios::join;
use crate::schedules::draw;
use crate::{HostRow, SamplingParams};
use mainstem_grammar::{ConstraintStart, Form, Grammar, Limits, Spec, Token, Vocabulary};
use std::sync::{Arc, LazyLock};
use std::thread::spawn;

/// The number of logits: the letters of a text, and the end of it.
const VOCABULARY: usize = 4;

/// A grammar of the texts "ab" and "ac". The end is token 3.
static GRAMMAR: LazyLock<Arc<Grammar>> = LazyLock::new(|| {
    let token = |id: u32| {
        [Token::Text(b"a"), Token::Text(b"b"), Token::Text(b"c"), Token::Special("<end>")][id as usize]
    };
    let vocabulary = Vocabulary::new(VOCABULARY, token, &[3], None).expect("the vocabulary is valid");
    let spec = Spec::new(Form::Regex("a(b|c)".into()));
    Arc::new(
        Grammar::compile(&spec, &Arc::new(vocabulary), &Limits::default()).expect("the grammar is valid"),
    )
});

fn pool(threads: usize) -> Arc<HostPool> {
    Arc::new(HostPool::new(threads, 2, VOCABULARY, |_, _| ()).expect("threads can be created"))
}

/// Each row of each sequence gets its token, drawn after those of the rows before it.
pub fn rows_are_drawn_in_order() {
    let (pool, plan) = (pool(2), Arc::new(SamplingPlan));
    let sequences =
        [0, 10].map(|prompt| HostSequence::begin(&pool, Some(&plan), None, &vec![0; prompt], 9, 0));
    for step in 0..2 {
        let late: Arc<LateInputs> = Arc::default();
        for (row, sequence) in sequences.iter().flatten().enumerate() {
            // The next row is registered, and its logits may come, before the first one is drawn.
            [2 * row, 2 * row + 1].iter().for_each(|row| {
                sequence.register(&late, *row, &mut SamplingParams::GREEDY.clone());
            });
        }
        (0..4).for_each(|row| late.begin_draw(row, HostRow::of_logits(&[0.5; VOCABULARY])));
        let tokens = [0, 1, 2, 3].map(|row| late.wait_token(row));
        let first = 2 * step;
        assert_eq!(tokens, [first, first + 1, first + 10, first + 11].map(|token| Ok(Some(token))));
    }
}

/// A draw that unwinds fails its row; every other row of the sequence ends too, and other sequences go on.
pub fn a_failed_draw_fails_only_its_sequence() {
    let (pool, plan) = (pool(2), Arc::new(SamplingPlan));
    let [bad, good] = [(); 2].map(|()| HostSequence::begin(&pool, Some(&plan), None, &[0], 9, 0));
    let late: Arc<LateInputs> = Arc::default();
    for (row, sequence) in [&bad, &bad, &good].into_iter().flatten().enumerate() {
        sequence.register(&late, row, &mut SamplingParams::GREEDY.clone());
    }
    for row in 0..3 {
        let logit = if row == 0 { -1.0 } else { 1.0 };
        late.begin_draw(row, HostRow::of_logits(&[logit; VOCABULARY]));
    }
    assert_eq!([0, 1, 2].map(|row| late.wait_token(row)), [Ok(None), Ok(None), Ok(Some(1))]);
    assert!(bad.is_some_and(|bad| bad.error().is_some()));
}

/// Rows that wait when the pool is dropped end, with their token or without.
pub fn a_dropped_pool_leaves_no_row_waiting() {
    let (pool, plan) = (pool(1 + draw(2)), Arc::new(SamplingPlan));
    let late: Arc<LateInputs> = Arc::default();
    let sequence = HostSequence::begin(&pool, Some(&plan), None, &[], 9, 0);
    for row in 0..3 {
        sequence.iter().for_each(|it| it.register(&late, row, &mut SamplingParams::GREEDY.clone()));
    }
    let dropper = spawn(move || drop((sequence, pool)));
    let mut is_given_up = false;
    for row in 0..3 {
        late.begin_draw(row, HostRow::of_logits(&[0.5; VOCABULARY]));
    }
    for row in 0..3 {
        let token = late.wait_token(row).expect("nothing aborts");
        is_given_up |= token.is_none();
        assert!(is_given_up || token == Some(row as u32));
    }
    join([dropper]);
}

/// Masks reach their rows in the order of the tokens, whether the mask or the row comes first, also when the
/// grammar leaves no choice and its tokens are forced.
pub fn masks_follow_the_tokens() {
    let constraint = Arc::new(Constraint { grammar: GRAMMAR.clone(), start: ConstraintStart::Immediately });
    let pool = pool(2);
    let jump_limit = draw(2);
    let sequence = HostSequence::begin(&pool, None, Some(&constraint), &[], 9, jump_limit);
    let sequence = sequence.expect("the sequence has a constraint");
    let mask = |sequence: &HostSequence| {
        let late: Arc<LateInputs> = Arc::default();
        sequence.register(&late, 0, &mut SamplingParams::GREEDY.clone());
        let mut words = [0];
        assert_eq!(late.wait_mask(0, &mut words), Ok(true));
        words[0] & 0b1111
    };
    assert_eq!(mask(&sequence), 0b0001, "only 'a' begins the text");
    let forced = sequence.accept(0);
    assert!(forced.is_empty(), "after 'a', there is a choice");
    assert_eq!(mask(&sequence), 0b0110, "'b' or 'c' follows");
    sequence.accept(2);
    assert_eq!(mask(&sequence), 0b1000, "the end follows");
}

/// A token that the grammar does not allow fails the rows of its sequence, present and later.
pub fn a_failed_constraint_fails_its_rows() {
    let constraint = Arc::new(Constraint { grammar: GRAMMAR.clone(), start: ConstraintStart::Immediately });
    let pool = pool(2);
    let sequence = HostSequence::begin(&pool, None, Some(&constraint), &[], 9, 0);
    let sequence = sequence.expect("the sequence has a constraint");
    let late: Arc<LateInputs> = Arc::default();
    (0..3).for_each(|row| sequence.register(&late, row, &mut SamplingParams::GREEDY.clone()));
    assert_eq!(late.wait_mask(0, &mut [0]), Ok(true));
    sequence.accept(1);
    assert_eq!([1, 2].map(|row| late.wait_mask(row, &mut [0])), [Ok(false); 2]);
    assert!(sequence.error().is_some());
    let later: Arc<LateInputs> = Arc::default();
    sequence.register(&later, 0, &mut SamplingParams::GREEDY.clone());
    assert_eq!(later.wait_mask(0, &mut [0]), Ok(false));
}
