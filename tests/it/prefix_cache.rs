//! Tests of the prefix cache with real models: answers have the same bits with and without it, whatever K and
//! V depend on, and what can be shared is.

use crate::common::{Outcome, all_home, complete_all, config, fixture, greedy, prompt};
use crate::families::family;
use mainstem::actors::Engine;
use mainstem::cli::start;
use mainstem::request::Request;
use std::path::Path;
use toml::Value;

/// A prompt and its answer. The first prompt is new; the second one continues the first answer, the third one
/// is the second again, and the last one continues the third answer.
struct Turn {
    /// Number of tokens at the end of the prompt that are new.
    new: usize,
    max_tokens: u32,
    /// Number of tokens of the prompt that the cache knows; `None` for some.
    cached: Option<usize>,
}

type Settings<'a> = &'a [(&'static str, Value)];

fn turns(new: [usize; 3], max_tokens: [u32; 4], cached: [Option<usize>; 4]) -> Vec<Turn> {
    let new = [new[0], new[1], 0, new[2]].into_iter();
    let turns = new.zip(max_tokens).zip(cached);
    turns.map(|((new, max_tokens), cached)| Turn { new, max_tokens, cached }).collect()
}

/// Turns of sequences on whose length nothing depends. Pages know all tokens but the last one of an answer,
/// which was not computed, and `of_answers` tells whether these can be shared.
fn plain(of_answers: bool) -> Vec<Turn> {
    let known = |answer: usize| if of_answers { answer - 1 } else { 0 };
    let cached = [0, 40 + known(20), 64, 65 + known(30)];
    turns([40, 5, 3], [20, 10, 30, 15], cached.map(Some))
}

/// Returns the bits of an answer: its tokens and log-probabilities.
fn bits(outcome: &Outcome) -> Vec<(u32, u32)> {
    assert!(outcome.end.as_ref().is_some_and(Result::is_ok), "{:?}", outcome.end);
    let logprob = |logprob: Option<f32>| logprob.expect("it was requested").to_bits();
    outcome.tokens.iter().map(|token| (token.id, logprob(token.logprob))).collect()
}

/// Answers each prompt twice at once. Returns the lengths of the prompts and the two outcomes of each.
async fn conversation(model: &Path, settings: Settings<'_>, turns: &[Turn]) -> Vec<(usize, Vec<Outcome>)> {
    let engine: Engine = start::start_engine(&config(model, settings)).await.expect("the model loads");
    let mut prompt_tokens: Vec<u32> = Vec::new();
    let (mut answer, mut all) = (Vec::new(), Vec::new());
    for (number, turn) in turns.iter().enumerate() {
        if number != 2 {
            prompt_tokens.extend(answer);
            let new = prompt(number + 1, turn.new);
            // Ids that exist in every vocabulary used here.
            prompt_tokens.extend(new.into_iter().map(|id| 8 + id % 88));
        }
        let request = Request { logprobs: Some(0), ..greedy(&prompt_tokens, turn.max_tokens) };
        let outcomes = complete_all(&engine, [request.clone(), request]).await;
        answer = outcomes[0].ids();
        all.push((prompt_tokens.len(), outcomes));
    }
    all_home(&engine, 4).await;
    engine.stop();
    all
}

/// Compares answers with and without the cache.
async fn check(model: &Path, settings: Settings<'_>, turns: &[Turn]) {
    let with = |cache: &str| [settings, &[("kv.prefix_cache", cache.into())]].concat();
    let off = conversation(model, &with("off"), turns).await;
    let on = conversation(model, &with("on"), turns).await;
    for (number, ((turn, (len, on)), (_, off))) in turns.iter().zip(&on).zip(&off).enumerate() {
        let what = format!("{}, {settings:?}, turn {number}", model.display());
        for outcome in on {
            assert_eq!(bits(outcome), bits(&off[0]), "{what}");
        }
        assert_eq!(
            (bits(&off[1]), off[0].cached_tokens, off[1].cached_tokens),
            (bits(&off[0]), 0, 0),
            "{what}"
        );
        // The second one waits for what the first one computes; the last token is computed for its logits.
        let cached = [on[0].cached_tokens, on[1].cached_tokens];
        match turn.cached {
            Some(expected) => assert_eq!(cached, [expected, len - 1], "{what}"),
            None => assert!(cached[0] > 0 && cached[1] > 0, "{what}: {cached:?}"),
        }
    }
}

#[actix::test]
async fn answers_have_the_same_bits_with_and_without_the_cache() {
    let gqa = fixture("gqa");
    check(&gqa, &[], &plain(true)).await;
    // Chunks that end within a page, and two lanes.
    check(&gqa, &[("scheduler.token_budget", 23.into()), ("scheduler.lanes", 2.into())], &plain(true)).await;
    check(&gqa, &[("device.groups", "cpu:0;cpu:1".into())], &plain(true)).await;
    let folder = std::env::temp_dir().display().to_string();
    check(&gqa, &[("tiers.kv", "0%".into()), ("tiers.disk_path", folder.into())], &plain(true)).await;
    for ty in ["q8", "q4"] {
        check(Path::new(""), &[("kv.type", ty.into())], &plain(true)).await;
    }
}

/// A generated token does not read all values, so its K and V differ from those of the same token in a
/// prompt.
#[actix::test]
async fn generated_tokens_are_not_shared_as_a_prompt_with_sparse_attention() {
    let sparse = ("kv.sparse_attention", 0.2.into());
    check(&fixture("gqa"), std::slice::from_ref(&sparse), &plain(false)).await;
    check(Path::new(""), &[sparse.clone(), ("kv.type", "q4".into())], &plain(false)).await;
    check(&fixture("gqa"), &[sparse, ("device.groups", "cpu:0;cpu:1".into())], &plain(false)).await;
}

/// K depends on the reserved length: beyond 32 tokens, dynamic NTK scaling has a table of rotations for each
/// length, and LongRoPE another table for all.
#[actix::test]
async fn pages_are_shared_among_sequences_with_the_same_rotations() {
    let max_tokens = [8, 6, 20, 9];
    for (name, last) in [("dynamic_ntk", 0), ("phi3_longrope", 22 + 19)] {
        let model = family(name, "prefix-cache");
        check(&model.0, &[], &turns([10, 4, 2], max_tokens, [0, 17, 0, last].map(Some))).await;
    }
    // The third length is that of the second.
    let model = family("dynamic_ntk", "prefix-cache-again");
    check(&model.0, &[], &turns([10, 4, 2], [8, 20, 20, 9], [0, 0, 21, 0].map(Some))).await;
}

#[actix::test]
async fn windows_of_shared_prefixes_have_the_same_bits() {
    for name in ["gemma3", "mistral"] {
        let model = family(name, "prefix-cache");
        let turns = turns([40, 5, 3], [20, 10, 30, 15], [Some(0), None, None, None]);
        check(&model.0, &[("scheduler.token_budget", 16.into())], &turns).await;
    }
}
