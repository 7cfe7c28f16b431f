//! Downloads models from a hub: `hf:owner/name[@revision]` becomes a folder in the hub's local cache, which
//! is shared with the hub's own tools.
//!
//! Files are fetched by commit, so that they belong together even if the revision moves during the download.
//! At every start, the hub is asked for the current commit of a branch or tag; if it does not respond, the
//! cached commit is used.
//!
//! Invariant: a revision's ref is written only after all files of its commit are present, and a complete
//! commit that is requested by its own name needs no network access. Text from the hub, or from a downloaded
//! file, becomes a path only if it is a plain name; the file names looked up in such a folder are constants.

mod cached;
mod client;
mod progress;
mod reference;
mod repository;

pub use cached::{CachedModel, CachedRevision};
pub use client::Timeouts;
pub use progress::{Progress, ProgressBars};
pub use reference::HubReference;

use crate::config::HubSettings;
use crate::formats::sentence::{MODULES, PROMPTS_FILE, TEXT_CONFIG};
use crate::formats::{CONFIG_FILE as CONFIG, SAFETENSORS_FILE as WEIGHTS, SAFETENSORS_INDEX as INDEX};
use crate::formats::{Folder, SentenceConfig, is_plain_name};
use anyhow::{Context, Result, anyhow, bail, ensure};
use client::{Client, FetchError, ListedFile, Listing};
use repository::{Blob, Locks, Repository};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use tracing::{info, warn};

const ENDPOINT: &str = "https://huggingface.co";

/// Files that the loader reads if they exist.
const OPTIONAL_FILES: [&str; 10] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "spec.toml",
    MODULES,
    TEXT_CONFIG,
    PROMPTS_FILE,
];

/// Maximum attempts per file.
const ATTEMPTS: u32 = 3;
/// Read buffer size, in bytes.
const CHUNK: usize = 256 << 10;

/// A model hub and its local cache.
pub struct Hub {
    cache: PathBuf,
    client: Client,
    /// Whether network access is disabled.
    is_offline: bool,
}

/// Downloads the model's files that are not cached and returns their folder. Blocks.
///
/// Errors name the model, the hub and, if one is affected, the file.
pub fn fetch(
    reference: &HubReference,
    settings: &HubSettings,
    progress: &mut impl Progress,
) -> Result<PathBuf> {
    Hub::new(settings, |variable| std::env::var(variable).ok())?.fetch(reference, progress)
}

/// A commit in the cache that has all files needed for loading.
struct CachedSnapshot {
    folder: PathBuf,
    /// Whether every optional file is either present or known to be absent.
    is_complete: bool,
}

impl Hub {
    /// Creates a hub from settings; `environment` looks up environment variables.
    pub fn new(settings: &HubSettings, environment: impl Fn(&str) -> Option<String>) -> Result<Hub> {
        let variable = |name| environment(name).filter(|value| !value.trim().is_empty());
        let path = |name| variable(name).map(PathBuf::from);
        let home = path("HF_HOME").or_else(|| Some(path("XDG_CACHE_HOME")?.join("huggingface")));
        let home = home.or_else(|| Some(std::env::home_dir()?.join(".cache/huggingface")));
        let cache = settings.cache.clone().or_else(|| path("HF_HUB_CACHE"));
        let cache = cache.or_else(|| Some(home.as_ref()?.join("hub")));
        let cache = cache.context("no cache folder for the hub: set hub.cache or HF_HOME")?;
        let endpoint = settings.endpoint.clone().or_else(|| variable("HF_ENDPOINT"));
        let endpoint = endpoint.unwrap_or_else(|| ENDPOINT.to_owned()).trim_end_matches('/').to_owned();
        let is_address = ["https://", "http://"].iter().any(|scheme| endpoint.starts_with(scheme));
        // The endpoint is part of error messages, so a password in it would leak.
        ensure!(!endpoint.contains('@'), "the hub's endpoint must not hold a user name");
        ensure!(is_address, "the hub's endpoint '{endpoint}' does not begin with https:// or http://");
        let token_file = || path("HF_TOKEN_PATH").or_else(|| Some(home?.join("token")));
        let token = variable("HF_TOKEN").or_else(|| read_token(&token_file()?));
        let token = token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        let fits = |token: &String| token.bytes().all(|byte| byte.is_ascii_graphic());
        ensure!(token.iter().all(fits), "the hub's token contains an invalid character");
        let is_set =
            |value: String| ["1", "ON", "YES", "TRUE"].contains(&value.trim().to_uppercase().as_str());
        let is_offline = variable("HF_HUB_OFFLINE").is_some_and(is_set);
        Ok(Hub { cache, client: Client { endpoint, token, timeouts: Timeouts::default() }, is_offline })
    }

    /// Replaces the default time limits.
    pub fn with_timeouts(mut self, timeouts: Timeouts) -> Hub {
        self.client.timeouts = timeouts;
        self
    }

    /// Downloads a model; see [`fetch`].
    pub fn fetch(&self, reference: &HubReference, progress: &mut impl Progress) -> Result<PathBuf> {
        let about = || format!("cannot fetch {reference} from {}", self.client.endpoint);
        let repository = Repository::new(&self.cache, reference);
        let commit = match reference.is_commit() {
            true => Some(reference.revision.clone()),
            false => repository.commit(&reference.revision),
        };
        let cached = commit.and_then(|commit| CachedSnapshot::find(&repository, &commit));
        let is_settled =
            |cached: &CachedSnapshot| self.is_offline || (cached.is_complete && reference.is_commit());
        if let Some(cached) = cached.as_ref().filter(|cached| is_settled(cached)) {
            info!("{reference} is cached: {}", cached.folder.display());
            return Ok(cached.folder.clone());
        }
        ensure!(
            !self.is_offline,
            "{reference} is not cached in {}, and HF_HUB_OFFLINE is set",
            self.cache.display()
        );
        match (self.update(reference, &repository, cached.is_some(), progress), cached) {
            (Ok(folder), _) => Ok(folder),
            (Err(error), Some(CachedSnapshot { folder, .. })) => {
                warn!("{}: {error:#}; using the cached files in {}", about(), folder.display());
                Ok(folder)
            }
            (Err(error), None) => Err(error).with_context(about),
        }
    }

    /// Asks the hub for the revision's commit, downloads its missing files, and returns its folder. If there
    /// is a cached commit to fall back on, the time limit for the answer is shorter.
    fn update(
        &self,
        reference: &HubReference,
        repository: &Repository,
        has_other: bool,
        progress: &mut impl Progress,
    ) -> Result<PathBuf> {
        let Timeouts { response: answer, update_check: news, .. } = self.client.timeouts;
        let within = if has_other { news } else { answer };
        let listing = self.client.listing(reference.repository(), &reference.revision, within);
        let listing = listing.map_err(|failure| anyhow!(failure.reason))?;
        let commit = &listing.sha;
        ensure!(
            !commit.is_empty() && commit.bytes().all(|b| b.is_ascii_alphanumeric()),
            "the hub returned {commit:?}, which is not a commit"
        );
        // Until the revision is noted, so that what it refers to is not removed before.
        let _lock = Locks::new(&self.cache, reference).share();
        let what = match CachedSnapshot::find(repository, commit).is_some_and(|cached| cached.is_complete) {
            true => "is cached",
            false => {
                info!("fetching {reference} (commit {commit}) from {}", self.client.endpoint);
                CommitFetch { hub: self, reference, repository, listing: &listing }.fetch_all(progress)?;
                "has been fetched"
            }
        };
        let noted = repository.set_commit(&reference.revision, commit);
        noted.with_context(|| format!("cannot write to {}", self.cache.display()))?;
        let folder = repository.snapshot(commit);
        info!("{reference} {what}: {}", folder.display());
        Ok(folder)
    }

    /// Converts an I/O error of the cache's file system.
    fn disk_error(&self, error: &io::Error) -> FetchError {
        let cache = self.cache.display();
        FetchError::permanent(match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => format!("no space left in {cache}"),
            _ => format!("{error} (the cache is {cache})"),
        })
    }
}

/// Reads the token that the hub's own tools store in a file.
fn read_token(file: &Path) -> Option<String> {
    let read = fs::read_to_string(file);
    if let Err(error) = &read
        && error.kind() != ErrorKind::NotFound
    {
        warn!("cannot read the hub's token from {}: {error}", file.display());
    }
    read.ok()
}

impl CachedSnapshot {
    /// Checks which files of a commit are cached. Returns `None` if it cannot be loaded.
    fn find(repository: &Repository, commit: &str) -> Option<CachedSnapshot> {
        let folder = repository.snapshot(commit);
        let has = |name: &str| folder.join(name).exists();
        let shards = || shards(&folder.join(INDEX)).is_ok_and(|shards| shards.iter().all(|shard| has(shard)));
        let is_loadable = has(CONFIG) && (has(WEIGHTS) || shards());
        let is_known = |name: &str| has(name) || repository.is_absent(commit, name);
        let pooling = SentenceConfig::module_files(&Folder::disk(&folder));
        let is_whole = OPTIONAL_FILES.into_iter().all(is_known) && pooling.iter().all(|name| is_known(name));
        is_loadable.then_some(CachedSnapshot { folder, is_complete: is_whole })
    }
}

/// The download of one commit.
struct CommitFetch<'a> {
    hub: &'a Hub,
    reference: &'a HubReference,
    repository: &'a Repository,
    listing: &'a Listing,
}

impl CommitFetch<'_> {
    /// Downloads all files the loader reads.
    fn fetch_all(&self, progress: &mut impl Progress) -> Result<()> {
        self.fetch_file(CONFIG, progress)?;
        for name in OPTIONAL_FILES {
            self.fetch_if_listed(name, progress)?;
        }
        let folder = Folder::disk(&self.repository.snapshot(self.commit()));
        for name in SentenceConfig::module_files(&folder) {
            self.fetch_if_listed(&name, progress)?;
        }
        self.fetch_weights(progress)
    }

    /// Downloads a file if the commit has it, otherwise records its absence.
    fn fetch_if_listed(&self, name: &str, progress: &mut impl Progress) -> Result<()> {
        if self.listed(name).is_some() {
            return self.fetch_file(name, progress);
        }
        let marked = self.repository.mark_absent(self.commit(), name);
        marked.map_err(|error| anyhow!(self.hub.disk_error(&error).reason))
    }

    /// Downloads the single weight file, or the index and the files it lists.
    fn fetch_weights(&self, progress: &mut impl Progress) -> Result<()> {
        if self.listed(WEIGHTS).is_some() {
            return self.fetch_file(WEIGHTS, progress);
        }
        let others = self.listing.siblings.iter().map(|listed| listed.name.as_str());
        let others: Vec<&str> =
            others.filter(|name| name.ends_with(".safetensors") || name.ends_with(".gguf")).collect();
        ensure!(
            self.listed(INDEX).is_some(),
            "the repository has neither {WEIGHTS} nor {INDEX}; its other weight files: {}",
            if others.is_empty() { "none".to_owned() } else { others.join(", ") }
        );
        self.fetch_file(INDEX, progress)?;
        let shards = shards(&self.repository.snapshot(self.commit()).join(INDEX)).context(INDEX)?;
        shards.iter().try_for_each(|shard| self.fetch_file(shard, progress))
    }

    fn commit(&self) -> &str {
        &self.listing.sha
    }

    fn listed(&self, name: &str) -> Option<&ListedFile> {
        self.listing.siblings.iter().find(|listed| listed.name == name)
    }

    /// Downloads a file unless it is cached, with retries.
    fn fetch_file(&self, name: &str, progress: &mut impl Progress) -> Result<()> {
        let listed = self.listed(name).with_context(|| format!("the repository has no {name}"))?;
        let path = self.repository.snapshot(self.commit()).join(name);
        if path.exists() {
            return Ok(());
        }
        // A link to a deleted blob would prevent the creation of a new one.
        let _ = fs::remove_file(path);
        for attempt in 1.. {
            match self.download(listed, progress) {
                Ok(()) => break,
                Err(failure) if failure.transient && attempt < ATTEMPTS => {
                    warn!("{name}: {}; trying again", failure.reason);
                    std::thread::sleep(self.hub.client.timeouts.retry_delay * attempt);
                }
                Err(failure) => bail!("{name}: {}", failure.reason),
            }
        }
        Ok(())
    }

    /// Downloads a file's content, unless it is cached under another name, and links it into the snapshot.
    fn download(&self, listed: &ListedFile, progress: &mut impl Progress) -> Result<(), FetchError> {
        let disk = |error: io::Error| self.hub.disk_error(&error);
        let described = self.hub.client.file_info(self.file_url(listed))?;
        if described.commit.is_some_and(|commit| commit != self.commit()) {
            return Err(FetchError::permanent("the hub sent the file of another commit"));
        }
        let blob = self.repository.blob(&described.etag);
        let blob = blob.map_err(|error| FetchError::permanent(error.to_string()))?;
        let size = listed.size.or(described.size);
        let _lock = blob.lock(&listed.name).map_err(disk)?;
        // Another process may have finished the download while this one waited for the lock.
        let is_there = blob.path().metadata().is_ok_and(|is| size.is_none_or(|size| is.len() == size));
        if !is_there {
            self.resume_download(listed, &blob, size, progress)?;
            self.verify_hash(listed, &blob)?;
            fs::rename(blob.partial_path(), blob.path()).map_err(disk)?;
        }
        self.repository.link(&blob, self.commit(), &listed.name).map_err(disk)
    }

    fn file_url(&self, listed: &ListedFile) -> String {
        self.hub.client.file_url(self.reference.repository(), self.commit(), &listed.name)
    }

    /// Downloads the rest of the partial file, from where an earlier attempt ended.
    fn resume_download(
        &self,
        listed: &ListedFile,
        blob: &Blob,
        size: Option<u64>,
        progress: &mut impl Progress,
    ) -> Result<(), FetchError> {
        let disk = |error: io::Error| self.hub.disk_error(&error);
        let mut part =
            OpenOptions::new().create(true).append(true).open(blob.partial_path()).map_err(disk)?;
        let there = part.metadata().map_err(disk)?.len();
        if size == Some(there) {
            return Ok(());
        }
        let start = if size.is_some_and(|size| there < size) { there } else { 0 };
        let content = self.hub.client.content(self.file_url(listed), start)?;
        part.set_len(content.start).map_err(disk)?;
        let size = size.or(content.size);
        progress.begin(&listed.name, size.unwrap_or(0));
        progress.advance(content.start);
        // Reading one extra byte is enough to detect a file that is too long.
        let most = size.map_or(u64::MAX, |size| size.saturating_sub(content.start).saturating_add(1));
        let copied = self.copy(content.reader.take(most), &mut part, progress);
        progress.finish();
        copied?;
        part.sync_all().map_err(disk)?;
        let is = part.metadata().map_err(disk)?.len();
        match size {
            Some(should) if is != should => {
                Err(FetchError::transient(format!("received {is} bytes instead of {should}")))
            }
            _ => Ok(()),
        }
    }

    fn copy(
        &self,
        mut reader: impl Read,
        part: &mut File,
        progress: &mut impl Progress,
    ) -> Result<(), FetchError> {
        let mut buffer = vec![0; CHUNK];
        loop {
            let count = match reader.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(self.hub.client.read_error(&error)),
            };
            part.write_all(&buffer[..count]).map_err(|error| self.hub.disk_error(&error))?;
            progress.advance(count as u64);
        }
    }

    /// Compares the partial file's hash with the one the hub lists. Removes the file if they differ.
    fn verify_hash(&self, listed: &ListedFile, blob: &Blob) -> Result<(), FetchError> {
        let Some(should) = listed.sha256() else { return Ok(()) };
        let is = sha256(&blob.partial_path()).map_err(|error| self.hub.disk_error(&error))?;
        if is.eq_ignore_ascii_case(should) {
            return Ok(());
        }
        fs::remove_file(blob.partial_path()).map_err(|error| self.hub.disk_error(&error))?;
        Err(FetchError::transient(format!(
            "the content is corrupt: its SHA-256 is {is}, but the hub lists {should}"
        )))
    }
}

/// Returns a file's SHA-256 in hexadecimal.
fn sha256(file: &Path) -> io::Result<String> {
    let (mut file, mut hash, mut buffer) = (File::open(file)?, Sha256::new(), vec![0; CHUNK]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()),
            count => hash.update(&buffer[..count]),
        }
    }
}

/// Returns the files listed in an index.
fn shards(index: &Path) -> Result<BTreeSet<String>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(&fs::read(index)?)?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    ensure!(!shards.is_empty(), "it lists no files");
    match shards.iter().find(|shard| !is_plain_name(shard)) {
        Some(shard) => bail!("'{shard}' is not a plain file name"),
        None => Ok(shards),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    fn hub(settings: &HubSettings, variables: &[(&str, &str)]) -> Result<Hub> {
        Hub::new(settings, |name| {
            let hit = variables.iter().find(|(known, _)| *known == name);
            hit.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn settings_come_before_the_environment_and_that_before_the_usual() {
        let variables =
            [("HF_HOME", "/nowhere/home"), ("HF_ENDPOINT", "http://mirror/"), ("HF_TOKEN", " hf_secret\n")];
        let by_environment = hub(&HubSettings::default(), &variables).unwrap();
        assert_eq!(by_environment.cache, Path::new("/nowhere/home/hub"));
        assert_eq!(by_environment.client.endpoint, "http://mirror");
        assert_eq!(by_environment.client.token.as_deref(), Some("hf_secret"));
        let settings =
            HubSettings { cache: Some("/nowhere/cache".into()), endpoint: Some("https://own".to_owned()) };
        let by_settings = hub(&settings, &variables[..2]).unwrap();
        assert_eq!(by_settings.cache, Path::new("/nowhere/cache"));
        assert_eq!((by_settings.client.endpoint.as_str(), by_settings.client.token), ("https://own", None));
        let usual = [("HF_ENDPOINT", ""), ("XDG_CACHE_HOME", "/nowhere/caches")];
        let usual = hub(&HubSettings::default(), &usual).unwrap();
        assert_eq!(usual.client.endpoint, ENDPOINT);
        assert_eq!(usual.cache, Path::new("/nowhere/caches/huggingface/hub"));
    }

    /// The token file is not looked up next to the cache, where a file of that name may be anything.
    #[test]
    fn the_token_is_looked_for_where_the_hubs_own_tools_leave_it() {
        let scratch = Scratch::new();
        scratch.write("token", b"beside");
        for (folder, token) in [("home", "at_home\n"), ("caches/huggingface", "in_caches"), ("own", "named")]
        {
            fs::create_dir_all(scratch.path().join(folder)).unwrap();
            scratch.write(&format!("{folder}/token"), token.as_bytes());
        }
        let path = |name: &str| scratch.path().join(name).display().to_string();
        let (home, caches, own, none) = (path("home"), path("caches"), path("own/token"), path("none"));
        let (home, caches) = (("HF_HOME", home.as_str()), ("XDG_CACHE_HOME", caches.as_str()));
        let (own, none) = (("HF_TOKEN_PATH", own.as_str()), ("HF_TOKEN_PATH", none.as_str()));
        let settings = HubSettings { cache: Some(scratch.path().join("cache")), endpoint: None };
        for (variables, token) in [
            (vec![("HF_TOKEN", "given"), own, home], Some("given")),
            (vec![own, home], Some("named")),
            (vec![none, home], None),
            (vec![home, caches], Some("at_home")),
            (vec![caches], Some("in_caches")),
            (vec![("HF_HOME", none.1)], None),
        ] {
            let hub = hub(&settings, &variables).unwrap();
            assert_eq!(hub.client.token.as_deref(), token, "{variables:?}");
        }
    }

    fn settings_with(endpoint: Option<&str>) -> HubSettings {
        HubSettings { cache: Some("/nowhere/cache".into()), endpoint: endpoint.map(str::to_owned) }
    }

    #[test]
    fn secrets_are_in_no_error() {
        for (endpoint, token) in [
            ("https://user:s3cret@own", "t"),
            ("https://own", "s3cret s3cret"),
            ("https://own", "s3cret\u{e4}"),
        ] {
            let error = hub(&settings_with(Some(endpoint)), &[("HF_TOKEN", token)]).err().unwrap();
            assert!(!format!("{error:#}").contains("s3cret"), "{error:#}");
        }
        assert!(hub(&settings_with(Some("ftp://own")), &[]).is_err());
    }

    #[test]
    fn a_full_disk_is_reported_and_final() {
        let hub = hub(&settings_with(None), &[]).unwrap();
        let failure = hub.disk_error(&ErrorKind::StorageFull.into());
        assert!(failure.reason.contains("/nowhere/cache") && !failure.transient, "{}", failure.reason);
    }
}
