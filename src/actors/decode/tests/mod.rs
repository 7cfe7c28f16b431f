//! Tests of lanes against simulated devices that the test drives: what is in flight, what the results are,
//! and what it costs on the devices' clock.
//!
//! Invariant: no test measures real time; the clock is the simulated devices'.

mod constrained;

mod rig;

mod run_ahead;

mod tenancy;

use crate::config::Policy;
use crate::decoding::beams::EarlyStopping;
use crate::decoding::{AcceptanceRule, Pooling};
use crate::request::client::{ClientId, ClientSettings};
use crate::request::{BeamOptions, Class, Client, DraftSource, Request, RequestError, Speculation, Task};
use crate::telemetry;
use mainstem_kernels::random::philox;
use mainstem_kernels::{SpanOutput, SpanTable, SpanTokens, StepBatch};
use rig::{FaultOrder, PAGE, Rig, RigConfig, Signals, VOCAB, expected};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Random choices of a test, by number.
struct Dice(u32);

impl Dice {
    fn throw(&self, number: u32, sides: usize) -> usize {
        philox([number, 0, 0, 0], [self.0, 9])[0] as usize % sides
    }
}

fn request(number: u64, len: usize, max_tokens: u32) -> Request {
    let token = |i: usize| (number as u32 * 13 + (i * i) as u32 * 5 + i as u32) % VOCAB;
    let prompt: Vec<u32> = (0..len).map(token).collect();
    Request { ignore_eos: true, ..Request::greedy("test", prompt, max_tokens) }
}

fn lanes_of(steps: &[&StepBatch]) -> BTreeSet<u32> {
    steps.iter().map(|step| step.lane).collect()
}

/// There are as many steps in flight as lanes, each of another lane, until the sequences run out.
#[actix::test]
async fn each_lane_has_a_step_in_flight() {
    for lanes in 1..5 {
        let mut rig = Rig::new(RigConfig::new(8, lanes));
        for number in 0..8 {
            rig.submit(request(number, 3, 20)).await;
        }
        for landing in 0..19 * lanes {
            rig.run_until_idle().await;
            let in_flight = rig.in_flight();
            assert_eq!((in_flight.len(), lanes_of(&in_flight).len()), (lanes, lanes), "landing {landing}");
            assert!(rig.complete_step().await);
        }
        rig.run_to_end().await;
        rig.clients.iter().for_each(|client| client.assert_complete());
        rig.assert_all_released().await;
    }
}

fn speculation(max_drafts: usize) -> Speculation {
    Speculation { drafter: DraftSource::Model, max_drafts, rule: AcceptanceRule::Coupled }
}

/// With a draft model that makes no mistakes, a step gives all tokens that it can; with one that makes some,
/// the tokens are the same.
#[actix::test]
async fn drafts_change_no_token() {
    for (drafts_well, run_ahead) in [(true, false), (true, true), (false, false)] {
        let mut rig = Rig::new(RigConfig { budget: 40, run_ahead, ..RigConfig::new(8, 1) });
        rig.model.draft_errors = if drafts_well { 0 } else { 4 };
        for number in 0..6 {
            let request = request(number, 7 + 9 * number as usize, 31);
            let speculation = (number < 4).then(|| speculation(1 + number as usize));
            rig.submit(Request { speculation, ..request }).await;
        }
        while rig.clients[3].speculated.is_none() {
            assert!(rig.complete_step().await);
        }
        assert_eq!(rig.clients[3].end, None, "the client knows the drafts of its tokens at any time");
        rig.run_to_end().await;
        rig.clients.iter().for_each(|client| client.assert_complete());
        for (number, client) in rig.clients.iter().enumerate() {
            let Some((drafted, accepted)) = client.speculated else { continue };
            assert!(number < 4);
            if drafts_well {
                // The first token comes with the prompt. The number of drafts is small at first, until it
                // shows how many are accepted.
                let rounds = 30usize.div_ceil(2 + number);
                assert!(drafted == accepted && accepted + rounds >= 24, "request {number}: {accepted}");
            } else {
                assert!(accepted > 0 && accepted < drafted, "{accepted} of {drafted}");
            }
        }
        assert_eq!(rig.clients.iter().filter(|client| client.speculated.is_some()).count(), 4);
        rig.assert_all_released().await;
    }
}

/// Drafts that were not worth their time are tried again, though the draft model has missed many tokens.
#[actix::test]
async fn drafts_are_tried_again_after_a_while() {
    let mut rig = Rig::new(RigConfig { run_ahead: false, ..RigConfig::new(2, 1) });
    rig.model.draft_errors = 1;
    rig.model.pass_time = Duration::from_micros(500);
    rig.submit(Request { speculation: Some(speculation(3)), ..request(0, 8, 140) }).await;
    let mut steps = Vec::new();
    loop {
        rig.run_until_idle().await;
        steps.extend(rig.in_flight().iter().map(|step| step.draft_count() > 0));
        if !rig.complete_step().await {
            break;
        }
    }
    rig.clients[0].assert_complete();
    let last_at_first = steps.windows(30).position(|steps| !steps.contains(&true));
    let last_at_first = last_at_first.expect("drafts that are all wrong are not worth their time");
    assert!(steps[last_at_first..].contains(&true), "{steps:?}");
}

/// Returns the requests for the best `answers` results of a beam search.
fn search(request: &Request, width: usize, answers: usize) -> Vec<Request> {
    let answer = |answer| {
        let early_stopping = EarlyStopping::Estimate;
        let beams = BeamOptions { width, length_penalty: 1.0, early_stopping, forced_tokens: 0, answer };
        Request { beams: Some(beams), prompt_logprobs: None, speculation: None, ..request.clone() }
    };
    (0..answers).map(answer).collect()
}

/// Beams permute their pages in every step, beside other sequences, in every lane, and begin anew after they
/// are preempted.
#[actix::test]
async fn beams_find_what_a_search_over_whole_sequences_finds() {
    for (lanes, run_ahead) in [(1, false), (1, true), (2, true)] {
        let mut charged = Vec::new();
        for (pages, stops) in [(None, &[5, 50, 60, 70][..]), (None, &[][..]), (Some(30), &[][..])] {
            let mut rig = Rig::new(RigConfig { pages, run_ahead, ..RigConfig::new(12, lanes) });
            rig.submit(request(1, 9, 40)).await;
            for (number, width) in [(2, 4), (3, 2), (4, 5), (5, 1)] {
                let plain = Request { stop_ids: stops.into(), ..request(number, 7 + number as usize, 12) };
                rig.submit_all(search(&plain, width, width.min(3))).await;
            }
            rig.submit(request(6, 9, 40)).await;
            rig.run_to_end().await;
            rig.clients.iter().for_each(|client| client.assert_complete());
            rig.assert_all_released().await;
            let preemptions = rig.count(&telemetry::PREEMPTIONS);
            assert_eq!(preemptions > 0, pages.is_some(), "{preemptions}");
            charged.push(rig.queue.lock().charged());
        }
        assert_eq!(charged[1], charged[2], "what is computed again is charged once");
    }
}

/// A search that fails tells all its clients, once; one whose client leaves gives up its slots.
#[actix::test]
async fn a_search_ends_as_a_whole() {
    let submit = async |rig: &mut Rig| {
        let others = rig.submit_all(search(&request(1, 5, 30), 4, 3)).await;
        for _ in 0..5 {
            rig.complete_step().await;
        }
        rig.run_until_idle().await;
        others
    };
    let mut rig = Rig::new(RigConfig::new(6, 1));
    submit(&mut rig).await;
    rig.complete_step_failing_row(2).await;
    rig.run_to_end().await;
    let ends =
        rig.clients.iter().map(|client| matches!(client.end, Some(Err(RequestError::SamplingFailed(_)))));
    assert_eq!(ends.collect::<Vec<_>>(), [true; 3]);
    rig.assert_all_released().await;
    submit(&mut rig).await;
    rig.fail(0, FaultOrder::First);
    rig.run_to_end().await;
    let ends =
        rig.clients[3..].iter().map(|client| matches!(client.end, Some(Err(RequestError::DeviceFailed(_)))));
    assert_eq!(ends.collect::<Vec<_>>(), [true; 3]);
    rig.assert_all_released().await;
    let last = submit(&mut rig).await;
    (last - 2..=last).for_each(|number| rig.disconnect(number));
    rig.run_to_end().await;
    rig.assert_all_released().await;
}

/// Returns the number of prompt rows in the steps that the rig completes until nothing is left.
async fn prompt_rows_to_end(rig: &mut Rig) -> usize {
    let mut rows = 0;
    loop {
        rig.run_until_idle().await;
        let spans = rig.in_flight().first().map_or(Vec::new(), |step| step.spans.clone());
        let given = spans.iter().filter(|span| matches!(span.tokens, SpanTokens::Given { .. }));
        rows += given.map(|span| span.len()).sum::<usize>();
        if !rig.complete_step().await {
            return rows;
        }
    }
}

/// A prompt that begins with the tokens of a finished sequence, of a running one, or of one that was
/// cancelled, computes only the rest, and gets the same tokens as without sharing.
#[actix::test]
async fn a_prompt_continues_the_pages_of_other_sequences() {
    for (lanes, budget) in [(1, 24), (1, 3), (2, 24)] {
        for (rounds, cancelled) in [(usize::MAX, false), (9, false), (9, true)] {
            let mut rig = Rig::new(RigConfig { budget, ..RigConfig::new(4, lanes) });
            let first = request(1, 10, 60);
            rig.submit(first.clone()).await;
            let mut round = 0;
            while round < rounds && rig.complete_step().await {
                round += 1;
            }
            rig.run_until_idle().await;
            let known = [&first.prompt[..], &rig.clients[0].ids].concat();
            if cancelled {
                rig.disconnect(0);
            }
            if rounds == usize::MAX {
                assert_eq!(known.len(), 70);
            } else {
                rig.complete_step().await;
                rig.run_until_idle().await;
            }
            // The last token of a running sequence may not be computed; pages are found when they are full.
            let len = known.len() - 1;
            let prompt = [&known[..len], &[5, 6, 7]].concat();
            let second = rig.submit(Request { prompt: prompt.into(), ..request(3, 0, 6) }).await;
            let rows = prompt_rows_to_end(&mut rig).await;
            let cached = rig.clients[second].cached.expect("it started");
            assert_eq!(rows, len + 3 - cached, "only the rest of the prompt is computed");
            let expected = if rounds == usize::MAX || cancelled { len } else { len - len % 4 };
            assert!(cached >= expected, "{cached} of {len} tokens, {rounds} rounds, {cancelled}");
            let ended: Vec<usize> = if cancelled { vec![second] } else { vec![0, second] };
            ended.iter().for_each(|number| rig.clients[*number].assert_complete());
            rig.assert_all_released().await;
        }
    }
}

/// The answers of one prompt compute it once.
#[actix::test]
async fn answers_of_one_prompt_compute_it_once() {
    for (prefix_cache, lanes, run_ahead) in [(true, 1, true), (false, 1, false), (false, 3, true)] {
        let mut rig = Rig::new(RigConfig { prefix_cache, run_ahead, ..RigConfig::new(9, lanes) });
        rig.submit_all(vec![request(1, 70, 9); 5]).await;
        let rows = prompt_rows_to_end(&mut rig).await;
        assert_eq!(rows, 70 + 4, "the others compute the last row of the prompt");
        rig.clients.iter().for_each(|client| client.assert_complete());
        rig.assert_all_released().await;
    }
}

/// Pages that a fault has lost are not shared, also by sequences that were about to start.
#[actix::test]
async fn a_fault_forgets_the_prefix_cache() {
    for (lanes, starts) in [(1, true), (1, false), (2, false), (3, false)] {
        let mut rig = Rig::new(RigConfig::new(6, lanes));
        rig.submit(request(1, 30, 4)).await;
        rig.run_to_end().await;
        rig.submit(request(2, 3, 30)).await;
        rig.complete_step().await;
        rig.run_until_idle().await;
        if starts {
            let next = rig.submit(request(1, 30, 4)).await;
            rig.fail_at_chunk_request();
            rig.run_to_end().await;
            rig.clients[next].assert_complete();
        } else {
            rig.fail(0, FaultOrder::First);
            rig.run_until_idle().await;
            let next = rig.submit(request(1, 30, 4)).await;
            rig.run_to_end().await;
            rig.clients[next].assert_complete();
            assert_eq!(rig.clients[next].cached, Some(0));
        }
        let last = rig.submit(request(1, 30, 4)).await;
        rig.run_to_end().await;
        rig.clients[last].assert_complete();
        assert_eq!(rig.clients[last].cached, Some(29), "what was computed since is found");
        rig.assert_all_released().await;
    }
}

/// Sequences that do not fit together all end with their tokens, those that have waited longest first.
#[actix::test]
async fn sequences_are_preempted_and_continue() {
    for (lanes, run_ahead) in [(1, false), (1, true), (2, false), (3, false)] {
        let pages = Some(24);
        let mut rig = Rig::new(RigConfig { pages, run_ahead, ..RigConfig::new(6, lanes) });
        // Each needs 20 pages at its end.
        for number in 0..6 {
            rig.submit(request(number, 10, 70)).await;
        }
        rig.run_to_end().await;
        rig.clients.iter().for_each(|client| client.assert_complete());
        assert!(rig.count(&telemetry::PREEMPTIONS) >= 5);
        let ends: Vec<u64> = rig.clients.iter().map(|client| client.token_times[69]).collect();
        assert!(ends.is_sorted(), "{ends:?}");
        rig.assert_all_released().await;
    }
}

#[actix::test]
async fn one_step_in_flight_with_one_lane() {
    let mut rig = Rig::new(RigConfig { stages: 2, ..RigConfig::new(4, 1) });
    for number in 0..6 {
        rig.submit(request(number, 30, 9)).await;
    }
    while rig.complete_step().await {
        rig.run_until_idle().await;
        assert!(rig.in_flight().len() <= 1);
    }
    rig.clients.iter().for_each(|client| client.assert_complete());
}

/// With a step for each stage in flight, no stage waits, so throughput is proportional to the number of
/// stages. In this test only rows cost time.
#[actix::test]
async fn throughput_grows_with_the_stages() {
    let time = async |stages, lanes| {
        let mut rig = Rig::new(RigConfig { stages, step_cost: 0, row_cost: 1, ..RigConfig::new(12, lanes) });
        for number in 0..12 {
            rig.submit(request(number, 2, 60)).await;
        }
        rig.run_to_end().await;
        rig.clients.iter().for_each(|client| client.assert_complete());
        rig.clock as f64
    };
    for stages in 2..5 {
        let gain = time(stages, 1).await / time(stages, stages).await;
        assert!(gain > 0.93 * stages as f64, "{stages} stages: {gain:.2} times one lane's");
    }
}

/// Requests that arrive together have the same lengths, and so take the same time, whatever their lanes.
#[actix::test]
async fn latency_does_not_depend_on_the_lane() {
    for (lanes, sequences) in [(2, 8), (3, 8), (4, 16), (4, 5)] {
        let config = RigConfig::new(16, lanes);
        let step = config.step_cost;
        let mut rig = Rig::new(config);
        for number in 0..sequences {
            rig.submit(request(number, 2, 40)).await;
        }
        rig.run_to_end().await;
        // Between two of its tokens, each sequence waits for exactly one step of each lane.
        for client in &rig.clients {
            client.assert_complete();
            let gaps: BTreeSet<u64> = client.token_times.windows(2).map(|pair| pair[1] - pair[0]).collect();
            assert_eq!(gaps, BTreeSet::from([step * lanes as u64]));
        }
        let firsts: Vec<u64> = rig.clients.iter().map(|client| client.token_times[0]).collect();
        let (first, last) = (firsts.iter().min().unwrap(), firsts.iter().max().unwrap());
        assert!(last - first <= 2 * step * lanes as u64, "{firsts:?}");
    }
}

/// With nothing else to do, the chunks of a long prompt follow each other through the stages without gaps.
#[actix::test]
async fn chunks_of_a_long_prompt_use_idle_lanes_capacity() {
    for lanes in 1..5 {
        let config = RigConfig { budget: 9, ..RigConfig::new(8, lanes) };
        let step = config.step_cost;
        let mut rig = Rig::new(config);
        rig.submit(Request { prompt_logprobs: Some(0), ..request(1, 120, 3) }).await;
        let chunks = 120usize.div_ceil(9);
        for landed in 0..chunks {
            rig.run_until_idle().await;
            let in_flight = rig.in_flight();
            assert_eq!(in_flight.len(), lanes.min(chunks - landed), "{landed} landed");
            assert_eq!(lanes_of(&in_flight).len(), 1, "all are of one lane");
            assert!(rig.complete_step().await);
        }
        let first = (chunks + lanes - 1) as u64 * step;
        assert_eq!(rig.clock, first, "each stage was busy all the time");
        rig.run_to_end().await;
        let client = &rig.clients[0];
        client.assert_complete();
        assert_eq!(client.token_times[0], first);
        rig.assert_all_released().await;
    }
}

/// Beside a decoding lane, a long prompt is prefilled ahead as long as the third lane is idle, and no longer.
#[actix::test]
async fn chunks_are_sent_ahead_only_for_idle_lanes() {
    let mut rig = Rig::new(RigConfig { budget: 9, ..RigConfig::new(6, 3) });
    rig.submit(request(0, 3, 30)).await;
    rig.complete_step().await;
    rig.submit(request(1, 140, 3)).await;
    // The long prompt's first chunk is sent as soon as its lane requests chunks, which is at once: it is
    // idle.
    rig.run_until_idle().await;
    assert_eq!(rig.in_flight().iter().map(|step| step.lane).collect::<Vec<_>>(), [0, 1, 1]);
    for _ in 0..6 {
        rig.complete_step().await;
        rig.run_until_idle().await;
        let mut lanes: Vec<u32> = rig.in_flight().iter().map(|step| step.lane).collect();
        lanes.sort_unstable();
        assert_eq!(lanes, [0, 1, 1]);
    }
    rig.submit(request(2, 3, 30)).await;
    for _ in 0..3 {
        rig.complete_step().await;
    }
    for _ in 0..6 {
        rig.complete_step().await;
        rig.run_until_idle().await;
        assert_eq!(lanes_of(&rig.in_flight()).len(), 3);
        assert_eq!(rig.in_flight().len(), 3);
    }
    rig.run_to_end().await;
    rig.clients.iter().for_each(|client| client.assert_complete());
    // The decoding sequence never waited for more than the other lanes' steps.
    let gaps: BTreeSet<u64> = rig.clients[0].token_times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.iter().all(|gap| *gap <= 4 * rig.config.step_cost), "{gaps:?}");
    rig.assert_all_released().await;
}

#[actix::test]
async fn a_disconnect_frees_slot_and_pages_of_its_lane() {
    let mut rig = Rig::new(RigConfig { budget: 9, ..RigConfig::new(6, 3) });
    // One sequence decodes, one is in the middle of a prompt with chunks ahead, and one stays.
    for (number, len) in [(0, 3), (1, 140), (2, 3)] {
        rig.submit(request(number, len, 12)).await;
    }
    for _ in 0..4 {
        rig.complete_step().await;
    }
    rig.disconnect(0);
    rig.disconnect(1);
    rig.run_to_end().await;
    rig.clients[2].assert_complete();
    rig.assert_all_released().await;
    // A single sequence in the middle of its prompt, with steps ahead.
    let number = rig.submit(request(3, 140, 12)).await;
    rig.complete_step().await;
    rig.run_until_idle().await;
    assert_eq!(rig.in_flight().len(), 3);
    rig.disconnect(number);
    rig.run_to_end().await;
    rig.assert_all_released().await;
    let number = rig.submit(request(4, 10, 12)).await;
    rig.run_to_end().await;
    rig.clients[number].assert_complete();
}

#[actix::test]
async fn a_panic_affects_its_lane_only() {
    let mut rig = Rig::new(RigConfig::new(6, 3));
    for number in 0..6 {
        rig.submit(request(number, 3, 12)).await;
    }
    for _ in 0..7 {
        rig.complete_step().await;
    }
    rig.run_until_idle().await;
    let lost = rig.in_flight()[0].lane;
    rig.complete_without_results();
    let number = rig.submit(request(6, 30, 12)).await;
    rig.run_to_end().await;
    rig.clients[number].assert_complete();
    let (silent, whole): (Vec<_>, Vec<_>) = rig.clients.iter().partition(|client| client.end.is_none());
    assert_eq!((silent.len(), whole.len()), (2, 5), "the sequences of lane {lost}, and the others");
    assert!(silent.iter().all(|client| client.closed && expected(&client.request).starts_with(&client.ids)));
    whole.iter().for_each(|client| client.assert_complete());
    assert!(!rig.status.has_failed());
    rig.assert_all_released().await;
}

#[actix::test]
async fn a_fault_fails_every_lane() {
    let mut rig = Rig::new(RigConfig::new(6, 3));
    for number in 0..9 {
        rig.submit(request(number, 3, 12)).await;
    }
    for _ in 0..5 {
        rig.complete_step().await;
    }
    rig.run_until_idle().await;
    assert_eq!(rig.in_flight().len(), 3);
    rig.fail(0, FaultOrder::First);
    rig.run_to_end().await;
    for (number, client) in rig.clients.iter().enumerate() {
        match number {
            0..6 => assert!(
                matches!(&client.end, Some(Err(RequestError::DeviceFailed(why))) if why.contains("test's"))
            ),
            _ => client.assert_complete(),
        }
        assert!(expected(&client.request).starts_with(&client.ids));
    }
    rig.assert_all_released().await;
}

/// In a step with its prompt, or later.
#[actix::test]
async fn a_row_without_a_token_ends_its_sequence_and_no_other() {
    // The step after the failing one is in flight already, and the last one is that of a sequence that
    // leaves.
    for steps in [0, 3, 11] {
        let mut rig = Rig::new(RigConfig::new(4, 1));
        for number in 0..5 {
            rig.submit(request(number, 3, 12)).await;
        }
        for _ in 0..steps {
            rig.complete_step().await;
        }
        rig.complete_step_failing_row(0).await;
        rig.run_to_end().await;
        for (number, client) in rig.clients.iter().enumerate() {
            if number == 0 {
                let why = "the host supplied no valid mask or token".to_owned();
                assert_eq!(client.end, Some(Err(RequestError::SamplingFailed(why))));
                assert_eq!(client.ids, expected(&client.request)[..steps]);
            } else {
                client.assert_complete();
            }
        }
        rig.assert_all_released().await;
    }
}

/// A step that completed before another lane's step failed may be processed before or after the fault is
/// reported. Its sequences are lost too, and its token is their last.
#[actix::test]
async fn a_lane_without_a_failed_step_fails_too() {
    for heard in [FaultOrder::First, FaultOrder::Last] {
        let mut rig = Rig::new(RigConfig::new(4, 2));
        for number in 0..4 {
            rig.submit(request(number, 3, 12)).await;
        }
        for _ in 0..5 {
            rig.complete_step().await;
        }
        rig.run_until_idle().await;
        assert_eq!(lanes_of(&rig.in_flight()).len(), 2);
        rig.fail(1, heard);
        rig.run_until_idle().await;
        assert!(rig.in_flight().is_empty(), "no lane continues");
        for client in &rig.clients {
            assert!(matches!(client.end, Some(Err(RequestError::DeviceFailed(_)))), "{:?}", client.end);
            assert!(
                expected(&client.request).starts_with(&client.ids),
                "no token is computed from lost state"
            );
        }
        let number = rig.submit(request(9, 20, 12)).await;
        rig.run_to_end().await;
        rig.clients[number].assert_complete();
        rig.assert_all_released().await;
    }
}

/// An idle lane has no state on the devices, and starts on the rebuilt ones.
#[actix::test]
async fn an_idle_lane_loses_nothing_in_a_fault() {
    let mut rig = Rig::new(RigConfig::new(4, 2));
    rig.submit(request(0, 3, 12)).await;
    for _ in 0..4 {
        rig.complete_step().await;
    }
    rig.run_until_idle().await;
    rig.fail(0, FaultOrder::First);
    rig.run_until_idle().await;
    let next = [rig.submit(request(1, 3, 12)).await, rig.submit(request(2, 3, 12)).await];
    rig.run_until_idle().await;
    assert_eq!(lanes_of(&rig.in_flight()).len(), 2);
    rig.run_to_end().await;
    next.iter().for_each(|number| rig.clients[*number].assert_complete());
    assert!(matches!(rig.clients[0].end, Some(Err(RequestError::DeviceFailed(_)))));
    rig.assert_all_released().await;
}

/// A fault while the request for chunks is pending: the sequences of the reply had no slots yet, and start on
/// the rebuilt devices, whether their prompts take one chunk or several.
#[actix::test]
async fn sequences_that_start_during_a_fault_are_not_lost() {
    for len in [3, 70] {
        let mut rig = Rig::new(RigConfig::new(4, 1));
        rig.submit(request(0, 3, 20)).await;
        for _ in 0..4 {
            rig.complete_step().await;
        }
        rig.run_until_idle().await;
        let next = rig.submit(request(1, len, 12)).await;
        rig.fail_at_chunk_request();
        rig.run_to_end().await;
        let [old, new] = [&rig.clients[0], &rig.clients[next]];
        assert!(matches!(old.end, Some(Err(RequestError::DeviceFailed(_)))), "{:?}", old.end);
        new.assert_complete();
        rig.assert_all_released().await;
    }
}

/// A fault during the slot update: the new sequences have their slots by then, and fail like the others.
#[actix::test]
async fn sequences_with_slots_fail_when_the_devices_fail() {
    for len in [3, 70] {
        let mut rig = Rig::new(RigConfig::new(4, 1));
        rig.submit(request(0, 3, 20)).await;
        for _ in 0..4 {
            rig.complete_step().await;
        }
        rig.run_until_idle().await;
        rig.submit(request(1, len, 12)).await;
        rig.fail_at_slot_update();
        rig.run_to_end().await;
        for client in &rig.clients {
            assert!(matches!(client.end, Some(Err(RequestError::DeviceFailed(_)))), "{:?}", client.end);
            assert!(expected(&client.request).starts_with(&client.ids));
        }
        let next = rig.submit(request(2, len, 12)).await;
        rig.run_to_end().await;
        rig.clients[next].assert_complete();
        rig.assert_all_released().await;
    }
}

/// `/health` depends on this: an iteration of many steps may take long, but each step that completes is a
/// heartbeat.
#[actix::test]
async fn every_completed_step_is_a_heartbeat() {
    let mut rig = Rig::new(RigConfig { policy: Policy::Concurrent, ..RigConfig::new(4, 1) });
    for number in 0..4 {
        rig.submit(request(number, 3, 12)).await;
    }
    for landing in 0..12 {
        rig.run_until_idle().await;
        while rig.status.stalled_for() < Duration::from_millis(20) {
            tokio::task::yield_now().await;
        }
        let before = Instant::now();
        rig.complete_step().await;
        rig.run_until_idle().await;
        let stalled = rig.status.stalled_for();
        // Times are kept in whole milliseconds.
        let most = before.elapsed() + Duration::from_millis(2);
        assert!(stalled <= most, "landing {landing}");
    }
}

/// Returns the clients that get a token from the oldest step in flight, in the order of submission.
async fn clients_with_a_token_from_next_step(rig: &mut Rig) -> Vec<usize> {
    rig.run_until_idle().await;
    let before: Vec<usize> = rig.clients.iter().map(|client| client.ids.len()).collect();
    rig.complete_step().await;
    rig.run_until_idle().await;
    (0..before.len()).filter(|number| rig.clients[*number].ids.len() > before[*number]).collect()
}

/// The steps of a long prompt are in flight when a sequence before it leaves, so that its index changes and
/// another sequence takes its old one.
#[actix::test]
async fn results_reach_their_sequence_when_its_index_changes() {
    let mut rig = Rig::new(RigConfig { budget: 9, shuffle: false, ..RigConfig::new(12, 3) });
    for number in 0..12 {
        rig.submit(request(number, 1, 60)).await;
    }
    for _ in 0..30 {
        rig.complete_step().await;
    }
    // The long prompt takes a slot between others in one lane; the other lanes become idle.
    let own = clients_with_a_token_from_next_step(&mut rig).await;
    assert_eq!(own.len(), 4);
    rig.disconnect(own[1]);
    for _ in 0..4 {
        rig.complete_step().await;
    }
    let long = rig.submit(Request { prompt_logprobs: Some(0), ..request(20, 130, 5) }).await;
    for _ in 0..6 {
        rig.complete_step().await;
    }
    (0..12).filter(|number| !own.contains(number)).for_each(|number| rig.disconnect(number));
    for _ in 0..5 {
        rig.complete_step().await;
    }
    rig.run_until_idle().await;
    assert_eq!(
        (rig.in_flight().len(), lanes_of(&rig.in_flight()).len()),
        (3, 1),
        "its chunks are sent ahead"
    );
    rig.disconnect(own[0]);
    rig.run_to_end().await;
    for number in [own[2], own[3], long] {
        rig.clients[number].assert_complete();
    }
    rig.assert_all_released().await;
}

/// Texts are embedded in chunks, together with others that generate, while clients leave. The model's hidden
/// states are the tokens.
#[actix::test]
async fn hidden_states_reach_their_owners_when_others_leave() {
    for (seed, lanes, run_ahead) in [(1, 1, true), (2, 1, false), (3, 3, true), (4, 3, false)] {
        let mut rig = Rig::new(RigConfig { run_ahead, pages: Some(60), ..RigConfig::new(6, lanes) });
        let dice = Dice(seed);
        for number in 0..40 {
            let task = [Task::Embed(Pooling::Mean), Task::Embed(Pooling::Last), Task::Generate];
            let task = task[dice.throw(number, 3)].clone();
            let max_tokens = if task == Task::Generate { 4 } else { 0 };
            let len = 1 + dice.throw(100 + number, 40);
            rig.submit(Request { task, ..request(number.into(), len, max_tokens) }).await;
        }
        let mut gone = BTreeSet::new();
        for step in 200.. {
            rig.run_until_idle().await;
            let running = (0..40).find(|number| rig.clients[*number].end.is_none() && !gone.contains(number));
            if let Some(number) = running.filter(|_| dice.throw(step, 4) == 0) {
                rig.disconnect(number);
                gone.insert(number);
            }
            if !rig.complete_step().await {
                break;
            }
        }
        let stayed = rig.clients.iter().enumerate().filter(|(number, _)| !gone.contains(number));
        for (_, client) in stayed {
            let mut tokens = client.request.prompt.iter().map(|token| *token as f32);
            let expected = match client.request.task {
                Task::Embed(Pooling::Mean) => tokens.clone().sum::<f32>() / tokens.len() as f32,
                Task::Embed(_) => tokens.next_back().expect("there is a token"),
                _ => {
                    client.assert_complete();
                    continue;
                }
            };
            let vector = client.vector.as_deref().expect("there is a vector");
            assert!((vector[0] - expected).abs() < 1e-4 && vector.len() == 1, "{vector:?} {expected}");
        }
        assert!((3..30).contains(&gone.len()), "{}", gone.len());
        rig.assert_all_released().await;
    }
}

/// The number of holes computed in the steps in flight.
fn computed_holes(steps: &[&StepBatch]) -> usize {
    let spans = steps.iter().flat_map(|step| &step.spans);
    spans.filter(|span| span.table == SpanTable::Null && span.output == SpanOutput::Last).count()
}

/// Random test of everything at once: requests of all lengths at random times, some of which end at a stop
/// token, clients that disconnect, and faults if `faults` is set. Every token that a client gets is the right
/// one, and all resources are released at the end.
async fn stress(config: RigConfig, dice: Dice, faults: bool) -> StressCounts {
    // In every other run, the draft model's context ends before those of many sequences.
    let config = RigConfig { draft_context: [48, config.draft_context][dice.0 as usize % 2], ..config };
    let label = format!("{config:?}, seed {}", dice.0);
    let mut rig = Rig::new(config);
    let (mut submitted, mut faulty, mut hung_up) = (0, 0, BTreeSet::new());
    for round in 0..600u32 {
        let throw = |number: u32, sides| dice.throw(round * 16 + number, sides);
        // In every other run, requests are so rare that lanes become idle.
        if submitted < 40 && throw(0, [3, 14][dice.0 as usize % 2]) == 0 {
            for _ in 0..1 + throw(1, 4) {
                let n = submitted as u32;
                let (len, tokens) = (1 + dice.throw(90_000 + n, 70), 1 + dice.throw(91_000 + n, 25) as u32);
                let prompt_logprobs = (dice.throw(92_000 + n, 4) == 0).then_some(0);
                let stops = 4 * (dice.throw(93_000 + n, 2) as u32);
                let stop_ids = (0..stops).map(|i| (n * 7 + i * 20) % VOCAB).collect();
                let min_tokens = dice.throw(94_000 + n, tokens as usize + 1) as u32;
                // Prompts of one family begin alike.
                let request = request(dice.throw(95_000 + n, 3) as u64, len, tokens);
                let speculates = dice.throw(99_000 + n, 3) == 0;
                let mut speculation = speculates.then(|| speculation(1 + dice.throw(99_500 + n, 4)));
                if let Some(speculation) = speculation.as_mut().filter(|_| n.is_multiple_of(3)) {
                    speculation.drafter = DraftSource::PromptLookup { shortest: 1, longest: 3 };
                }
                // In two of three runs, there are several clients, of which some are of the later class.
                let client = dice.0 % 3 * dice.throw(99_700 + n, 4) as u32;
                let class = [Class::Interactive, Class::Batch][client as usize / 3 % 2];
                let settings = ClientSettings { weight: 1 + client, ..ClientSettings::default() };
                let client = Client { id: ClientId::Key(client.into()), name: "test".into(), settings };
                let request = Request { client: client.into(), class, ..request };
                let request = Request { prompt_logprobs, stop_ids, min_tokens, speculation, ..request };
                let answers = 1 + dice.throw(96_000 + n, 8) / 6;
                let width = (1 + dice.throw(97_000 + n, 4)).min(rig.config.slots / rig.config.lanes);
                let shared = len / PAGE;
                let needed = shared + width * ((len + tokens as usize).div_ceil(PAGE) - shared);
                let requests = match dice.throw(98_000 + n, 5) {
                    0 if needed <= rig.config.pages.unwrap_or(usize::MAX) => {
                        search(&request, width, answers.min(width))
                    }
                    _ => vec![request; answers],
                };
                submitted += requests.len() as u64;
                rig.submit_all(requests).await;
            }
        }
        if throw(2, 12) == 0 && submitted > 0 {
            let number = throw(3, submitted as usize);
            // The clients of a search are one.
            let answer = |number: usize| rig.clients.get(number)?.request.beams.map(|beams| beams.answer);
            let first = number - answer(number).unwrap_or(0);
            let more = (first + 1..).take_while(|number| answer(*number).is_some_and(|answer| answer > 0));
            let all: Vec<usize> = std::iter::once(first).chain(more).collect();
            all.iter().for_each(|number| rig.disconnect(*number));
            hung_up.extend(all);
        }
        if faults && throw(4, 25) == 0 {
            if throw(6, 3) > 0 {
                rig.run_until_idle().await;
            }
            let in_flight = rig.in_flight().len();
            match throw(8, 4) {
                0 if in_flight == 0 => rig.fail_at_chunk_request(),
                1 if in_flight == 0 => rig.fail_at_slot_update(),
                _ => rig.fail(throw(5, in_flight + 1), [FaultOrder::First, FaultOrder::Last][throw(7, 2)]),
            }
            faulty += 1;
        }
        if !rig.complete_step().await && submitted >= 40 {
            break;
        }
    }
    rig.run_to_end().await;
    for (number, client) in rig.clients.iter().enumerate() {
        let is_search = client.request.beams.is_some();
        assert!(is_search || expected(&client.request).starts_with(&client.ids), "{label}: request {number}");
        match client.end {
            _ if hung_up.contains(&number) => {}
            Some(Ok(_)) => client.assert_complete(),
            Some(Err(RequestError::DeviceFailed(_))) if faulty > 0 => {}
            ref end => panic!("{label}: request {number} ended with {end:?}"),
        }
    }
    assert_eq!(submitted, rig.clients.len() as u64);
    rig.assert_all_released().await;
    let (hits, queries) =
        (rig.count(&telemetry::PREFIX_CACHE_HITS), rig.count(&telemetry::PREFIX_CACHE_QUERIES));
    let is_used = 0 < hits && hits < queries;
    assert!(if rig.config.prefix_cache { is_used } else { queries == 0 }, "{label}: {hits} of {queries}");
    StressCounts { faults: faulty, preemptions: rig.count(&telemetry::PREEMPTIONS) }
}

/// Events of a random test.
struct StressCounts {
    faults: usize,
    preemptions: u64,
}

/// With few pages, sequences are preempted all the time, and each client still gets its own tokens.
#[actix::test]
async fn preemption_changes_no_token() {
    let mut preemptions = 0;
    for seed in 0..10 {
        for lanes in 1..5 {
            let pages = Some(24 + 5 * (seed as usize % 4));
            let config = RigConfig { budget: 11, shuffle: seed % 3 > 0, pages, ..RigConfig::new(9, lanes) };
            let stages = if seed % 2 == 0 { 1 } else { lanes };
            let config = RigConfig { stages, prefix_cache: seed % 4 > 0, ..config };
            let counts = stress(config, Dice(seed + 600), seed % 3 == 1).await;
            preemptions += counts.preemptions;
        }
    }
    assert!(preemptions > 200, "{preemptions}");
}

#[actix::test]
async fn each_client_gets_its_own_tokens() {
    for seed in 0..4 {
        for lanes in 1..5 {
            let config =
                RigConfig { budget: 11, shuffle: seed % 3 > 0, row_cost: 1, ..RigConfig::new(9, lanes) };
            stress(RigConfig { stages: 1, ..config.clone() }, Dice(seed), false).await;
            stress(config, Dice(seed + 50), false).await;
        }
    }
}

/// With and without run-ahead, and with signals that come too late for it, each client gets the tokens that
/// its request alone determines.
#[actix::test]
async fn running_ahead_changes_no_token() {
    for seed in 0..8 {
        for (run_ahead, signals) in
            [(false, Signals::Always), (true, Signals::Always), (true, Signals::Sometimes(seed))]
        {
            let policy =
                if seed % 4 == 3 { Policy::Window { window: Duration::ZERO } } else { Policy::Fused };
            let config = RigConfig { budget: 11, shuffle: seed % 3 > 0, policy, ..RigConfig::new(9, 1) };
            let config = RigConfig { run_ahead, signals, ..config };
            stress(config.clone(), Dice(seed + 400), false).await;
            stress(config, Dice(seed + 500), true).await;
        }
    }
}

#[actix::test]
async fn faults_cause_no_wrong_tokens() {
    let mut faults = 0;
    for seed in 0..9 {
        for lanes in 1..5 {
            let config = RigConfig { budget: 11, shuffle: seed % 3 > 0, ..RigConfig::new(9, lanes) };
            let stages = if seed % 2 == 0 { 1 } else { lanes };
            faults += stress(RigConfig { stages, ..config }, Dice(seed + 100), true).await.faults;
        }
    }
    assert!(faults > 100, "{faults}");
}

#[actix::test]
async fn baseline_policies_are_correct_with_lanes() {
    for seed in 0..4 {
        for lanes in [1, 2, 3] {
            let config = RigConfig { budget: 11, shuffle: seed % 2 > 0, ..RigConfig::new(9, lanes) };
            let policy = Policy::Window { window: Duration::ZERO };
            stress(RigConfig { policy, ..config.clone() }, Dice(seed + 200), seed > 1).await;
            stress(RigConfig { policy: Policy::Concurrent, ..config }, Dice(seed + 300), seed > 1).await;
        }
    }
}

/// Under the papers' baselines, lanes change only how much is in flight.
#[actix::test]
async fn lanes_do_not_change_the_steps_of_the_baselines() {
    let mut rig = Rig::new(RigConfig { policy: Policy::Concurrent, ..RigConfig::new(6, 2) });
    for number in 0..6 {
        rig.submit(request(number, 30, 8)).await;
    }
    loop {
        rig.run_until_idle().await;
        assert!(rig.in_flight().iter().all(|step| step.spans.len() == 1), "one sequence per step");
        assert!(lanes_of(&rig.in_flight()).len() == rig.in_flight().len(), "one step per lane");
        if !rig.complete_step().await {
            break;
        }
    }
    rig.clients.iter().for_each(|client| client.assert_complete());
    let mut rig = Rig::new(RigConfig { shuffle: false, ..RigConfig::new(8, 2) });
    for (number, tokens) in [4, 9, 9, 20, 12, 2, 7, 20].into_iter().enumerate() {
        rig.submit(request(number as u64, 2, tokens)).await;
    }
    let mut seen = 0;
    while rig.complete_step().await {
        rig.run_until_idle().await;
        assert!(rig.in_flight().iter().all(|step| step.moves.is_empty()));
        seen += computed_holes(&rig.in_flight());
    }
    assert!(seen > 0, "holes are computed");
    rig.clients.iter().for_each(|client| client.assert_complete());
}
