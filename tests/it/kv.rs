//! Tests of quantized KV caches and of top-k sparse attention of generated tokens: their error, and batch
//! invariance.

use crate::common::{Outcome, config, mainstem};
use crate::weights::{answers_of, apart, texts};
use mainstem::cli::start;
use mainstem::model::executor::{Executor, KvCacheConfig, ModelExecutor};
use mainstem::model::{ModelRef, ModelSource, Shard};
use mainstem_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use mainstem_kernels::{
    ActivationPrecision, Fraction, HandoffPorts, KvTable, QuantType, SamplingParams, Span, SpanModel,
    SpanOutput, SpanStack, SpanTable, SpanTokens, StepBatch, StepLimits, StepOutput, TableUpdate,
};
use std::path::Path;

/// Runs the demo model on requests one after another with whole prompts, or all together with prompts in
/// chunks.
async fn answers(kv_type: &str, share: f64, together: bool) -> Vec<Outcome> {
    let (slots, budget) = if together { (4, 24) } else { (1, 512) };
    let settings = [
        ("kv.type", kv_type.into()),
        ("kv.sparse_attention", share.into()),
        ("scheduler.slots", slots.into()),
        ("scheduler.token_budget", budget.into()),
    ];
    let engine = start::start_engine(&config(Path::new(""), &settings)).await.expect("the demo model loads");
    answers_of(engine, slots as usize, together).await
}

#[actix::test]
async fn alone_and_batched_answers_have_the_same_bits_in_every_cache() {
    for (kv_type, share) in [("q8", 1.0), ("q4", 1.0), ("f16", 0.2), ("q4", 0.2)] {
        let [alone, together] = [false, true].map(|together| answers(kv_type, share, together));
        let (alone, together) = (alone.await, together.await);
        for (number, (alone, together)) in alone.iter().zip(&together).enumerate() {
            assert_eq!(
                (&alone.tokens, &alone.prompt),
                (&together.tokens, &together.prompt),
                "{kv_type}, a share of {share}, request {number}"
            );
        }
    }
}

const POSITIONS: usize = 128;
const PAGE_POSITIONS: usize = 32;

/// Returns an executor of the demo model with slots for `texts` texts.
fn demo(texts: usize, ty: QuantType, attended: Fraction) -> impl Executor {
    let source = ModelSource::open(&ModelRef::Demo, None).expect("it is built in");
    let limits = StepLimits {
        slots: texts,
        rows: POSITIONS,
        batch_rows: usize::MAX,
        logit_rows: texts,
        positions: POSITIONS,
        encoder_positions: 0,
        page_positions: PAGE_POSITIONS,
        window: None,
        top_logprobs: 0,
        vocab: source.spec.vocab,
        hidden: 0,
        drafts: 0,
        draft_logits: false,
        counts_tokens: false,
        opening_rows: 0,
        attended_fraction: attended,
    };
    let cpu = CpuBackend::new(CpuConfig {
        threads: 2,
        isa: Isa::Auto,
        activation_precision: ActivationPrecision::F32,
    });
    let kv = KvCacheConfig { ty, pages: 1 + texts * (POSITIONS / PAGE_POSITIONS), window_pages: 0 };
    let (cpu, whole) = (cpu.expect("there is a CPU"), Shard::whole(&source.spec));
    ModelExecutor::new(cpu, &source, &whole, kv, limits).expect("there is room")
}

/// Adds the token at `at` to the batch and samples the next one, which is forced to be the next token of the
/// text.
fn sample_next(batch: &mut StepBatch, slot: usize, text: &[u32], at: usize) {
    let tokens = match at {
        0 => SpanTokens::Given { at: batch.tokens.len() as u32, len: 1 },
        _ => SpanTokens::Last,
    };
    if at == 0 {
        batch.tokens.push(text[0]);
        let pages = (POSITIONS / PAGE_POSITIONS) as u32;
        let entry = |index| {
            let page = 1 + slot as u32 * pages + index;
            TableUpdate { slot: slot as u32, table: KvTable::Own, index, page }
        };
        batch.table_updates.extend((0..pages).map(entry));
    }
    batch.spans.push(Span {
        model: SpanModel::Target,
        stack: SpanStack::Decoder,
        slot: slot as u32,
        start: at as u32,
        tokens,
        table: SpanTable::Own,
        reserved: POSITIONS as u32,
        encoder_len: 0,
        output: SpanOutput::Last,
    });
    let bias_at = batch.logit_biases.len() as u32;
    batch.logit_biases.push((text[at + 1], 1e9));
    let row = SamplingParams { logprob: true, position: at as u32 + 1, ..SamplingParams::GREEDY };
    batch.sampling.push(SamplingParams { bias_at, bias_len: 1, ..row });
}

/// Returns the log-probabilities of the texts' tokens except the first, text by text, when each is sampled.
fn log_probabilities(texts: &[Vec<u32>], ty: QuantType, attended: Fraction) -> Vec<Vec<f32>> {
    let mut model = demo(texts.len(), ty, attended);
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    let mut logprobs = vec![Vec::new(); texts.len()];
    for at in 0..texts.iter().map(Vec::len).max().expect("there are texts") - 1 {
        let going: Vec<usize> = (0..texts.len()).filter(|slot| at + 1 < texts[*slot].len()).collect();
        batch.clear();
        batch.step += 1;
        going.iter().for_each(|slot| sample_next(&mut batch, *slot, &texts[*slot], at));
        model.run(&batch, HandoffPorts::default(), &mut out).expect("it runs");
        for (slot, row) in going.iter().zip(&out.tokens) {
            assert_eq!(row.token, texts[*slot][at + 1], "there is no choice");
            logprobs[*slot].push(row.logprob);
        }
    }
    logprobs
}

/// Returns the log-probability of the text's last token when all tokens but the first are computed again, in
/// one span.
fn log_probability_again(text: &[u32], attended: Fraction, tokens: fn(u32) -> SpanTokens) -> f32 {
    let mut model = demo(1, QuantType::F32, attended);
    let (mut batch, mut out) = (StepBatch { step: 1, ..StepBatch::default() }, StepOutput::default());
    sample_next(&mut batch, 0, text, 0);
    model.run(&batch, HandoffPorts::default(), &mut out).expect("it runs");
    batch.clear();
    batch.step = 2;
    let last = text.len() - 2;
    sample_next(&mut batch, 0, text, last);
    batch.tokens.extend(&text[1..=last]);
    (batch.spans[0].start, batch.spans[0].tokens) = (1, tokens(last as u32));
    model.run(&batch, HandoffPorts::default(), &mut out).expect("it runs");
    out.tokens[0].logprob
}

/// Sparse attention depends on whether a token was generated, not on where its id comes from.
#[actix::test]
async fn generated_tokens_that_are_computed_again_have_the_same_bits() {
    let sparse = Fraction::new(0.2).expect("a share");
    for text in texts().await {
        let one_by_one = log_probabilities(std::slice::from_ref(&text), QuantType::F32, sparse);
        let again = |tokens| Some(log_probability_again(&text, sparse, tokens));
        let sampled = one_by_one[0].last().copied();
        assert_eq!(again(|len| SpanTokens::Generated { at: 0, len }), sampled);
        assert_ne!(again(|len| SpanTokens::Given { at: 0, len }), sampled, "a prompt attends to everything");
    }
}

/// More bits and a larger attended fraction are closer; the full fraction is exact. docs/quantization.md
/// lists these values.
#[actix::test]
async fn what_a_smaller_cache_costs_is_bounded_and_falls_with_its_size() {
    let texts = texts().await;
    let logprobs =
        |ty, share: f64| log_probabilities(&texts, ty, Fraction::new(share).expect("a share")).concat();
    let exact = logprobs(QuantType::F32, 1.0);
    let costs = |ty, share| apart(&exact, &logprobs(ty, share));
    let by_type = [QuantType::F16, QuantType::Q8_0, QuantType::G4_B64].map(|ty| costs(ty, 1.0));
    let by_share = [0.8, 0.5, 0.2, 0.1].map(|share| costs(QuantType::F32, share));
    let figures = format!("by type {by_type:?}, by share {by_share:?}");
    assert!(by_type.is_sorted() && by_type[1] < 0.0005 && by_type[2] < 0.005, "{figures}");
    assert!(by_type[1] < 0.5 * by_type[2], "{figures}");
    assert!(by_share.is_sorted() && by_share[0] > 0.0 && by_share[1] < 0.03, "{figures}");
}

/// A device that did not sample a token itself is informed that it was generated.
#[test]
fn every_stage_takes_the_part_of_the_past_that_one_device_takes() {
    let story_with = |share: &str, more: &[&str]| {
        let story = ["run", "demo", "Once upon a time", "--raw", "--temperature", "0", "--max-tokens", "50"];
        let output = mainstem().args(story).args(["--sparse-attention", share]).args(more).output();
        let output = output.expect("the program starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("the answer is text")
    };
    let alone = story_with("0.1", &[]);
    assert_ne!(alone, story_with("1", &[]), "so little of the past makes another story");
    assert_eq!(alone, story_with("0.1", &["--devices", "0;1"]));
}
