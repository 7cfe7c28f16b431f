//! Tests of models with an encoder through the actors, against the recorded answers of Hugging Face
//! transformers (tests/oracle), alone and batched, and of the content of their steps.

mod recorded;

use crate::common::{
    Copied, Outcome, all_home, complete, complete_all, config, engine_with, greedy, outcome, prompt, sampled,
    submit,
};
use crate::families::family;
use crate::oracle::check_at;
use mainstem::actors::Engine;
use mainstem::actors::device::ExecutorFactory;
use mainstem::cli::inspect::Inspection;
use mainstem::cli::start;
use mainstem::model::executor::{Executor, ExecutorReport, page_bytes};
use mainstem::model::spec::Kind;
use mainstem::model::{ModelRef, ModelSource};
use mainstem::request::{FinishReason, Pooling, Request, RequestError, Task};
use mainstem_kernels::{
    DeviceError, HandoffPorts, KvTable, SampleMode, Span, SpanOutput, SpanStack, SpanTable, SpanTokens,
    StepBatch, StepOutput,
};
use recorded::Input;
use std::sync::mpsc;
use toml::Value;

pub const ENCODERS: [&str; 19] = [
    "albert",
    "albert_groups",
    "bert",
    "bert_gamma",
    "camembert",
    "data2vec_text",
    "deberta_v2",
    "deberta_v3",
    "distilbert",
    "electra",
    "electra_base",
    "megatron_bert",
    "modernbert",
    "mpnet",
    "roberta",
    "roberta_prelayernorm",
    "roformer",
    "xlm_roberta",
    "xlm_roberta_xl",
];
pub const ENCODER_DECODERS: [&str; 20] = [
    "bart",
    "blenderbot",
    "blenderbot_small",
    "ctranslate2_bart",
    "ctranslate2_m2m100",
    "ctranslate2_marian",
    "ctranslate2_marian_two_vocabularies",
    "ctranslate2_t5",
    "flan_t5",
    "invented_two",
    "m2m100",
    "marian",
    "marian_two_vocabularies",
    "mbart",
    "nllb",
    "pegasus",
    "plbart",
    "t5",
    "umt5",
    "umt5_tied",
];

type Settings<'a> = &'a [(&'static str, Value)];

/// Returns every scheduling policy, with budgets above and below the length of an encoder input.
fn schedules() -> Vec<Vec<(&'static str, Value)>> {
    let mut all = Vec::new();
    for policy in ["fused", "concurrent", "window"] {
        for (shuffle, budget) in [("on", 8), ("off", 8), ("on", 40), ("off", 512)] {
            all.push(vec![
                ("scheduler.policy", policy.into()),
                ("scheduler.window", "5ms".into()),
                ("scheduler.shuffle", shuffle.into()),
                ("scheduler.token_budget", budget.into()),
            ]);
        }
    }
    all
}

/// A device that records every step and fails at a given one.
struct Watched {
    inner: Box<dyn Executor>,
    steps: mpsc::Sender<StepBatch>,
    fails_at: u64,
}

impl Executor for Watched {
    fn run(
        &mut self,
        batch: &StepBatch,
        flow: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        let _ = self.steps.send(batch.clone());
        match batch.step == self.fails_at {
            true => Err(DeviceError::Fault("the test's device fails".into())),
            false => self.inner.run(batch, flow, out),
        }
    }

    fn report(&self) -> ExecutorReport {
        self.inner.report()
    }
}

/// Starts an engine for the model. Returns it with the recorded steps.
async fn watched(
    model: &Copied,
    settings: Settings<'_>,
    fails_at: u64,
) -> (Engine, mpsc::Receiver<StepBatch>) {
    let (steps, seen) = mpsc::channel();
    let wrap = |mut factory: ExecutorFactory| -> ExecutorFactory {
        Box::new(move |stage| {
            let (inner, steps) = (factory(stage)?, steps.clone());
            Ok(Box::new(Watched { inner, steps, fails_at }))
        })
    };
    let folder = model.0.to_str().expect("the folder's name is text");
    (engine_with(folder, settings, wrap).await, seen)
}

async fn plain(model: &Copied, settings: Settings<'_>) -> Engine {
    watched(model, settings, u64::MAX).await.0
}

fn embed(encoder_input: &[u32], pooling: Pooling) -> Request {
    Request { task: Task::Embed(pooling), encoder_input: encoder_input.into(), ..greedy(&[], 0) }
}

fn fill(encoder_input: &[u32], at: &[u32], top: u8) -> Request {
    Request {
        task: Task::FillMask { positions: at.into(), top_k: top },
        ..embed(encoder_input, Pooling::Mean)
    }
}

fn translate(encoder_input: &[u32], request: Request) -> Request {
    Request { encoder_input: encoder_input.into(), ..request }
}

/// Returns token ids of a vocabulary of 96.
fn words(number: usize, len: usize) -> Vec<u32> {
    prompt(number, len).into_iter().map(|id| 8 + id % 88).collect()
}

#[actix::test]
async fn an_encoder_gives_the_recorded_states_and_fills_the_recorded_masks() {
    for name in ENCODERS {
        for kind in ["cpu", "reference"] {
            check_recorded(name, kind).await;
        }
    }
}

async fn check_recorded(name: &str, kind: &str) {
    let inputs = Input::all(name);
    let requests: Vec<Vec<Request>> = inputs.iter().map(Input::requests).collect();
    let model = family(name, &format!("kinds-{kind}"));
    // As recorded: activations are not rounded with BF16 weights.
    let settings = [("device.kind", kind.into()), ("device.activations", "f32".into())];
    let engine = plain(&model, &settings).await;
    // All requests at once, many more than slots.
    let mut outcomes = complete_all(&engine, requests.iter().flatten().cloned()).await.into_iter();
    for (input, requests) in inputs.iter().zip(&requests) {
        let outcomes: Vec<Outcome> = outcomes.by_ref().take(requests.len()).collect();
        assert!(outcomes.iter().all(|outcome| outcome.end == Some(Ok(FinishReason::Stop))), "{name}");
        assert!(outcomes.iter().all(|outcome| outcome.tokens.is_empty() && outcome.prompt.is_empty()));
        input.check(&outcomes);
    }
    all_home(&engine, 4).await;
    engine.stop();
}

#[actix::test]
async fn texts_give_the_same_bits_in_any_batch() {
    let model = family("bert", "kinds-company");
    let requests = (0..12).map(|i| {
        let text = words(i, 1 + (i * 11) % 40);
        let last = text.len() as u32 - 1;
        match i % 3 {
            0 => fill(&text, &if last > 0 { vec![0, last] } else { vec![0] }, 3),
            1 => embed(&text, Pooling::Mean),
            _ => embed(&text, Pooling::Last),
        }
    });
    let requests: Vec<Request> = requests.collect();
    let mut alone = Vec::new();
    let engine = plain(&model, &[]).await;
    for request in &requests {
        alone.push(complete(&engine, request.clone()).await);
    }
    engine.stop();
    for settings in schedules() {
        let engine = plain(&model, &settings).await;
        let together = complete_all(&engine, requests.iter().cloned()).await;
        for (number, (ours, alone)) in together.iter().zip(&alone).enumerate() {
            assert_eq!(ours.embedding, alone.embedding, "{settings:?}, text {number}");
            assert_eq!(ours.filled, alone.filled, "{settings:?}, text {number}");
            assert_eq!(ours.end, Some(Ok(FinishReason::Stop)), "{settings:?}, text {number}");
        }
        all_home(&engine, 4).await;
        engine.stop();
    }
}

/// Eight texts on four slots take two steps, or as many as their rows need; nothing is sampled or cached.
#[actix::test]
async fn texts_share_their_steps() {
    let model = family("bert", "kinds-steps");
    for (budget, expected) in [(512, vec![4, 4]), (25, vec![2, 2, 2, 2]), (5, vec![1; 8])] {
        let settings = [("scheduler.token_budget", budget.into())];
        let (engine, steps) = watched(&model, &settings, u64::MAX).await;
        let texts = (0..8).map(|i| match i % 2 {
            0 => embed(&words(i, 10), Pooling::Mean),
            _ => fill(&words(i, 10), &[2, 7], 4),
        });
        let streams = engine.intake.submit(texts.collect()).await.expect("there is room");
        futures_util::future::join_all(streams.into_iter().map(outcome)).await;
        all_home(&engine, 4).await;
        engine.stop();
        let steps: Vec<StepBatch> = steps.try_iter().collect();
        let spans: Vec<usize> = steps.iter().map(|step| step.spans.len()).collect();
        assert_eq!(spans, expected, "budget {budget}");
        for step in &steps {
            assert!(step.spans.iter().all(|span| span.stack == SpanStack::Encoder));
            assert!(step.sampling.iter().all(|row| matches!(row.mode, SampleMode::Score(_))));
            assert!(step.table_updates.is_empty() && step.moves.is_empty());
        }
    }
}

/// Returns requests with encoder inputs, prompts and answers of different lengths, greedy and sampled.
fn translations() -> Vec<Request> {
    let request = |i: usize| {
        let (prompt, tokens) = (words(50 + i, 1 + (i * 5) % 13), 3 + (i as u32 * 7) % 19);
        let request = match i % 2 {
            0 => greedy(&prompt, tokens),
            _ => sampled(&prompt, tokens, 7 + i as u64),
        };
        translate(&words(i, 1 + (i * 17) % 60), Request { logprobs: Some(2), ..request })
    };
    (0..10).map(request).collect()
}

#[actix::test]
async fn encoder_decoders_give_the_recorded_answers() {
    for name in ENCODER_DECODERS {
        for kind in ["cpu", "reference"] {
            let model = family(name, &format!("kinds-{kind}"));
            check_at(&model.0, &format!("families/{name}/answers.json"), kind).await;
        }
    }
}

#[actix::test]
async fn translations_are_the_same_in_any_batch() {
    for name in ["m2m100", "t5"] {
        let model = family(name, "kinds-company");
        let requests = translations();
        let mut alone = Vec::new();
        let engine = plain(&model, &[]).await;
        for request in &requests {
            alone.push(complete(&engine, request.clone()).await);
        }
        engine.stop();
        let other_input = translate(&words(77, 20), requests[4].clone());
        let mut moves = 0;
        for (number, mut settings) in schedules().into_iter().enumerate() {
            // Pages for little more than the longest request, so that most wait for pages of others, or pages
            // for all.
            settings.push(("kv.size", if number % 3 == 0 { "160tokens" } else { "auto" }.into()));
            let (engine, steps) = watched(&model, &settings, u64::MAX).await;
            let together = complete_all(&engine, requests.iter().cloned()).await;
            for (number, (ours, alone)) in together.iter().zip(&alone).enumerate() {
                assert_eq!(ours.tokens, alone.tokens, "{name}, {settings:?}, request {number}");
                assert_eq!(ours.end, alone.end, "{name}, {settings:?}, request {number}");
            }
            assert_ne!(complete(&engine, other_input.clone()).await.tokens, alone[4].tokens, "{name}");
            all_home(&engine, 4).await;
            engine.stop();
            moves += steps.try_iter().map(|step| step.moves.len()).sum::<usize>();
        }
        assert!(moves > 0, "the shuffle moved somebody");
    }
}

/// A short and a long encoder input, where the long one exceeds the budget: it is processed whole and alone,
/// while decoding requests continue.
#[actix::test]
async fn an_encoder_input_goes_whole_before_its_prompt_and_stalls_nobody() {
    let model = family("m2m100", "kinds-spans");
    for policy in ["fused", "concurrent"] {
        let settings = [("scheduler.token_budget", 8.into()), ("scheduler.policy", policy.into())];
        let (engine, steps) = watched(&model, &settings, u64::MAX).await;
        let first = translate(&words(1, 3), greedy(&words(2, 2), 12));
        let second = translate(&words(3, 40), greedy(&words(4, 20), 2));
        let streams = engine.intake.submit(vec![first, second]).await.expect("there is room");
        futures_util::future::join_all(streams.into_iter().map(outcome)).await;
        all_home(&engine, 4).await;
        engine.stop();
        check_steps(&steps.try_iter().collect::<Vec<_>>(), policy);
    }
}

fn check_steps(steps: &[StepBatch], policy: &str) {
    let mut encoder_lens = Vec::new();
    for step in steps {
        assert!(step.spans.is_sorted_by_key(|span| span.stack), "sources come first");
        let (encoder, decoder): (Vec<&Span>, Vec<&Span>) =
            step.spans.iter().partition(|span| span.stack == SpanStack::Encoder);
        let long_ones: usize = encoder.iter().filter(|span| span.len() > 8).map(|span| span.len() + 1).sum();
        assert!(step.rows() <= 8 + long_ones, "{} rows, {policy}", step.rows());
        for span in &encoder {
            assert_eq!((span.start, span.table, span.output), (0, SpanTable::Scratch, SpanOutput::None));
            assert_eq!(span.reserved as usize, span.len(), "a source has room for itself");
            assert!(
                decoder.iter().any(|of| (of.slot, of.start) == (span.slot, 0)),
                "its prompt begins with it"
            );
            let decodes = decoder.iter().any(|span| span.tokens == SpanTokens::Last);
            assert!(span.len() < 8 || decodes || policy == "concurrent", "the first one's tokens go on");
            let entries = |table| step.table_updates.iter().filter(|entry| entry.table == table).count();
            let joined_before = policy == "concurrent" && step.table_updates.is_empty();
            assert!(joined_before || entries(KvTable::Cross) == span.len().div_ceil(32), "cross pages");
            encoder_lens.push(span.len());
        }
        assert!(decoder.iter().all(|span| span.encoder_len > 0 && span.table == SpanTable::Own));
    }
    assert_eq!(encoder_lens, [3, 40], "each source is computed once, {policy}");
}

#[actix::test]
async fn a_fault_ends_who_was_in_it_and_nobody_else() {
    for (name, is_encoder) in [("bert", true), ("m2m100", false)] {
        let model = family(name, "kinds-fault");
        for fails_at in [1, 2, 4] {
            let (engine, _steps) = watched(&model, &[], fails_at).await;
            let request = |i| match is_encoder {
                true => embed(&words(i, 5 + i), Pooling::Mean),
                false => translate(&words(i, 5 + i), greedy(&words(i, 3), 6)),
            };
            let requests: Vec<Request> = (0..17).map(request).collect();
            let outcomes = complete_all(&engine, requests.iter().cloned()).await;
            let failed = |outcome: &&Outcome| matches!(outcome.end, Some(Err(RequestError::DeviceFailed(_))));
            let failed = outcomes.iter().filter(failed).count();
            assert!((1..=4).contains(&failed), "{name}, step {fails_at}: {failed} failed");
            let served = |outcome: &Outcome| match is_encoder {
                true => outcome.embedding.is_some() && outcome.end == Some(Ok(FinishReason::Stop)),
                false => outcome.tokens.len() == 6 && outcome.end == Some(Ok(FinishReason::Length)),
            };
            assert_eq!(outcomes.iter().filter(|outcome| served(outcome)).count(), 17 - failed, "{name}");
            all_home(&engine, 4).await;
            assert!(complete_all(&engine, requests).await.iter().all(served), "{name}: it recovers");
            engine.stop();
        }
    }
}

#[actix::test]
async fn who_leaves_or_runs_out_of_time_leaves_nothing_behind() {
    for (name, is_encoder) in [("bert", true), ("m2m100", false)] {
        let model = family(name, "kinds-leaving");
        let engine = plain(&model, &[("scheduler.token_budget", 8.into())]).await;
        let request = |i| match is_encoder {
            true => embed(&words(i, 20), Pooling::Cls),
            false => translate(&words(i, 20), greedy(&words(i, 3), 30)),
        };
        let late = Request { time_limit: Some(std::time::Duration::ZERO), ..request(0) };
        assert_eq!(complete(&engine, late).await.end, None, "{name}: its time was up before it began");
        let mut leaving = Vec::new();
        for i in 0..6 {
            leaving.push(submit(&engine, request(i)).await.expect("it is taken in"));
        }
        let staying = submit(&engine, request(9)).await.expect("it is taken in");
        drop(leaving);
        assert!(matches!(outcome(staying).await.end, Some(Ok(_))), "{name}");
        all_home(&engine, 4).await;
        engine.stop();
    }
}

#[actix::test]
async fn the_engine_says_what_it_is_and_refuses_what_it_is_not() {
    let bert = family("bert", "kinds-limits");
    let engine = plain(&bert, &[("kv.max_context", 30.into())]).await;
    let model = &engine.model;
    assert_eq!((model.kind, model.has_head, model.context), (Kind::Encoder, true, 30));
    assert_eq!((model.encoder_context, model.max_sequence_tokens), (30, 30));
    assert_eq!(model.endpoints, ["/v1/embeddings", "/v1/fill-mask", "/v1/score", "/v1/rerank"]);
    assert!(engine.report().contains(": encoder, vocabulary 97, context 30\n"), "{}", engine.report());
    refused(&engine, greedy(&words(0, 3), 4), "model", "/v1/embeddings and /v1/fill-mask").await;
    refused(
        &engine,
        embed(&words(0, 31), Pooling::Mean),
        "input",
        "31 tokens, more than the model's limit of 30",
    )
    .await;
    assert!(complete(&engine, embed(&words(0, 30), Pooling::Mean)).await.embedding.is_some());
    engine.stop();

    let m2m100 = family("m2m100", "kinds-limits");
    let engine = plain(&m2m100, &[("kv.size", "96tokens".into())]).await;
    let model = &engine.model;
    assert_eq!((model.kind, model.context, model.max_sequence_tokens), (Kind::EncoderDecoder, 64, 64));
    assert_eq!(model.encoder_context, 64);
    assert!(
        engine.report().contains("encoder for inputs of up to 64 tokens and decoder"),
        "{}",
        engine.report()
    );
    refused(&engine, embed(&words(0, 3), Pooling::Mean), "model", "/v1/completions").await;
    refused(&engine, greedy(&words(0, 3), 4), "prompt", "no tokens").await;
    let longest = translate(&words(0, 32), greedy(&words(0, 4), 60));
    assert_eq!(complete(&engine, longest).await.tokens.len(), 60);
    let too_large = translate(&words(0, 33), greedy(&words(0, 4), 60));
    let refusal = submit(&engine, too_large).await.err();
    assert!(matches!(refusal, Some(RequestError::TooLarge { needed: 4, pages: 3, .. })), "{refusal:?}");
    engine.stop();
    let engine = plain(&m2m100, &[("kv.size", "64tokens".into())]).await;
    assert_eq!(engine.model.max_sequence_tokens, 32, "of two pages one is the source's");
    engine.stop();
    let one_page = config(&m2m100.0, &[("kv.size", "32tokens".into())]);
    let error = start::start_engine(&one_page).await.err().expect("a source and an answer need two pages");
    assert!(error.to_string().contains("a sequence needs at least 2"), "{error}");
}

#[actix::test]
async fn a_device_without_arithmetic_answers_for_encoders_too() {
    let model = family("bert", "kinds-fake");
    let engine = plain(&model, &[("device.kind", "fake".into())]).await;
    let requests = (1..9).map(|i| match i % 2 {
        0 => embed(&words(i, i), Pooling::Mean),
        _ => fill(&words(i, i), &[0], 2),
    });
    for (i, outcome) in (1..9).zip(complete_all(&engine, requests).await) {
        let expected = if i % 2 == 0 { (Some(vec![1.0; 32]), 0) } else { (None, 1) };
        assert_eq!((outcome.embedding, outcome.filled.len()), expected, "text of {i}");
    }
    all_home(&engine, 4).await;
    engine.stop();
}

#[test]
fn a_decoder_without_a_head_is_refused_at_start() {
    let model = Copied::of("tied", "kinds-headless");
    model.configure("model_type", "headless".into());
    let spec = include_str!("../../../specs/llama.toml").replace("[\"llama\"]", "[\"headless\"]");
    let tied = "tied = { key = \"tie_word_embeddings\", default = false }";
    let spec = spec.replace(tied, "kind = \"none\"").replace("head = \"lm_head.weight\"\n", "");
    std::fs::write(model.file("spec.toml"), spec).expect("it can be written");
    let source = ModelSource::open(&ModelRef::Path(model.0.clone()), None).expect("it opens");
    let error = start::engine_setup(&config(&model.0, &[]), &source).expect_err("it could not generate");
    assert!(error.to_string().contains("spec.toml: head.kind is \"none\""), "{error}");
}

async fn refused(engine: &Engine, request: Request, param: &str, word: &str) {
    match submit(engine, request).await.map(drop) {
        Err(RequestError::Invalid { param: named, message }) => {
            assert!(named == param && message.contains(word), "{named}: {message}");
        }
        other => panic!("{param}: {other:?}"),
    }
}

/// A sequence and its encoder input have pages; an encoder-only model has none.
#[test]
fn inspect_counts_the_pages_of_encoder_inputs_as_the_engine_does() {
    for (name, pages_each) in [("bert", 0), ("m2m100", 2 + 2), ("t5", 4 + 4)] {
        let model = family(name, "kinds-memory");
        let longest = if name == "t5" { 100 } else { 40 };
        let config = config(&model.0, &[("kv.max_context", longest.into())]);
        let source = ModelSource::open(&ModelRef::Path(model.0.clone()), None).expect("it opens");
        let setup = start::engine_setup(&config, &source).expect("the settings fit");
        assert_eq!(setup.kv.pages, 4 * pages_each + 1, "{name}");
        let page = page_bytes(&source.spec, setup.kv.ty, &setup.limits).expect("a page has a size").own;
        let memory = Inspection::inspect(config).expect("it can be looked at").memory;
        assert_eq!((memory.kv_per_sequence, memory.kv), (pages_each * page, setup.kv.pages * page), "{name}");
        assert_eq!((memory.kv_for_slots, memory.longest_tokens), (memory.kv, longest as usize), "{name}");
    }
}
