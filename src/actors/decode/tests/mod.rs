//! Lanes against devices that the test drives: what is in flight, what comes of it, what it costs on the devices' clock.
//!
//! Invariant: no test asks how long anything took here; the clock is the devices'.

mod rig;

use crate::config::Policy;
use crate::request::{Request, RequestError};
use mainstem_kernels::random::philox;
use mainstem_kernels::{SpanTable, StepBatch, Want};
use rig::{Heard, Rig, VOCAB, Wish, expected};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Random choices of a test: each question has its number.
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

/// As many steps in flight as lanes, each of another lane, until sequences run out.
#[actix::test]
async fn each_lane_has_a_step_in_flight() {
    for lanes in 1..5 {
        let mut rig = Rig::new(Wish::new(8, lanes));
        for number in 0..8 {
            rig.submit(request(number, 3, 20)).await;
        }
        for landing in 0..19 * lanes {
            rig.calm().await;
            let flying = rig.flying();
            assert_eq!((flying.len(), lanes_of(&flying).len()), (lanes, lanes), "landing {landing}");
            assert!(rig.land().await);
        }
        rig.run().await;
        rig.told.iter().for_each(|told| told.assert_whole());
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
    rig.told.iter().for_each(|told| told.assert_whole());
}

/// Stages times one: with a step for each stage in flight, none of them waits. Rows are what costs time here.
#[actix::test]
async fn throughput_grows_with_the_stages() {
    let time = async |stages, lanes| {
        let mut rig = Rig::new(Wish { stages, step: 0, row: 1, ..Wish::new(12, lanes) });
        for number in 0..12 {
            rig.submit(request(number, 2, 60)).await;
        }
        rig.run().await;
        rig.told.iter().for_each(|told| told.assert_whole());
        rig.clock as f64
    };
    for stages in 2..5 {
        let gain = time(stages, 1).await / time(stages, stages).await;
        assert!(gain > 0.93 * stages as f64, "{stages} stages: {gain:.2} times one lane's");
    }
}

/// Those that come together have the same lengths: whatever their lanes, they take the same time.
#[actix::test]
async fn latency_does_not_depend_on_the_lane() {
    for (lanes, sequences) in [(2, 8), (3, 8), (4, 16), (4, 5)] {
        let wish = Wish::new(16, lanes);
        let step = wish.step;
        let mut rig = Rig::new(wish);
        for number in 0..sequences {
            rig.submit(request(number, 2, 40)).await;
        }
        rig.run().await;
        // Between its tokens each waits for one step of each lane, no more and no less.
        for told in &rig.told {
            told.assert_whole();
            let gaps: BTreeSet<u64> = told.at.windows(2).map(|pair| pair[1] - pair[0]).collect();
            assert_eq!(gaps, BTreeSet::from([step * lanes as u64]));
        }
        let firsts: Vec<u64> = rig.told.iter().map(|told| told.at[0]).collect();
        let (first, last) = (firsts.iter().min().unwrap(), firsts.iter().max().unwrap());
        assert!(last - first <= 2 * step * lanes as u64, "{firsts:?}");
    }
}

/// With nothing else to do, a long prompt's chunks follow each other through the stages without a gap.
#[actix::test]
async fn chunks_of_a_long_prompt_fill_what_other_lanes_leave() {
    for lanes in 1..5 {
        let wish = Wish { budget: 9, ..Wish::new(8, lanes) };
        let step = wish.step;
        let mut rig = Rig::new(wish);
        rig.submit(Request { prompt_logprobs: true, ..request(1, 120, 3) }).await;
        let chunks = 120usize.div_ceil(9);
        for landed in 0..chunks {
            rig.calm().await;
            let flying = rig.flying();
            assert_eq!(flying.len(), lanes.min(chunks - landed), "{landed} landed");
            assert_eq!(lanes_of(&flying).len(), 1, "all of one lane");
            assert!(rig.land().await);
        }
        let first = (chunks + lanes - 1) as u64 * step;
        assert_eq!(rig.clock, first, "each stage had a chunk all the time");
        rig.run().await;
        let told = &rig.told[0];
        told.assert_whole();
        assert_eq!(told.at[0], first);
        rig.all_home().await;
    }
}

/// Beside a lane that decodes, a long prompt goes ahead as far as the third lane rests; and no further once that works.
#[actix::test]
async fn bubbles_are_for_lanes_that_rest() {
    let mut rig = Rig::new(Wish { budget: 9, ..Wish::new(6, 3) });
    rig.submit(request(0, 3, 30)).await;
    rig.land().await;
    rig.submit(request(1, 140, 3)).await;
    // The long prompt's first chunk goes when its lane is asked, which is at once: it rests.
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
    rig.told.iter().for_each(|told| told.assert_whole());
    // What decodes beside it never waited for more than the others' steps.
    let gaps: BTreeSet<u64> = rig.told[0].at.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.iter().all(|gap| *gap <= 4 * rig.wish.step), "{gaps:?}");
    rig.all_home().await;
}

#[actix::test]
async fn who_hangs_up_frees_slot_and_pages_of_its_lane() {
    let mut rig = Rig::new(Wish { budget: 9, ..Wish::new(6, 3) });
    // One decoding, one amid a prompt whose chunks are ahead, one that stays.
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
    // Alone amid its prompt, with steps ahead.
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
    let (silent, whole): (Vec<_>, Vec<_>) = rig.told.iter().partition(|told| told.end.is_none());
    assert_eq!((silent.len(), whole.len()), (2, 5), "those of lane {lost}, and the others");
    assert!(silent.iter().all(|told| told.silent && expected(&told.request).starts_with(&told.ids)));
    whole.iter().for_each(|told| told.assert_whole());
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
    for (number, told) in rig.told.iter().enumerate() {
        match number {
            0..6 => assert!(
                matches!(&told.end, Some(Err(RequestError::DeviceFailed(why))) if why.contains("test's"))
            ),
            _ => told.assert_whole(),
        }
        assert!(expected(&told.request).starts_with(&told.ids));
    }
    rig.all_home().await;
}

/// A lane's step was through before another's failed, and is heard of before or after that: its sequences are lost too, and
/// the token that it gave is the last.
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
        assert!(rig.flying().is_empty(), "nobody goes on");
        for told in &rig.told {
            assert!(matches!(told.end, Some(Err(RequestError::DeviceFailed(_)))), "{:?}", told.end);
            assert!(expected(&told.request).starts_with(&told.ids), "no token of what the devices forgot");
        }
        let number = rig.submit(request(9, 20, 12)).await;
        rig.run().await;
        rig.told[number].assert_whole();
        rig.all_home().await;
    }
}

/// It had nothing on the devices, and begins on what is built anew.
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

/// The question is asked, and who comes with the answer had no slot: it begins on what is built anew, whether its prompt
/// comes at once or in chunks.
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

/// Who joins has its slot by then, and is told like those who had one before.
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
        for told in &rig.told {
            assert!(matches!(told.end, Some(Err(RequestError::DeviceFailed(_)))), "{:?}", told.end);
            assert!(expected(&told.request).starts_with(&told.ids));
        }
        let next = rig.submit(request(2, len, 12)).await;
        rig.run().await;
        rig.told[next].assert_whole();
        rig.all_home().await;
    }
}

/// `/health` goes by that: a turn of many steps may take long, but not without a step that comes back.
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
        // Moments are kept in whole milliseconds.
        let most = before.elapsed() + Duration::from_millis(2);
        assert!(stalled <= most, "landing {landing}");
    }
}

/// Who of the submitted has its next token from the step that lands first; in the order of their slots, as they came.
async fn next_told(rig: &mut Rig) -> Vec<usize> {
    rig.calm().await;
    let before: Vec<usize> = rig.told.iter().map(|told| told.ids.len()).collect();
    rig.land().await;
    rig.calm().await;
    (0..before.len()).filter(|number| rig.told[*number].ids.len() > before[*number]).collect()
}

/// A long prompt's steps are on their way when somebody before it leaves, so that it stands elsewhere among the living
/// when they land, and another where it stood.
#[actix::test]
async fn results_find_who_waits_for_them_wherever_it_stands_by_then() {
    let mut rig = Rig::new(Wish { budget: 9, shuffle: false, ..Wish::new(12, 3) });
    for number in 0..12 {
        rig.submit(request(number, 1, 60)).await;
    }
    for _ in 0..30 {
        rig.land().await;
    }
    // In one lane it takes a place between others; the others' lanes come to rest.
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
    assert_eq!((rig.flying().len(), lanes_of(&rig.flying()).len()), (3, 1), "it goes ahead");
    rig.hang_up(own[0]);
    rig.run().await;
    for number in [own[2], own[3], long] {
        rig.told[number].assert_whole();
    }
    rig.all_home().await;
}

/// Holes that are computed, and sequences, of all steps in flight.
fn holes(steps: &[&StepBatch]) -> usize {
    let spans = steps.iter().flat_map(|step| &step.spans);
    spans.filter(|span| span.table == SpanTable::Sink && span.want == Want::Last).count()
}

/// One run of everything at once: requests of all lengths at random moments, clients that leave, faults if wanted. Every
/// token that anybody hears is the right one, and all is at home at the end. How often the devices failed.
async fn tumult(wish: Wish, dice: Dice, faults: bool) -> usize {
    let what = format!("{wish:?}, seed {}", dice.0);
    let mut rig = Rig::new(wish);
    let (mut submitted, mut faulty, mut hung_up) = (0, 0, BTreeSet::new());
    for round in 0..600u32 {
        let throw = |number: u32, sides| dice.throw(round * 16 + number, sides);
        // In every other run they come so seldom that lanes rest.
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
            let flying = rig.flying().len();
            match throw(8, 4) {
                0 if flying == 0 => rig.fail_at_question(),
                1 if flying == 0 => rig.fail_at_turn(),
                _ => rig.fail(throw(5, flying + 1), [Heard::First, Heard::Last][throw(7, 2)]),
            }
            faulty += 1;
        }
        if !rig.land().await && submitted >= 40 {
            break;
        }
    }
    rig.run().await;
    for (number, told) in rig.told.iter().enumerate() {
        assert!(expected(&told.request).starts_with(&told.ids), "{what}: request {number}");
        match told.end {
            _ if hung_up.contains(&number) => {}
            Some(Ok(_)) => told.assert_whole(),
            Some(Err(RequestError::DeviceFailed(_))) if faulty > 0 => {}
            ref end => panic!("{what}: request {number} ended with {end:?}"),
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
            let wish = Wish { budget: 11, shuffle: seed % 3 > 0, row: 1, ..Wish::new(9, lanes) };
            tumult(Wish { stages: 1, ..wish.clone() }, Dice(seed), false).await;
            tumult(wish, Dice(seed + 50), false).await;
        }
    }
}

#[actix::test]
async fn whatever_fails_nobody_hears_a_wrong_token() {
    let mut faults = 0;
    for seed in 0..9 {
        for lanes in 1..5 {
            let wish = Wish { budget: 11, shuffle: seed % 3 > 0, ..Wish::new(9, lanes) };
            let stages = if seed % 2 == 0 { 1 } else { lanes };
            faults += tumult(Wish { stages, ..wish }, Dice(seed + 100), true).await;
        }
    }
    assert!(faults > 100, "{faults}");
}

#[actix::test]
async fn the_baselines_hold_their_promises_in_lanes_too() {
    for seed in 0..4 {
        for lanes in [1, 2, 3] {
            let wish = Wish { budget: 11, shuffle: seed % 2 > 0, ..Wish::new(9, lanes) };
            let policy = Policy::Window { window: Duration::ZERO };
            tumult(Wish { policy, ..wish.clone() }, Dice(seed + 200), seed > 1).await;
            tumult(Wish { policy: Policy::Concurrent, ..wish }, Dice(seed + 300), seed > 1).await;
        }
    }
}

/// Under the papers' baselines lanes change how much is in flight, and nothing else.
#[actix::test]
async fn a_step_of_the_baselines_is_what_it_was() {
    let mut rig = Rig::new(Wish { policy: Policy::Concurrent, ..Wish::new(6, 2) });
    for number in 0..6 {
        rig.submit(request(number, 30, 8)).await;
    }
    loop {
        rig.calm().await;
        assert!(rig.flying().iter().all(|step| step.spans.len() == 1), "one sequence for each step");
        assert!(lanes_of(&rig.flying()).len() == rig.flying().len(), "one step for each lane");
        if !rig.land().await {
            break;
        }
    }
    rig.told.iter().for_each(|told| told.assert_whole());
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
    rig.told.iter().for_each(|told| told.assert_whole());
}
