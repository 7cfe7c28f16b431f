//! The store of a model's packed matrices: a folder with one file of data, in which the matrices of the
//! layers follow one another in the order of use, and an index in JSON with their checksums.
//!
//! A store is written once per model, formats and kind of device, by [`StoreWriter`]; which one a model
//! needs follows from a [`StoreKey`]. A model whose files change needs another one.
//! Invariant: a store under its final name is complete, because it is written under another name first, and
//! what a process uses is not removed by others.

use super::direct::{self, BLOCK, to_blocks};
use super::store_key::{StoreKey, StoredMatrix};
use super::tier::host_memory;
use crate::model::load_target::LoadTarget;
use anyhow::{Context, Result, ensure};
use mainstem_kernels::Weight;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tracing::{info, warn};
use xxhash_rust::xxh3::xxh3_64;

/// File names in a store.
const DATA: &str = "weights.bin";
const INDEX: &str = "index.json";

/// Ending of the folder of a store that is being written.
const UNFINISHED: &str = "mainstem-unfinished";

/// Name of the file in a store's folder that its writer locks, and those that use it share; and of the one
/// that is locked while stores are looked for, begun, completed and removed.
const LOCK: &str = "lock";

/// Bytes of a store that are written before they are made to leave the page cache.
const WRITTEN_AHEAD: u64 = 64 << 20;

/// The folder of all stores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorePlace(pub PathBuf);

/// The index of a store.
#[derive(Serialize, Deserialize)]
pub(super) struct Index {
    pub(super) key: StoreKey,
    /// By matrix.
    pub(super) checksums: Vec<u64>,
    /// Checksums of all bytes of the model's files, of a store beside it.
    #[serde(default)]
    pub(super) contents: Vec<u64>,
}

impl Index {
    /// Returns whether the model's files have the times of change that they had when the store was made.
    pub(super) fn has_times_of(&self, key: &StoreKey) -> bool {
        self.key == *key
    }

    /// Writes the index to a store's folder, in place of the one that is there.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        // Under a name of this process until it is complete.
        let begun = folder.join(format!("{INDEX}.{}", process::id()));
        let write = || {
            let mut file = File::create(&begun)?;
            file.write_all(&serde_json::to_vec(self)?)?;
            file.sync_all()?;
            anyhow::Ok(fs::rename(&begun, folder.join(INDEX))?)
        };
        write().inspect_err(|_| _ = fs::remove_file(&begun))
    }
}

/// Damaged stores whose index cannot be removed, such as those on a disk that is read only: this process does
/// not use them again.
static DAMAGED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn damaged() -> MutexGuard<'static, Vec<PathBuf>> {
    DAMAGED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A complete store.
#[derive(Clone, Debug)]
pub struct PackedStore {
    folder: PathBuf,
    /// In the order of use.
    pub matrices: Vec<StoredMatrix>,
    /// Locked as long as the store is used, if its folder can have a lock.
    _lock: Option<Arc<StoreLock>>,
}

impl PackedStore {
    /// Returns the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the bytes of the matrices.
    pub fn bytes(&self) -> u64 {
        self.matrices.iter().map(|matrix| matrix.bytes as u64).sum()
    }

    /// Returns the data file.
    pub fn data_file(&self) -> PathBuf {
        self.folder.join(DATA)
    }

    /// Returns the name of the matrix at `index` and its file, for messages.
    pub fn describe(&self, index: usize) -> String {
        format!("{} in {}", self.matrices[index].name, self.data_file().display())
    }

    /// Checks the bytes of the matrix at `index`. Those of a damaged store are not used again.
    pub fn verify(&self, index: usize, bytes: &[u8]) -> Result<(), String> {
        if xxh3_64(bytes) == self.matrices[index].checksum {
            return Ok(());
        }
        self.discard();
        Err(format!("{} has changed; the next start writes it anew", self.describe(index)))
    }

    /// Returns the message for a matrix that cannot be read. The store is not used again, because the same
    /// place of the disk would fail once more.
    pub fn read_failure(&self, index: usize, error: &io::Error) -> String {
        self.discard();
        let reason = match error.kind() {
            io::ErrorKind::UnexpectedEof => "the file ends before it".to_owned(),
            _ => error.to_string(),
        };
        format!("cannot read {}: {reason}; the next start writes it anew", self.describe(index))
    }

    /// Removes the index, so that the next start writes the store anew.
    fn discard(&self) {
        let file = self.folder.join(INDEX);
        if let Err(error) = fs::remove_file(&file)
            && error.kind() != io::ErrorKind::NotFound
        {
            warn!(file = %file.display(), %error, "cannot remove the index of a damaged store");
            damaged().push(self.folder.clone());
        }
    }
}

impl StorePlace {
    /// Returns the folder of the store for `key`.
    pub fn folder(&self, key: &StoreKey) -> PathBuf {
        self.0.join(key.folder_name())
    }

    /// Returns whether there seems to be a store for `key`, without reading its index, which may be long.
    pub(super) fn has_index(&self, key: &StoreKey) -> bool {
        self.folder(key).join(INDEX).exists()
    }

    /// Opens the store for `key`; `None` if there is none, or if it is incomplete. Fails if its index cannot
    /// be read. Removes what earlier writers left that did not finish, and stores that nobody uses any more.
    pub fn open(&self, key: &StoreKey) -> Result<Option<PackedStore>> {
        // Without one, in a folder that cannot be written, nothing is removed.
        let place = self.lock().ok();
        if place.is_some() {
            self.remove_useless(key);
        }
        self.find(key)
    }

    /// Locks the folder until the returned file is dropped.
    fn lock(&self) -> io::Result<File> {
        let place = File::create(self.0.join(LOCK))?;
        place.lock()?;
        Ok(place)
    }

    /// Removes the folder if it has no stores.
    fn remove_if_empty(&self) {
        let names = self.0.read_dir().into_iter().flatten().flatten().map(|entry| entry.file_name());
        let Ok(_place) = self.lock() else { return };
        if names.into_iter().all(|name| name == LOCK) {
            let _ = fs::remove_file(self.0.join(LOCK)).and_then(|()| fs::remove_dir(&self.0));
        }
    }

    fn find(&self, key: &StoreKey) -> Result<Option<PackedStore>> {
        Ok(self.find_with_index(key)?.map(|(store, _)| store))
    }

    /// Opens the store for `key` with its index. One beside a model may be of files with other times.
    pub(super) fn find_with_index(&self, key: &StoreKey) -> Result<Option<(PackedStore, Index)>> {
        let (folder, setting) = (self.folder(key), key.setting());
        if damaged().contains(&folder) {
            return Ok(None);
        }
        let file = folder.join(INDEX);
        let text = match fs::read(&file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.with_context(|| format!("{setting}cannot read {}", file.display()))?,
        };
        let index: Option<Index> = serde_json::from_slice(&text).ok();
        let is_valid = |index: &Index| key.accepts(&index.key) && index.checksums.len() == key.matrices.len();
        let Some(index) = index.filter(is_valid) else {
            warn!(store = %folder.display(), "the store has an invalid index, and is written anew");
            return Ok(None);
        };
        let lock =
            share_lock(&folder).with_context(|| format!("{setting}cannot lock {}", folder.display()))?;
        let data = folder.join(DATA);
        let found = match data.metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            found => found.with_context(|| format!("{setting}cannot read {}", data.display()))?.len(),
        };
        if found != key.data_bytes() {
            let expected = key.data_bytes();
            warn!(file = %data.display(), found, expected, "the store has a wrong size, and is written anew");
            return Ok(None);
        }
        Ok(Some((PackedStore { folder, matrices: key.stored(&index.checksums), _lock: lock }, index)))
    }

    /// Returns whether the folder has a store of the model that no start can use any more.
    pub(super) fn has_outdated(&self, key: &StoreKey) -> bool {
        let stores = self.0.read_dir().into_iter().flatten().flatten();
        let mut indices = stores.filter_map(|store| fs::read(store.path().join(INDEX)).ok());
        indices.any(|index| is_outdated(&index, key))
    }

    /// Begins to write the store for `key`. A damaged one is removed first, because it takes the same place.
    pub fn write(&self, key: StoreKey) -> Result<StoreWriter> {
        let in_place = || format!("{}cannot write the weights' store to {}", key.setting(), self.0.display());
        fs::create_dir_all(&self.0).with_context(in_place)?;
        // Others that begin at the same time would remove this writer's folder before it has its lock.
        let _place = self.lock().with_context(in_place)?;
        self.remove_useless(&key);
        let folder = self.create_folder(&key).with_context(in_place)?;
        let lock = File::create(folder.join(LOCK)).with_context(in_place)?;
        lock.lock().with_context(in_place)?;
        let data = BufWriter::new(File::create(folder.join(DATA)).with_context(in_place)?);
        let store = self.folder(&key);
        info!(store = %store.display(), bytes = key.data_bytes(), "writing the layers' weights to a store");
        Ok(StoreWriter {
            key,
            folder,
            place: self.clone(),
            lock: Arc::new(StoreLock(lock)),
            data,
            written: 0,
            clean: 0,
            checksums: Vec::new(),
            contents: Vec::new(),
            is_kept: false,
        })
    }

    /// Creates a new folder for a store that is being written.
    fn create_folder(&self, key: &StoreKey) -> io::Result<PathBuf> {
        let (name, process) = (key.folder_name(), process::id());
        let mut number = 0;
        loop {
            // Processes in different containers may have the same number.
            let folder = self.0.join(format!("{name}.{process}.{number}.{UNFINISHED}"));
            match fs::create_dir(&folder) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
                created => return created.map(|()| folder),
            }
        }
    }

    /// Removes the folders of writers that have ended without finishing, damaged stores, and the stores of
    /// the same model that no start can use any more, unless a process uses them.
    fn remove_useless(&self, key: &StoreKey) {
        let entries = self.0.read_dir().into_iter().flatten().flatten();
        for folder in entries.map(|entry| entry.path()) {
            let is_useless = match folder.extension().is_some_and(|ending| ending == UNFINISHED) {
                true => true,
                false => match fs::read(folder.join(INDEX)) {
                    Ok(text) => is_outdated(&text, key),
                    Err(error) => error.kind() == io::ErrorKind::NotFound && is_store_without_index(&folder),
                },
            };
            if is_useless && is_unused(&folder) {
                info!(store = %folder.display(), "removing an unfinished, damaged or outdated store");
                let _ = fs::remove_dir_all(&folder);
            }
        }
    }
}

/// Returns whether a folder is a store that has lost its index: it has the name and the files of one.
fn is_store_without_index(folder: &Path) -> bool {
    let name = folder.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let is_digest = |digest: &str| digest.len() == 16 && digest.bytes().all(|byte| byte.is_ascii_hexdigit());
    let files = folder.read_dir().into_iter().flatten().flatten();
    name.rsplit_once('-').is_some_and(|(_, digest)| is_digest(digest))
        && files.map(|file| file.file_name()).all(|name| name == DATA || name == LOCK)
}

/// Returns whether no process writes or uses a store, which it would have locked.
fn is_unused(folder: &Path) -> bool {
    match File::open(folder.join(LOCK)) {
        Ok(lock) => lock.try_lock().is_ok(),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

/// Locks a store for one that uses it. `None` if it has no lock, and none can be created.
fn share_lock(folder: &Path) -> io::Result<Option<Arc<StoreLock>>> {
    let path = folder.join(LOCK);
    let Ok(lock) = File::open(&path).or_else(|_| File::create(&path)) else { return Ok(None) };
    lock.lock_shared()?;
    Ok(Some(Arc::new(StoreLock(lock))))
}

/// A locked file of a store. It is unlocked at once when it is dropped, even if a process that is just being
/// started has the same open file.
#[derive(Debug)]
struct StoreLock(File);

impl Drop for StoreLock {
    fn drop(&mut self) {
        _ = self.0.unlock();
    }
}

/// Returns whether an index is that of the same model with other files or of another version.
fn is_outdated(index: &[u8], key: &StoreKey) -> bool {
    let index: Option<Index> = serde_json::from_slice(index).ok();
    index.is_some_and(|index| key.makes_useless(&index.key))
}

/// Writes a store. Its folder is removed if it is dropped before it is finished.
pub struct StoreWriter {
    key: StoreKey,
    /// The folder, until it is renamed.
    folder: PathBuf,
    place: StorePlace,
    /// Locked as long as the writer lives.
    lock: Arc<StoreLock>,
    data: BufWriter<File>,
    /// Bytes written so far, and those of them that have left the page cache.
    written: u64,
    clean: u64,
    /// Checksums of the matrices so far.
    checksums: Vec<u64>,
    /// Checksums of the model's files, of a store beside it.
    pub(super) contents: Vec<u64>,
    is_kept: bool,
}

impl StoreWriter {
    /// Returns the bytes of the complete store.
    pub fn bytes(&self) -> usize {
        self.key.matrices.iter().map(|matrix| matrix.bytes).sum()
    }

    /// Appends the next matrix, as the device holds it. Fails if it cannot be written.
    pub(super) fn append_weight<T: LoadTarget>(
        &mut self,
        target: &mut T,
        weight: &Weight<T::Buf>,
    ) -> Result<()> {
        let layout = target.device_sizes().packed_layout(weight.ty, weight.n, weight.k);
        let mut bytes = host_memory(layout.bytes)?;
        target.download_packed(&weight.buf, &mut bytes);
        self.append(&bytes)
    }

    /// Appends the packed bytes of the next matrix. Fails if they cannot be written.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        const ZEROS: [u8; BLOCK] = [0; BLOCK];
        let expected = self.key.matrices.get(self.checksums.len()).map(|matrix| matrix.bytes);
        ensure!(expected == Some(bytes.len()), "matrices are written in the order of the key; this is a bug");
        let padding = to_blocks(bytes.len()) - bytes.len();
        #[cfg(test)]
        super::testing::before_packing(&self.folder, self.written).with_context(|| self.failure())?;
        let write = self.data.write_all(bytes).and_then(|()| self.data.write_all(&ZEROS[..padding]));
        self.written += to_blocks(bytes.len()) as u64;
        write.and_then(|()| self.clean()).with_context(|| self.failure())?;
        self.checksums.push(xxh3_64(bytes));
        Ok(())
    }

    /// Completes the store. If another process was faster, its store is used.
    pub fn finish(mut self) -> Result<PackedStore> {
        let (found, expected) = (self.checksums.len(), self.key.matrices.len());
        ensure!(found == expected, "{found} of {expected} matrices were written; this is a bug");
        self.end().with_context(|| self.failure())?;
        let _place = self.place.lock().with_context(|| self.failure())?;
        match self.place.find_with_index(&self.key)? {
            Some((store, index)) if index.has_times_of(&self.key) => return Ok(store),
            _ => {}
        }
        let last = self.place.folder(&self.key);
        // A damaged one, which others may still use, as far as it goes.
        let _ = fs::remove_dir_all(&last);
        fs::rename(&self.folder, &last)
            .with_context(|| format!("cannot rename {} to {}", self.folder.display(), last.display()))?;
        self.is_kept = true;
        damaged().retain(|folder| *folder != last);
        self.lock.0.lock_shared().with_context(|| self.failure())?;
        let (matrices, lock) = (self.key.stored(&self.checksums), Some(self.lock.clone()));
        Ok(PackedStore { folder: last, matrices, _lock: lock })
    }

    /// Makes what was written leave the page cache, if that is much.
    fn clean(&mut self) -> io::Result<()> {
        if self.written - self.clean < WRITTEN_AHEAD {
            return Ok(());
        }
        self.data.flush()?;
        let data = self.data.get_ref();
        data.sync_data()?;
        direct::forget(data, self.clean, self.written - self.clean);
        self.clean = self.written;
        Ok(())
    }

    /// Writes what is buffered, and the index.
    fn end(&mut self) -> Result<()> {
        self.data.flush()?;
        let data = self.data.get_ref();
        data.sync_all()?;
        direct::forget(data, 0, self.key.data_bytes());
        let (key, checksums, contents) = (self.key.clone(), self.checksums.clone(), self.contents.clone());
        Index { key, checksums, contents }.write(&self.folder)
    }

    fn failure(&self) -> String {
        let (file, bytes) = (self.folder.join(DATA), self.key.data_bytes());
        let setting = self.key.setting();
        format!("{setting}cannot write the weights' store of {bytes} bytes, {}", file.display())
    }
}

impl Drop for StoreWriter {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        let _ = fs::remove_dir_all(&self.folder);
        if self.key.is_beside() {
            self.place.remove_if_empty();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::mark::FileMark;
    use super::super::matrix::LayerMatrix;
    use super::super::store_key::VERSION;
    use super::*;
    use crate::testing::Scratch;
    use mainstem_kernels::reference::ReferenceSizes;
    use mainstem_kernels::{DeviceSizes, QuantType};

    /// A model's file, a place for stores, and two matrices of different sizes.
    struct Case {
        scratch: Scratch,
        matrices: Vec<LayerMatrix>,
    }

    /// The name of a damage, and a function that does it.
    type Damage = (&'static str, fn(&PackedStore));

    impl Case {
        fn new() -> Case {
            let scratch = Scratch::new();
            let matrix = |n| LayerMatrix {
                role: "up",
                name: format!("matrix {n}"),
                part: String::new(),
                layout: ReferenceSizes.packed_layout(QuantType::F32, n, 32),
                expert: None,
                is_for_openings: false,
            };
            let matrices = [3, 50].map(matrix).to_vec();
            Case { scratch, matrices }
        }

        fn place(&self) -> StorePlace {
            StorePlace(self.scratch.path().join("stores"))
        }

        fn key(&self) -> StoreKey {
            let mut key = StoreKey::new(Path::new("some.gguf"), &[], self.matrices.iter());
            let file = self.scratch.path().join("some.gguf");
            if file.exists() {
                key.files.push(FileMark { changed: 1, ..FileMark::new(&file).unwrap() });
            }
            key
        }

        fn bytes(&self, index: usize) -> Vec<u8> {
            (0..self.matrices[index].layout.bytes).map(|at| (at * 7 + index) as u8).collect()
        }

        fn write(&self) -> PackedStore {
            let mut writer = self.place().write(self.key()).unwrap();
            (0..2).for_each(|index| writer.append(&self.bytes(index)).unwrap());
            writer.finish().unwrap()
        }

        fn folders(&self) -> usize {
            self.place().0.read_dir().unwrap().flatten().filter(|entry| entry.path().is_dir()).count()
        }
    }

    #[test]
    fn a_store_is_found_again_and_has_what_was_written() {
        let case = Case::new();
        assert!(case.place().open(&case.key()).unwrap().is_none());
        let (written, found) = (case.write(), case.place().open(&case.key()).unwrap().unwrap());
        assert_eq!(written.matrices, found.matrices);
        let data = fs::read(found.data_file()).unwrap();
        for (index, matrix) in found.matrices.iter().enumerate() {
            let bytes = &data[matrix.offset as usize..][..matrix.bytes];
            assert_eq!((bytes, matrix.offset % 4096), (&case.bytes(index)[..], 0));
            assert_eq!(found.verify(index, bytes), Ok(()));
        }
    }

    #[test]
    fn a_damaged_store_is_not_used() {
        let damage: [Damage; 4] = [
            ("truncated", |store| {
                let file = File::options().write(true).open(store.data_file()).unwrap();
                file.set_len(file.metadata().unwrap().len() - 1).unwrap();
            }),
            ("no data", |store| fs::remove_file(store.data_file()).unwrap()),
            ("a torn index", |store| {
                let file = File::options().write(true).open(store.folder.join(INDEX)).unwrap();
                file.set_len(30).unwrap();
            }),
            ("changed", |store| {
                let error = store.verify(1, b"other").unwrap_err();
                assert!(error.starts_with("matrix 50 in ") && error.contains("has changed"), "{error}");
            }),
        ];
        for (what, damage) in damage {
            let case = Case::new();
            damage(&case.write());
            assert!(case.place().open(&case.key()).unwrap().is_none(), "{what}");
            case.write();
            assert!(case.place().open(&case.key()).unwrap().is_some(), "{what}: it is written anew");
            assert_eq!(case.folders(), 1, "{what}");
        }
    }

    #[test]
    fn another_model_format_file_or_version_needs_another_store() {
        let case = Case::new();
        case.write();
        let key = case.key();
        let mut layout = key.clone();
        layout.matrices[1].layout = "other".into();
        let others = [
            StoreKey { model: "other".into(), ..key.clone() },
            StoreKey { version: VERSION + 1, ..key.clone() },
            StoreKey { program: "0".into(), ..key.clone() },
            layout,
        ];
        for other in others {
            assert!(case.place().open(&other).unwrap().is_none(), "{other:?}");
        }
        // Regression: a file of the same size and time counted as the same.
        for text in [b"changed", b"Changed"] {
            case.scratch.write("some.gguf", text);
            assert!(case.place().open(&case.key()).unwrap().is_none());
            case.write();
            assert_eq!(case.folders(), 1, "the store of the file before it changed is removed");
        }
    }

    /// Regression: a new version deleted the store that a running server of the old one needs after a fault.
    #[test]
    fn a_store_that_is_used_is_not_removed() {
        let case = Case::new();
        case.scratch.write("some.gguf", b"before");
        let used = case.write();
        let found = case.place().open(&case.key()).unwrap().unwrap();
        case.scratch.write("some.gguf", b"after");
        case.write();
        drop(used);
        assert!(case.place().open(&case.key()).unwrap().is_some());
        assert_eq!(case.folders(), 2, "one process uses the old store, others the new one");
        drop(found);
        assert!(case.place().open(&case.key()).unwrap().is_some());
        assert_eq!(case.folders(), 1);
    }

    /// A folder of the user is not removed, whatever it is like.
    #[test]
    fn damaged_stores_of_any_model_are_removed_and_nothing_else() {
        let case = Case::new();
        case.write().read_failure(1, &io::ErrorKind::UnexpectedEof.into());
        for (folder, file) in [("backup", DATA), ("a-0123456789abcdef", "notes.txt")] {
            fs::create_dir(case.place().0.join(folder)).unwrap();
            fs::write(case.place().0.join(folder).join(file), b"").unwrap();
        }
        let other = StoreKey { model: "other".into(), ..case.key() };
        assert!(case.place().open(&other).unwrap().is_none());
        assert_eq!(case.folders(), 2);
    }

    #[test]
    fn what_a_writer_that_ended_early_leaves_is_removed() {
        let case = Case::new();
        drop(case.place().write(case.key()).unwrap());
        assert_eq!(case.folders(), 0, "an error removes it at once");
        let crashed = case.place().0.join(format!("model-1.1.0.{UNFINISHED}"));
        fs::create_dir(&crashed).unwrap();
        fs::write(crashed.join(DATA), b"part").unwrap();
        assert!(case.place().open(&case.key()).unwrap().is_none());
        assert!(!crashed.exists());
        let mut running = case.place().write(case.key()).unwrap();
        case.write();
        assert!(running.folder.exists(), "that of a running writer is kept");
        (0..2).for_each(|index| running.append(&case.bytes(index)).unwrap());
        running.finish().unwrap();
        assert_eq!(case.folders(), 1, "the second of two writers leaves nothing");
    }

    #[test]
    fn a_place_that_cannot_be_written_is_named() {
        let case = Case::new();
        case.scratch.write("stores", b"a file");
        let error = format!("{:#}", case.place().write(case.key()).err().unwrap());
        assert!(error.contains("tiers.disk_path: cannot write the weights' store to"), "{error}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_an_error_and_leaves_nothing() {
        let case = Case::new();
        let mut writer = case.place().write(case.key()).unwrap();
        writer.data = BufWriter::new(File::options().write(true).open("/dev/full").unwrap());
        (0..2).for_each(|index| _ = writer.append(&case.bytes(index)));
        let error = match writer.checksums.len() {
            2 => writer.finish().map(|_| ()),
            _ => writer.append(&case.bytes(1)),
        };
        let error = format!("{:#}", error.unwrap_err());
        assert!(error.contains("tiers.disk_path") && error.contains("No space left"), "{error}");
    }
}
