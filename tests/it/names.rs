//! Tests that the code that computes models does not depend on model families, which are data.

use mainstem::model::spec::SpecFile;
use mainstem::specs;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Returns all source files below a directory.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = folder.read_dir().expect("the folder is there").flatten().map(|entry| entry.path());
    let files = entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] });
    files.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

/// Returns the words of a text.
fn words(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    text.split(|c| !is_part(c)).map(str::to_owned).collect()
}

/// No code can depend on a family, because no `model_type` occurs as a word. (`llama3` is a rotary position
/// scaling, not a family; `gptj` is both a family and a style of rotation that any model can have.)
#[test]
fn no_family_is_named_where_models_are_computed() {
    let mut types = BTreeSet::new();
    for (file, text) in specs::ALL {
        let spec = SpecFile::parse(file, text).expect("a shipped specification is one");
        types.extend(spec.model_types().iter().cloned());
    }
    assert!(types.remove("gptj") && types.len() > 30);
    for folder in ["src/model", "src/kernels", "src/memory", "src/actors"] {
        let files = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder));
        assert!(!files.is_empty(), "{folder}");
        for file in files {
            let text = std::fs::read_to_string(&file).expect("it can be read");
            let named: Vec<_> = types.intersection(&words(&text)).cloned().collect();
            assert!(named.is_empty(), "{} names {named:?}", file.display());
        }
    }
}
