//! Tests of the run-ahead: what is sent before the results of the step before it, and what becomes of steps
//! that were sent too early.
//!
//! Invariant: a step's signal and its result are separate events, which each test orders itself.

use super::request;
use super::rig::{FaultOrder, PAGE, Rig, RigConfig, Signals, expected};
use crate::actors::kv::GetUsage;
use crate::actors::testing::with_timeout;
use crate::config::Policy;
use crate::request::{FinishReason, Request, RequestError};
use mainstem_kernels::{SpanTokens, StepBatch};

/// A rig with one lane on one device, which sends no signal unless the test does.
fn rig(slots: usize) -> Rig {
    Rig::new(RigConfig { signals: Signals::Never, ..RigConfig::new(slots, 1) })
}

/// The rows of the steps in flight, and how many of them decode a token.
fn rows(rig: &Rig) -> Vec<(usize, usize)> {
    let decoding =
        |step: &StepBatch| step.spans.iter().filter(|span| span.tokens == SpanTokens::Last).count();
    rig.in_flight().iter().map(|step| (step.rows(), decoding(step))).collect()
}

#[actix::test]
async fn a_step_is_sent_before_the_results_of_the_last_one() {
    let mut rig = rig(4);
    rig.submit(request(0, 3, 5)).await;
    rig.run_until_idle().await;
    assert_eq!(rows(&rig), [(3, 0)]);
    rig.signal_last_layer().await;
    assert_eq!(rows(&rig), [(3, 0), (1, 1)], "the token to decode is still being sampled");
    let next = rig.in_flight()[1];
    assert_eq!((next.spans[0].start, next.sampling[0].position), (3, 4));
    assert!(rig.clients[0].ids.is_empty());
    rig.signal_last_layer().await;
    assert_eq!(rig.in_flight().len(), 2, "at most one step is sent ahead");
    rig.complete_step().await;
    rig.run_until_idle().await;
    assert_eq!((rows(&rig), rig.clients[0].ids.len()), (vec![(1, 1)], 1));
    rig.run_to_end().await;
    rig.clients[0].assert_complete();
    rig.assert_all_released().await;
}

#[actix::test]
async fn a_request_that_arrives_before_the_signal_joins_the_next_step() {
    let mut rig = rig(4);
    rig.submit(request(0, 3, 9)).await;
    rig.complete_step().await;
    rig.run_until_idle().await;
    rig.submit(request(1, 7, 9)).await;
    rig.signal_last_layer().await;
    assert_eq!(rows(&rig), [(1, 1), (1 + 7, 1)]);
    // The next one comes too late for that step.
    rig.submit(request(2, 5, 9)).await;
    rig.complete_step().await;
    rig.signal_last_layer().await;
    assert_eq!(rows(&rig), [(1 + 7, 1), (2 + 5, 2)]);
    rig.run_to_end().await;
    rig.clients.iter().for_each(|client| client.assert_complete());
}

/// A sequence of maximum length leaves with the step that samples its last token: the next step has no row
/// for it, its slot and pages are free, and its last token still arrives.
#[actix::test]
async fn a_sequence_that_is_known_to_end_has_no_row_in_the_next_step() {
    let mut rig = rig(2);
    for (number, tokens) in [(0, 3), (1, 9), (2, 4)] {
        rig.submit(request(number, 3, tokens)).await;
    }
    // The first sequence starts a step before the second one.
    for _ in 0..2 {
        rig.signal_last_layer().await;
        rig.complete_step().await;
    }
    rig.signal_last_layer().await;
    // The third one begins in its slot.
    assert_eq!(rows(&rig), [(2, 2), (1 + 3, 1)]);
    let (slots, pages) = with_timeout(rig.kv.send(GetUsage)).await.expect("kv replies");
    // The second one has pages for its prompt and two of its tokens, and the third one for its prompt.
    assert_eq!((slots, pages), (2, (3 + 2usize).div_ceil(PAGE) + 3usize.div_ceil(PAGE)));
    assert_eq!((rig.clients[0].ids.len(), &rig.clients[0].end), (2, &None));
    rig.complete_step().await;
    rig.run_until_idle().await;
    rig.clients[0].assert_complete();
    rig.run_to_end().await;
    rig.clients.iter().for_each(|client| client.assert_complete());
    rig.assert_all_released().await;
}

/// With only such sequences, nothing is sent ahead, because the lane may be idle then.
#[actix::test]
async fn nothing_is_sent_ahead_of_the_last_step() {
    let mut rig = rig(2);
    rig.submit(Request { prompt_logprobs: Some(0), ..request(0, 3, 0) }).await;
    rig.submit(request(1, 3, 1)).await;
    for _ in 0..2 {
        rig.signal_last_layer().await;
        assert_eq!(rows(&rig), [(3, 0)]);
        rig.complete_step().await;
    }
    rig.run_to_end().await;
    assert!(rig.clients.iter().all(|client| client.end == Some(Ok(FinishReason::Length))));
    assert_eq!(rig.clients[0].prompt_tokens.len(), 3);
    rig.assert_all_released().await;
}

/// The row in the step after the stop token is computed in vain, and within the sequence's own pages.
#[actix::test]
async fn a_sequence_that_turns_out_to_have_ended_gets_no_further_token() {
    for signals in [Signals::Never, Signals::Always] {
        let mut rig = rig(2);
        let tokens = expected(&request(0, 3, 9));
        let end = tokens.iter().position(|token| *token == tokens[3]).expect("it is there") as u32 + 1;
        rig.submit(Request { stop_ids: [tokens[3]].into(), ..request(0, 3, 9) }).await;
        rig.submit(request(1, 3, 20)).await;
        for _ in 0..end {
            rig.signal_last_layer().await;
            rig.complete_step().await;
        }
        rig.run_until_idle().await;
        rig.clients[0].assert_complete();
        assert_eq!(rows(&rig), [(2, 2)], "the step with the useless row is in flight");
        // Its results come before or after the next step is scheduled.
        rig.config.signals = signals;
        rig.complete_step().await;
        rig.run_until_idle().await;
        assert_eq!((rows(&rig), rig.clients[0].ids.len()), (vec![(1, 1)], end as usize));
        rig.run_to_end().await;
        rig.clients.iter().for_each(|client| client.assert_complete());
        rig.assert_all_released().await;
    }
}

#[actix::test]
async fn a_disconnect_after_the_signal_wastes_one_row() {
    let mut rig = rig(2);
    rig.submit(request(0, 3, 20)).await;
    rig.submit(request(1, 3, 20)).await;
    rig.signal_last_layer().await;
    rig.complete_step().await;
    rig.signal_last_layer().await;
    rig.disconnect(0);
    rig.complete_step().await;
    rig.signal_last_layer().await;
    assert_eq!(rows(&rig), [(2, 2), (1, 1)]);
    rig.run_to_end().await;
    rig.clients[1].assert_complete();
    rig.assert_all_released().await;
}

/// A fault with two steps in flight: each client gets one end. What the first step sampled before the fault
/// counts, and a sequence that ended with it is complete.
#[actix::test]
async fn a_fault_fails_both_steps_once() {
    for through in [0, 1, 2] {
        for order in [FaultOrder::First, FaultOrder::Last] {
            let mut rig = rig(3);
            for (number, tokens) in [(0, 3), (1, 9), (2, 9)] {
                rig.submit(request(number, 3, tokens)).await;
            }
            for _ in 0..2 {
                rig.signal_last_layer().await;
                rig.complete_step().await;
            }
            rig.signal_last_layer().await;
            assert_eq!(rows(&rig), [(3, 3), (2, 2)]);
            rig.fail(through, order);
            rig.run_until_idle().await;
            assert!(rig.in_flight().is_empty(), "no step of the old epoch follows");
            match through {
                0 => assert!(matches!(rig.clients[0].end, Some(Err(RequestError::DeviceFailed(_))))),
                _ => rig.clients[0].assert_complete(),
            }
            for client in &rig.clients[1..] {
                assert!(matches!(client.end, Some(Err(RequestError::DeviceFailed(_)))), "{:?}", client.end);
                assert_eq!(client.ids, expected(&client.request)[..1 + through]);
            }
            let next = rig.submit(request(4, 9, 9)).await;
            rig.run_to_end().await;
            rig.clients[next].assert_complete();
            rig.assert_all_released().await;
        }
    }
}

/// The fault is noticed while the next step is scheduled, which is before the results of the step in flight.
#[actix::test]
async fn results_from_before_a_fault_count_while_the_next_step_is_scheduled() {
    for at_slot_update in [false, true] {
        let mut rig = rig(2);
        rig.submit(request(0, 3, 9)).await;
        rig.complete_step().await;
        rig.run_until_idle().await;
        let joining = rig.submit(request(1, 3, 9)).await;
        match at_slot_update {
            false => rig.fail_at_chunk_request(),
            true => rig.fail_at_slot_update(),
        }
        rig.signal_last_layer().await;
        rig.run_to_end().await;
        assert!(matches!(rig.clients[0].end, Some(Err(RequestError::DeviceFailed(_)))));
        // It has a slot, and so state on the devices, from the slot update on.
        match at_slot_update {
            false => rig.clients[joining].assert_complete(),
            true => assert!(matches!(rig.clients[joining].end, Some(Err(RequestError::DeviceFailed(_))))),
        }
        rig.assert_all_released().await;
    }
}

#[actix::test]
async fn a_panic_with_two_steps_in_flight_restarts_the_lane() {
    let mut rig = rig(2);
    rig.submit(request(0, 3, 20)).await;
    rig.submit(request(1, 3, 20)).await;
    rig.signal_last_layer().await;
    rig.complete_without_results();
    rig.run_until_idle().await;
    assert!(rig.clients.iter().all(|client| client.closed && client.end.is_none()));
    let next = rig.submit(request(2, 30, 12)).await;
    rig.run_to_end().await;
    rig.clients[next].assert_complete();
    rig.assert_all_released().await;
}

/// Several devices, several lanes, one step per sequence, or the setting.
#[actix::test]
async fn other_configurations_wait_for_the_results() {
    let one = RigConfig { signals: Signals::Never, ..RigConfig::new(4, 1) };
    for config in [
        RigConfig { stages: 2, ..one.clone() },
        RigConfig { lanes: 2, ..one.clone() },
        RigConfig { policy: Policy::Concurrent, ..one.clone() },
        RigConfig { run_ahead: false, ..one },
    ] {
        let (lanes, mut rig) = (config.lanes, Rig::new(config));
        for number in 0..4 {
            rig.submit(request(number, 3, 20)).await;
        }
        for _ in 0..12 {
            rig.signal_last_layer().await;
            assert_eq!(rig.in_flight().len(), lanes, "{:?}", rig.config);
            rig.complete_step().await;
        }
        rig.run_to_end().await;
        rig.clients.iter().for_each(|client| client.assert_complete());
    }
}
