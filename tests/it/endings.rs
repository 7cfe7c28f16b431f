//! Tests of stop tokens, minimum lengths, logit biases and request groups, each alone and batched with other
//! requests.

use crate::common::{
    Copied, Outcome, all_home, complete, complete_all, config, engine, greedy, outcome, prompt, sampled,
};
use mainstem::actors::Engine;
use mainstem::cli::start;
use mainstem::request::FinishReason::{Length, Stop, StopToken};
use mainstem::request::{FinishReason, Request, RequestError};
use mainstem::telemetry;

/// The end-of-sequence token of the fixture.
const EOS: u32 = 2;
/// The number of tokens of the fixture's vocabulary.
const VOCAB: u32 = 263;
const FORBID: f32 = f32::NEG_INFINITY;

/// Submits requests as one group and returns their outcomes.
async fn complete_group(engine: &Engine, requests: Vec<Request>) -> Vec<Outcome> {
    let streams = engine.intake.submit(requests).await.expect("the group is taken in");
    futures_util::future::join_all(streams.into_iter().map(outcome)).await
}

fn reason(outcome: &Outcome) -> FinishReason {
    outcome.end.clone().expect("there is an end").expect("nothing failed")
}

/// Returns the ids before the first `id`.
fn until(ids: &[u32], id: u32) -> &[u32] {
    &ids[..ids.iter().position(|other| *other == id).expect("it was taken from them")]
}

#[actix::test]
async fn each_of_a_group_ends_at_its_own_stop_token() {
    let engine = engine("gqa", &[]).await;
    let given = prompt(4, 9);
    let whole = complete(&engine, greedy(&given, 30)).await.ids();
    // More requests than slots, one of them with a stop token that never occurs.
    let stops: Vec<u32> = whole.iter().copied().step_by(5).chain([EOS]).collect();
    let request = |stop: &u32| Request { stop_ids: [EOS, *stop].into(), ..greedy(&given, 30) };
    let outcomes = complete_group(&engine, stops.iter().map(request).collect()).await;
    assert_eq!(outcomes.len(), 7);
    for (stop, outcome) in stops.iter().zip(&outcomes) {
        let (ids, end) = match stop {
            &EOS => (&whole[..], Length),
            stop => (until(&whole, *stop), StopToken(*stop)),
        };
        assert_eq!((outcome.ids().as_slice(), reason(outcome)), (ids, end));
        assert_eq!(outcome.last.as_ref().map(|token| token.id), (end != Length).then_some(*stop));
    }
    all_home(&engine, 4).await;
    engine.stop();
}

/// A model that would end at once must generate the minimum length first, as if its end tokens were
/// forbidden.
#[actix::test]
async fn nothing_ends_before_the_minimum_length() {
    let engine = engine("gqa", &[]).await;
    let given = prompt(5, 12);
    let eager = |min_tokens, bias| Request {
        min_tokens,
        ignore_eos: false,
        logit_bias: [(EOS, bias)].into(),
        ..greedy(&given, 8)
    };
    let never = complete(&engine, eager(0, FORBID)).await.ids();
    assert_eq!(never.len(), 8);
    for min_tokens in [0, 1, 3, 7, 8] {
        let outcome = complete(&engine, eager(min_tokens, 1000.0)).await;
        let end = if min_tokens < 8 { Stop } else { Length };
        assert_eq!((outcome.ids().as_slice(), reason(&outcome)), (&never[..min_tokens as usize], end));
    }
    // With ignore_eos, the token is an ordinary one unless it is a stop token.
    let heedless = Request { ignore_eos: true, ..eager(3, 1000.0) };
    assert_eq!(complete(&engine, heedless.clone()).await.ids(), [EOS; 8]);
    let stopping = Request { stop_ids: [EOS].into(), ..heedless };
    let outcome = complete(&engine, stopping).await;
    assert_eq!((outcome.ids().as_slice(), reason(&outcome)), (&never[..3], StopToken(EOS)));
    all_home(&engine, 4).await;
    engine.stop();
}

#[actix::test]
async fn with_all_tokens_forbidden_but_one_that_one_comes() {
    let engine = engine("gqa", &[]).await;
    let but = |id: u32| (0..263).filter(|other| *other != id).map(|id| (id, FORBID)).collect();
    let request = |id| Request { logit_bias: but(id), ..greedy(&prompt(1, 7), 5) };
    let random = |id| Request { logit_bias: but(id), ..sampled(&prompt(1, 7), 5, 77) };
    let outcomes = complete_group(&engine, vec![request(0), random(262), request(100), random(9)]).await;
    let ids: Vec<Vec<u32>> = outcomes.iter().map(Outcome::ids).collect();
    assert_eq!(ids, [[0; 5], [262; 5], [100; 5], [9; 5]]);
    all_home(&engine, 4).await;
    engine.stop();
}

/// Reported log-probabilities are those of the model, independent of the sampled token.
#[actix::test]
async fn a_bias_changes_the_token_and_no_log_probability() {
    let engine = engine("gqa", &[]).await;
    let plain = Request { logprobs: Some(5), ..greedy(&prompt(2, 20), 1) };
    let outcome = complete(&engine, plain.clone()).await;
    let second = outcome.tokens[0].top[1];
    let biased = complete(&engine, Request { logit_bias: [(second.0, 50.0)].into(), ..plain }).await;
    assert_eq!(biased.tokens[0].top, outcome.tokens[0].top);
    assert_eq!((biased.tokens[0].id, biased.tokens[0].logprob), (second.0, Some(second.1)));
    engine.stop();
}

#[actix::test]
async fn a_seed_gives_the_same_biased_tokens_in_any_batch() {
    let engine = engine("gqa", &[]).await;
    let request = |number: usize| {
        let biases = (0..40).map(|i| ((number as u32 * 7 + i * 5) % 263, 6.0 - i as f32 / 4.0)).collect();
        Request {
            logit_bias: biases,
            min_tokens: 6,
            ..sampled(&prompt(number, 5 + 9 * number), 15, number as u64)
        }
    };
    let together = complete_group(&engine, (0..8).map(request).collect()).await;
    for (number, outcome) in together.iter().enumerate() {
        let alone = complete(&engine, request(number)).await;
        assert_eq!(outcome.ids(), alone.ids(), "request {number}");
        let unbiased = Request { logit_bias: [].into(), ..request(number) };
        assert_ne!(outcome.ids(), complete(&engine, unbiased).await.ids(), "request {number}");
    }
    all_home(&engine, 4).await;
    engine.stop();
}

/// A refused group leaves nothing behind, and a dropped group releases all its resources.
#[actix::test]
async fn a_group_comes_whole_or_not_at_all() {
    let engine = engine("gqa", &[("scheduler.max_waiting", 2.into())]).await;
    let group = |len| vec![greedy(&prompt(3, 5), 20); len];
    let refused = engine.intake.submit(group(7)).await.map(drop);
    assert!(matches!(refused, Err(RequestError::Invalid { param: "n", .. })), "{refused:?}");
    let list = (0..7).map(|number| greedy(&prompt(number, 5), 20)).collect();
    let refused = engine.intake.submit(list).await.map(drop);
    assert!(matches!(refused, Err(RequestError::Invalid { param: "prompt", .. })), "{refused:?}");
    let mut with_a_bad_one = group(3);
    with_a_bad_one[2].stop_ids = [263].into();
    let refused = engine.intake.submit(with_a_bad_one).await.map(drop);
    assert!(matches!(refused, Err(RequestError::Invalid { param: "stop_token_ids", .. })), "{refused:?}");
    all_home(&engine, 4).await;
    drop(engine.intake.submit(group(6)).await.expect("the group is taken in"));
    all_home(&engine, 4).await;
    assert!(complete_group(&engine, group(6)).await.iter().all(|outcome| outcome.tokens.len() == 20));
    all_home(&engine, 4).await;
    engine.stop();
}

/// Before `min_tokens`, every end token and every stop token has a bias, beside those of the request.
#[actix::test]
async fn end_tokens_that_stand_many_times_are_one_and_any_number_of_biases_is_served() {
    let model = Copied::of("gqa", "many-ends");
    let named = format!("{{\"eos_token_id\": {:?}}}", [EOS; 600]);
    std::fs::write(model.file("generation_config.json"), named).expect("it can be written");
    let engine = start::start_engine(&config(&model.0, &[])).await.expect("one end token is not too many");
    assert_eq!(engine.model.eos, [EOS]);
    let ending = Request {
        ignore_eos: false,
        stop_ids: (3..200).collect(),
        logit_bias: [(EOS, 1000.0)].into(),
        ..greedy(&prompt(1, 6), 8)
    };
    assert_eq!(reason(&complete(&engine, ending).await), Stop);
    let request = Request { min_tokens: 6, stop_ids: [5].into(), ..greedy(&prompt(1, 6), 8) };
    let neutral = (0..VOCAB).map(|id| (id, 0.0)).collect();
    let many = Request { stop_ids: [5; VOCAB as usize].into(), logit_bias: neutral, ..request.clone() };
    assert_eq!(complete(&engine, many).await.ids(), complete(&engine, request).await.ids());
    engine.stop();
}

/// Every metric of steps and request times is recorded after some requests, and the counts of related metrics
/// agree.
#[actix::test]
async fn steps_and_times_are_recorded() {
    let handle = telemetry::install(None);
    let engine = engine("gqa", &[]).await;
    // The two requests that end early leave holes between the other two.
    complete_all(&engine, [9, 3, 6, 4].map(|tokens| greedy(&prompt(1, 6), tokens))).await;
    all_home(&engine, 4).await;
    engine.stop();
    let text = handle.render();
    let value = |series: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {series} in {text}")).parse().expect("it is a number")
    };
    for phase in ["plan", "forward", "sample", "deliver"] {
        for part in ["sum", "count"] {
            assert!(
                value(&format!("mainstem_step_phase_seconds_{part}{{phase=\"{phase}\"}}")) > 0.0,
                "{phase}"
            );
        }
    }
    for time in ["queue_time", "prefill_time", "decode_time", "inference_time", "time_per_output_token"] {
        let labels = if time == "queue_time" { "{class=\"interactive\"}" } else { "" };
        assert!(value(&format!("mainstem_request_{time}_seconds_sum{labels}")) > 0.0, "{time}");
        assert!(value(&format!("mainstem_request_{time}_seconds_count{labels}")) >= 4.0, "{time}");
    }
    assert!(value("mainstem_step_slots_sum") >= 22.0);
    assert!(value("mainstem_slot_moves_total") >= value("mainstem_slot_shuffles_total"));
    // Engines of other tests set the same gauges, and one that only embeds has no pages.
    assert!(value("mainstem_slots") > 0.0 && value("mainstem_kv_pages") >= 0.0);
    assert!(value("mainstem_queue_capacity") > 0.0);
    assert_eq!(value("mainstem_waiting_room"), value("mainstem_queue_capacity"));
}
