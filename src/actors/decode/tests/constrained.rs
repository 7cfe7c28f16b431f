//! Tests of sequences whose output follows a grammar: which tokens have rows, and what ended sequences leave.
//!
//! Invariant: token i of the model is the character with the number 0x4e00 + i.

use super::rig::{Rig, RigConfig, VOCAB};
use super::{request, speculation};
use crate::decoding::Constraint;
use crate::request::Request;
use mainstem_grammar::{ConstraintStart, Form, Grammar, Limits, Spec, Token, Vocabulary};
use mainstem_kernels::SpanTokens;
use std::sync::Arc;

fn text(token: u32) -> String {
    char::from_u32(0x4e00 + token).expect("it is a character").to_string()
}

/// Words of tokens that the output repeats, of which each begins with another token.
const WORDS: [&[u32]; 3] = [&[3, 4, 5, 6, 7, 8, 9], &[20, 21], &[30]];

/// Returns a request whose output is a sequence of the words.
fn constrained(number: u64, len: usize, max_tokens: u32) -> Request {
    repeating(&WORDS, request(number, len, max_tokens))
}

/// Returns the request with an output that is a sequence of the words.
fn repeating(words: &[&[u32]], request: Request) -> Request {
    let texts: Vec<String> = (0..VOCAB).map(text).collect();
    let token = |id: u32| texts.get(id as usize).map_or(Token::Unused, |text| Token::Text(text.as_bytes()));
    let vocabulary = Arc::new(Vocabulary::new(VOCAB as usize, token, &[], None).expect("it is valid"));
    let word = |word: &&[u32]| word.iter().map(|token| texts[*token as usize].as_str()).collect::<String>();
    let words: Vec<String> = words.iter().map(word).collect();
    let spec = Spec::new(Form::Regex(format!("({})*", words.join("|")).into()));
    let grammar = Grammar::compile(&spec, &vocabulary, &Limits::default()).expect("it is valid");
    let constraint = Constraint { grammar: Arc::new(grammar), start: ConstraintStart::Immediately };
    Request { constraint: Some(Arc::new(constraint)), ..request }
}

/// Returns whether the tokens are words, of which the last may be cut.
fn are_words(mut tokens: &[u32]) -> bool {
    while let Some(first) = tokens.first() {
        let Some(word) = WORDS.iter().find(|word| word[0] == *first) else { return false };
        let len = word.len().min(tokens.len());
        if tokens[..len] != word[..len] {
            return false;
        }
        tokens = &tokens[len..];
    }
    true
}

/// Runs requests of all kinds. Returns their tokens, and the number of rows that forced tokens had.
async fn run(run_ahead: bool, lanes: usize) -> (Vec<Vec<u32>>, usize) {
    let mut rig = Rig::new(RigConfig { run_ahead, budget: 40, ..RigConfig::new(4, lanes) });
    for number in 0..9 {
        let tokens = 20 + 3 * number as u32;
        let kind = if number % 3 == 2 { request } else { constrained };
        rig.submit(kind(number, 3 + number as usize, tokens)).await;
    }
    let mut forced = 0;
    loop {
        rig.run_until_idle().await;
        for span in rig.in_flight().iter().flat_map(|step| &step.spans) {
            if let SpanTokens::Generated { len, .. } = span.tokens {
                forced += len as usize - 1;
            }
        }
        if !rig.complete_step().await {
            break;
        }
    }
    for (number, client) in rig.clients.iter().enumerate() {
        match number % 3 {
            2 => client.assert_complete(),
            _ => {
                assert_eq!(client.ids.len(), 20 + 3 * number);
                assert!(are_words(&client.ids), "{:?}", client.ids);
            }
        }
    }
    rig.assert_all_released().await;
    (rig.clients.iter().map(|client| client.ids.clone()).collect(), forced)
}

/// The tokens are the same whether those without a choice have rows of their own (with run-ahead) or not.
#[actix::test]
async fn forced_tokens_are_computed_with_the_next_step() {
    let (ahead, none) = run(true, 1).await;
    assert_eq!(none, 0);
    for lanes in [1, 2] {
        let (tokens, forced) = run(false, lanes).await;
        assert_eq!(tokens, ahead, "{lanes}");
        assert!(forced > 50, "{forced}");
    }
}

/// Forced tokens and drafts of others are in the same steps.
#[actix::test]
async fn drafts_beside_forced_tokens_fit_into_the_budget_and_change_no_token() {
    let budget = 40;
    let mut texts = Vec::new();
    for drafts in [0, 16] {
        let mut rig = Rig::new(RigConfig { run_ahead: false, budget, ..RigConfig::new(8, 1) });
        rig.model.draft_errors = 0;
        for number in 0..16 {
            let request = request(number, 3, 60);
            let request = match number % 8 {
                7 => Request { speculation: (drafts > 0).then(|| speculation(drafts)), ..request },
                // Nearly all of its tokens are forced.
                _ => repeating(&[&(0..40).collect::<Vec<u32>>()], request),
            };
            rig.submit(request).await;
        }
        let (mut drafted, mut most) = (0, 0);
        loop {
            rig.run_until_idle().await;
            for step in rig.in_flight() {
                drafted += step.draft_count();
                most = most.max(step.rows());
            }
            if !rig.complete_step().await {
                break;
            }
        }
        assert!(most <= budget && most >= 30, "{most}");
        assert_eq!(drafted > 50, drafts > 0, "{drafted}");
        rig.assert_all_released().await;
        texts.push(rig.clients.iter().map(|client| client.ids.clone()).collect::<Vec<_>>());
    }
    assert_eq!(texts[0], texts[1]);
}

/// The model's next token depends on all tokens in the pages, so a sequence that shared tokens which were
/// never computed would go on differently.
#[actix::test]
async fn a_sequence_that_ends_with_a_forced_token_leaves_only_computed_ones() {
    let mut ended_with_forced = 0;
    for max_tokens in 1..24 {
        let mut rig = Rig::new(RigConfig { run_ahead: false, ..RigConfig::new(2, 1) });
        let first = constrained(0, 5, max_tokens);
        let prompt = first.prompt.clone();
        rig.submit(first).await;
        rig.run_to_end().await;
        let all = [&prompt[..], &rig.clients[0].ids].concat();
        let next = Request { prompt: [&all[..], &[5]].concat().into(), ..request(1, 0, 4) };
        let next = rig.submit(next).await;
        rig.run_to_end().await;
        rig.clients[next].assert_complete();
        let cached = rig.clients[next].cached.expect("it started");
        ended_with_forced += usize::from(cached + 1 < all.len());
        assert!(cached >= prompt.len() && cached < all.len(), "{cached} of {}", all.len());
    }
    assert!(ended_with_forced > 3, "{ended_with_forced}");
}
