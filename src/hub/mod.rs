//! Models from a hub: `hf:owner/name[@revision]` becomes a folder in the hub's cache on this machine, which
//! is shared with the hub's own tools.
//!
//! A commit is fetched by its own name, so that its files belong together even if the revision moves on
//! meanwhile. Where a branch or a tag is now is asked at every start; if nobody answers, what is in the cache
//! will do.
//!
//! Invariant: a revision's ref is written once everything of its commit is there, and a commit that is there
//! is used without a word to the network. What the hub, or a file of it, says becomes a path only where it is a plain
//! name; what is looked for in a folder of such a name is our own.

mod client;
mod progress;
mod reference;
mod repository;

pub use client::Timeouts;
pub use progress::{Bars, Progress};
pub use reference::HubReference;

use crate::config::HubSettings;
use crate::formats::sentence::{MODULES, TEXT_CONFIG};
use crate::formats::{Folder, SentenceFiles, is_plain_name};
use anyhow::{Context, Result, anyhow, bail, ensure};
use client::{Client, Failure, Listed, Listing};
use repository::{Blob, Repository};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use tracing::{info, warn};

const ENDPOINT: &str = "https://huggingface.co";

/// The loader's files: one that must be there, those that may be, and the weights in one file or several.
const CONFIG: &str = "config.json";
const OPTIONAL: [&str; 9] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "spec.toml",
    MODULES,
    TEXT_CONFIG,
];
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// How often a file is tried.
const ATTEMPTS: u32 = 3;
/// What is read of a file at once, in bytes.
const CHUNK: usize = 256 << 10;

/// A hub and the cache beside it.
pub struct Hub {
    cache: PathBuf,
    client: Client,
    /// Nothing may be asked of the network.
    is_offline: bool,
}

/// The folder with the model's files. Fetches those that are not in the cache. Blocks.
///
/// Errors name the model, the hub and, where there is one, the file.
pub fn fetch(
    reference: &HubReference,
    settings: &HubSettings,
    progress: &mut impl Progress,
) -> Result<PathBuf> {
    Hub::new(settings, |variable| std::env::var(variable).ok())?.fetch(reference, progress)
}

/// A commit in the cache that can be loaded.
struct Cached {
    folder: PathBuf,
    /// Whether it is known that the commit has no more of the loader's files.
    is_whole: bool,
}

impl Hub {
    /// The hub of these settings; `environment` looks variables up.
    pub fn new(settings: &HubSettings, environment: impl Fn(&str) -> Option<String>) -> Result<Hub> {
        let variable = |name| environment(name).filter(|value| !value.trim().is_empty());
        let path = |name| variable(name).map(PathBuf::from);
        let home = path("HF_HOME").or_else(|| Some(path("XDG_CACHE_HOME")?.join("huggingface")));
        let home = home.or_else(|| Some(std::env::home_dir()?.join(".cache/huggingface")));
        let cache = settings.cache.clone().or_else(|| path("HF_HUB_CACHE"));
        let cache = cache.or_else(|| Some(home.as_ref()?.join("hub")));
        let cache = cache.context("no place for the hub's files: set hub.cache or HF_HOME")?;
        let endpoint = settings.endpoint.clone().or_else(|| variable("HF_ENDPOINT"));
        let endpoint = endpoint.unwrap_or_else(|| ENDPOINT.to_owned()).trim_end_matches('/').to_owned();
        let is_address = ["https://", "http://"].iter().any(|scheme| endpoint.starts_with(scheme));
        // A password in it would be shown with every error.
        ensure!(!endpoint.contains('@'), "the hub's endpoint must not hold a user name");
        ensure!(is_address, "the hub's endpoint '{endpoint}' does not begin with https:// or http://");
        let token_file = || path("HF_TOKEN_PATH").or_else(|| Some(home?.join("token")));
        let token = variable("HF_TOKEN").or_else(|| read_token(&token_file()?));
        let token = token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        let fits = |token: &String| token.bytes().all(|byte| byte.is_ascii_graphic());
        ensure!(token.iter().all(fits), "the hub's token has a character that no token has");
        let is_set =
            |value: String| ["1", "ON", "YES", "TRUE"].contains(&value.trim().to_uppercase().as_str());
        let is_offline = variable("HF_HUB_OFFLINE").is_some_and(is_set);
        Ok(Hub { cache, client: Client { endpoint, token, timeouts: Timeouts::default() }, is_offline })
    }

    /// The same with other patience.
    pub fn with_timeouts(mut self, timeouts: Timeouts) -> Hub {
        self.client.timeouts = timeouts;
        self
    }

    /// See [`fetch`].
    pub fn fetch(&self, reference: &HubReference, progress: &mut impl Progress) -> Result<PathBuf> {
        let about = || format!("cannot fetch {reference} from {}", self.client.endpoint);
        let repository = Repository::new(&self.cache, reference);
        let commit = match reference.names_commit() {
            true => Some(reference.revision.clone()),
            false => repository.commit(&reference.revision),
        };
        let cached = commit.and_then(|commit| Cached::look(&repository, &commit));
        let is_settled = |cached: &Cached| self.is_offline || (cached.is_whole && reference.names_commit());
        if let Some(cached) = cached.as_ref().filter(|cached| is_settled(cached)) {
            info!("{reference} is in the cache: {}", cached.folder.display());
            return Ok(cached.folder.clone());
        }
        ensure!(
            !self.is_offline,
            "{reference} is not in {}, and HF_HUB_OFFLINE is set",
            self.cache.display()
        );
        match (self.update(reference, &repository, cached.is_some(), progress), cached) {
            (Ok(folder), _) => Ok(folder),
            (Err(error), Some(Cached { folder, .. })) => {
                warn!("{}: {error:#}; what is in {} must do", about(), folder.display());
                Ok(folder)
            }
            (Err(error), None) => Err(error).with_context(about),
        }
    }

    /// Asks where the revision is now, and fetches what is missing of that commit. With something to fall
    /// back on, the hub has less time to answer.
    fn update(
        &self,
        reference: &HubReference,
        repository: &Repository,
        has_other: bool,
        progress: &mut impl Progress,
    ) -> Result<PathBuf> {
        let Timeouts { answer, news, .. } = self.client.timeouts;
        let within = if has_other { news } else { answer };
        let listing = self.client.listing(reference.repository(), &reference.revision, within);
        let listing = listing.map_err(|failure| anyhow!(failure.reason))?;
        let commit = &listing.sha;
        ensure!(
            !commit.is_empty() && commit.bytes().all(|b| b.is_ascii_alphanumeric()),
            "{commit:?} is no commit"
        );
        let what = match Cached::look(repository, commit).is_some_and(|cached| cached.is_whole) {
            true => "is in the cache",
            false => {
                info!("fetching {reference} (commit {commit}) from {}", self.client.endpoint);
                Fetching { hub: self, reference, repository, listing: &listing }.all(progress)?;
                "has been fetched"
            }
        };
        let noted = repository.set_commit(&reference.revision, commit);
        noted.with_context(|| format!("writing to {}", self.cache.display()))?;
        let folder = repository.snapshot(commit);
        info!("{reference} {what}: {}", folder.display());
        Ok(folder)
    }

    /// An error of the disk.
    fn disk(&self, error: &io::Error) -> Failure {
        let cache = self.cache.display();
        Failure::lasting(match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => format!("there is no room left in {cache}"),
            _ => format!("{error} (the cache is {cache})"),
        })
    }
}

/// The token that the hub's own tools have left in a file.
fn read_token(file: &Path) -> Option<String> {
    let read = fs::read_to_string(file);
    if let Err(error) = &read
        && error.kind() != ErrorKind::NotFound
    {
        warn!("the hub's token cannot be read from {}: {error}", file.display());
    }
    read.ok()
}

impl Cached {
    /// What of a commit is there, as far as can be told without asking.
    fn look(repository: &Repository, commit: &str) -> Option<Cached> {
        let folder = repository.snapshot(commit);
        let has = |name: &str| folder.join(name).exists();
        let shards = || shards(&folder.join(INDEX)).is_ok_and(|shards| shards.iter().all(|shard| has(shard)));
        let is_loadable = has(CONFIG) && (has(WEIGHTS) || shards());
        let is_known = |name: &str| has(name) || repository.is_absent(commit, name);
        let pooling = SentenceFiles::pooling_files(&Folder::disk(&folder));
        let is_whole = OPTIONAL.into_iter().all(is_known) && pooling.iter().all(|name| is_known(name));
        is_loadable.then_some(Cached { folder, is_whole })
    }
}

/// A commit on its way from the hub to the cache.
struct Fetching<'a> {
    hub: &'a Hub,
    reference: &'a HubReference,
    repository: &'a Repository,
    listing: &'a Listing,
}

impl Fetching<'_> {
    /// Fetches what the loader reads.
    fn all(&self, progress: &mut impl Progress) -> Result<()> {
        self.get(CONFIG, progress)?;
        for name in OPTIONAL {
            self.get_if_listed(name, progress)?;
        }
        let folder = Folder::disk(&self.repository.snapshot(self.commit()));
        for name in SentenceFiles::pooling_files(&folder) {
            self.get_if_listed(&name, progress)?;
        }
        self.weights(progress)
    }

    /// Fetches a file, or notes that there is none.
    fn get_if_listed(&self, name: &str, progress: &mut impl Progress) -> Result<()> {
        if self.listed(name).is_some() {
            return self.get(name, progress);
        }
        let marked = self.repository.mark_absent(self.commit(), name);
        marked.map_err(|error| anyhow!(self.hub.disk(&error).reason))
    }

    /// The one file of weights, or the index and those it names.
    fn weights(&self, progress: &mut impl Progress) -> Result<()> {
        if self.listed(WEIGHTS).is_some() {
            return self.get(WEIGHTS, progress);
        }
        let others = self.listing.siblings.iter().map(|listed| listed.name.as_str());
        let others: Vec<&str> =
            others.filter(|name| name.ends_with(".safetensors") || name.ends_with(".gguf")).collect();
        ensure!(
            self.listed(INDEX).is_some(),
            "the repository has neither {WEIGHTS} nor {INDEX}; its other files of weights: {}",
            if others.is_empty() { "none".to_owned() } else { others.join(", ") }
        );
        self.get(INDEX, progress)?;
        let shards = shards(&self.repository.snapshot(self.commit()).join(INDEX)).context(INDEX)?;
        shards.iter().try_for_each(|shard| self.get(shard, progress))
    }

    fn commit(&self) -> &str {
        &self.listing.sha
    }

    fn listed(&self, name: &str) -> Option<&Listed> {
        self.listing.siblings.iter().find(|listed| listed.name == name)
    }

    /// Fetches a file, unless it is there.
    fn get(&self, name: &str, progress: &mut impl Progress) -> Result<()> {
        let listed = self.listed(name).with_context(|| format!("the repository has no {name}"))?;
        let path = self.repository.snapshot(self.commit()).join(name);
        if path.exists() {
            return Ok(());
        }
        // A link whose blob has been removed would be in the way.
        let _ = fs::remove_file(path);
        for attempt in 1.. {
            match self.download(listed, progress) {
                Ok(()) => break,
                Err(failure) if failure.passing && attempt < ATTEMPTS => {
                    warn!("{name}: {}; trying again", failure.reason);
                    std::thread::sleep(self.hub.client.timeouts.pause * attempt);
                }
                Err(failure) => bail!("{name}: {}", failure.reason),
            }
        }
        Ok(())
    }

    /// Fetches a file's content, unless it is there under another name, and links it.
    fn download(&self, listed: &Listed, progress: &mut impl Progress) -> Result<(), Failure> {
        let disk = |error: io::Error| self.hub.disk(&error);
        let described = self.hub.client.describe(self.address(listed))?;
        if described.commit.is_some_and(|commit| commit != self.commit()) {
            return Err(Failure::lasting("the hub gave another commit's"));
        }
        let blob = self.repository.blob(&described.etag);
        let blob = blob.map_err(|error| Failure::lasting(error.to_string()))?;
        let size = listed.size.or(described.size);
        let _lock = blob.lock(&listed.name).map_err(disk)?;
        // Another process may have had the lock, and finished.
        let is_there = blob.path().metadata().is_ok_and(|is| size.is_none_or(|size| is.len() == size));
        if !is_there {
            self.fill(listed, &blob, size, progress)?;
            self.check(listed, &blob)?;
            fs::rename(blob.part(), blob.path()).map_err(disk)?;
        }
        self.repository.link(&blob, self.commit(), &listed.name).map_err(disk)
    }

    fn address(&self, listed: &Listed) -> String {
        self.hub.client.address(self.reference.repository(), self.commit(), &listed.name)
    }

    /// Brings the part to the file's whole length, from where an earlier attempt ended.
    fn fill(
        &self,
        listed: &Listed,
        blob: &Blob,
        size: Option<u64>,
        progress: &mut impl Progress,
    ) -> Result<(), Failure> {
        let disk = |error: io::Error| self.hub.disk(&error);
        let mut part = OpenOptions::new().create(true).append(true).open(blob.part()).map_err(disk)?;
        let there = part.metadata().map_err(disk)?.len();
        if size == Some(there) {
            return Ok(());
        }
        let start = if size.is_some_and(|size| there < size) { there } else { 0 };
        let content = self.hub.client.content(self.address(listed), start)?;
        part.set_len(content.start).map_err(disk)?;
        let size = size.or(content.size);
        progress.begin(&listed.name, size.unwrap_or(0));
        progress.advance(content.start);
        // One byte too many tells that it is too long as well as all of them.
        let most = size.map_or(u64::MAX, |size| size.saturating_sub(content.start).saturating_add(1));
        let copied = self.copy(content.reader.take(most), &mut part, progress);
        progress.finish();
        copied?;
        part.sync_all().map_err(disk)?;
        let is = part.metadata().map_err(disk)?.len();
        match size {
            Some(should) if is != should => Err(Failure::passing(format!("{is} bytes came, not {should}"))),
            _ => Ok(()),
        }
    }

    fn copy(
        &self,
        mut reader: impl Read,
        part: &mut File,
        progress: &mut impl Progress,
    ) -> Result<(), Failure> {
        let mut buffer = vec![0; CHUNK];
        loop {
            let count = match reader.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(self.hub.client.broken(&error)),
            };
            part.write_all(&buffer[..count]).map_err(|error| self.hub.disk(&error))?;
            progress.advance(count as u64);
        }
    }

    /// Holds the part against the hash that the hub lists. One that does not fit is removed.
    fn check(&self, listed: &Listed, blob: &Blob) -> Result<(), Failure> {
        let Some(should) = listed.sha256() else { return Ok(()) };
        let is = sha256(&blob.part()).map_err(|error| self.hub.disk(&error))?;
        if is.eq_ignore_ascii_case(should) {
            return Ok(());
        }
        fs::remove_file(blob.part()).map_err(|error| self.hub.disk(&error))?;
        Err(Failure::passing(format!(
            "what came is not what the hub lists: its SHA-256 is {is}, not {should}"
        )))
    }
}

/// A file's SHA-256 in hexadecimal digits.
fn sha256(file: &Path) -> io::Result<String> {
    let (mut file, mut hash, mut buffer) = (File::open(file)?, Sha256::new(), vec![0; CHUNK]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()),
            count => hash.update(&buffer[..count]),
        }
    }
}

/// The files that an index names.
fn shards(index: &Path) -> Result<BTreeSet<String>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(&fs::read(index)?)?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    ensure!(!shards.is_empty(), "it names no file");
    match shards.iter().find(|shard| !is_plain_name(shard)) {
        Some(shard) => bail!("'{shard}' is not the name of a file"),
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

    /// Wherever the cache is: a file called token beside it may be anything.
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
    fn a_full_disk_is_told_and_final() {
        let hub = hub(&settings_with(None), &[]).unwrap();
        let failure = hub.disk(&ErrorKind::StorageFull.into());
        assert!(failure.reason.contains("/nowhere/cache") && !failure.passing, "{}", failure.reason);
    }
}
