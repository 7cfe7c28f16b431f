//! Tests of whole engines whose weights and KV caches are on a disk that is slow, fails, hangs or is full:
//! answers are right or errors, others are unharmed, and nothing is left behind.

use super::start_engine;
use crate::actors::Engine;
use crate::actors::intake::GetFreePermits;
use crate::actors::kv::GetUsage;
use crate::config::{Config, Overrides};
use crate::model::offload::testing::{Access, Gate, Hooked};
use crate::request::{Request, RequestError, TokenEvent};
use crate::testing::Scratch;
use futures_util::StreamExt;
use futures_util::future::{join, join_all};
use futures_util::stream::FuturesUnordered;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, SystemTime};

/// Sequences that run at once.
const SLOTS: u32 = 2;

/// Tokens of an answer.
const TOKENS: u32 = 6;

/// Timeout of every wait; exceeding it means a hang.
const PATIENCE: Duration = Duration::from_secs(120);

/// The accesses that fail.
#[derive(Default)]
struct Faults {
    /// The next access of this kind fails, and so does its repetition.
    next: Option<(Access, ErrorKind)>,
    /// The repetition that fails.
    again: Option<(Access, ErrorKind, u64)>,
    /// All accesses of this kind fail.
    all: Option<(Access, ErrorKind)>,
}

impl Faults {
    fn access(&mut self, access: Access, offset: u64) -> io::Result<()> {
        if let Some((_, error)) = self.all.filter(|(kind, _)| *kind == access) {
            return Err(error.into());
        }
        if let Some((_, error, _)) = self.again.take_if(|(kind, _, at)| (*kind, *at) == (access, offset)) {
            return Err(error.into());
        }
        match self.next.take_if(|(kind, _)| *kind == access) {
            Some((kind, error)) => {
                self.again = Some((kind, error, offset));
                Err(error.into())
            }
            None => Ok(()),
        }
    }
}

/// A disk with stores and caches.
struct Disk {
    folder: Scratch,
    gate: Arc<Gate>,
    faults: Arc<Mutex<Faults>>,
    /// Number of matrices that were written to stores.
    writes: Arc<AtomicUsize>,
    _hook: Hooked,
}

impl Disk {
    fn new() -> Disk {
        let (folder, gate, faults) = (Scratch::new(), Arc::new(Gate::default()), Arc::default());
        let (on_gate, fails): (_, Arc<Mutex<Faults>>) = (gate.clone(), Arc::clone(&faults));
        let writes = Arc::new(AtomicUsize::new(0));
        let counter = writes.clone();
        let _hook = Hooked::new(folder.path(), move |access, offset| {
            on_gate.pass();
            counter.fetch_add(usize::from(access == Access::Pack), Ordering::SeqCst);
            fails.lock().unwrap().access(access, offset)
        });
        Disk { folder, gate, faults, writes, _hook }
    }

    /// Starts an engine with these parts of weights and KV caches in memory.
    async fn engine(&self, weights: &str, caches: &str, settings: &[(&'static str, &str)]) -> Engine {
        let stores = self.folder.path().display().to_string();
        let tiers = [("tiers.host", weights), ("tiers.kv", caches), ("tiers.disk_path", &stores)];
        engine(&[&tiers[..], settings].concat()).await
    }

    fn writes(&self) -> usize {
        self.writes.load(Ordering::SeqCst)
    }

    /// Returns the data files of all stores, with the times when they were written.
    fn stores(&self) -> Vec<(PathBuf, Option<SystemTime>)> {
        let entries = self.folder.path().read_dir().unwrap().flatten().map(|entry| entry.path());
        let data = entries.filter(|path| path.is_dir()).map(|store| store.join("weights.bin"));
        data.map(|file| (file.clone(), file.metadata().and_then(|found| found.modified()).ok())).collect()
    }

    /// Checks that the folder has one complete store, and nothing that is temporary.
    fn assert_tidy(&self) {
        let names = |folder: &Path| {
            let mut names: Vec<_> =
                folder.read_dir().unwrap().flatten().map(|entry| entry.file_name()).collect();
            names.sort();
            names
        };
        let [(data, _)] = &self.stores()[..] else { panic!("{:?}", self.stores()) };
        let store = data.parent().unwrap();
        assert_eq!(names(store), ["index.json", "lock", "weights.bin"]);
        assert_eq!(names(self.folder.path()), [store.file_name().unwrap(), "lock".as_ref()]);
    }
}

async fn engine(settings: &[(&'static str, &str)]) -> Engine {
    let mut flags = Overrides::default();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gqa");
    flags.set("model.path", fixture.to_str());
    flags.set("device.threads", Some(1));
    flags.set("scheduler.slots", Some(SLOTS));
    flags.set("kv.size", Some("1024 tokens"));
    settings.iter().for_each(|(key, value)| flags.set(key, Some(*value)));
    start_engine(&Config::load(None, flags).unwrap()).await.unwrap()
}

fn request(number: u32) -> Request {
    let prompt: Vec<u32> = (0..20 + 3 * number).map(|i| 8 + (number * 31 + i * 7 + i * i) % 88).collect();
    Request { ignore_eos: true, ..Request::greedy("test", prompt, TOKENS) }
}

/// The tokens of an answer, or the error that it ended with.
type Answer = Result<Vec<u32>, RequestError>;

async fn answer(engine: &Engine, number: u32) -> Answer {
    let mut stream = engine.intake.submit(vec![request(number)]).await?.pop().unwrap();
    let mut tokens = Vec::new();
    while let Some(event) = stream.next().await {
        match event {
            TokenEvent::Token(token) => tokens.push(token.id),
            TokenEvent::Failed(error) => return Err(error),
            _ => {}
        }
    }
    assert_eq!(tokens.len(), TOKENS as usize);
    Ok(tokens)
}

/// Answers so many requests at once: as many as there are slots run, the others wait.
async fn answers(engine: &Engine, count: u32) -> Vec<Answer> {
    let all = join_all((0..count).map(|number| answer(engine, number)));
    within(all).await
}

async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(PATIENCE, future).await.expect("something hangs")
}

/// Returns the right answers: those with everything in memory.
async fn expected(count: u32) -> Vec<Answer> {
    let engine = engine(&[]).await;
    let expected = answers(&engine, count).await;
    assert!(expected.iter().all(Result::is_ok), "{expected:?}");
    engine.stop();
    expected
}

/// Waits until no sequence has a slot, a page or a permit.
async fn all_home(engine: &Engine) {
    within(async {
        while engine.actors.kv.send(GetUsage).await.unwrap() != (0, 0)
            || engine.actors.intake.send(GetFreePermits).await.unwrap() != SLOTS as usize
        {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// Runs `work` while accesses to the disk pass one after another.
async fn slowed<F: Future>(disk: &Disk, work: F) -> F::Output {
    let (gate, (end, ended)) = (disk.gate.clone(), mpsc::channel::<()>());
    let slow = std::thread::spawn(move || gate.slow_down(|| _ = ended.recv()));
    let done = work.await;
    drop(end);
    slow.join().unwrap();
    done
}

/// Requests of clients that leave, too, do not change the answers of others.
#[actix_web::test]
async fn a_slow_disk_changes_no_answer() {
    let (disk, expected) = (Disk::new(), expected(5).await);
    let engine = disk.engine("0", "0%", &[]).await;
    let before = disk.stores();
    slowed(&disk, async {
        let left = engine.intake.submit(vec![request(9)]).await.unwrap().pop().unwrap();
        let leaves = async {
            let mut left = left;
            while !matches!(within(left.next()).await, Some(TokenEvent::Token(_))) {}
        };
        let (found, ()) = join(answers(&engine, 5), leaves).await;
        assert_eq!(found, expected);
    })
    .await;
    all_home(&engine).await;
    assert_eq!(disk.stores(), before);
    disk.assert_tidy();
    engine.stop();
}

/// Answers so many requests at once, and calls `on_failure` when the first of them has failed.
async fn answers_with_failure(engine: &Engine, count: u32, on_failure: impl FnOnce()) -> Vec<Answer> {
    let mut on_failure = Some(on_failure);
    let mut found: Vec<Option<Answer>> = (0..count).map(|_| None).collect();
    let mut all: FuturesUnordered<_> =
        (0..count).map(|number| async move { (number, answer(engine, number).await) }).collect();
    while let Some((number, answer)) = within(all.next()).await {
        if answer.is_err()
            && let Some(on_failure) = on_failure.take()
        {
            on_failure();
        }
        found[number as usize] = Some(answer);
    }
    found.into_iter().flatten().collect()
}

/// Checks that some of the requests that ran together have failed for a reason, and that all others, which
/// waited, have the right answers.
fn assert_those_in_flight_failed(found: &[Answer], expected: &[Answer], reason: &str) {
    let mut failed = 0;
    for (found, expected) in found.iter().zip(expected) {
        match found {
            Err(RequestError::DeviceFailed(why)) if why.contains(reason) => failed += 1,
            found => assert_eq!(found, expected),
        }
    }
    assert!((1..=SLOTS).contains(&failed), "{failed} failed, but {SLOTS} run at once: {found:?}");
}

/// Requests in flight end if a store cannot be read, or a cache cannot be written. A store is written anew if
/// it could not be read, once, and not if a cache could not be written.
#[actix_web::test]
async fn a_disk_that_fails_ends_the_requests_in_flight_only() {
    let expected = expected(5).await;
    for (weights, caches, failing, reason) in [
        ("0", "all", (Access::Read, ErrorKind::Other), "cannot read"),
        ("0", "0%", (Access::Write, ErrorKind::Other), "cannot write the KV cache"),
        ("0", "0%", (Access::Write, ErrorKind::StorageFull), "cannot write the KV cache"),
    ] {
        let disk = Disk::new();
        let engine = disk.engine(weights, caches, &[]).await;
        let (store, before) = (disk.writes(), disk.stores());
        assert_eq!(answers(&engine, 5).await, expected);
        for _ in 0..2 {
            let writes = disk.writes();
            disk.faults.lock().unwrap().next = Some(failing);
            let found = answers(&engine, 5).await;
            assert_those_in_flight_failed(&found, &expected, reason);
            assert_eq!(answers(&engine, 5).await, expected, "{failing:?}");
            all_home(&engine).await;
            disk.assert_tidy();
            match failing.0 {
                Access::Read => assert_eq!(disk.writes(), writes + store),
                _ => assert_eq!((disk.writes(), disk.stores()), (writes, before.clone())),
            }
        }
        engine.stop();
    }
}

/// While a store that could not be read cannot be written anew, requests fail; later, they are answered.
#[actix_web::test]
async fn a_disk_that_is_full_fails_requests_until_there_is_room() {
    let (disk, expected) = (Disk::new(), expected(5).await);
    let engine = disk.engine("0", "all", &[]).await;
    {
        let mut faults = disk.faults.lock().unwrap();
        faults.next = Some((Access::Read, ErrorKind::Other));
        faults.all = Some((Access::Pack, ErrorKind::StorageFull));
    }
    let found = answers(&engine, 5).await;
    for found in &found {
        let Err(RequestError::DeviceFailed(why)) = found else { panic!("{found:?}") };
        let is_full = why.contains("cannot write the weights' store") && why.contains("no storage space");
        assert!(why.contains("cannot read") || is_full, "{why}");
    }
    let entries = disk.folder.path().read_dir().unwrap().flatten();
    let left: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    assert!(!left.iter().any(|name| name.contains("unfinished")), "{left:?}");
    disk.faults.lock().unwrap().all = None;
    assert_eq!(answers(&engine, 5).await, expected);
    all_home(&engine).await;
    disk.assert_tidy();
    engine.stop();
}

/// The timeout of steps gives up the device, which is built again while its threads still wait.
#[actix_web::test]
async fn a_disk_that_hangs_ends_the_requests_in_flight_only() {
    let (disk, expected) = (Disk::new(), expected(5).await);
    let engine = disk.engine("0", "0%", &[("device.step_timeout", "3s")]).await;
    let before = disk.stores();
    assert_eq!(answers(&engine, 5).await, expected);
    disk.gate.shut();
    let found = answers_with_failure(&engine, 5, || disk.gate.open()).await;
    assert_those_in_flight_failed(&found, &expected, "no step result within");
    assert_eq!(answers(&engine, 5).await, expected);
    all_home(&engine).await;
    assert_eq!(disk.stores(), before);
    disk.assert_tidy();
    engine.stop();
}
