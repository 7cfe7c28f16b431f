mod verification;

use super::constraint::ConstraintState;
use super::*;
use crate::decoding::strategies::{CheckedDefaults, Vocabulary as _};
use mainstem_grammar::{ConstraintStart, Form, Grammar, Limits, Spec, Token, Vocabulary};
use mainstem_kernels::late::HostRow;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::sync::Mutex;
use std::thread;

const SIZE: usize = 40;
const EOS: u32 = 39;
const OPEN: u32 = 38;

/// A vocabulary of letters, with an end token and a token that begins reasoning.
struct Letters;

impl crate::decoding::strategies::Vocabulary for Letters {
    fn size(&self) -> usize {
        SIZE
    }

    fn end_tokens(&self) -> Cow<'_, [u32]> {
        vec![EOS].into()
    }

    fn encode(&self, text: &str) -> Vec<u32> {
        text.bytes().map(token).collect()
    }

    fn tokens_with(&self, text: &str) -> Vec<u32> {
        self.encode(text)
    }
}

/// The token of a lowercase letter.
fn token(letter: u8) -> u32 {
    u32::from(letter - b'a')
}

fn vocabulary() -> Arc<Vocabulary> {
    let letters: Vec<[u8; 1]> = (b'a'..=b'z').map(|letter| [letter]).collect();
    let token = |id: u32| match id {
        EOS => Token::Special("<eos>"),
        OPEN => Token::Special("<think>"),
        _ => letters.get(id as usize).map_or(Token::Unused, |letter| Token::Text(letter)),
    };
    Arc::new(Vocabulary::new(SIZE, token, &[EOS], None).unwrap())
}

fn constraint(regex: &str, start: ConstraintStart) -> Arc<Constraint> {
    let spec = Spec::new(Form::Regex(regex.into()));
    let grammar = Grammar::compile(&spec, &vocabulary(), &Limits::default()).unwrap();
    Arc::new(Constraint { grammar: Arc::new(grammar), start })
}

fn plan(params: Value) -> Arc<SamplingPlan> {
    let pairs = params.as_object().unwrap().iter().map(|(name, value)| (name.as_str(), value));
    Arc::new(SamplingPlan::parse(&CheckedDefaults::default(), pairs, &Letters).unwrap())
}

fn pool(threads: usize) -> Arc<HostPool> {
    Arc::new(HostPool::new(threads, 1, SIZE, |_, _| ()).unwrap())
}

/// Generates up to `steps` tokens as a device would that takes the largest logit which the mask allows, with
/// logits that fall with the id. With `ahead`, each row is registered before the token before it is accepted,
/// which no token may be forced with. Ends with the first row that has no token.
fn generate(host: &HostSequence, steps: u32, ahead: bool) -> Vec<u32> {
    let register = |position| {
        let late = Arc::new(LateInputs::default());
        let mut params = SamplingParams { position, seed: 5, ..SamplingParams::GREEDY };
        host.register(&late, 0, &mut params);
        (late, params)
    };
    let logits: Vec<f32> = (0..SIZE).map(|id| -(id as f32) / 8.0).collect();
    let mut generated = Vec::new();
    let mut next = register(0);
    while generated.len() < steps as usize {
        let (late, params) = next;
        let token = if params.mode == SampleMode::Host {
            late.begin_draw(0, HostRow::of_logits(&logits));
            late.wait_token(0).unwrap()
        } else {
            let mut mask = [0; SIZE.div_ceil(32)];
            let first =
                |mask: &[u32]| (0..SIZE as u32).find(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1);
            late.wait_mask(0, &mut mask).unwrap().then(|| first(&mask)).flatten()
        };
        let Some(token) = token else { break };
        generated.push(token);
        if ahead {
            next = register(generated.len() as u32);
            assert!(host.accept(token).is_empty());
        } else {
            generated.extend(host.accept(token));
            next = register(generated.len() as u32);
        }
    }
    generated
}

/// Catches masks of the wrong token, and draws that see a state other than that after their predecessor.
#[test]
fn tokens_do_not_depend_on_when_rows_are_registered_nor_on_the_number_of_threads() {
    let penalized = plan(json!({"frequency_penalty": 2.0, "temperature": 0.7}));
    let grammar = constraint("(abc|xyz|hello){3}", ConstraintStart::Immediately);
    let cases = [(Some(&penalized), None), (None, Some(&grammar)), (Some(&penalized), Some(&grammar))];
    for (plan, constraint) in cases {
        let results: Vec<Vec<u32>> = [(1, false), (1, true), (4, false), (4, true)]
            .map(|(threads, ahead)| {
                let host = HostSequence::begin(&pool(threads), plan, constraint, &[1, 2], 30, 0).unwrap();
                generate(&host, 30, ahead)
            })
            .into();
        assert!(results.iter().all(|result| *result == results[0]), "{results:?}");
        assert_eq!(results[0].len(), 30, "{results:?}");
        if constraint.is_some() {
            // After the text, only the end token is left.
            let end = results[0].iter().position(|&token| token == EOS).unwrap();
            assert!((9..=15).contains(&end) && results[0][end..].iter().all(|&token| token == EOS));
        }
    }
}

/// Catches masks that belong to another token than the row's after a jump, and jumps over the end.
#[test]
fn tokens_without_a_choice_need_no_rows() {
    let grammar = constraint("(abc|xyz|hello){3}(no|yes)", ConstraintStart::Immediately);
    let begin = |limit| HostSequence::begin(&pool(2), None, Some(&grammar), &[1], 30, limit).unwrap();
    let one_by_one = generate(&begin(0), 30, false);
    for limit in 1..9 {
        let host = begin(limit);
        assert_eq!(generate(&host, 30, false)[..30], one_by_one, "{limit}");
    }
    // "bc" follows "a": b is sampled under its mask, c is not.
    let host = begin(8);
    assert_eq!(generate(&host, 2, false), Letters.encode("abc"));
}

#[test]
fn reasoning_is_free_and_the_constraint_begins_behind_its_marker() {
    let accept = |state: &mut ConstraintState, text: &str| {
        let mut mask = [0; SIZE.div_ceil(32)];
        for id in Letters.encode(text) {
            state.mask(&mut mask).unwrap();
            assert_ne!(mask[id as usize / 32] >> (id % 32) & 1, 0, "{text}: {id}");
            state.accept(id).unwrap();
        }
        state.mask(&mut mask).unwrap();
        mask
    };
    let only = |letter: u8| [1 << token(letter), 0];
    let free = constraint("no", ConstraintStart::After { marker: "end".into() });
    let mut state = ConstraintState::new(&free);
    let mask = accept(&mut state, "anything eeeen".replace(' ', "").as_str());
    assert_eq!(mask[1] >> (EOS - 32) & 1, 0, "the output does not end within the reasoning");
    assert_eq!(accept(&mut state, "d"), only(b'n'));
    assert_eq!(accept(&mut state, "no"), [0, 1 << (EOS - 32)]);

    let start = ConstraintStart::UnlessOpened { open: OPEN, close: "x".into() };
    let may_open = constraint("no", start);
    let mut state = ConstraintState::new(&may_open);
    assert_eq!(accept(&mut state, ""), [1 << token(b'n'), 1 << (OPEN - 32)]);
    assert_eq!(accept(&mut state, "n"), only(b'o'), "the reasoning begins with the first token or never");
    let mut state = ConstraintState::new(&may_open);
    state.accept(OPEN).unwrap();
    assert_eq!(accept(&mut state, "abcx"), only(b'n'));
}

#[test]
fn a_grammar_that_cannot_go_on_ends_its_sequence_with_an_error() {
    let vocabulary = Arc::new(Vocabulary::new(SIZE, |_| Token::Text(b"a"), &[], None).unwrap());
    let spec = Spec::new(Form::Regex("aa".into()));
    let grammar = Arc::new(Grammar::compile(&spec, &vocabulary, &Limits::default()).unwrap());
    let constraint = Arc::new(Constraint { grammar, start: ConstraintStart::Immediately });
    for plan in [None, Some(plan(json!({"mirostat": 2})))] {
        let pool = pool(2);
        let host = HostSequence::begin(&pool, plan.as_ref(), Some(&constraint), &[1], 9, 0).unwrap();
        assert_eq!(generate(&host, 9, false).len(), 2);
        assert!(host.error().unwrap().to_string().contains("no end token"), "{:?}", host.error());
    }
}

#[test]
fn log_probabilities_of_candidates_are_reported_in_the_order_of_the_tokens() {
    let plan = plan(json!({"top_k": 1, "logprobs_mode": "processed_logprobs"}));
    let pool = pool(3);
    let host = HostSequence::begin(&pool, Some(&plan), None, &[1], 9, 0).unwrap();
    for position in 0..4 {
        let late = Arc::new(LateInputs::default());
        let mut params =
            SamplingParams { position, logprob: true, top_logprobs: 2, ..SamplingParams::GREEDY };
        host.register(&late, 0, &mut params);
        let logits: Vec<f32> = (0..SIZE as u32).map(|id| if id == position { 3.0 } else { 0.0 }).collect();
        late.begin_draw(0, HostRow::of_logits(&logits));
        assert_eq!(late.wait_token(0), Ok(Some(position)));
    }
    for token in 0..4 {
        assert_eq!(host.take_report(), Some(LogprobReport { logprob: 0.0, top: vec![(token, 0.0)] }));
    }
    assert_eq!(host.take_report(), None);
}

#[test]
fn dropping_the_pool_gives_up_rows_that_wait() {
    let plan = plan(json!({"mirostat": 2}));
    let pool = pool(1);
    let host = HostSequence::begin(&pool, Some(&plan), None, &[1], 9, 0).unwrap();
    let late = Arc::new(LateInputs::default());
    host.register(&late, 0, &mut SamplingParams::GREEDY.clone());
    drop((host, pool));
    thread::scope(|scope| {
        scope.spawn(|| late.begin_draw(0, HostRow::of_logits(&[0.0; SIZE])));
    });
    // The queue is gone with its jobs, or the draw was made before.
    assert!(late.wait_token(0).is_ok());
}

/// With run-ahead, a row is registered before the mask of the row before it has come.
#[test]
fn rows_may_wait_for_masks_one_behind_the_other() {
    static GATE: Mutex<()> = Mutex::new(());
    let pool = HostPool::new(1, 2, SIZE, |_, _| drop(GATE.lock().unwrap())).unwrap();
    let pool = Arc::new(pool);
    let grammar = constraint("ab", ConstraintStart::Immediately);
    let begin = || HostSequence::begin(&pool, None, Some(&grammar), &[1], 9, 0).unwrap();
    let closed = GATE.lock().unwrap();
    // The only thread waits behind the job of the first sequence.
    let (_first, host) = (begin(), begin());
    let rows = [0, 1].map(|position| {
        let late = Arc::new(LateInputs::default());
        host.register(&late, 0, &mut SamplingParams { position, ..SamplingParams::GREEDY });
        late
    });
    drop(closed);
    for (late, letter) in rows.iter().zip(*b"ab") {
        let mut mask = [0; SIZE.div_ceil(32)];
        assert_eq!((late.wait_mask(0, &mut mask), mask), (Ok(true), [1 << token(letter), 0]));
        host.accept(token(letter));
    }
}

#[test]
fn a_panic_of_a_job_ends_its_sequence() {
    let panicking = Arc::new(HostPool::new(1, 1, SIZE, |_, _| panic!("planted")).unwrap());
    let grammar = constraint("[a-z]*", ConstraintStart::Immediately);
    for plan in [None, Some(plan(json!({"mirostat": 2})))] {
        let host = HostSequence::begin(&panicking, plan.as_ref(), Some(&grammar), &[1], 9, 0).unwrap();
        // The panic follows the first token, which may have been sent, and precedes all others.
        assert!(generate(&host, 9, false).len() <= 1);
        assert!(host.error().unwrap().to_string().contains("internal error"));
    }
}

/// Otherwise, text that the grammar has not seen would stand before the constrained text.
#[test]
fn no_token_ends_the_reasoning_and_begins_the_answer() {
    let texts: [&[u8]; 6] = [b"x", b"</", b"end>", b"end>\n", b"end>{", b"a</end>{"];
    let vocabulary = Vocabulary::new(
        8,
        |id| texts.get(id as usize).map_or(Token::Unused, |text| Token::Text(text)),
        &[7],
        None,
    );
    let spec = Spec::new(Form::Regex("x".into()));
    let grammar = Grammar::compile(&spec, &Arc::new(vocabulary.unwrap()), &Limits::default()).unwrap();
    let start = ConstraintStart::After { marker: "</end>".into() };
    let mut state = ConstraintState::new(&Constraint { grammar: Arc::new(grammar), start });
    let mut mask = [0];
    let mut allowed = |state: &mut ConstraintState| {
        state.mask(&mut mask).unwrap();
        (0..6).filter(|id| mask[0] >> id & 1 == 1).collect::<Vec<u32>>()
    };
    assert_eq!(allowed(&mut state), [0, 1, 2, 3, 4], "the rest of a marker may stand anywhere else");
    state.accept(1).unwrap();
    assert_eq!(allowed(&mut state), [0, 1, 2, 3]);
    state.accept(3).unwrap();
    assert_eq!(allowed(&mut state), [0], "a line break behind the marker belongs to neither side");
}
