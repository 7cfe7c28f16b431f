//! Tests of boundary cases: full contexts, page boundaries, the smallest engine, more requested rows than
//! logits rows.

use crate::common::{Outcome, all_home, complete, complete_all, config, engine, fixture, greedy, prompt};
use mainstem::cli::start;
use mainstem::request::{FinishReason, Request};
use toml::Value;

/// The context of the fixtures.
const CONTEXT: usize = 128;

fn with_logprobs(len: usize, max_tokens: usize) -> Request {
    let prompt = prompt(len, len);
    Request { logprobs: Some(3), prompt_logprobs: Some(3), ..greedy(&prompt, max_tokens as u32) }
}

/// Submits all requests at once to an engine with these settings and returns their outcomes.
async fn outcomes(settings: &[(&'static str, Value)], requests: &[Request]) -> Vec<Outcome> {
    let engine = engine("gqa", settings).await;
    let outcomes = complete_all(&engine, requests.iter().cloned()).await;
    let slots = settings.iter().find(|(key, _)| *key == "scheduler.slots");
    all_home(&engine, slots.and_then(|(_, slots)| slots.as_integer()).unwrap_or(4) as usize).await;
    engine.stop();
    outcomes
}

fn same(ours: &[Outcome], theirs: &[Outcome], what: &str) {
    assert_eq!(ours.len(), theirs.len());
    for (number, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        assert_eq!(ours.tokens, theirs.tokens, "{what}, request {number}");
        assert_eq!(ours.prompt, theirs.prompt, "{what}, request {number}");
        assert_eq!(ours.end, theirs.end, "{what}, request {number}");
    }
}

/// A sequence may fill its context to the last position, and each token equals the first token generated
/// after the prompt and the tokens before it.
#[actix::test]
async fn prompt_and_answer_may_fill_the_context() {
    let engine = engine("gqa", &[]).await;
    assert_eq!(engine.model.context, CONTEXT);
    for len in [1, 63, 64, 96, 127] {
        let given = prompt(len, len);
        let whole = complete(&engine, greedy(&given, (CONTEXT - len) as u32)).await;
        assert_eq!(whole.end, Some(Ok(FinishReason::Length)));
        assert_eq!(whole.tokens.len(), CONTEXT - len);
        for cut in [0, whole.tokens.len() / 2, whole.tokens.len() - 1] {
            let longer: Vec<u32> = given.iter().copied().chain(whole.ids()[..cut].to_vec()).collect();
            assert_eq!(complete(&engine, greedy(&longer, 1)).await.ids(), whole.ids()[cut..=cut]);
        }
    }
    all_home(&engine, 4).await;
    engine.stop();
}

/// Prompts and answers that end before, at and after page boundaries, compared with pages that are never
/// filled.
#[actix::test]
async fn page_edges_change_nothing() {
    let mut requests = Vec::new();
    for len in [1, 31, 32, 33, 63, 64, 65] {
        for end in [len + 1, 32, 33, 64, 65, 96, 128] {
            requests.extend((end > len).then(|| with_logprobs(len, end - len)));
        }
    }
    let one_page = outcomes(&[("kv.page_size", Value::from(CONTEXT as i64))], &requests).await;
    assert!(one_page.iter().zip(&requests).all(|(o, r)| o.tokens.len() == r.max_tokens as usize));
    for positions in [32, 64] {
        let paged = outcomes(&[("kv.page_size", Value::from(positions))], &requests).await;
        same(&paged, &one_page, &format!("pages of {positions}"));
    }
}

/// Prompt log-probabilities are bit-identical with more requested rows in a step than logits rows, in chunks,
/// and without an answer.
#[actix::test]
async fn scores_do_not_depend_on_how_the_prompt_is_cut() {
    let requests: Vec<Request> = [(100, 0), (100, 3), (33, 0), (2, 0), (1, 0), (128, 0)]
        .map(|(len, max)| with_logprobs(len, max))
        .into();
    let whole = outcomes(&[("scheduler.token_budget", 512.into())], &requests).await;
    for (outcome, request) in whole.iter().zip(&requests) {
        assert_eq!(outcome.end, Some(Ok(FinishReason::Length)));
        assert_eq!(outcome.tokens.len(), request.max_tokens as usize);
        assert!(outcome.prompt.iter().map(|token| token.id).eq(request.prompt.iter().copied()));
        assert_eq!(outcome.prompt[0].logprob, None);
        assert!(outcome.prompt[1..].iter().all(|token| token.logprob.is_some_and(|p| p < 0.0)));
        assert!(outcome.prompt[1..].iter().all(|token| token.top.len() == 3));
    }
    for budget in [5, 8, 33, 40] {
        let chunked = outcomes(&[("scheduler.token_budget", budget.into())], &requests).await;
        same(&chunked, &whole, &format!("budget {budget}"));
    }
    for rows in [1, 7, 40] {
        let batches = outcomes(&[("scheduler.batch_rows", rows.into())], &requests).await;
        same(&batches, &whole, &format!("{rows} rows at once"));
    }
}

#[actix::test]
async fn the_smallest_engine_gives_the_same_tokens() {
    let requests: Vec<Request> = [(40, 30), (1, 5), (33, 0)].map(|(len, max)| with_logprobs(len, max)).into();
    let usual = outcomes(&[], &requests).await;
    let smallest = [("scheduler.slots", 1.into()), ("scheduler.token_budget", 2.into())];
    same(&outcomes(&smallest, &requests).await, &usual, "one slot, two rows a step");
}

/// The largest possible page may exceed memory: the engine works, or refuses it with an error that names it.
#[actix::test]
async fn the_largest_page_works_or_is_refused() {
    let request = with_logprobs(40, 30);
    let usual = outcomes(&[], std::slice::from_ref(&request)).await;
    let settings = [("kv.page_size", Value::from(1 << 24)), ("scheduler.slots", 1.into())];
    match start::start_engine(&config(&fixture("gqa"), &settings)).await {
        Ok(engine) => {
            same(&[complete(&engine, request).await], &usual, "one huge page");
            engine.stop();
        }
        Err(refusal) => {
            let refusal = format!("{refusal:#}");
            assert!(refusal.contains("KV cache") || refusal.contains("page_size"), "{refusal}");
        }
    }
}
