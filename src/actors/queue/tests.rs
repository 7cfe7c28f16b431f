//! Tests of the queue alone, with the test in place of intake and prefill.
//!
//! Invariant: time passes only as the test says.

use super::*;
use crate::actors::loop_metrics::SequenceTimes;
use crate::actors::sequence::Progress;
use crate::actors::stream::TokenStream;
use crate::actors::testing::{request, sequence};
use crate::request::client::ClientSettings;
use crate::request::{Request, RequestError};
use mainstem_kernels::random::philox;
use std::time::Duration;

fn client_with(number: u64, settings: ClientSettings) -> Arc<Client> {
    Arc::new(Client { id: ClientId::Key(number), name: format!("{number}").into(), settings })
}

fn client(number: u64) -> Arc<Client> {
    client_with(number, ClientSettings::default())
}

/// A queue with the test in place of the other actors.
struct Rig {
    queue: SharedQueue,
    now: Instant,
    next_key: u64,
    /// The streams of the clients.
    streams: Vec<TokenStream>,
}

impl Rig {
    fn new(slots: usize, max_waiting: usize) -> Rig {
        let queue = SharedQueue::new(slots, max_waiting, Arc::new(Status::new(Duration::ZERO, 1)));
        Rig { queue, now: Instant::now(), next_key: 0, streams: Vec::new() }
    }

    fn push_request(&mut self, client: &Arc<Client>, request: Request) -> u64 {
        self.next_key += 1;
        let (sequence, stream) = sequence(self.next_key, Request { client: client.clone(), ..request });
        self.queue.lock().push(sequence, self.now);
        self.streams.push(stream);
        self.next_key
    }

    /// Adds a sequence with a prompt of so many tokens; returns its key.
    fn push(&mut self, client: &Arc<Client>, len: usize) -> u64 {
        self.push_request(client, Request { class: client.settings.class, ..request(len, 4) })
    }

    /// Takes the next sequence, which computes its prompt and generates so many tokens.
    fn serve(&mut self, generated: usize) -> Option<Box<Sequence>> {
        let mut queue = self.queue.lock();
        let next = queue.first(&Skipped::default(), false)?;
        let sequence = queue.take(&next).sequence;
        sequence.account.charge_prompt(sequence.request.prompt.len());
        sequence.account.charge_generated(generated);
        Some(sequence)
    }

    /// Takes all sequences; returns their keys in the order of their turns.
    fn drain(&mut self) -> Vec<u64> {
        std::iter::from_fn(|| self.serve(0)).map(|sequence| sequence.key.0).collect()
    }

    fn admit(&self, client: &Arc<Client>, coming: usize) -> Result<(), RequestError> {
        self.queue.lock().admit(client, client.settings.class, coming, self.now)
    }

    /// Returns the numbers of slots that the queued sequences need, of these sequences, and of released ones.
    fn counts(&self) -> (usize, usize, usize) {
        let queue = self.queue.lock();
        (queue.waiting_by(LAST), queue.len(), queue.released())
    }

    fn served(&self, number: u64) -> u64 {
        self.queue.lock().clients[&ClientId::Key(number)].account.served()
    }
}

fn dice(throw: u32, round: u32, sides: usize) -> usize {
    philox([throw, round, 7, 0], [3, 0])[0] as usize % sides
}

#[test]
fn turns_go_by_class_then_priority_then_service_then_arrival() {
    let mut rig = Rig::new(4, 100);
    let (one, two) = (client(1), client(2));
    let with = |class, priority| Request { class, priority, ..request(10, 4) };
    let late = rig.push_request(&one, with(Class::Batch, -9));
    let first = rig.push_request(&one, with(Class::Interactive, 0));
    let second = rig.push_request(&one, with(Class::Interactive, 0));
    let other = rig.push_request(&two, with(Class::Interactive, 0));
    let urgent = rig.push_request(&two, with(Class::Interactive, -1));
    let patient = rig.push_request(&one, with(Class::Interactive, 1));
    // The second client has been served its urgent sequence when the others are equal but for that.
    assert_eq!(rig.drain(), [urgent, first, second, other, patient, late]);
    assert_eq!(rig.counts(), (0, 0, 0));
}

/// Clients come, wait, leave the queue and hang up at random: the next one is always one that was served the
/// least, and every sequence is taken once, unless its client has gone.
#[test]
fn nobody_waits_while_its_counter_is_the_smallest_and_nothing_is_lost() {
    for round in 0..20 {
        let mut rig = Rig::new(1000, 1000);
        let clients: Vec<_> = (0..5)
            .map(|number| {
                let weight = 1 + dice(number as u32, round, 4) as u32;
                client_with(number, ClientSettings { weight, ..ClientSettings::default() })
            })
            .collect();
        let (mut taken, mut gone) = (Vec::new(), Vec::new());
        for step in 0..400u32 {
            let throw = |number: u32, sides| dice(100 + 8 * step + number, round, sides);
            if throw(0, 2) == 0 {
                rig.push(&clients[throw(1, 5)], 1 + throw(2, 50));
            }
            if throw(3, 20) == 0
                && let Some(at) = (!rig.streams.is_empty()).then(|| throw(4, rig.streams.len()))
            {
                rig.streams[at].close();
                gone.push(at as u64 + 1);
            }
            if throw(5, 3) > 0 {
                let queue = rig.queue.lock();
                let open = |client: &&QueuedClient| {
                    client.line.values().any(|queued| !queued.sequence.events.is_closed())
                };
                let least = queue.clients.values().filter(open).map(|client| client.account.served()).min();
                drop(queue);
                let next = rig.queue.lock().first(&Skipped::default(), false);
                assert_eq!(next.map(|next| next.turn.served), least, "round {round}, step {step}");
                taken.extend(rig.serve(throw(6, 30)).map(|sequence| sequence.key.0));
            }
        }
        taken.extend(rig.drain());
        let all: BTreeSet<u64> = (1..=rig.next_key).collect();
        let found: BTreeSet<u64> = taken.iter().chain(&gone).copied().collect();
        assert_eq!((&found, taken.iter().collect::<BTreeSet<_>>().len()), (&all, taken.len()));
    }
}

#[test]
fn weights_give_proportional_service() {
    let mut rig = Rig::new(10_000, 10_000);
    let weights = [1, 2, 5];
    let clients = weights
        .map(|weight| client_with(weight.into(), ClientSettings { weight, ..ClientSettings::default() }));
    let mut costs = [0; 3];
    for step in 0..3000u32 {
        // Each has always a sequence that waits.
        for client in &clients {
            let waits =
                |rig: &Rig| rig.queue.lock().clients.get(&client.id).map_or(0, |known| known.line.len());
            while waits(&rig) < 2 {
                rig.push(client, 1 + dice(step, client.settings.weight, 200));
            }
        }
        let generated = dice(step, 9, 100);
        let sequence = rig.serve(generated).expect("there are some");
        let place = weights.iter().position(|weight| *weight == sequence.request.client.settings.weight);
        costs[place.expect("it is one of them")] += sequence.request.prompt.len() + 2 * generated;
    }
    for (cost, weight) in costs.into_iter().zip(weights) {
        let ratio = cost as f64 / costs[0] as f64 / f64::from(weight);
        assert!((0.98..1.02).contains(&ratio), "{costs:?}");
    }
}

/// A client gets no credit for the time in which it asked for nothing.
#[test]
fn a_client_that_comes_back_is_lifted_to_those_that_wait() {
    let mut rig = Rig::new(100, 100);
    let (busy, other, idle) = (client(1), client(2), client(3));
    rig.push(&idle, 5);
    rig.serve(0);
    for _ in 0..10 {
        rig.push(&busy, 100);
    }
    for _ in 0..9 {
        rig.serve(0);
    }
    rig.push(&idle, 5);
    assert_eq!(rig.served(3), rig.served(1));
    // Those of another class do not count: they have waited for these.
    let late = client_with(4, ClientSettings { class: Class::Batch, ..ClientSettings::default() });
    rig.push(&late, 5);
    assert_eq!(rig.served(4), 0);
    // If nobody waits, the last one that did counts, with what it was served since.
    rig.drain();
    rig.push(&busy, 1000);
    let last = rig.serve(50).expect("it is the only one");
    rig.push(&other, 5);
    assert_eq!(rig.served(2), last.account.served());
    assert!(rig.served(2) > rig.served(3));
}

/// A preempted sequence is before those of its client that arrived later, and has lost its permit.
#[actix::test]
async fn a_sequence_that_comes_back_keeps_its_place() {
    let mut rig = Rig::new(2, 100);
    let one = client(1);
    for _ in 0..3 {
        rig.push(&one, 10);
    }
    let first = rig.serve(0).expect("it is there");
    let second = rig.serve(0).expect("it is there");
    assert_eq!((rig.queue.lock().free_permits, first.account.running(Class::Interactive)), (0, 2));
    let served = rig.served(1);
    rig.queue.lock().push_again(second, rig.now);
    assert_eq!((rig.queue.lock().free_permits, first.account.running(Class::Interactive)), (1, 1));
    assert_eq!((rig.served(1), rig.drain()), (served, vec![2, 3]));
}

#[test]
fn a_client_with_a_limit_runs_no_more_and_holds_back_nobody() {
    let mut rig = Rig::new(100, 100);
    let limited = client_with(1, ClientSettings { max_sequences: Some(2), ..ClientSettings::default() });
    for _ in 0..4 {
        rig.push(&limited, 1);
    }
    let running = [rig.serve(0), rig.serve(0)].map(|sequence| sequence.expect("it may run").key.0);
    assert_eq!((running, rig.serve(0).is_none()), ([1, 2], false), "dropped sequences run no more");
    let held = [rig.serve(0).expect("it may run")];
    rig.push(&limited, 1);
    rig.push(&limited, 1);
    let second = rig.serve(0).expect("it may run");
    assert!(rig.serve(0).is_none());
    let unclaimed = rig.queue.lock().unclaimed_permits();
    assert_eq!(unclaimed, 100 - 5, "a sequence that may not run claims none");
    rig.push(&client(2), 1);
    assert_eq!(rig.drain(), [7]);
    drop((held, second));
    assert_eq!(rig.drain(), [6]);
}

/// Preempted sequences keep states, so that their number is bounded.
#[test]
fn nobody_is_preempted_while_many_wait_to_continue() {
    let mut rig = Rig::new(2, 100);
    let late = client_with(1, ClientSettings { class: Class::Batch, ..ClientSettings::default() });
    rig.push(&client(2), 1);
    let next = rig.queue.lock().first(&Skipped::default(), false).expect("it waits");
    let all = running(&[(9, 1, Class::Batch, false, 0)]);
    for key in 20..24 {
        let found = rig.queue.lock().victims_for_slots(&next, 1, &all);
        assert!(
            found.is_some()
                && rig.queue.lock().victims_for_pages(&next, demand(1, 1, 100), &all, |_| true).is_some()
        );
        let (mut sequence, stream) =
            sequence(key, Request { client: late.clone(), class: Class::Batch, ..request(1, 4) });
        let times = SequenceTimes { scheduled: rig.now, first_token: rig.now };
        sequence.progress = Some(Progress { generated: Vec::new(), host: None, times, speculator: None });
        rig.queue.lock().push_again(sequence, rig.now);
        rig.streams.push(stream);
    }
    let mut queue = rig.queue.lock();
    assert!(queue.victims_for_slots(&next, 1, &all).is_none());
    assert!(queue.victims_for_pages(&next, demand(1, 1, 100), &all, |_| true).is_none());
    let skipped = Skipped { sequences: BTreeSet::from([next.place.key]), ..Skipped::default() };
    let preempted = queue.first(&skipped, false).expect("it waits");
    queue.take(&preempted);
    assert!(queue.victims_for_slots(&next, 1, &all).is_some());
}

/// One client fills the queue, and others have their share of it nevertheless.
#[test]
fn the_queue_has_space_for_others_when_one_client_has_filled_it() {
    let mut rig = Rig::new(2, 8);
    let (one, two, three) = (client(1), client(2), client(3));
    let busy = |coming, waiting| Err(RequestError::Busy { coming, waiting, limit: 8, retry_after_s: 0 });
    assert_eq!(rig.admit(&one, 10), Ok(()), "slots and queue");
    (0..10).for_each(|_| _ = rig.push(&one, 1));
    assert_eq!(rig.admit(&one, 1), busy(1, 8));
    assert_eq!((rig.admit(&two, 5), rig.admit(&two, 4)), (busy(5, 8), Ok(())));
    (0..4).for_each(|_| _ = rig.push(&two, 1));
    assert_eq!((rig.admit(&two, 1), rig.admit(&three, 2)), (busy(1, 12), Ok(())));
    // Batch requests do not take the share of interactive ones.
    let late =
        client_with(4, ClientSettings { class: Class::Batch, weight: 100, ..ClientSettings::default() });
    (0..10).for_each(|_| _ = rig.push(&late, 1));
    assert_eq!(rig.admit(&three, 2), Ok(()));
    // In total, the room is bounded too, of interactive requests whatever waits behind them.
    (0..8).for_each(|_| _ = rig.push(&late, 1));
    let later =
        client_with(5, ClientSettings { class: Class::Batch, weight: 1000, ..ClientSettings::default() });
    assert_eq!((rig.admit(&later, 1), rig.admit(&three, 1)), (busy(1, 30), Ok(())));
    for client in 6..9 {
        (0..6).for_each(|_| _ = rig.push(&self::client(client), 1));
    }
    assert_eq!(rig.admit(&three, 1), busy(1, 30));
    assert_eq!(rig.admit(&three, 0), Ok(()), "what needs no slot needs no room");
}

/// Credit of a client that may not run, or whose other requests wait by its own choice, is not lent.
#[actix::test]
async fn nobody_is_lifted_less_for_one_that_cannot_begin() {
    let mut rig = Rig::new(100, 100);
    let (busy, other) = (client(1), client(2));
    let limited = client_with(3, ClientSettings { max_sequences: Some(1), ..ClientSettings::default() });
    rig.push(&limited, 1);
    let running = rig.serve(0);
    rig.push(&limited, 1);
    // Its patient request waits at the same time.
    rig.push_request(&other, Request { class: Class::Interactive, priority: 5, ..request(10, 4) });
    for _ in 0..3 {
        rig.push(&busy, 1000);
    }
    drop(rig.serve(0));
    drop(rig.serve(0));
    let least = rig.served(1);
    rig.push(&other, 10);
    rig.push(&client(4), 10);
    assert_eq!([rig.served(2), rig.served(4)], [least; 2]);
    drop(running);
}

/// A sequence that lacks something is passed until as many tokens were computed for each of the others as it
/// has itself.
#[test]
fn a_sequence_that_lacks_pages_is_passed_for_a_while() {
    let mut rig = Rig::new(100, 100);
    let long = client(1);
    rig.push(&long, 100);
    let head = rig.queue.lock().first(&Skipped::default(), false).expect("it waits");
    assert!(!rig.queue.lock().may_be_passed(&head), "there is nobody else");
    for number in 2..4 {
        rig.push(&client(number), 60);
        rig.push(&client(number), 60);
    }
    let skipped = Skipped { clients: BTreeSet::from([ClientId::Key(1)]), ..Skipped::default() };
    let mut passing = Vec::new();
    while rig.queue.lock().may_be_passed(&head)
        && let Some(next) = { rig.queue.lock().first(&skipped, false) }
    {
        let sequence = rig.queue.lock().take(&next).sequence;
        sequence.account.charge_prompt(60);
        passing.push(sequence.key.0);
    }
    assert_eq!(passing, [2, 4, 3], "180 tokens are enough for the one that is left");
    assert_eq!(rig.queue.lock().first(&Skipped::default(), false).map(|next| next.place.key.0), Some(1));
}

/// A search with more beams than a limit that came later is not lost.
#[actix::test]
async fn a_search_beyond_a_new_limit_runs_alone() {
    use crate::decoding::EarlyStopping;
    use crate::request::BeamOptions;
    let mut rig = Rig::new(100, 100);
    let early_stopping = EarlyStopping::Estimate;
    let beams = BeamOptions { width: 4, length_penalty: 1.0, early_stopping, forced_tokens: 0, answer: 0 };
    let class = Class::Interactive;
    rig.push_request(&client(1), Request { class, beams: Some(beams), ..request(1, 4) });
    let limited = client_with(1, ClientSettings { max_sequences: Some(2), ..ClientSettings::default() });
    // Of the same place, so that it is behind the search.
    rig.push(&limited, 1);
    let search = rig.serve(0).expect("nothing else of its client runs");
    assert_eq!((search.permits.len(), rig.serve(0).is_none()), (4, true));
    // What comes back does not bring back its old settings.
    rig.queue.lock().push_again(search, rig.now);
    let settings = rig.queue.lock().clients[&ClientId::Key(1)].client.settings;
    assert_eq!(settings.max_sequences, Some(2));
}

#[test]
fn a_client_within_its_share_of_the_pages_takes_those_of_clients_above_theirs() {
    use Class::Interactive;
    let mut rig = Rig::new(100, 100);
    let clients = [1, 2, 3].map(client);
    for client in &clients[..2] {
        for _ in 0..3 {
            rig.push(client, 10);
            std::mem::forget(rig.serve(0));
        }
    }
    rig.push(&clients[2], 10);
    let next = rig.queue.lock().first(&Skipped::default(), false).expect("it waits");
    let charge =
        |client, tokens| rig.queue.lock().clients[&ClientId::Key(client)].account.charge_prompt(tokens);
    charge(2, 100);
    let of = |key, client, pages, progress| Preemptible {
        pages,
        ..running(&[(key, client, Interactive, true, progress)])[0]
    };
    let all = [of(1, 1, 10, 40), of(2, 1, 10, 40), of(3, 1, 10, 31), of(4, 2, 5, 40), of(5, 2, 5, 40)];
    let chosen = |needed, missing, total| {
        let found = rig.queue.lock().victims_for_pages(&next, demand(needed, missing, total), &all, |_| true);
        found.map(|(victims, reason)| {
            assert_eq!(reason, Reason::Share);
            victims.iter().map(|victim| victim.key.0).collect::<Vec<_>>()
        })
    };
    assert_eq!(chosen(10, 5, 30), None, "it would be the other's turn at once");
    charge(1, 100);
    assert_eq!(chosen(10, 5, 30), Some(vec![2]), "the youngest that has progressed, of the one most above");
    assert_eq!(chosen(10, 15, 30), Some(vec![2, 1]));
    assert_eq!(chosen(10, 21, 30), None, "nobody goes below its share");
    assert_eq!(chosen(11, 5, 30), None, "it would be above its own share");
    assert_eq!(chosen(10, 5, 45), Some(vec![2]));
    assert_eq!(chosen(10, 5, 69), None, "all are within their shares, or left below");
}

#[test]
fn limits_per_minute_say_when_to_retry_and_change_with_the_settings() {
    let mut rig = Rig::new(100, 100);
    let settings = ClientSettings { requests_per_minute: Some(2), ..ClientSettings::default() };
    let one = client_with(1, settings);
    let limited = |what, limit, retry_after_s| Err(RequestError::RateLimited { what, limit, retry_after_s });
    assert_eq!([(); 2].map(|()| rig.admit(&one, 1)), [Ok(()), Ok(())]);
    assert_eq!(rig.admit(&one, 1), limited("requests", 2, 30));
    assert_eq!(rig.admit(&client(2), 1), Ok(()), "others have limits of their own");
    rig.now += Duration::from_secs(20);
    assert_eq!(rig.admit(&one, 1), limited("requests", 2, 10));
    // The same client after its key file was read again: what was counted stays.
    let faster = client_with(1, ClientSettings { requests_per_minute: Some(6), ..settings });
    assert_eq!(rig.admit(&faster, 1), limited("requests", 6, 4));
    let tokens = client_with(1, ClientSettings { tokens_per_minute: Some(600), ..ClientSettings::default() });
    assert_eq!(rig.admit(&tokens, 1), Ok(()));
    rig.push(&tokens, 500);
    rig.serve(400);
    // 900 tokens are 300 more than there are: one more is there after 30.1 s.
    assert_eq!(rig.admit(&tokens, 1), limited("tokens", 600, 31));
    rig.now += Duration::from_secs(31);
    assert_eq!(rig.admit(&tokens, 1), Ok(()));
    rig.push(&tokens, 500_000);
    rig.serve(0);
    assert_eq!(rig.admit(&tokens, 1), limited("tokens", 600, 600), "the time is bounded");
}

/// The rate at which sequences end says when there is space.
#[actix::test]
async fn a_full_queue_says_when_to_retry() {
    let mut rig = Rig::new(2, 4);
    let one = client(1);
    let busy =
        |coming, retry_after_s| Err(RequestError::Busy { coming, waiting: 4, limit: 4, retry_after_s });
    (0..16).for_each(|_| _ = rig.push(&one, 1));
    for _ in 0..10 {
        std::mem::forget(rig.serve(0));
        rig.now += Duration::from_secs(3);
        rig.queue.lock().release_permit(rig.now);
    }
    assert_eq!(rig.admit(&one, 1), busy(1, 3));
    assert_eq!(rig.admit(&one, 3), busy(3, 9));
    rig.now += Duration::from_secs(30);
    assert_eq!(rig.admit(&one, 1), busy(1, 6), "none has ended for a while");
    // While nobody waits, ends say nothing of how fast they come when somebody does.
    rig.drain();
    rig.queue.lock().release_permit(rig.now);
    (0..16).for_each(|_| _ = rig.push(&one, 1));
    rig.now += Duration::from_secs(3600);
    assert!(matches!(rig.admit(&one, 1), Err(RequestError::Busy { retry_after_s: 0, .. })));
}

#[test]
fn a_batch_is_made_of_those_whose_turn_comes_first() {
    let mut rig = Rig::new(4, 100);
    let (one, two) = (client(1), client(2));
    for _ in 0..6 {
        rig.push(&one, 10);
    }
    rig.push(&two, 10);
    rig.queue.lock().release_batch();
    assert_eq!(rig.counts(), (7, 7, 4));
    let mut keys = Vec::new();
    let mut queue = rig.queue.lock();
    while let Some(next) = queue.first(&Skipped::default(), true) {
        keys.push(queue.take(&next).sequence.key.0);
    }
    drop(queue);
    keys.sort_unstable();
    assert_eq!((keys, rig.counts()), (vec![1, 2, 3, 7], (3, 3, 0)), "the second client has its part");
}

fn demand(needed: usize, missing: usize, total: usize) -> Demand {
    Demand { needed, missing, total }
}

/// Running sequences of a lane: (key, client, class, preempted before, tokens since).
fn running(all: &[(u64, u64, Class, bool, usize)]) -> Vec<Preemptible> {
    let of = |&(key, client, class, was_preempted, progress): &(u64, u64, Class, bool, usize)| Preemptible {
        key: SequenceKey(key),
        class,
        client: ClientId::Key(client),
        slots: 1,
        pages: 2,
        was_preempted,
        progress,
    };
    all.iter().map(of).collect()
}

#[test]
fn batch_sequences_make_way_for_interactive_ones_the_youngest_first() {
    use Class::{Batch, Interactive};
    let mut rig = Rig::new(4, 100);
    rig.push(&client(9), 10);
    let next = rig.queue.lock().first(&Skipped::default(), false).expect("it waits");
    let all = [
        (1, 1, Batch, false, 0),
        (2, 1, Interactive, false, 0),
        (3, 2, Batch, true, 0),
        (4, 1, Batch, true, 40),
    ];
    let chosen = |missing, all: &[_]| {
        let found = rig.queue.lock().victims_for_slots(&next, missing, &running(all));
        found.map(|(victims, reason)| {
            assert_eq!(reason, Reason::Class);
            victims.iter().map(|victim| victim.key.0).collect::<Vec<_>>()
        })
    };
    assert_eq!(chosen(1, &all), Some(vec![4]));
    assert_eq!(chosen(2, &all), Some(vec![4, 1]), "the third one has made little progress");
    assert_eq!(chosen(4, &all), None, "nobody is preempted in vain");
    let pages = rig
        .queue
        .lock()
        .victims_for_pages(&next, demand(3, 3, 100), &running(&all), |_| true)
        .map(|(victims, _)| victims.len());
    assert_eq!(pages, Some(2));
}

#[test]
fn a_client_below_its_share_takes_a_slot_of_the_one_most_above() {
    use Class::Interactive;
    let mut rig = Rig::new(6, 100);
    let (one, two, three) = (client(1), client(2), client(3));
    let begin = |rig: &mut Rig, client: &Arc<Client>, count| {
        (0..count)
            .map(|_| {
                rig.push(client, 10);
                rig.serve(0).expect("it begins")
            })
            .collect::<Vec<_>>()
    };
    let mut held = begin(&mut rig, &one, 3);
    held.extend(begin(&mut rig, &two, 3));
    rig.push(&three, 10);
    let victim = |rig: &Rig, all: &[_]| {
        let next = rig.queue.lock().first(&Skipped::default(), false).expect("it waits");
        let found = rig.queue.lock().victims_for_slots(&next, 1, &running(all));
        found.map(|(victims, reason)| (victims[0].key.0, reason))
    };
    let of = |key, client| (key, client, Interactive, false, 1);
    let all = [of(1, 1), of(2, 1), of(3, 1), of(4, 2), of(5, 2), of(6, 2)];
    assert_eq!(victim(&rig, &all), Some((6, Reason::Share)), "each has a share of two");
    assert_eq!(victim(&rig, &[(6, 2, Interactive, true, 31), of(4, 2)]), Some((4, Reason::Share)));
    assert_eq!(victim(&rig, &[(6, 2, Interactive, true, 31)]), None, "it has to make progress first");
    assert_eq!(victim(&rig, &[(6, 2, Interactive, true, 32)]), Some((6, Reason::Share)));
    // With two sequences of the third client, it has its share.
    held.extend(rig.serve(0));
    held.extend(begin(&mut rig, &three, 1));
    rig.push(&three, 10);
    assert_eq!(victim(&rig, &all), None);
    // Clients that have no more than their share keep it.
    held.retain(|sequence| !matches!(sequence.key.0, 1 | 4 | 7 | 8));
    assert_eq!((held.len(), victim(&rig, &all)), (4, None));
}
