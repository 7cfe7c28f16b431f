//! Tests of lanes against simulated devices that the test drives: what is in flight, what the results are,
//! and what it costs on the devices' clock.
//!
//! Invariant: no test measures real time; the clock is the simulated devices'.

mod rig;

use crate::config::Policy;
use crate::request::{Request, RequestError};
use mainstem_kernels::random::philox;
use mainstem_kernels::{SpanTable, StepBatch, Want};
use rig::{Heard, Rig, VOCAB, Wish, expected};
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
        let mut rig = Rig::new(Wish::new(8, lanes));
        for number in 0..8 {
            rig.submit(request(number, 3, 20)).await;
        }
        for landing in 0..19 * lanes {
            rig.calm().await;
            let in_flight = rig.flying();
            assert_eq!((in_flight.len(), lanes_of(&in_flight).len()), (lanes, lanes), "landing {landing}");
            assert!(rig.land().await);
        }
        rig.run().await;
        rig.told.iter().for_each(|client| client.assert_whole());
        rig.all_home().await;
    }
}

#[actix::test]
async fn one_step_at_a_time_without_lanes() {
    let mut rig = Rig::new(Wish { stages: 2, ..Wish::new(4, 1) });
    for number in 0..6 {
        rig.submit(request(number, 30, 9)).await;
    }
    while rig.land().await {
        rig.calm().await;
        assert!(rig.flying().len() <= 1);
    }
    rig.told.iter().for_each(|client| client.assert_whole());
}

/// With a step for each stage in flight, no stage waits, so throughput is proportional to the number of
/// stages. In this test only rows cost time.
#[actix::test]
async fn throughput_grows_with_the_stages() {
    let time = async |stages, lanes| {
        let mut rig = Rig::new(Wish { stages, step: 0, row: 1, ..Wish::new(12, lanes) });
        for number in 0..12 {
            rig.submit(request(number, 2, 60)).await;
        }
        rig.run().await;
        rig.told.iter().for_each(|client| client.assert_whole());
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
        let config = Wish::new(16, lanes);
        let step = config.step;
        let mut rig = Rig::new(config);
        for number in 0..sequences {
            rig.submit(request(number, 2, 40)).await;
        }
        rig.run().await;
        // Between two of its tokens, each sequence waits for exactly one step of each lane.
        for client in &rig.told {
            client.assert_whole();
            let gaps: BTreeSet<u64> = client.at.windows(2).map(|pair| pair[1] - pair[0]).collect();
            assert_eq!(gaps, BTreeSet::from([step * lanes as u64]));
        }
        let firsts: Vec<u64> = rig.told.iter().map(|client| client.at[0]).collect();
        let (first, last) = (firsts.iter().min().unwrap(), firsts.iter().max().unwrap());
        assert!(last - first <= 2 * step * lanes as u64, "{firsts:?}");
    }
}

/// With nothing else to do, the chunks of a long prompt follow each other through the stages without gaps.
#[actix::test]
async fn chunks_of_a_long_prompt_fill_what_other_lanes_leave() {
    for lanes in 1..5 {
        let config = Wish { budget: 9, ..Wish::new(8, lanes) };
        let step = config.step;
        let mut rig = Rig::new(config);
        rig.submit(Request { prompt_logprobs: true, ..request(1, 120, 3) }).await;
        let chunks = 120usize.div_ceil(9);
        for landed in 0..chunks {
            rig.calm().await;
            let in_flight = rig.flying();
            assert_eq!(in_flight.len(), lanes.min(chunks - landed), "{landed} landed");
            assert_eq!(lanes_of(&in_flight).len(), 1, "all are of one lane");
            assert!(rig.land().await);
        }
        let first = (chunks + lanes - 1) as u64 * step;
        assert_eq!(rig.clock, first, "each stage was busy all the time");
        rig.run().await;
        let client = &rig.told[0];
        client.assert_whole();
        assert_eq!(client.at[0], first);
        rig.all_home().await;
    }
}

/// Beside a decoding lane, a long prompt is prefilled ahead as long as the third lane is idle, and no longer.
#[actix::test]
async fn bubbles_are_for_lanes_that_rest() {
    let mut rig = Rig::new(Wish { budget: 9, ..Wish::new(6, 3) });
    rig.submit(request(0, 3, 30)).await;
    rig.land().await;
    rig.submit(request(1, 140, 3)).await;
    // The long prompt's first chunk is sent as soon as its lane requests chunks, which is at once: it is
    // idle.
    rig.calm().await;
    assert_eq!(rig.flying().iter().map(|step| step.lane).collect::<Vec<_>>(), [0, 1, 1]);
    for _ in 0..6 {
        rig.land().await;
        rig.calm().await;
        let mut lanes: Vec<u32> = rig.flying().iter().map(|step| step.lane).collect();
        lanes.sort_unstable();
        assert_eq!(lanes, [0, 1, 1]);
    }
    rig.submit(request(2, 3, 30)).await;
    for _ in 0..3 {
        rig.land().await;
    }
    for _ in 0..6 {
        rig.land().await;
        rig.calm().await;
        assert_eq!(lanes_of(&rig.flying()).len(), 3);
        assert_eq!(rig.flying().len(), 3);
    }
    rig.run().await;
    rig.told.iter().for_each(|client| client.assert_whole());
    // The decoding sequence never waited for more than the other lanes' steps.
    let gaps: BTreeSet<u64> = rig.told[0].at.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.iter().all(|gap| *gap <= 4 * rig.wish.step), "{gaps:?}");
    rig.all_home().await;
}

#[actix::test]
async fn who_hangs_up_frees_slot_and_pages_of_its_lane() {
    let mut rig = Rig::new(Wish { budget: 9, ..Wish::new(6, 3) });
    // One sequence decodes, one is in the middle of a prompt with chunks ahead, and one stays.
    for (number, len) in [(0, 3), (1, 140), (2, 3)] {
        rig.submit(request(number, len, 12)).await;
    }
    for _ in 0..4 {
        rig.land().await;
    }
    rig.hang_up(0);
    rig.hang_up(1);
    rig.run().await;
    rig.told[2].assert_whole();
    rig.all_home().await;
    // A single sequence in the middle of its prompt, with steps ahead.
    let number = rig.submit(request(3, 140, 12)).await;
    rig.land().await;
    rig.calm().await;
    assert_eq!(rig.flying().len(), 3);
    rig.hang_up(number);
    rig.run().await;
    rig.all_home().await;
    let number = rig.submit(request(4, 10, 12)).await;
    rig.run().await;
    rig.told[number].assert_whole();
}

#[actix::test]
async fn a_panic_ends_its_lane_alone() {
    let mut rig = Rig::new(Wish::new(6, 3));
    for number in 0..6 {
        rig.submit(request(number, 3, 12)).await;
    }
    for _ in 0..7 {
        rig.land().await;
    }
    rig.calm().await;
    let lost = rig.flying()[0].lane;
    rig.land_without_results();
    let number = rig.submit(request(6, 30, 12)).await;
    rig.run().await;
    rig.told[number].assert_whole();
    let (silent, whole): (Vec<_>, Vec<_>) = rig.told.iter().partition(|client| client.end.is_none());
    assert_eq!((silent.len(), whole.len()), (2, 5), "the sequences of lane {lost}, and the others");
    assert!(silent.iter().all(|client| client.silent && expected(&client.request).starts_with(&client.ids)));
    whole.iter().for_each(|client| client.assert_whole());
    assert!(!rig.status.has_failed());
    rig.all_home().await;
}

#[actix::test]
async fn a_fault_is_told_in_every_lane() {
    let mut rig = Rig::new(Wish::new(6, 3));
    for number in 0..9 {
        rig.submit(request(number, 3, 12)).await;
    }
    for _ in 0..5 {
        rig.land().await;
    }
    rig.calm().await;
    assert_eq!(rig.flying().len(), 3);
    rig.fail(0, Heard::First);
    rig.run().await;
    for (number, client) in rig.told.iter().enumerate() {
        match number {
            0..6 => assert!(
                matches!(&client.end, Some(Err(RequestError::DeviceFailed(why))) if why.contains("test's"))
            ),
            _ => client.assert_whole(),
        }
        assert!(expected(&client.request).starts_with(&client.ids));
    }
    rig.all_home().await;
}

/// A step that completed before another lane's step failed may be processed before or after the fault is
/// reported. Its sequences are lost too, and its token is their last.
#[actix::test]
async fn a_lane_without_a_failed_step_is_not_fooled() {
    for heard in [Heard::First, Heard::Last] {
        let mut rig = Rig::new(Wish::new(4, 2));
        for number in 0..4 {
            rig.submit(request(number, 3, 12)).await;
        }
        for _ in 0..5 {
            rig.land().await;
        }
        rig.calm().await;
        assert_eq!(lanes_of(&rig.flying()).len(), 2);
        rig.fail(1, heard);
        rig.calm().await;
        assert!(rig.flying().is_empty(), "no lane continues");
        for client in &rig.told {
            assert!(matches!(client.end, Some(Err(RequestError::DeviceFailed(_)))), "{:?}", client.end);
            assert!(
                expected(&client.request).starts_with(&client.ids),
                "no token is computed from lost state"
            );
        }
        let number = rig.submit(request(9, 20, 12)).await;
        rig.run().await;
        rig.told[number].assert_whole();
        rig.all_home().await;
    }
}

/// An idle lane has no state on the devices, and starts on the rebuilt ones.
#[actix::test]
async fn a_lane_that_rests_during_a_fault_loses_nobody() {
    let mut rig = Rig::new(Wish::new(4, 2));
    rig.submit(request(0, 3, 12)).await;
    for _ in 0..4 {
        rig.land().await;
    }
    rig.calm().await;
    rig.fail(0, Heard::First);
    rig.calm().await;
    let next = [rig.submit(request(1, 3, 12)).await, rig.submit(request(2, 3, 12)).await];
    rig.calm().await;
    assert_eq!(lanes_of(&rig.flying()).len(), 2);
    rig.run().await;
    next.iter().for_each(|number| rig.told[*number].assert_whole());
    assert!(matches!(rig.told[0].end, Some(Err(RequestError::DeviceFailed(_)))));
    rig.all_home().await;
}

/// A fault while the request for chunks is pending: the sequences of the reply had no slots yet, and start on
/// the rebuilt devices, whether their prompts take one chunk or several.
#[actix::test]
async fn who_begins_while_the_devices_fail_loses_nothing() {
    for len in [3, 70] {
        let mut rig = Rig::new(Wish::new(4, 1));
        rig.submit(request(0, 3, 20)).await;
        for _ in 0..4 {
            rig.land().await;
        }
        rig.calm().await;
        let next = rig.submit(request(1, len, 12)).await;
        rig.fail_at_question();
        rig.run().await;
        let [old, new] = [&rig.told[0], &rig.told[next]];
        assert!(matches!(old.end, Some(Err(RequestError::DeviceFailed(_)))), "{:?}", old.end);
        new.assert_whole();
        rig.all_home().await;
    }
}

/// A fault during the slot update: the new sequences have their slots by then, and fail like the others.
#[actix::test]
async fn who_joins_a_turn_that_the_devices_do_not_outlast_is_told() {
    for len in [3, 70] {
        let mut rig = Rig::new(Wish::new(4, 1));
        rig.submit(request(0, 3, 20)).await;
        for _ in 0..4 {
            rig.land().await;
        }
        rig.calm().await;
        rig.submit(request(1, len, 12)).await;
        rig.fail_at_turn();
        rig.run().await;
        for client in &rig.told {
            assert!(matches!(client.end, Some(Err(RequestError::DeviceFailed(_)))), "{:?}", client.end);
            assert!(expected(&client.request).starts_with(&client.ids));
        }
        let next = rig.submit(request(2, len, 12)).await;
        rig.run().await;
        rig.told[next].assert_whole();
        rig.all_home().await;
    }
}

/// `/health` depends on this: an iteration of many steps may take long, but each step that completes is a
/// heartbeat.
#[actix::test]
async fn every_step_that_lands_is_a_sign_of_life() {
    let mut rig = Rig::new(Wish { policy: Policy::Concurrent, ..Wish::new(4, 1) });
    for number in 0..4 {
        rig.submit(request(number, 3, 12)).await;
    }
    for landing in 0..12 {
        rig.calm().await;
        while rig.status.stalled_for() < Duration::from_millis(20) {
            tokio::task::yield_now().await;
        }
        let before = Instant::now();
        rig.land().await;
        rig.calm().await;
        let stalled = rig.status.stalled_for();
        // Times are kept in whole milliseconds.
        let most = before.elapsed() + Duration::from_millis(2);
        assert!(stalled <= most, "landing {landing}");
    }
}

/// Returns the clients that get a token from the oldest step in flight, in the order of submission.
async fn next_told(rig: &mut Rig) -> Vec<usize> {
    rig.calm().await;
    let before: Vec<usize> = rig.told.iter().map(|client| client.ids.len()).collect();
    rig.land().await;
    rig.calm().await;
    (0..before.len()).filter(|number| rig.told[*number].ids.len() > before[*number]).collect()
}

/// The steps of a long prompt are in flight when a sequence before it leaves, so that its index changes and
/// another sequence takes its old one.
#[actix::test]
async fn results_find_who_waits_for_them_wherever_it_stands_by_then() {
    let mut rig = Rig::new(Wish { budget: 9, shuffle: false, ..Wish::new(12, 3) });
    for number in 0..12 {
        rig.submit(request(number, 1, 60)).await;
    }
    for _ in 0..30 {
        rig.land().await;
    }
    // The long prompt takes a slot between others in one lane; the other lanes become idle.
    let own = next_told(&mut rig).await;
    assert_eq!(own.len(), 4);
    rig.hang_up(own[1]);
    for _ in 0..4 {
        rig.land().await;
    }
    let long = rig.submit(Request { prompt_logprobs: true, ..request(20, 130, 5) }).await;
    for _ in 0..6 {
        rig.land().await;
    }
    (0..12).filter(|number| !own.contains(number)).for_each(|number| rig.hang_up(number));
    for _ in 0..5 {
        rig.land().await;
    }
    rig.calm().await;
    assert_eq!((rig.flying().len(), lanes_of(&rig.flying()).len()), (3, 1), "its chunks are sent ahead");
    rig.hang_up(own[0]);
    rig.run().await;
    for number in [own[2], own[3], long] {
        rig.told[number].assert_whole();
    }
    rig.all_home().await;
}

/// The number of holes computed in the steps in flight.
fn holes(steps: &[&StepBatch]) -> usize {
    let spans = steps.iter().flat_map(|step| &step.spans);
    spans.filter(|span| span.table == SpanTable::Sink && span.want == Want::Last).count()
}

/// Random test of everything at once: requests of all lengths at random times, clients that disconnect, and
/// faults if `faults` is set. Every token that a client gets is the right one, and all resources are released
/// at the end. Returns the number of faults.
async fn tumult(config: Wish, dice: Dice, faults: bool) -> usize {
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
                let prompt_logprobs = dice.throw(92_000 + n, 4) == 0;
                rig.submit(Request { prompt_logprobs, ..request(submitted, len, tokens) }).await;
                submitted += 1;
            }
        }
        if throw(2, 12) == 0 && submitted > 0 {
            let number = throw(3, submitted as usize);
            rig.hang_up(number);
            hung_up.insert(number);
        }
        if faults && throw(4, 25) == 0 {
            if throw(6, 3) > 0 {
                rig.calm().await;
            }
            let in_flight = rig.flying().len();
            match throw(8, 4) {
                0 if in_flight == 0 => rig.fail_at_question(),
                1 if in_flight == 0 => rig.fail_at_turn(),
                _ => rig.fail(throw(5, in_flight + 1), [Heard::First, Heard::Last][throw(7, 2)]),
            }
            faulty += 1;
        }
        if !rig.land().await && submitted >= 40 {
            break;
        }
    }
    rig.run().await;
    for (number, client) in rig.told.iter().enumerate() {
        assert!(expected(&client.request).starts_with(&client.ids), "{label}: request {number}");
        match client.end {
            _ if hung_up.contains(&number) => {}
            Some(Ok(_)) => client.assert_whole(),
            Some(Err(RequestError::DeviceFailed(_))) if faulty > 0 => {}
            ref end => panic!("{label}: request {number} ended with {end:?}"),
        }
    }
    assert_eq!(submitted, rig.told.len() as u64);
    rig.all_home().await;
    faulty
}

#[actix::test]
async fn whatever_happens_each_client_hears_its_own_tokens() {
    for seed in 0..4 {
        for lanes in 1..5 {
            let config = Wish { budget: 11, shuffle: seed % 3 > 0, row: 1, ..Wish::new(9, lanes) };
            tumult(Wish { stages: 1, ..config.clone() }, Dice(seed), false).await;
            tumult(config, Dice(seed + 50), false).await;
        }
    }
}

#[actix::test]
async fn whatever_fails_nobody_hears_a_wrong_token() {
    let mut faults = 0;
    for seed in 0..9 {
        for lanes in 1..5 {
            let config = Wish { budget: 11, shuffle: seed % 3 > 0, ..Wish::new(9, lanes) };
            let stages = if seed % 2 == 0 { 1 } else { lanes };
            faults += tumult(Wish { stages, ..config }, Dice(seed + 100), true).await;
        }
    }
    assert!(faults > 100, "{faults}");
}

#[actix::test]
async fn the_baselines_hold_their_promises_in_lanes_too() {
    for seed in 0..4 {
        for lanes in [1, 2, 3] {
            let config = Wish { budget: 11, shuffle: seed % 2 > 0, ..Wish::new(9, lanes) };
            let policy = Policy::Window { window: Duration::ZERO };
            tumult(Wish { policy, ..config.clone() }, Dice(seed + 200), seed > 1).await;
            tumult(Wish { policy: Policy::Concurrent, ..config }, Dice(seed + 300), seed > 1).await;
        }
    }
}

/// Under the papers' baselines, lanes change only how much is in flight.
#[actix::test]
async fn a_step_of_the_baselines_is_what_it_was() {
    let mut rig = Rig::new(Wish { policy: Policy::Concurrent, ..Wish::new(6, 2) });
    for number in 0..6 {
        rig.submit(request(number, 30, 8)).await;
    }
    loop {
        rig.calm().await;
        assert!(rig.flying().iter().all(|step| step.spans.len() == 1), "one sequence per step");
        assert!(lanes_of(&rig.flying()).len() == rig.flying().len(), "one step per lane");
        if !rig.land().await {
            break;
        }
    }
    rig.told.iter().for_each(|client| client.assert_whole());
    let mut rig = Rig::new(Wish { shuffle: false, ..Wish::new(8, 2) });
    for (number, tokens) in [4, 9, 9, 20, 12, 2, 7, 20].into_iter().enumerate() {
        rig.submit(request(number as u64, 2, tokens)).await;
    }
    let mut seen = 0;
    while rig.land().await {
        rig.calm().await;
        assert!(rig.flying().iter().all(|step| step.moves.is_empty()));
        seen += holes(&rig.flying());
    }
    assert!(seen > 0, "holes are computed");
    rig.told.iter().for_each(|client| client.assert_whole());
}
