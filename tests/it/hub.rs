//! Tests of hub downloads against a local hub: requests, cache contents, and messages.

use crate::common::{PATIENCE, fixture, mainstem};
use actix_web::dev::ServerHandle;
use actix_web::http::{StatusCode, header};
use actix_web::{App, HttpRequest, HttpResponse, HttpServer, web};
use futures_util::{StreamExt, stream};
use mainstem::config::HubSettings;
use mainstem::formats::{Folder, PoolingConfig, SentenceConfig};
use mainstem::hub::{Hub, HubReference, Progress, Timeouts};
use mainstem::model::{ModelRef, ModelSource};
use mainstem::request::Pooling;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const BRANCH_COMMIT: &str = "89abcdef0123456789abcdef0123456789abcdef";
const WEIGHTS: &str = "model.safetensors";

/// A local hub with one repository, `owner/tiny`, whose `main` is a fixture.
struct LocalHub {
    endpoint: String,
    state: Arc<Mutex<State>>,
    handle: ServerHandle,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    files: BTreeMap<String, Vec<u8>>,
    /// Required token; requests without it get status 401.
    token: Option<String>,
    /// Remaining number of times that the content of a file fails half-way, and how.
    faults: BTreeMap<String, (Fault, usize)>,
    /// Part of the path of requests that are never answered.
    mute: Option<&'static str>,
    /// Whether every request is answered with status 503.
    is_down: bool,
    /// Whether ranges are ignored and whole files are sent.
    ignores_ranges: bool,
    /// Whether the list contains only file names.
    lists_names_only: bool,
    /// False answers: a revision's commit in the list, a file's commit, and config.json's ETag.
    false_sha: Option<String>,
    false_commit: Option<String>,
    false_etag: Option<String>,
    /// Whether `main` is now another commit.
    has_moved: bool,
    /// Address of the weights, if not this hub.
    store: Option<String>,
    requests: Vec<ReceivedRequest>,
}

#[derive(Clone, Copy)]
enum Fault {
    /// The connection breaks.
    Break,
    /// The connection stalls.
    Stall,
    /// One byte is changed.
    Spoil,
}

#[derive(Clone, Debug)]
struct ReceivedRequest {
    path: String,
    authorization: Option<String>,
    range: Option<String>,
}

impl LocalHub {
    fn serving(model: &str) -> LocalHub {
        let entries = fs::read_dir(fixture(model)).expect("the fixture is there").flatten();
        let file = |entry: fs::DirEntry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            (name, fs::read(entry.path()).expect("it can be read"))
        };
        let mut files: BTreeMap<String, Vec<u8>> = entries.map(file).collect();
        // Files that only other programs use.
        for other in ["pytorch_model.bin", "consolidated.safetensors", "model.onnx", "q4.gguf", "README.md"] {
            files.insert(other.to_owned(), b"unwanted".to_vec());
        }
        let state = Arc::new(Mutex::new(State { files, ..State::default() }));
        let (sender, receiver) = mpsc::channel();
        let shared = web::Data::from(state.clone());
        let thread = std::thread::spawn(move || {
            actix_web::rt::System::new().block_on(async move {
                let app = move || {
                    App::new()
                        .app_data(shared.clone())
                        .route("/api/models/{owner}/{name}/revision/{revision}", web::get().to(list))
                        .route("/{owner}/{name}/resolve/{revision}/{file:.+}", web::get().to(file_at))
                        .route("/blob/{file}", web::get().to(blob))
                };
                let server = HttpServer::new(app).workers(1).disable_signals();
                let server = server.bind(("127.0.0.1", 0)).expect("a port is free");
                let port = server.addrs()[0].port();
                let server = server.run();
                sender.send((port, server.handle())).expect("the test waits");
                server.await.expect("the server ends well");
            });
        });
        let (port, handle) = receiver.recv().expect("the server starts");
        LocalHub { endpoint: format!("http://127.0.0.1:{port}"), state, handle, thread: Some(thread) }
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().expect("no handler panics"));
    }

    /// Takes the requests received since the last call.
    fn take_requests(&self) -> Vec<ReceivedRequest> {
        std::mem::take(&mut self.state.lock().expect("no handler panics").requests)
    }

    fn fault(&self, file: &str, fault: Fault, times: usize) {
        self.set(|state| _ = state.faults.insert(file.to_owned(), (fault, times)));
    }

    /// Takes the files requested since the last call, in order.
    fn take_requested_files(&self) -> Vec<String> {
        let name = |request: ReceivedRequest| {
            Some(request.path.split_once("/resolve/")?.1.split_once('/')?.1.to_owned())
        };
        let mut names: Vec<String> = self.take_requests().into_iter().filter_map(name).collect();
        names.dedup();
        names
    }
}

impl Drop for LocalHub {
    fn drop(&mut self) {
        drop(self.handle.stop(false));
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Notes the request; a refusal if there is one for everybody or for those without the token. Never comes
/// back when there is to be no answer.
async fn enter<'a>(
    state: &'a Mutex<State>,
    request: &HttpRequest,
) -> Result<MutexGuard<'a, State>, HttpResponse> {
    let refusal = note(&mut state.lock().expect("no handler panics"), request);
    if let Some(refusal) = refusal {
        return Err(refusal);
    }
    let mute = state.lock().expect("no handler panics").mute;
    if mute.is_some_and(|part| request.path().contains(part)) {
        std::future::pending::<()>().await;
    }
    Ok(state.lock().expect("no handler panics"))
}

fn note(state: &mut State, request: &HttpRequest) -> Option<HttpResponse> {
    let header =
        |name| request.headers().get(name).map(|value| value.to_str().expect("it is text").to_owned());
    let authorization = header(header::AUTHORIZATION);
    let is_known = state.token.as_ref().is_none_or(|token| {
        authorization.as_ref().is_some_and(|given| given.strip_prefix("Bearer ") == Some(token))
    });
    state.requests.push(ReceivedRequest {
        path: request.path().to_owned(),
        authorization,
        range: header(header::RANGE),
    });
    match (state.is_down, is_known) {
        (true, _) => Some(HttpResponse::ServiceUnavailable().finish()),
        (_, false) => {
            Some(HttpResponse::Unauthorized().insert_header(("x-error-code", "RepoNotFound")).finish())
        }
        _ => None,
    }
}

/// Returns the commit of a revision of the repository, or the hub's error code.
fn commit(state: &State, owner: &str, name: &str, revision: &str) -> Result<&'static str, &'static str> {
    match (owner, name, revision) {
        ("owner", "tiny", "main") if state.has_moved => Ok(BRANCH_COMMIT),
        ("owner", "tiny", "main" | COMMIT) => Ok(COMMIT),
        ("owner", "tiny", "branch/one" | "branch%2Fone" | BRANCH_COMMIT) => Ok(BRANCH_COMMIT),
        ("owner", "tiny", _) => Err("RevisionNotFound"),
        _ => Err("RepoNotFound"),
    }
}

fn not_found(why: &'static str) -> HttpResponse {
    HttpResponse::NotFound().insert_header(("x-error-code", why)).finish()
}

fn is_large(file: &str) -> bool {
    file.ends_with(".safetensors")
}

/// A name for a file's content, as the public hub makes it: the SHA-256 of a large one, 40 digits for others.
fn etag(file: &str, content: &[u8]) -> String {
    if is_large(file) {
        return Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
    }
    let sum = content.iter().fold(7u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
    format!("{sum:040x}")
}

/// Returns the list entry of a file.
fn sibling(state: &State, file: &str, content: &[u8]) -> serde_json::Value {
    match (state.lists_names_only, is_large(file)) {
        (true, _) => json!({"rfilename": file}),
        (_, true) => {
            let lfs = json!({"sha256": etag(file, content), "size": content.len()});
            json!({"rfilename": file, "size": content.len(), "lfs": lfs})
        }
        (_, false) => json!({"rfilename": file, "size": content.len()}),
    }
}

async fn list(
    state: web::Data<Mutex<State>>,
    request: HttpRequest,
    path: web::Path<(String, String, String)>,
) -> HttpResponse {
    let state = match enter(&state, &request).await {
        Ok(state) => state,
        Err(refusal) => return refusal,
    };
    let (owner, name, revision) = path.into_inner();
    let siblings: Vec<_> = state.files.iter().map(|(file, content)| sibling(&state, file, content)).collect();
    match commit(&state, &owner, &name, &revision) {
        Ok(sha) => {
            let sha = state.false_sha.as_deref().unwrap_or(sha);
            HttpResponse::Ok().json(json!({"sha": sha, "siblings": siblings}))
        }
        Err(why) => not_found(why),
    }
}

/// Small files at once, weights by way of another address, as the public hub does it.
async fn file_at(
    state: web::Data<Mutex<State>>,
    request: HttpRequest,
    path: web::Path<(String, String, String, String)>,
) -> HttpResponse {
    let mut state = match enter(&state, &request).await {
        Ok(state) => state,
        Err(refusal) => return refusal,
    };
    let (owner, name, revision, file) = path.into_inner();
    let commit = match commit(&state, &owner, &name, &revision) {
        Ok(commit) => state.false_commit.clone().unwrap_or_else(|| commit.to_owned()),
        Err(why) => return not_found(why),
    };
    let Some(content) = state.files.get(&file) else { return not_found("EntryNotFound") };
    if !is_large(&file) {
        return send(&mut state, &file, &request, &commit);
    }
    let own = || format!("http://{}", request.connection_info().host());
    let store = state.store.clone().unwrap_or_else(own);
    HttpResponse::Found()
        .insert_header(("x-repo-commit", commit))
        .insert_header(("x-linked-etag", format!("\"{}\"", etag(&file, content))))
        .insert_header((header::LOCATION, format!("{store}/blob/{file}")))
        .finish()
}

async fn blob(state: web::Data<Mutex<State>>, request: HttpRequest, file: web::Path<String>) -> HttpResponse {
    match enter(&state, &request).await {
        Ok(mut state) => send(&mut state, &file, &request, COMMIT),
        Err(refusal) => refusal,
    }
}

/// Sends the requested range, with a fault if one is pending.
fn send(state: &mut State, file: &str, request: &HttpRequest, commit: &str) -> HttpResponse {
    let mut content = state.files.get(file).expect("it was looked up").clone();
    let etag = etag(file, &content);
    let etag = state.false_etag.clone().filter(|_| file == "config.json").unwrap_or(etag);
    let range = request.headers().get(header::RANGE).map(|range| range.to_str().expect("it is text"));
    let (start, end) =
        range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-')).unwrap_or(("0", ""));
    let is_probe = end == "0";
    let end = end.parse().map_or(content.len(), |last: usize| last + 1);
    let start = if state.ignores_ranges && !is_probe { 0 } else { start.parse().expect("a number") };
    if start >= end {
        return HttpResponse::RangeNotSatisfiable().finish();
    }
    let mut answer = HttpResponse::build(StatusCode::PARTIAL_CONTENT);
    answer
        .insert_header((header::ETAG, format!("\"{etag}\"")))
        .insert_header(("x-repo-commit", commit))
        .insert_header((header::CONTENT_RANGE, format!("bytes {start}-{}/{}", end - 1, content.len())));
    let fault = state.faults.get_mut(file).filter(|(_, left)| *left > 0 && !is_probe);
    let fault = fault.map(|(fault, left)| {
        *left -= 1;
        *fault
    });
    if let Some(Fault::Spoil) = fault {
        content[end - 1] ^= 1;
    }
    let part = web::Bytes::copy_from_slice(&content[start..end]);
    let half = part.slice(..part.len() / 2);
    let half = stream::once(async { Ok::<_, std::io::Error>(half) });
    match fault {
        None | Some(Fault::Spoil) => answer.body(part),
        Some(Fault::Stall) => answer.no_chunking(part.len() as u64).streaming(half.chain(stream::pending())),
        Some(Fault::Break) => {
            let broken = async {
                // Sent only after the preceding data is on its way.
                actix_web::rt::task::yield_now().await;
                Err(std::io::Error::other("the connection is to break here"))
            };
            answer.no_chunking(part.len() as u64).streaming(half.chain(stream::once(broken)))
        }
    }
}

/// A cache directory of one test, removed on drop.
struct CacheFolder(PathBuf);

impl CacheFolder {
    fn new() -> CacheFolder {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        CacheFolder(std::env::temp_dir().join(format!("mainstem-hub-{}-{number}", std::process::id())))
    }

    fn path(&self) -> PathBuf {
        self.0.join("hub")
    }

    fn repository(&self) -> PathBuf {
        self.path().join("models--owner--tiny")
    }

    fn blobs(&self) -> PathBuf {
        self.repository().join("blobs")
    }

    /// Returns the value for `HF_HOME`.
    fn home(&self) -> PathBuf {
        self.0.join("home")
    }

    fn snapshot(&self, commit: &str) -> PathBuf {
        self.repository().join("snapshots").join(commit)
    }
}

impl Drop for CacheFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns long timeouts for a hub that responds, with short delays between attempts.
fn patient() -> Timeouts {
    Timeouts { retry_delay: Duration::from_millis(1), ..Timeouts::default() }
}

/// Time to wait for an answer that never comes; others come sooner, on a busy machine too.
const SHORT: Duration = Duration::from_millis(400);

fn hub_at(endpoint: &str, cache: &CacheFolder, variables: &[(&str, &str)]) -> Hub {
    let settings = HubSettings { cache: Some(cache.path()), endpoint: Some(endpoint.to_owned()) };
    let home = cache.home().display().to_string();
    let environment = |name: &str| {
        let mut variables = variables.iter().copied().chain([("HF_HOME", home.as_str())]);
        variables.find(|(known, _)| *known == name).map(|(_, value)| value.to_owned())
    };
    Hub::new(&settings, environment).expect("the settings are right").with_timeouts(patient())
}

fn fetch_with(
    endpoint: &str,
    cache: &CacheFolder,
    reference: &str,
    token: Option<&str>,
    progress: &mut impl Progress,
) -> anyhow::Result<PathBuf> {
    let variables: Vec<_> = token.map(|token| ("HF_TOKEN", token)).into_iter().collect();
    hub_at(endpoint, cache, &variables).fetch(&HubReference::parse(reference)?, progress)
}

fn fetch(hub: &LocalHub, cache: &CacheFolder, reference: &str) -> anyhow::Result<PathBuf> {
    fetch_with(&hub.endpoint, cache, reference, None, &mut ())
}

/// Fetches the model with these timeouts.
fn fetch_within(hub: &LocalHub, cache: &CacheFolder, timeouts: Timeouts) -> anyhow::Result<PathBuf> {
    let hub = hub_at(&hub.endpoint, cache, &[]).with_timeouts(timeouts);
    hub.fetch(&HubReference::parse("hf:owner/tiny")?, &mut ())
}

fn refusal(result: anyhow::Result<PathBuf>) -> String {
    format!("{:#}", result.expect_err("this cannot be fetched"))
}

fn same_files(ours: &Path, model: &str) {
    for entry in fs::read_dir(ours).expect("the folder is there").flatten() {
        let theirs = fixture(model).join(entry.file_name());
        assert!(fs::read(entry.path()).unwrap() == fs::read(&theirs).unwrap(), "{}", theirs.display());
    }
}

#[test]
fn a_model_is_fetched_once_and_then_needs_no_hub() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    let folder = fetch(&hub, &cache, "hf:owner/tiny").unwrap();
    assert_eq!(folder, cache.snapshot(COMMIT));
    let wanted =
        ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS];
    assert_eq!(hub.take_requested_files(), wanted);
    same_files(&folder, "gqa");
    ModelSource::open(&ModelRef::Path(folder.clone()), None).expect("what was fetched is a model");
    // A commit is immutable; a branch may have moved.
    assert_eq!(fetch(&hub, &cache, &format!("hf:owner/tiny@{COMMIT}")).unwrap(), folder);
    assert!(hub.take_requests().is_empty());
    assert_eq!(fetch(&hub, &cache, "hf:owner/tiny").unwrap(), folder);
    let requests: Vec<String> = hub.take_requests().into_iter().map(|request| request.path).collect();
    assert_eq!(requests, ["/api/models/owner/tiny/revision/main"]);
    drop(hub);
    assert_eq!(fetch_with("http://127.0.0.1:1", &cache, "hf:owner/tiny", None, &mut ()).unwrap(), folder);
}

#[test]
fn the_models_of_the_cache_are_listed_and_removed() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    let local = hub_at(&hub.endpoint, &cache, &[]);
    assert_eq!(local.cached().unwrap(), [], "a cache that does not exist yet is empty");
    fetch(&hub, &cache, "hf:owner/tiny").unwrap();
    // What is no model's folder is left alone.
    fs::create_dir_all(cache.path().join("datasets--owner--texts")).unwrap();
    fs::write(cache.path().join("models--owner--file"), "not a folder").unwrap();
    fs::write(cache.repository().join("snapshots/.DS_Store"), "no commit").unwrap();
    // A commit of which a file is missing.
    fs::create_dir_all(cache.snapshot(BRANCH_COMMIT)).unwrap();

    let [model] = &local.cached().unwrap()[..] else { panic!("one model is there") };
    assert_eq!((model.repository.as_str(), &model.folder), ("owner/tiny", &cache.repository()));
    let sizes = fs::read_dir(cache.snapshot(COMMIT))
        .unwrap()
        .map(|file| fs::metadata(file.unwrap().path()).unwrap().len());
    assert_eq!(model.bytes, sizes.sum::<u64>(), "each file counts once, as locks are empty");
    let revisions: Vec<_> =
        model.revisions.iter().map(|it| (it.name.as_str(), it.commit.as_str(), it.is_loadable)).collect();
    assert_eq!(revisions, [("main", COMMIT, true), (BRANCH_COMMIT, BRANCH_COMMIT, false)]);

    let reference = HubReference::parse("hf:owner/tiny").unwrap();
    // Locks of a download of this program and of the hub's tools.
    let locks = cache.path().join(".locks/models--owner--tiny");
    for path in [locks.join("mainstem.lock"), locks.join("other.lock"), cache.blobs().join("other.lock")] {
        let lock = fs::File::create(&path).unwrap();
        lock.lock_shared().unwrap();
        let refused = format!("{:#}", local.remove(&reference).unwrap_err());
        assert!(refused.contains("owner/tiny") && refused.contains("downloading"), "{refused}");
        assert!(cache.snapshot(COMMIT).join(WEIGHTS).exists());
    }
    let leftover = cache.path().join(".removed-1");
    fs::create_dir(&leftover).unwrap();
    assert_eq!(local.remove(&reference).unwrap().bytes, model.bytes);
    assert_eq!(local.cached().unwrap(), []);
    let left: Vec<_> = fs::read_dir(cache.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 3, "other models' files, and locks: {left:?}");
    std::os::unix::fs::symlink(cache.path().join("elsewhere"), cache.repository()).unwrap();
    fs::create_dir(cache.path().join("elsewhere")).unwrap();
    assert!(format!("{:#}", local.remove(&reference).unwrap_err()).contains("is a link"));
    fs::remove_file(cache.repository()).unwrap();
    let missing = format!("{:#}", local.remove(&reference).unwrap_err());
    assert!(missing.contains("owner/tiny is not in"), "{missing}");
}

/// `models` of the program: what is pulled is listed, and nothing is removed without an answer.
#[test]
fn the_program_pulls_lists_and_removes_models() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    let models = |args: &[&str]| {
        let mut command = mainstem();
        command.arg("models").args(args).env("HF_ENDPOINT", &hub.endpoint).env("HF_HUB_CACHE", cache.path());
        let output = command.env("HF_HOME", cache.home()).stdin(Stdio::null()).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.success(), text(&output.stdout), text(&output.stderr))
    };
    assert!(models(&["list"]).1.contains("models pull owner/name"));
    let (is_fetched, folder, log) = models(&["pull", "owner/tiny"]);
    assert!(is_fetched, "{log}");
    assert_eq!(Path::new(folder.trim_end()), cache.snapshot(COMMIT));
    let (_, list, _) = models(&["list"]);
    assert!(list.starts_with("owner/tiny  ") && list.ends_with("  main\n"), "{list}");
    let json: serde_json::Value = serde_json::from_str(&models(&["list", "--json"]).1).unwrap();
    assert_eq!(json[0]["revisions"], json!([{"name": "main", "commit": COMMIT, "is_loadable": true}]));

    for (args, error) in [
        (&["remove", "owner/tiny"][..], "--yes"),
        (&["remove", "owner/other", "--yes"], "owner/other is not in"),
        (&["remove", "owner/tiny@main", "--yes"], "leave out @"),
        (&["remove", "../tiny", "--yes"], "../tiny"),
        (&["pull", "owner/other"], "owner/other"),
    ] {
        let (is_done, _, text) = models(args);
        assert!(!is_done && text.contains(error), "{args:?}: {text}");
    }
    let (is_done, text, _) = models(&["remove", "hf:owner/tiny", "--yes"]);
    assert!(is_done && text.starts_with("removed owner/tiny"), "{text}");
    assert!(!cache.repository().exists());
}

#[test]
fn all_shards_of_an_index_are_fetched() {
    let (hub, cache) = (LocalHub::serving("sharded"), CacheFolder::new());
    let folder = fetch(&hub, &cache, "hf:owner/tiny").unwrap();
    ModelSource::open(&ModelRef::Path(folder.clone()), None).expect("what was fetched is a model");
    assert!(!folder.join("consolidated.safetensors").exists());
    hub.take_requests();
    // A lost file is fetched again, and only that.
    let lost = "model-00002-of-00003.safetensors";
    fs::remove_file(folder.join(lost).canonicalize().unwrap()).unwrap();
    fetch(&hub, &cache, "hf:owner/tiny").unwrap();
    assert_eq!(hub.take_requested_files(), [lost]);
    same_files(&folder, "sharded");
}

/// The files of sentence-transformers are fetched, one of which is in a subdirectory.
#[test]
fn an_encoders_way_of_pooling_is_fetched_with_it() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    let modules = json!([
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "2_Other", "type": "sentence_transformers.models.Pooling"},
    ]);
    let pooling = json!({"pooling_mode_cls_token": true});
    let files = [("modules.json", &modules), ("2_Other/config.json", &pooling)];
    let add = |state: &mut State, (name, content): (&str, &serde_json::Value)| {
        state.files.insert(name.to_owned(), content.to_string().into_bytes());
    };
    hub.set(|state| files.into_iter().for_each(|file| add(state, file)));
    let folder = fetch(&hub, &cache, "hf:owner/tiny").unwrap();
    let found = SentenceConfig::from_folder(&Folder::Disk(folder.clone())).unwrap().expect("they are there");
    assert_eq!(found.pooling, PoolingConfig::Supported(Pooling::Cls));
    // The layout of the hub's own tools: a link to the content.
    let link = fs::read_link(folder.join("2_Other/config.json")).unwrap();
    assert!(link.starts_with("../../../blobs"), "{}", link.display());
    hub.take_requests();
    assert_eq!(fetch(&hub, &cache, &format!("hf:owner/tiny@{COMMIT}")).unwrap(), folder);
    assert!(hub.take_requests().is_empty(), "the commit is known to be whole");
    // Without the file, the commit is incomplete.
    fs::remove_file(folder.join("2_Other/config.json")).unwrap();
    fetch(&hub, &cache, &format!("hf:owner/tiny@{COMMIT}")).unwrap();
    assert_eq!(hub.take_requested_files(), ["2_Other/config.json"]);
}

/// Modules that a hub's file names are looked for only in a folder beside that file.
#[test]
fn a_pooling_module_that_is_elsewhere_is_not_fetched() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    let module = |path: &str| json!({"path": path, "type": "sentence_transformers.models.Pooling"});
    let modules = json!([module("../../1_Pooling"), module("/etc"), module("")]);
    hub.set(|state| _ = state.files.insert("modules.json".into(), modules.to_string().into_bytes()));
    fetch(&hub, &cache, "hf:owner/tiny").unwrap();
    assert!(hub.take_requested_files().iter().all(|name| !name.contains('/')));
}

#[test]
fn revisions_have_folders_of_their_own() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    assert_eq!(fetch(&hub, &cache, "hf:owner/tiny").unwrap(), cache.snapshot(COMMIT));
    assert_eq!(fetch(&hub, &cache, "hf:owner/tiny@branch/one").unwrap(), cache.snapshot(BRANCH_COMMIT));
    let known = fs::read_to_string(cache.repository().join("refs/branch/one")).unwrap();
    assert_eq!(known, BRANCH_COMMIT);
    let error = refusal(fetch(&hub, &cache, "hf:owner/tiny@never"));
    assert!(error.contains("no such revision") && error.contains("@never"), "{error}");
}

#[test]
fn the_token_goes_to_the_hub_when_there_is_one_and_into_no_message() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    fetch(&hub, &cache, "hf:owner/tiny").unwrap();
    assert!(hub.take_requests().iter().all(|request| request.authorization.is_none()));

    hub.set(|state| state.token = Some("hf_right".to_owned()));
    let cache = CacheFolder::new();
    let error = refusal(fetch(&hub, &cache, "hf:owner/tiny"));
    assert!(error.contains("set HF_TOKEN") && error.contains(&hub.endpoint), "{error}");
    let error = refusal(fetch_with(&hub.endpoint, &cache, "hf:owner/tiny", Some("hf_s3cret"), &mut ()));
    assert!(error.contains("the token gives no access") && !error.contains("s3cret"), "{error}");
    hub.take_requests();
    fetch_with(&hub.endpoint, &cache, "hf:owner/tiny", Some("hf_right"), &mut ()).unwrap();
    let requests = hub.take_requests();
    assert!(
        requests.iter().all(|request| request.authorization.as_deref() == Some("Bearer hf_right")),
        "{requests:?}"
    );

    // The token file of the hub's own tools.
    let cache = CacheFolder::new();
    fs::create_dir_all(cache.home()).unwrap();
    fs::write(cache.home().join("token"), "hf_right\n").unwrap();
    fetch(&hub, &cache, "hf:owner/tiny").unwrap();
}

#[test]
fn the_token_goes_to_no_other_address() {
    let (hub, store, cache) = (LocalHub::serving("gqa"), LocalHub::serving("gqa"), CacheFolder::new());
    hub.set(|state| {
        state.token = Some("hf_right".to_owned());
        state.store = Some(store.endpoint.clone());
    });
    let folder = fetch_with(&hub.endpoint, &cache, "hf:owner/tiny", Some("hf_right"), &mut ()).unwrap();
    same_files(&folder, "gqa");
    let requests = store.take_requests();
    assert!(
        !requests.is_empty() && requests.iter().all(|request| request.authorization.is_none()),
        "{requests:?}"
    );
}

/// Data of a hub or a mirror must not determine paths of written files.
#[test]
fn what_a_hub_says_becomes_no_path() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    fs::create_dir_all(cache.repository()).unwrap();
    let victim = cache.0.join("victim");
    let absolute = victim.display().to_string();
    for name in [&absolute, "../../../victim", "..", "", "C:victim", "a\\b"] {
        hub.set(|state| state.false_etag = Some(name.to_owned()));
        let error = refusal(fetch(&hub, &cache, "hf:owner/tiny"));
        assert!(
            error.contains("config.json") && error.contains("not usable as a file name"),
            "{name}: {error}"
        );
        hub.set(|state| (state.false_etag, state.false_commit) = (None, Some(name.replace('\\', "/"))));
        let error = refusal(fetch(&hub, &cache, "hf:owner/tiny"));
        assert!(error.contains("another commit"), "{name}: {error}");
        hub.set(|state| (state.false_commit, state.false_sha) = (None, Some(name.to_owned())));
        let error = refusal(fetch(&hub, &cache, "hf:owner/tiny"));
        assert!(error.contains("is not a commit"), "{name}: {error}");
        hub.set(|state| state.false_sha = None);
    }
    assert!(!victim.exists());
    assert_eq!(fs::read_dir(cache.repository()).unwrap().count(), 0, "nothing has been written");
}

#[test]
fn what_is_not_there_is_named() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    let error = refusal(fetch(&hub, &cache, "hf:owner/other"));
    for part in ["hf:owner/other", "does not exist or needs a token: set HF_TOKEN", &hub.endpoint] {
        assert!(error.contains(part), "{error}");
    }
    hub.set(|state| _ = state.files.remove(WEIGHTS));
    let error = refusal(fetch(&hub, &cache, "hf:owner/tiny"));
    assert!(error.contains(WEIGHTS) && error.contains("consolidated.safetensors, q4.gguf"), "{error}");
    hub.set(|state| _ = state.files.remove("config.json"));
    let error = refusal(fetch(&hub, &CacheFolder::new(), "hf:owner/tiny"));
    assert!(error.contains("config.json"), "{error}");
    let error = refusal(fetch_with("http://127.0.0.1:1", &cache, "hf:owner/tiny", None, &mut ()));
    assert!(error.contains("http://127.0.0.1:1") && error.contains("Connection Failed"), "{error}");
}

#[test]
fn a_broken_connection_is_taken_up_where_it_broke() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    hub.fault(WEIGHTS, Fault::Break, 1);
    let folder = fetch(&hub, &cache, "hf:owner/tiny").unwrap();
    same_files(&folder, "gqa");
    let half = fs::metadata(folder.join(WEIGHTS)).unwrap().len() / 2;
    let ranges: Vec<String> = hub.take_requests().into_iter().filter_map(|request| request.range).collect();
    assert!(ranges.contains(&format!("bytes={half}-")), "{ranges:?}");
}

#[test]
fn a_hub_that_keeps_breaking_leaves_nothing_that_looks_whole() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    hub.fault(WEIGHTS, Fault::Break, usize::MAX);
    let error = refusal(fetch(&hub, &cache, "hf:owner/tiny"));
    assert!(error.contains(WEIGHTS) && error.contains("the connection broke"), "{error}");
    assert!(!cache.snapshot(COMMIT).join(WEIGHTS).exists());
    assert!(!cache.repository().join("refs/main").exists());
    hub.take_requests();
    // The next start resumes there and requests nothing twice.
    hub.set(|state| state.faults.clear());
    let folder = fetch(&hub, &cache, "hf:owner/tiny").unwrap();
    assert_eq!(hub.take_requested_files(), [WEIGHTS]);
    same_files(&folder, "gqa");
}

#[test]
fn a_hub_that_ignores_ranges_spoils_nothing() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    hub.fault(WEIGHTS, Fault::Break, 1);
    hub.set(|state| state.ignores_ranges = true);
    let folder = fetch(&hub, &cache, "hf:owner/tiny").unwrap();
    same_files(&folder, "gqa");
}

/// A partial file of full length is used, a longer one is not, and a stale lock is ignored.
#[test]
fn what_an_ended_process_has_left_is_no_obstacle() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    let content = fs::read(fixture("gqa").join(WEIGHTS)).unwrap();
    let left = |ending| cache.blobs().join(format!("{}.{ending}", etag(WEIGHTS, &content)));
    fs::create_dir_all(cache.blobs()).unwrap();
    fs::write(left("part"), &content).unwrap();
    fs::write(left("lock"), []).unwrap();
    same_files(&fetch(&hub, &cache, "hf:owner/tiny").unwrap(), "gqa");
    assert!(!hub.take_requests().iter().any(|request| request.path.starts_with("/blob/")));

    let cache = CacheFolder::new();
    let longer = [&content[..], b"more"].concat();
    fs::create_dir_all(cache.blobs()).unwrap();
    fs::write(cache.blobs().join(etag(WEIGHTS, &content)).with_extension("part"), longer).unwrap();
    same_files(&fetch(&hub, &cache, "hf:owner/tiny").unwrap(), "gqa");
}

#[test]
fn content_that_is_not_what_the_hub_lists_is_not_kept() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    hub.fault(WEIGHTS, Fault::Spoil, usize::MAX);
    let error = refusal(fetch(&hub, &cache, "hf:owner/tiny"));
    assert!(error.contains(WEIGHTS) && error.contains("SHA-256"), "{error}");
    let kept = fs::read_dir(cache.blobs()).unwrap().flatten().map(|entry| entry.file_name());
    let kept: Vec<String> = kept.map(|name| name.to_string_lossy().into_owned()).collect();
    assert!(!kept.iter().any(|name| name.len() == 64 || name.ends_with(".part")), "{kept:?}");
    hub.fault(WEIGHTS, Fault::Spoil, 1);
    same_files(&fetch(&hub, &cache, "hf:owner/tiny").unwrap(), "gqa");
}

#[test]
fn a_mirror_that_lists_names_only_will_do() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    hub.set(|state| state.lists_names_only = true);
    hub.fault(WEIGHTS, Fault::Break, 1);
    same_files(&fetch(&hub, &cache, "hf:owner/tiny").unwrap(), "gqa");
}

#[test]
fn a_hub_that_falls_silent_is_taken_up_where_it_did() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    hub.fault(WEIGHTS, Fault::Stall, 1);
    let folder = fetch_within(&hub, &cache, Timeouts { idle: SHORT, ..patient() }).unwrap();
    same_files(&folder, "gqa");
    assert!(
        hub.take_requests()
            .iter()
            .any(|request| request.range.as_ref().is_some_and(|range| !range.ends_with('0')))
    );
}

#[test]
fn a_hub_that_never_answers_is_given_up() {
    let short = Timeouts { response: 5 * SHORT, idle: SHORT, ..patient() };
    for (mute, what) in [("/api/", "hf:owner/tiny"), ("/resolve/", "config.json"), ("/blob/", WEIGHTS)] {
        let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
        hub.set(|state| state.mute = Some(mute));
        let error = refusal(fetch_within(&hub, &cache, short.clone()));
        assert!(error.contains(what) && error.contains("timed out"), "{error}");
    }
}

/// A branch is checked again, but a hub that does not respond does not block the use of the cache.
#[test]
fn a_branch_is_looked_at_again_for_a_moment() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    assert_eq!(fetch(&hub, &cache, "hf:owner/tiny").unwrap(), cache.snapshot(COMMIT));
    hub.set(|state| (state.has_moved, state.mute) = (true, Some("/api/")));
    let timeouts = Timeouts { update_check: SHORT, ..patient() };
    assert_eq!(fetch_within(&hub, &cache, timeouts).unwrap(), cache.snapshot(COMMIT));
    // A commit that cannot be fetched completely does not replace a cached one.
    hub.set(|state| {
        state.mute = None;
        let config = state.files.get_mut("config.json").expect("it is served");
        config.push(b'\n');
    });
    hub.fault("config.json", Fault::Break, usize::MAX);
    assert_eq!(fetch(&hub, &cache, "hf:owner/tiny").unwrap(), cache.snapshot(COMMIT));
    hub.set(|state| state.faults.clear());
    hub.take_requests();
    assert_eq!(fetch(&hub, &cache, "hf:owner/tiny").unwrap(), cache.snapshot(BRANCH_COMMIT));
    // Unchanged files are not downloaded again.
    assert!(!hub.take_requests().iter().any(|request| request.path.starts_with("/blob/")));
    assert_eq!(fs::read_to_string(cache.repository().join("refs/main")).unwrap(), BRANCH_COMMIT);
    let config = fs::read(cache.snapshot(BRANCH_COMMIT).join("config.json")).unwrap();
    assert!(config.ends_with(b"\n"));
}

#[test]
fn offline_there_are_no_requests() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    let offline = hub_at(&hub.endpoint, &cache, &[("HF_HUB_OFFLINE", "1")]);
    let reference = HubReference::parse("hf:owner/tiny").unwrap();
    let error = refusal(offline.fetch(&reference, &mut ()));
    assert!(error.contains("hf:owner/tiny") && error.contains("HF_HUB_OFFLINE"), "{error}");
    assert!(hub.take_requests().is_empty());
    let folder = fetch(&hub, &cache, "hf:owner/tiny").unwrap();
    hub.take_requests();
    assert_eq!(offline.fetch(&reference, &mut ()).unwrap(), folder);
    assert!(hub.take_requests().is_empty());
}

#[test]
fn a_file_that_another_process_fetches_is_waited_for() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    let content = fs::read(fixture("gqa").join("config.json")).unwrap();
    let blob = cache.blobs().join(etag("config.json", &content));
    fs::create_dir_all(cache.blobs()).unwrap();
    let lock = fs::File::create(blob.with_extension("lock")).unwrap();
    lock.lock().unwrap();
    let mut requests = Vec::new();
    let folder = std::thread::scope(|scope| {
        let fetching = scope.spawn(|| fetch(&hub, &cache, "hf:owner/tiny"));
        let start = Instant::now();
        while !requests.iter().any(|request: &ReceivedRequest| request.path.ends_with("config.json")) {
            assert!(start.elapsed() < PATIENCE, "nobody asks for config.json");
            requests.extend(hub.take_requests());
            std::thread::yield_now();
        }
        assert!(!fetching.is_finished());
        fs::write(&blob, &content).unwrap();
        drop(lock);
        fetching.join().expect("fetching does not panic").unwrap()
    });
    same_files(&folder, "gqa");
    requests.extend(hub.take_requests());
    let config = requests.iter().filter(|request| request.path.ends_with("/config.json"));
    assert!(config.clone().all(|request| request.range.as_deref() == Some("bytes=0-0")), "{requests:?}");
}

/// A cache filled by other tools may be incomplete, but is used if the hub is unreachable.
#[test]
fn what_other_tools_have_fetched_is_used_when_the_hub_is_away() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    let folder = fetch(&hub, &cache, "hf:owner/tiny").unwrap();
    fs::remove_dir_all(cache.repository().join(".no_exist")).unwrap();
    hub.take_requests();
    hub.set(|state| state.is_down = true);
    let commit = format!("hf:owner/tiny@{COMMIT}");
    assert_eq!(fetch(&hub, &cache, &commit).unwrap(), folder);
    let requests: Vec<String> = hub.take_requests().into_iter().map(|request| request.path).collect();
    assert_eq!(requests, [format!("/api/models/owner/tiny/revision/{COMMIT}")]);
    fs::remove_file(folder.join(WEIGHTS)).unwrap();
    let error = refusal(fetch(&hub, &cache, "hf:owner/tiny"));
    assert!(error.contains("503"), "{error}");
}

#[test]
fn a_cache_that_cannot_be_written_is_named() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    fs::create_dir_all(&cache.0).unwrap();
    fs::write(cache.path(), "a file where the folder should be").unwrap();
    let error = refusal(fetch(&hub, &cache, "hf:owner/tiny"));
    assert!(error.contains(&cache.path().display().to_string()), "{error}");
}

/// Returns the command `mainstem inspect` with hub and cache set by the environment.
fn inspect(hub: &LocalHub, cache: &CacheFolder) -> Command {
    let mut command = crate::common::mainstem();
    command.args(["inspect", "hf:owner/tiny", "--json"]);
    command.env("HF_ENDPOINT", &hub.endpoint).env("HF_HUB_CACHE", cache.path()).env("HF_HOME", cache.home());
    for name in ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE"] {
        command.env_remove(name);
    }
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn the_command_line_fetches_by_name() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    let output = inspect(&hub, &cache).output().expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).expect("the answer is JSON");
    assert_eq!(answer["name"], "owner/tiny");
    assert_eq!(answer["path"], json!(cache.snapshot(COMMIT)));
    let log = String::from_utf8_lossy(&output.stderr);
    assert_eq!(log.lines().count(), 2, "one line at the start and one at the end: {log}");
}

#[test]
fn two_processes_fetch_a_file_once() {
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    let start = || inspect(&hub, &cache).spawn().expect("the program starts");
    for process in [start(), start()] {
        let output = process.wait_with_output().expect("the program ends");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let requests = hub.take_requests();
    let contents =
        requests.iter().filter(|request| request.range.is_none() && request.path.starts_with("/blob/"));
    assert_eq!(contents.count(), 1, "{requests:?}");
    same_files(&cache.snapshot(COMMIT), "gqa");
}

#[test]
fn progress_counts_every_byte() {
    #[derive(Default)]
    struct Counted {
        files: BTreeMap<String, (u64, u64)>,
        at: String,
    }
    impl Progress for Counted {
        fn begin(&mut self, file: &str, size: u64) {
            self.at = file.to_owned();
            self.files.insert(file.to_owned(), (size, 0));
        }
        fn advance(&mut self, bytes: u64) {
            self.files.get_mut(&self.at).expect("a file has begun").1 += bytes;
        }
        fn finish(&mut self) {}
    }
    let (hub, cache) = (LocalHub::serving("gqa"), CacheFolder::new());
    let mut counted = Counted::default();
    let folder = fetch_with(&hub.endpoint, &cache, "hf:owner/tiny", None, &mut counted).unwrap();
    assert_eq!(counted.files.len(), fs::read_dir(&folder).unwrap().count());
    for (name, (size, came)) in counted.files {
        let len = fs::metadata(folder.join(&name)).unwrap().len();
        assert_eq!((size, came), (len, len), "{name}");
    }
}
