//! Tests of the open and the closed loop, their limits and their ends.
//!
//! Invariant: a server that waits for several concurrent requests asserts their number by completing.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc, Barrier,
        atomic::{AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use load_tests::{
    plan::arrivals::Arrivals,
    run::{Connections, Progress, RunSettings, run},
    sample::{FailureKind, Outcome},
};

use super::support::{
    HEAD, PATIENCE, TOKEN, all_completed, chunk, constant, failure_kinds, good_response, listen, page,
    read_request, run_to_end, serve, serve_bytes, settings, users,
};

/// Responds to `count` requests only after all have arrived.
fn serve_when_all_arrived(count: usize) -> SocketAddr {
    let (listener, address) = listen();
    thread::spawn(move || {
        let streams: Vec<TcpStream> = listener.incoming().take(count).map(Result::unwrap).collect();
        for mut stream in streams {
            let request = read_request(&stream).unwrap();
            stream.write_all(good_response(&request).as_bytes()).unwrap();
        }
    });
    address
}

/// Responds to requests in groups of `count`, each once the group is complete. Returns the address and the
/// peak concurrency.
fn serve_in_groups(count: usize) -> (SocketAddr, Arc<AtomicUsize>) {
    let (group, now, most) = (Barrier::new(count), AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
    let seen = Arc::clone(&most);
    let address = serve_bytes(move |request| {
        seen.fetch_max(now.fetch_add(1, SeqCst) + 1, SeqCst);
        group.wait();
        // Decremented before the response, after which the next request may arrive.
        now.fetch_sub(1, SeqCst);
        good_response(&request)
    });
    (address, most)
}

#[test]
fn more_requests_are_in_flight_than_a_connection_pool_would_hold() {
    const REQUESTS: usize = 120;
    for connections in [Connections::New, Connections::Reused] {
        let address = serve_when_all_arrived(REQUESTS);
        let record = run_to_end(&RunSettings { connections, ..settings(address, REQUESTS) });
        assert!(all_completed(&record));
        let last_sent = record.samples.iter().map(|s| s.sent).max().unwrap();
        assert!(
            record.samples.iter().all(|s| s.deliveries[0].at() >= last_sent),
            "all requests were in flight at once"
        );
    }
}

#[test]
fn a_stalled_server_shows_because_latency_counts_from_when_it_was_due() {
    const REQUESTS: u32 = 20;
    let gap = Duration::from_millis(5);
    // A client that waited for a response before sending the next request would never send the last one.
    let address = serve_when_all_arrived(REQUESTS as usize);
    let settings = RunSettings { arrivals: constant(gap), ..settings(address, REQUESTS as usize) };
    let record = run_to_end(&settings);
    assert!(all_completed(&record));
    for (index, sample) in (0..REQUESTS).zip(&record.samples) {
        assert_eq!(sample.scheduled, gap * index);
        assert!(sample.sent >= sample.scheduled, "nothing is sent before it is due");
        let ttft = sample.deliveries[0].at() - sample.scheduled;
        assert!(ttft >= gap * (REQUESTS - 1 - index), "request {index}: {sample:?}");
    }
}

/// Reads requests and never responds.
fn serve_silence() -> SocketAddr {
    serve(|mut stream, _| {
        let _ = stream.read(&mut [0]);
    })
}

#[test]
fn the_run_ends_at_its_limit() {
    let time_limit = Duration::from_millis(100);
    let arrivals = constant(Duration::from_millis(40));
    let record = run_to_end(&RunSettings { time_limit, arrivals, ..settings(serve_silence(), 1000) });
    assert!(record.samples.len() <= 3, "nothing is due between 100 and 120 ms");
    assert_eq!(record.samples.len() + record.unsent, 1000);
    assert_eq!(failure_kinds(&record), vec![FailureKind::TimeLimit; record.samples.len()]);
}

#[test]
fn what_waits_for_others_at_the_limit_is_never_sent() {
    let time_limit = Duration::from_millis(50);
    let limited = RunSettings { time_limit, workers: 1, ..settings(serve_silence(), 5) };
    for settings in [
        RunSettings { max_concurrency: Some(1), ..limited.clone() },
        RunSettings { max_concurrency: Some(1), arrivals: users(3), ..limited.clone() },
        RunSettings { arrivals: users(1), ..limited },
    ] {
        let record = run_to_end(&settings);
        assert!(record.samples.len() <= 1, "{:?}", record.samples);
        assert_eq!(record.samples.len() + record.unsent, 5);
        assert_eq!(failure_kinds(&record), vec![FailureKind::TimeLimit; record.samples.len()]);
    }
}

#[test]
fn a_run_with_nothing_more_due_before_its_limit_does_not_wait_for_it() {
    let address = serve_bytes(|request| good_response(&request));
    let begin = Instant::now();
    let record = run_to_end(&RunSettings { arrivals: constant(PATIENCE * 2), ..settings(address, 2) });
    assert!(all_completed(&record) && begin.elapsed() < PATIENCE);
    assert_eq!((record.samples.len(), record.unsent), (1, 1));
}

#[test]
fn users_begin_together_and_none_has_two_requests_in_flight() {
    const USERS: usize = 3;
    for workers in [1, 2] {
        // With fewer than all users in flight, the server would never respond.
        let (address, most) = serve_in_groups(USERS);
        let record = run_to_end(&RunSettings { arrivals: users(USERS), workers, ..settings(address, 12) });
        assert!(all_completed(&record), "{:?}", record.samples);
        assert_eq!((record.samples.len(), record.unsent), (12, 0));
        assert_eq!(most.load(SeqCst), USERS);
        assert_eq!(record.samples.iter().filter(|s| s.scheduled == Duration::ZERO).count(), USERS);
        assert!(record.samples.iter().enumerate().all(|(index, s)| s.index == index));
    }
}

#[test]
fn a_user_thinks_from_the_end_of_one_answer_to_the_next_request() {
    let address = serve_bytes(|request| good_response(&request));
    let think = Duration::from_millis(5);
    let arrivals = Arrivals::Users { count: 1, think };
    let record = run_to_end(&RunSettings { arrivals, ..settings(address, 4) });
    for pair in record.samples.windows(2) {
        assert_eq!(pair[1].scheduled, pair[0].ended + think);
        assert!(pair[1].sent >= pair[1].scheduled);
    }
}

#[test]
fn more_users_than_requests_send_each_request_once() {
    let address = serve_bytes(|request| good_response(&request));
    let record = run_to_end(&RunSettings { arrivals: users(10), ..settings(address, 4) });
    assert!(all_completed(&record));
    assert_eq!(record.samples.iter().map(|s| s.index).collect::<Vec<_>>(), [0, 1, 2, 3]);
}

#[test]
fn a_limit_on_what_is_in_flight_holds_for_users_too() {
    let (address, most) = serve_in_groups(3);
    let limited = RunSettings { max_concurrency: Some(3), arrivals: users(6), ..settings(address, 12) };
    assert!(all_completed(&run_to_end(&limited)));
    assert_eq!(most.load(SeqCst), 3);
}

#[test]
fn a_limit_on_what_is_in_flight_holds_over_all_workers_and_its_wait_counts() {
    let (address, most) = serve_in_groups(3);
    let record = run_to_end(&RunSettings { max_concurrency: Some(3), ..settings(address, 12) });
    assert!(all_completed(&record));
    assert_eq!(most.load(SeqCst), 3);
    assert!(record.samples.iter().all(|s| s.scheduled == Duration::ZERO));
    let mut sent: Vec<Duration> = record.samples.iter().map(|s| s.sent).collect();
    let mut ended: Vec<Duration> = record.samples.iter().map(|s| s.ended).collect();
    sent.sort_unstable();
    ended.sort_unstable();
    // The n-th request is sent only when all but two of the earlier ones have ended.
    assert!((3..12).all(|n| sent[n] >= ended[n - 3]), "{sent:?} {ended:?}");
}

/// Runs the settings and stops the run once the server has received `requests` requests and sent `begin` to
/// each.
fn stop_after(
    requests: usize,
    begin: String,
    change: impl Fn(RunSettings) -> RunSettings,
) -> load_tests::run::RunRecord {
    let (seen, came) = mpsc::channel();
    let address = serve(move |mut stream, _| {
        stream.write_all(begin.as_bytes()).unwrap();
        seen.send(()).unwrap();
        let _ = stream.read(&mut [0]);
    });
    let progress = &Progress::default();
    thread::scope(|scope| {
        scope.spawn(move || {
            (0..requests).for_each(|_| came.recv_timeout(PATIENCE).unwrap());
            progress.stop.store(true, SeqCst);
        });
        run(&change(settings(address, 10)), progress).unwrap()
    })
}

#[test]
fn a_stopped_run_ends_with_everything_hanging() {
    let begun = format!("{HEAD}{}", chunk(TOKEN));
    for begin in ["", "HTTP/1.1 200", &begun] {
        let record = stop_after(2, begin.into(), |settings| RunSettings { arrivals: users(2), ..settings });
        assert_eq!(failure_kinds(&record), [FailureKind::Interrupted; 2], "{begin:?}");
        assert_eq!(record.unsent, 8);
    }
}

#[test]
fn a_stopped_run_sends_nothing_more_whatever_it_waits_for() {
    let waits: [fn(RunSettings) -> RunSettings; 2] = [
        |settings| RunSettings { max_concurrency: Some(1), workers: 1, ..settings },
        |settings| RunSettings { arrivals: constant(PATIENCE / 2), ..settings },
    ];
    for wait in waits {
        let record = stop_after(1, String::new(), wait);
        assert_eq!(failure_kinds(&record), [FailureKind::Interrupted]);
        assert_eq!((record.samples[0].index, record.unsent), (0, 9));
    }
}

#[test]
fn a_pause_before_another_try_is_cut_short_by_the_end_of_the_run() {
    let (seen, came) = mpsc::channel();
    let address = serve_bytes(move |_| {
        seen.send(()).unwrap();
        page("503 X", "retry-after: 30\r\n", "")
    });
    let settings = RunSettings { retries: 1, ..settings(address, 1) };
    let progress = &Progress::default();
    let record = thread::scope(|scope| {
        scope.spawn(move || {
            came.recv_timeout(PATIENCE).unwrap();
            progress.stop.store(true, SeqCst);
        });
        run(&settings, progress).unwrap()
    });
    assert_eq!(failure_kinds(&record), [FailureKind::Interrupted]);
}

#[test]
fn the_watcher_sees_the_counts_of_the_run() {
    let address = serve_bytes(|request| {
        let text = good_response(&request);
        if request.json()["max_tokens"] == 3 { page("500 X", "", "") } else { text }
    });
    let progress = Progress::default();
    let record = run(&settings(address, 30), &progress).unwrap();
    let failed = record.samples.iter().filter(|s| matches!(s.outcome, Outcome::Failed(_))).count();
    assert!((1..30).contains(&failed), "lengths are random from 3 to 6");
    assert_eq!(progress.failed.load(SeqCst), failed);
    assert_eq!(progress.completed.load(SeqCst), 30 - failed);
    assert_eq!((progress.sent.load(SeqCst), progress.in_flight.load(SeqCst)), (30, 0));
    let tokens: u32 = record.samples.iter().map(|s| s.output_len).sum();
    assert_eq!(progress.tokens.load(SeqCst), u64::from(tokens));
}
