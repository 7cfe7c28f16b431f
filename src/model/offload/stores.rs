//! The stores of a model's packed matrices: one beside the model, which goes where the model goes, and one in
//! the folder of all stores.
//!
//! Invariant: a store beside a model is used only if the model's files have the bytes that it was made of:
//! they have the same sizes and samples, and either the same times of change or the same checksums.

use super::mark::{self, FileMark};
use super::matrix::LayerMatrix;
use super::store::{Index, PackedStore, StorePlace, StoreWriter};
use super::store_key::StoreKey;
use crate::formats::Checkpoint;
use crate::model::progress::Progress;
use anyhow::Result;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use tracing::{info, warn};

/// The places of a model's store.
pub struct ModelStores {
    /// The folder of all stores, and the key there.
    place: StorePlace,
    key: StoreKey,
    beside: Option<StoreBeside>,
}

/// The place of a store beside its model.
struct StoreBeside {
    place: StorePlace,
    key: StoreKey,
    /// The model's files, in the order of the key.
    files: Vec<PathBuf>,
}

impl ModelStores {
    /// Returns the places of the store for `matrices` of the model at a path: in the folder of all stores,
    /// `place`, and in `beside`, if the model has files. Fails if one of these cannot be read.
    pub fn new<'a>(
        model: &Path,
        (checkpoint, marks): (&Checkpoint, &[FileMark]),
        matrices: impl Iterator<Item = &'a LayerMatrix>,
        (place, beside): (&StorePlace, Option<PathBuf>),
    ) -> ModelStores {
        let key = StoreKey::new(model, marks, matrices);
        let files: Vec<PathBuf> =
            checkpoint.files().filter(|path| path.exists()).map(Path::to_owned).collect();
        // The file of a model that is a single one may have any name.
        let folder = if model.is_dir() { Some(model) } else { model.parent() };
        let relative = |path: &PathBuf| match path == model {
            true => PathBuf::new(),
            false => folder.and_then(|folder| path.strip_prefix(folder).ok()).unwrap_or(path).to_owned(),
        };
        let beside = beside.map(|folder| StoreBeside {
            place: StorePlace(folder),
            key: key.beside(files.iter().map(relative).collect()),
            files,
        });
        ModelStores { place: place.clone(), key, beside }
    }

    /// Returns the folder of the store: beside the model if it seems to be there, else in the folder of all
    /// stores.
    pub fn folder(&self) -> PathBuf {
        let beside = self.beside.as_ref().filter(|beside| beside.place.has_index(&beside.key));
        beside.map_or_else(|| self.place.folder(&self.key), |beside| beside.place.folder(&beside.key))
    }

    /// Opens the store, beside the model or in the folder of all stores; `None` if there is none. Fails if
    /// its index cannot be read.
    pub fn open(&self, progress: &Progress) -> Result<Option<PackedStore>> {
        match self.open_beside(progress)? {
            Some(store) => Ok(Some(store)),
            None => self.place.open(&self.key),
        }
    }

    /// Opens the store beside the model; `None` if there is none.
    pub fn open_beside(&self, progress: &Progress) -> Result<Option<PackedStore>> {
        Ok(self.beside.as_ref().map(|beside| beside.open(progress)).transpose()?.flatten())
    }

    /// Begins to write the store in the folder of all stores.
    pub fn write(self) -> Result<StoreWriter> {
        self.place.write(self.key)
    }

    /// Begins to write the store beside the model, or in the folder of all stores if the model has no files,
    /// or no place beside it that can be written.
    pub fn write_beside(self, progress: &Progress) -> Result<StoreWriter> {
        let Some(StoreBeside { place, key, files }) = &self.beside else { return self.write() };
        match place.write(key.clone()) {
            Ok(mut writer) => {
                writer.contents = mark::contents(files, progress)?;
                Ok(writer)
            }
            Err(error) if is_read_only(&error) => {
                warn!("{error:#}; it is written to {} instead", self.place.0.display());
                self.write()
            }
            Err(error) => Err(error),
        }
    }
}

impl StoreBeside {
    /// Returns the store and its index, if there is one for files of the same sizes and samples.
    fn find(&self) -> Option<(PackedStore, Index)> {
        let found = self.place.find_with_index(&self.key);
        found.inspect_err(|error| warn!("{error:#}; the store is not used")).ok().flatten()
    }

    /// Opens the store; `None` if there is none for the model's files. If these have other times, they are
    /// read. Fails if the work is stopped.
    fn open(&self, progress: &Progress) -> Result<Option<PackedStore>> {
        let StoreBeside { place, key, files } = self;
        let Some((store, index)) = self.find() else {
            if place.has_outdated(key) {
                let folder = place.0.display();
                warn!(%folder, "a store is not used: it is of other weights or of another version");
            }
            return Ok(None);
        };
        if index.has_times_of(key) {
            return Ok(Some(store));
        }
        let folder = store.folder().display();
        info!(%folder, "comparing the model's files with those that a store was made of");
        if mark::contents(files, progress)? != index.contents {
            warn!(%folder, "a store is not used: it is of other weights");
            return Ok(None);
        }
        // Next time, they need not be read. A store that cannot be written is used all the same.
        let _ = Index { key: key.clone(), ..index }.write(store.folder());
        Ok(Some(store))
    }
}

/// Returns whether an error says that a folder cannot be written.
fn is_read_only(error: &anyhow::Error) -> bool {
    let cause = error.root_cause().downcast_ref::<io::Error>().map(io::Error::kind);
    matches!(cause, Some(ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;
    use mainstem_kernels::reference::ReferenceSizes;
    use mainstem_kernels::{DeviceSizes, QuantType};
    use std::fs::{self, File};
    use std::os::unix::fs::FileExt;

    /// Returns the places of the store of a matrix of the model in `folder`, whose file is large.
    fn stores(folder: &Path) -> ModelStores {
        let layout = ReferenceSizes.packed_layout(QuantType::F32, 3, 32);
        let (name, part) = ("matrix".into(), String::new());
        let matrix = LayerMatrix { role: "up", name, part, layout, expert: None, is_for_openings: false };
        let mut key = StoreKey::new(folder, &[], [matrix].iter());
        let file = folder.join("weights");
        key.files = vec![FileMark::new(&file).unwrap()];
        let (place, beside) = (StorePlace(folder.join("cache")), StorePlace(folder.join("beside")));
        let beside =
            StoreBeside { place: beside, key: key.beside(vec!["weights".into()]), files: vec![file] };
        ModelStores { place, key, beside: Some(beside) }
    }

    fn found(folder: &Path) -> Option<PathBuf> {
        let found = stores(folder).open(&Progress::default()).unwrap();
        found.map(|store| store.folder().to_owned())
    }

    fn write(folder: &Path) {
        let mut writer = stores(folder).write_beside(&Progress::default()).unwrap();
        let bytes = vec![7; writer.bytes()];
        writer.append(&bytes).unwrap();
        writer.finish().unwrap();
    }

    /// The sample of a large file does not see a change between its blocks: then its time tells, and if that
    /// is another one, all bytes.
    #[test]
    fn a_store_goes_with_its_model_and_never_with_others() {
        let scratch = Scratch::new();
        let [one, two] = ["one", "two"].map(|name| scratch.path().join(name));
        fs::create_dir(&one).unwrap();
        let file = File::create(one.join("weights")).unwrap();
        file.set_len(70 << 20).unwrap();
        assert_eq!(found(&one), None);
        write(&one);
        let store = found(&one).unwrap();
        assert!(store.starts_with(one.join("beside")) && stores(&one).folder() == store);
        fs::rename(&one, &two).unwrap();
        let moved = two.join(store.strip_prefix(&one).unwrap());
        assert_eq!(found(&two), Some(moved.clone()));
        let index = || fs::read(moved.join("index.json")).unwrap();
        let before = index();
        let touch = |file: &File| file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        touch(&file);
        assert_eq!(found(&two), Some(moved.clone()), "a copy has another time");
        assert_ne!(index(), before, "which is noted");
        let sample = |file: &Path| FileMark::new(&file.join("weights")).unwrap().sample;
        let same = sample(&two);
        file.write_all_at(b"x", (7 << 20) + 5000).unwrap();
        assert_eq!(sample(&two), same);
        assert_eq!(found(&two), None);
        write(&two);
        assert_eq!(found(&two), Some(moved), "the store of other contents is replaced");
        file.write_all_at(b"x", 9).unwrap();
        assert_eq!((found(&two), stores(&two).folder().starts_with(two.join("cache"))), (None, true));
        write(&two);
        let folders = two.join("beside").read_dir().unwrap().flatten().filter(|entry| entry.path().is_dir());
        assert_eq!(folders.count(), 1);
    }

    #[test]
    fn a_store_that_is_not_completed_leaves_no_folder_beside_the_model() {
        let scratch = Scratch::new();
        scratch.write("weights", b"few");
        drop(stores(scratch.path()).write_beside(&Progress::default()).unwrap());
        assert!(!scratch.path().join("beside").exists());
        let stopped = Progress::default();
        stopped.stop();
        assert!(stores(scratch.path()).write_beside(&stopped).is_err());
        assert!(!scratch.path().join("beside").exists());
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_told_from_a_full_disk() {
        let error = |kind: ErrorKind| anyhow::Error::from(io::Error::from(kind)).context("in its place");
        assert!(is_read_only(&error(ErrorKind::ReadOnlyFilesystem)));
        assert!(is_read_only(&error(ErrorKind::PermissionDenied)));
        assert!(!is_read_only(&error(ErrorKind::StorageFull)));
    }

    /// Its index cannot be removed, so it would be used again and again.
    #[test]
    fn a_damaged_store_on_a_disk_that_is_read_only_is_used_once() {
        let scratch = Scratch::new();
        scratch.write("weights", b"few");
        write(scratch.path());
        let store = stores(scratch.path()).open(&Progress::default()).unwrap().unwrap();
        let index = store.folder().join("index.json");
        let text = fs::read(&index).unwrap();
        // A folder is not removed as a file is.
        fs::remove_file(&index).unwrap();
        fs::create_dir(&index).unwrap();
        store.verify(0, b"other").unwrap_err();
        fs::remove_dir(&index).unwrap();
        fs::write(&index, text).unwrap();
        assert_eq!(found(scratch.path()), None);
        write(scratch.path());
        assert!(found(scratch.path()).is_some());
    }
}
