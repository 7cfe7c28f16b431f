//! Tests of the shares of clients and classes, in steps of simulated devices.
//!
//! Invariant: each step takes one unit of the clock, so that times are numbers of steps.

use super::rig::{Rig, RigConfig};
use super::{request, search};
use crate::request::client::{ClientId, ClientSettings};
use crate::request::{Class, Client, Request};
use crate::telemetry;
use std::sync::Arc;

fn config(slots: usize) -> RigConfig {
    RigConfig { step_cost: 1, stages: 1, run_ahead: false, ..RigConfig::new(slots, 1) }
}

fn client(number: u64) -> Arc<Client> {
    let settings = ClientSettings::default();
    Arc::new(Client { id: ClientId::Key(number), name: "test".into(), settings })
}

fn of(client: &Arc<Client>, class: Class, request: Request) -> Request {
    Request { client: client.clone(), class, ..request }
}

/// Runs steps until a client has its first token. Returns their number.
async fn steps_to_first_token(rig: &mut Rig, number: usize) -> u64 {
    let begin = rig.clock;
    rig.run_until_idle().await;
    while rig.clients[number].token_times.is_empty() {
        assert!(rig.complete_step().await, "it starts");
        rig.run_until_idle().await;
    }
    rig.clients[number].token_times[0] - begin
}

async fn finish(mut rig: Rig) {
    rig.run_to_end().await;
    rig.clients.iter().for_each(|client| client.assert_complete());
    rig.assert_all_released().await;
}

/// A group that fills slots and queue neither refuses nor delays the request of another client.
#[actix::test]
async fn a_large_group_does_not_delay_another_client() {
    let mut rig = Rig::new(RigConfig { max_waiting: 64, ..config(8) });
    let (one, two) = (client(1), client(2));
    let group = (0..72).map(|number| of(&one, Class::Interactive, request(number, 3, 40)));
    rig.submit_all(group.collect()).await;
    for _ in 0..20 {
        rig.complete_step().await;
    }
    rig.run_until_idle().await;
    let late = rig.submit(of(&two, Class::Interactive, request(100, 5, 2))).await;
    // The step in flight, and its own.
    assert_eq!(steps_to_first_token(&mut rig, late).await, 2);
    assert!(rig.count(&telemetry::PREEMPTIONS) == 1);
    finish(rig).await;
}

/// Short requests that come one after the other do not preempt the same streams all the time.
#[actix::test]
async fn a_client_with_short_requests_does_not_hold_up_a_stream() {
    let mut rig = Rig::new(config(4));
    let (one, two) = (client(1), client(2));
    for number in 0..4 {
        rig.submit(of(&one, Class::Interactive, request(number, 3, 100))).await;
    }
    for _ in 0..5 {
        rig.complete_step().await;
    }
    let mut count = 0;
    while rig.clients[..4].iter().any(|client| client.end.is_none()) {
        let short = rig.submit(of(&two, Class::Interactive, request(50 + count, 3, 2))).await;
        steps_to_first_token(&mut rig, short).await;
        count += 1;
    }
    let preemptions = rig.count(&telemetry::PREEMPTIONS);
    assert!(preemptions <= 4 * (1 + 100 / 32), "{preemptions} preemptions");
    assert!(count > 20 && rig.clock < 400, "{count} short requests, {} steps", rig.clock);
    finish(rig).await;
}

/// Ten times as much batch work as there are slots, and interactive requests in between: each starts with the
/// next step, and the answers of preempted requests are as if nothing had happened.
#[actix::test]
async fn interactive_requests_start_at_once_under_a_batch_overload() {
    for lanes in [1, 2] {
        let mut rig = Rig::new(RigConfig { lanes, budget: 64, ..config(8) });
        let (one, two) = (client(1), client(2));
        for number in 0..80 {
            rig.submit(of(&one, Class::Batch, request(number, 20, 60))).await;
        }
        let width = 3;
        rig.submit_all(search(&of(&one, Class::Batch, request(90, 9, 12)), width, 2)).await;
        for number in 0..30 {
            for _ in 0..7 {
                rig.complete_step().await;
            }
            let late = rig.submit(of(&two, Class::Interactive, request(100 + number, 12, 5))).await;
            let steps = steps_to_first_token(&mut rig, late).await;
            // The steps in flight of all lanes, and its own.
            assert!(steps <= 1 + lanes as u64, "{steps} steps with {lanes} lanes");
        }
        assert!(rig.count(&telemetry::PREEMPTIONS) > 0);
        finish(rig).await;
    }
}

/// Pages are taken from batch requests, too, in whatever lanes these are.
#[actix::test]
async fn interactive_requests_get_the_pages_of_batch_requests() {
    for lanes in [1, 2] {
        let mut rig = Rig::new(RigConfig { pages: Some(40), budget: 64, lanes, ..config(8) });
        let (one, two) = (client(1), client(2));
        for number in 0..6 {
            rig.submit(of(&one, Class::Batch, request(number, 20, 40))).await;
        }
        for _ in 0..9 {
            rig.complete_step().await;
        }
        let late = rig.submit(of(&two, Class::Interactive, request(100, 120, 5))).await;
        let steps = steps_to_first_token(&mut rig, late).await;
        // A step in flight of each lane, those that make way, and two chunks.
        assert!(steps <= 3 + 2 * lanes as u64, "{steps} with {lanes} lanes");
        assert!(rig.count(&telemetry::PREEMPTIONS) > 0);
        finish(rig).await;
    }
}

/// Batch requests whose long prompts fill the slots for many steps make way, too.
#[actix::test]
async fn interactive_requests_take_the_slots_of_long_batch_prompts() {
    let mut rig = Rig::new(RigConfig { budget: 12, ..config(4) });
    let two = client(9);
    for number in 0..16 {
        let one = client(number % 4);
        rig.submit(of(&one, Class::Batch, request(number, 140, 4))).await;
    }
    for number in 0..10 {
        for _ in 0..5 {
            rig.complete_step().await;
        }
        let late = rig.submit(of(&two, Class::Interactive, request(100 + number, 8, 4))).await;
        let steps = steps_to_first_token(&mut rig, late).await;
        assert!(steps <= 2, "{steps}");
    }
    assert!(rig.count(&telemetry::PREEMPTIONS) > 0);
    finish(rig).await;
}

/// A client whose long requests fill the pages makes way for one with a few pages.
#[actix::test]
async fn a_client_within_its_share_of_the_pages_gets_them() {
    let mut rig = Rig::new(RigConfig { pages: Some(120), budget: 256, ..config(8) });
    let (one, two) = (client(1), client(2));
    for number in 0..4 {
        rig.submit(of(&one, Class::Interactive, request(number, 20, 100))).await;
    }
    // They fill the pages when they end, soon.
    for _ in 0..85 {
        rig.complete_step().await;
    }
    rig.run_until_idle().await;
    let late = rig.submit(of(&two, Class::Interactive, request(100, 80, 5))).await;
    let steps = steps_to_first_token(&mut rig, late).await;
    assert!(steps <= 4 && rig.count(&telemetry::PREEMPTIONS) > 0, "{steps}");
    finish(rig).await;
}

/// A long prompt does not keep the prompts of other clients waiting for the budget.
#[actix::test]
async fn a_long_prompt_shares_the_budget() {
    let mut rig = Rig::new(RigConfig { budget: 12, ..config(4) });
    let (one, two) = (client(1), client(2));
    for number in 0..2 {
        rig.submit(of(&one, Class::Interactive, request(number, 140, 4))).await;
    }
    for _ in 0..3 {
        rig.complete_step().await;
    }
    let late = rig.submit(of(&two, Class::Interactive, request(9, 8, 4))).await;
    assert_eq!(steps_to_first_token(&mut rig, late).await, 2);
    finish(rig).await;
}

/// Under equal load, clients of different weights get tokens in proportion.
#[actix::test]
async fn weights_divide_the_device() {
    let mut rig = Rig::new(config(6));
    let clients = [1, 2].map(|weight| {
        let settings = ClientSettings { weight, ..ClientSettings::default() };
        Arc::new(Client { id: ClientId::Key(weight.into()), name: "test".into(), settings })
    });
    for number in 0..120 {
        for client in &clients {
            rig.submit(of(client, Class::Interactive, request(number, 4, 10))).await;
        }
    }
    for _ in 0..200 {
        rig.complete_step().await;
    }
    rig.run_until_idle().await;
    let tokens = clients.clone().map(|client| {
        let own = rig.clients.iter().filter(|other| other.request.client == client);
        own.map(|client| client.ids.len()).sum::<usize>()
    });
    let ratio = tokens[1] as f64 / tokens[0] as f64;
    assert!((1.7..2.3).contains(&ratio), "{tokens:?}");
    finish(rig).await;
}
