//! Tests of layers that see a window of a sequence, and have pages of their own: the answers are those of an
//! engine without such pages, and the cache is smaller.

use crate::common::{Outcome, all_home, complete_all, config, counting, engine_with, greedy, prompt};
use crate::families::family;
use mainstem::actors::Engine;
use mainstem::cli::start;
use mainstem::decoding::{AcceptanceRule, EarlyStopping};
use mainstem::request::{BeamOptions, DraftSource, Request, Speculation};
use mainstem_kernels::{Span, SpanTokens};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
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

fn settings(budget: i64, more: &[(&'static str, Value)]) -> Vec<(&'static str, Value)> {
    let settings = [("scheduler.token_budget", Value::from(budget)), ("kv.page_size", 32.into())];
    [&settings, more].concat()
}

async fn start(model: &Path, budget: i64, more: &[(&'static str, Value)]) -> Engine {
    start::start_engine(&config(model, &settings(budget, more))).await.expect("the fixture loads")
}

/// Starts an engine that counts the rows of prompts.
async fn start_counting(model: &Path, budget: i64, size: &'static str, rows: &Arc<AtomicUsize>) -> Engine {
    let model = model.to_str().expect("its path is text");
    let settings = settings(budget, &[("kv.size", size.into())]);
    let of_prompt = |span: &Span| match span.tokens {
        SpanTokens::Given { len, .. } => len as usize,
        _ => 0,
    };
    engine_with(model, &settings, |device| counting(device, of_prompt, rows.clone())).await
}

fn answer(outcome: &Outcome) -> Answer {
    assert!(outcome.end.as_ref().is_some_and(Result::is_ok), "{:?}", outcome.end);
    let bits = |logprob: Option<f32>| logprob.expect("it was requested").to_bits();
    (outcome.tokens.iter().map(|token| (token.id, bits(token.logprob))).collect(), outcome.cached_tokens)
}

/// Returns the answers to prompts of many lengths, to continued conversations, with drafts, and of a
/// beam search; and the number of prompt tokens that are not shared.
async fn answers(engine: &Engine) -> (Vec<Answer>, usize) {
    let mut computed = 0;
    let mut complete = async |requests: Vec<Request>| {
        let prompts: usize = requests.iter().map(|request| request.prompt.len()).sum();
        let outcomes = complete_all(engine, requests).await;
        computed += prompts - outcomes.iter().map(|outcome| outcome.cached_tokens).sum::<usize>();
        outcomes
    };
    let request = |prompt: &[u32], len| Request { logprobs: Some(0), ..greedy(prompt, len) };
    let lengths = [100, 88, 40, 64, 5, 33, 70, 17, 95, 20, 27, 24, 30];
    let prompts: Vec<Vec<u32>> = lengths.iter().enumerate().map(|(at, len)| words(at, *len)).collect();
    let most = |prompt: &Vec<u32>| request(prompt, (127 - prompt.len() as u32).min(40));
    let first = complete(prompts.iter().map(most).collect()).await;
    let mut all: Vec<Answer> = first.iter().map(answer).collect();
    let longer = prompts.iter().zip(&first).filter(|(prompt, _)| prompt.len() < 80);
    for (prompt, outcome) in longer {
        let ids: Vec<u32> = outcome.tokens.iter().map(|token| token.id).collect();
        let next = request(&[&prompt[..], &ids, &[7, 8, 9]].concat(), 12);
        all.extend(complete(vec![next.clone(), next]).await.iter().map(answer));
    }
    let drafter = DraftSource::PromptLookup { shortest: 1, longest: 3 };
    let speculation = Some(Speculation { drafter, max_drafts: 4, rule: AcceptanceRule::Coupled });
    let drafted = Request { speculation, ..request(&words(2, 20).repeat(3), 60) };
    let outcome = complete(vec![drafted]).await.swap_remove(0);
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
    let outcome = complete(vec![search]).await.swap_remove(0);
    let score = outcome.beam_score.expect("it is a search").to_bits();
    all.push((outcome.tokens.iter().map(|token| (token.id, score)).collect(), 0));
    all_home(engine, 4).await;
    (all, computed)
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
        assert!(!whole.report().contains("layers with a window"), "{name}: {}", whole.report());
        let (expected, _) = answers(&whole).await;
        whole.stop();
        for (budget, size) in [(16, "auto"), (23, "auto"), (16, scarce)] {
            let rows = Arc::default();
            let engine = start_counting(&model.0, budget, size, &rows).await;
            assert!(
                engine.report().contains("pages of layers with a window of 8"),
                "{name}: {}",
                engine.report()
            );
            let parts = [format!(": {own} pages of 32 "), format!("; {windowed} pages of layers")];
            let is_divided = parts.iter().all(|part| engine.report().contains(part));
            assert!(size == "auto" || is_divided, "{name}: {}", engine.report());
            let (got, computed) = answers(&engine).await;
            assert_eq!(tokens(&got), tokens(&expected), "{name}, chunks of {budget}, {size}");
            let cached: usize = got.iter().map(|(_, cached)| cached).sum();
            let again = rows.load(Ordering::SeqCst) - computed;
            match size {
                "auto" => assert!(cached > 100 && again == 0, "{name}: {cached} shared, {again} again"),
                _ => assert!(again > 0, "{name}: nothing was preempted"),
            }
            engine.stop();
        }
        let on_two = [("device.groups", Value::from("cpu:0;cpu:1"))];
        let engine = start(&model.0, 16, &on_two).await;
        assert_eq!(tokens(&answers(&engine).await.0), tokens(&expected), "{name} in two stages");
        engine.stop();
    }
}
