//! Tests of layers that see a window of a sequence, and have pages of their own: the answers are those of an
//! engine without such pages, and the cache is smaller.

use crate::common::{Outcome, all_home, complete_all, config, greedy, prompt};
use crate::families::family;
use mainstem::actors::Engine;
use mainstem::cli::start;
use mainstem::decoding::{AcceptanceRule, EarlyStopping};
use mainstem::request::{BeamOptions, DraftSource, Request, Speculation};
use std::path::Path;
use toml::Value;

/// Families whose layers see a window: every second one, most, or all. The sizes of their caches are too
/// small for all sequences; the numbers of pages, of layers that see whole sequences and of windowed ones.
const FAMILIES: [(&str, &str, [usize; 2]); 4] = [
    ("gemma2", "224 tokens", [7, 7]),
    ("gemma3", "118272B", [9, 4]),
    ("mistral", "128 tokens", [16, 4]),
    ("qwen2_window", "224 tokens", [7, 7]),
];

/// A step this long can compute a whole sequence at once, so no layer gets pages of its own.
const WHOLE: i64 = 256;

/// A result: tokens with the bits of their log-probabilities, and the number of shared prompt tokens.
type Answer = (Vec<(u32, u32)>, usize);

async fn start(model: &Path, budget: i64, more: &[(&'static str, Value)]) -> Engine {
    let settings = [("scheduler.token_budget", Value::from(budget)), ("kv.page_size", 32.into())];
    start::start_engine(&config(model, &[&settings, more].concat())).await.expect("the fixture loads")
}

fn answer(outcome: &Outcome) -> Answer {
    assert!(outcome.end.as_ref().is_some_and(Result::is_ok), "{:?}", outcome.end);
    let bits = |logprob: Option<f32>| logprob.expect("it was requested").to_bits();
    (outcome.tokens.iter().map(|token| (token.id, bits(token.logprob))).collect(), outcome.cached_tokens)
}

/// Returns the answers to prompts of many lengths, to continued conversations, with drafts, and of a
/// beam search.
async fn answers(engine: &Engine) -> Vec<Answer> {
    let request = |prompt: &[u32], len| Request { logprobs: Some(0), ..greedy(prompt, len) };
    let lengths = [100, 88, 40, 64, 5, 33, 70, 17, 95];
    let prompts: Vec<Vec<u32>> = lengths.iter().enumerate().map(|(at, len)| words(at, *len)).collect();
    let first = complete_all(engine, prompts.iter().map(|prompt| request(prompt, 25))).await;
    let mut all: Vec<Answer> = first.iter().map(answer).collect();
    let longer = prompts.iter().zip(&first).filter(|(prompt, _)| prompt.len() < 80);
    for (prompt, outcome) in longer {
        let ids: Vec<u32> = outcome.tokens.iter().map(|token| token.id).collect();
        let next = request(&[&prompt[..], &ids, &[7, 8, 9]].concat(), 12);
        all.extend(complete_all(engine, [next.clone(), next]).await.iter().map(answer));
    }
    let drafter = DraftSource::PromptLookup { shortest: 1, longest: 3 };
    let speculation = Some(Speculation { drafter, max_drafts: 4, rule: AcceptanceRule::Coupled });
    let drafted = Request { speculation, ..request(&words(2, 20).repeat(3), 60) };
    let outcome = complete_all(engine, [drafted]).await.swap_remove(0);
    assert!(outcome.speculated.is_some_and(|(made, _)| made > 0), "{:?}", outcome.speculated);
    all.push(answer(&outcome));
    let beams = BeamOptions {
        width: 2,
        length_penalty: 1.0,
        early_stopping: EarlyStopping::Never,
        forced_tokens: 0,
        answer: 0,
    };
    let search = Request { beams: Some(beams), ..greedy(&words(3, 50), 40) };
    let outcome = complete_all(engine, [search]).await.swap_remove(0);
    let score = outcome.beam_score.expect("it is a search").to_bits();
    all.push((outcome.tokens.iter().map(|token| (token.id, score)).collect(), 0));
    all_home(engine, 4).await;
    all
}

/// Returns token ids that exist in every vocabulary used here.
fn words(number: usize, len: usize) -> Vec<u32> {
    prompt(number, len).into_iter().map(|id| 8 + id % 88).collect()
}

fn tokens(answers: &[Answer]) -> Vec<&Vec<(u32, u32)>> {
    answers.iter().map(|(tokens, _)| tokens).collect()
}

/// Chunks are shorter than a page, so windows pass prompts as well as answers. With few pages, sequences are
/// preempted and computed again.
#[actix::test]
async fn answers_are_the_same_with_pages_of_windowed_layers() {
    for (name, scarce, [own, windowed]) in FAMILIES {
        let model = family(name, "windows");
        let whole = start(&model.0, WHOLE, &[]).await;
        assert!(!whole.report.contains("layers with a window"), "{name}: {}", whole.report);
        let expected = answers(&whole).await;
        whole.stop();
        for (budget, size) in [(16, "auto"), (23, "auto"), (16, scarce)] {
            let engine = start(&model.0, budget, &[("kv.size", size.into())]).await;
            assert!(
                engine.report.contains("pages of layers with a window of 8"),
                "{name}: {}",
                engine.report
            );
            let parts = [format!(": {own} pages of 32 "), format!("; {windowed} pages of layers")];
            let is_divided = parts.iter().all(|part| engine.report.contains(part));
            assert!(size == "auto" || is_divided, "{name}: {}", engine.report);
            let got = answers(&engine).await;
            assert_eq!(tokens(&got), tokens(&expected), "{name}, chunks of {budget}, {size}");
            let cached: usize = got.iter().map(|(_, cached)| cached).sum();
            assert!(cached > 100 || size != "auto", "{name}: {cached} tokens were shared");
            engine.stop();
        }
        let on_two = [("device.groups", Value::from("cpu:0;cpu:1"))];
        let engine = start(&model.0, 16, &on_two).await;
        assert_eq!(tokens(&answers(&engine).await), tokens(&expected), "{name} in two stages");
        engine.stop();
    }
}
