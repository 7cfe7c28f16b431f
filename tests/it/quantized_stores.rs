//! Tests of stores beside a model, which `mainstem quantize --store` writes: they go where the model goes,
//! and are never used for other weights.

use crate::common::{Copied, Outcome, complete_all, config, fixture, greedy, mainstem, prompt};
use crate::families::family;
use crate::quantize::Room;
use mainstem::cli::start;
use mainstem::request::FinishReason;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn quantize(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = mainstem();
    command.arg("quantize").args(arguments).env("MAINSTEM_TIERS_DISK_PATH", folder.join("cache"));
    command.current_dir(folder).output().expect("it starts")
}

fn written(folder: &Path, arguments: &[&str]) -> String {
    let output = quantize(folder, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The answers of a model, and the folder of its store.
struct Started {
    answers: Vec<Vec<u32>>,
    store: Option<PathBuf>,
}

/// Starts a model with a part of its weights in memory, and the folder of all stores in `room`.
async fn started(room: &Room, model: &Path, host: &str, rules: &str) -> Started {
    let cache = room.place("cache").display().to_string();
    let settings =
        [("tiers.host", host.into()), ("tiers.disk_path", cache.into()), ("model.weights", rules.into())];
    let words = |i| prompt(i, 9 + 5 * i).into_iter().map(|id| 8 + id % 80).collect::<Vec<u32>>();
    let engine = start::start_engine(&config(model, &settings)).await.expect("the engine starts");
    let outcomes = complete_all(&engine, (0..4).map(|i| greedy(&words(i), 8))).await;
    assert!(outcomes.iter().all(|outcome| outcome.end == Some(Ok(FinishReason::Length))), "{outcomes:?}");
    let store = engine.report().lines().find_map(|line| Some(line.strip_prefix("store ")?.trim().into()));
    engine.stop();
    Started { answers: outcomes.iter().map(Outcome::ids).collect(), store }
}

/// Asserts that a model answers as with all weights in memory, from a store in `stores`.
async fn assert_read_from(room: &Room, model: &Path, rules: &str, stores: &Path) {
    let expected = started(room, model, "all", rules).await.answers;
    let found = started(room, model, "0", rules).await;
    assert_eq!(found.answers, expected, "{}", model.display());
    let store = found.store.expect("weights are read from one");
    assert!(store.starts_with(stores), "{} is not in {}", store.display(), stores.display());
    assert!(store.join("weights.bin").exists());
}

/// Copies the files of a folder, which get new times.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("it is there").flatten() {
        match entry.path().is_dir() {
            true => copy(&entry.path(), &to.join(entry.file_name())),
            false => _ = fs::copy(entry.path(), to.join(entry.file_name())).expect("a file is copied"),
        }
    }
}

#[actix::test]
async fn the_store_of_a_written_model_goes_where_the_model_goes() {
    let (model, room) = (fixture("gqa"), Room::new("store"));
    let [out, moved, copied] = ["out", "moved", "copied"].map(|name| room.place(name));
    let model = model.to_str().expect("the path is text");
    let printed = written(&room.0, &[model, "out", "--weights", "*=f16", "--store"]);
    assert!(printed.contains("written to out") && printed.contains("mainstem-store"), "{printed}");
    assert_read_from(&room, &out, "", &out).await;
    fs::rename(&out, &moved).expect("it can be moved");
    assert_read_from(&room, &moved, "", &moved).await;
    copy(&moved, &copied);
    assert_read_from(&room, &copied, "", &copied).await;
    assert!(!room.place("cache").exists(), "no store was needed in the folder of all stores");
    // Other formats need another store.
    assert_read_from(&room, &moved, "*=bf16", &room.place("cache")).await;
    let printed = written(&room.0, &[model, "moved", "--weights", "*=bf16", "--store", "--force"]);
    assert!(printed.contains("mainstem-store"), "{printed}");
    assert_read_from(&room, &moved, "", &moved).await;
}

#[actix::test]
async fn changed_weights_make_a_store_beside_a_model_useless() {
    let (model, room) = (Copied::of("gqa", "store-changed"), Room::new("store-changed"));
    let path = model.0.to_str().expect("the path is text");
    written(&room.0, &[path, "--store"]);
    assert_read_from(&room, &model.0, "", &model.0).await;
    let before = started(&room, &model.0, "all", "").await.answers;
    let weights = model.file("model.safetensors");
    let time = fs::metadata(&weights).and_then(|found| found.modified()).expect("it has one");
    let mut bytes = fs::read(&weights).expect("it is there");
    let half = bytes.len() / 2;
    // The signs of half of the weights, which are in F32.
    bytes[half..].chunks_exact_mut(4).for_each(|number| number[3] ^= 0x80);
    fs::write(&weights, bytes).expect("it can be written");
    // Not even the time tells.
    fs::File::options().append(true).open(&weights).and_then(|file| file.set_modified(time)).expect("a time");
    assert_ne!(started(&room, &model.0, "all", "").await.answers, before);
    assert_read_from(&room, &model.0, "", &room.place("cache")).await;
    written(&room.0, &[path, "--store"]);
    assert_read_from(&room, &model.0, "", &model.0).await;
    let stores = fs::read_dir(model.file("mainstem-store")).expect("it is there").flatten();
    assert_eq!(stores.filter(|entry| entry.path().is_dir()).count(), 1, "the useless one is removed");
}

/// A file's store is beside the file, and goes with both. A mixture has experts in it.
#[actix::test]
async fn a_store_may_be_for_formats_or_beside_a_file() {
    let (mixture, room) = (family("mixtral", "store-rules"), Room::new("store-rules"));
    let path = mixture.0.to_str().expect("the path is text");
    written(&room.0, &[path, "--store", "--weights", "*.experts.*=q8"]);
    assert_read_from(&room, &mixture.0, "*.experts.*=q8", &mixture.0).await;
    assert!(!room.place("cache").exists());
    assert_read_from(&room, &mixture.0, "", &room.place("cache")).await;
    let llama2c = fixture("llama2c/v0.bin");
    let [file, other] = ["model.bin", "other.bin"].map(|name| room.place(name));
    let tokenizer = llama2c.with_file_name("tokenizer.bin");
    fs::copy(llama2c, &file).and_then(|_| fs::copy(tokenizer, room.place("tokenizer.bin"))).expect("copies");
    written(&room.0, &["model.bin", "--store"]);
    let beside = |file: &Path| file.with_extension("bin.mainstem-store");
    assert_read_from(&room, &file, "", &beside(&file)).await;
    fs::rename(&file, &other).and_then(|()| fs::rename(beside(&file), beside(&other))).expect("moved");
    assert_read_from(&room, &other, "", &beside(&other)).await;
}

#[test]
fn what_has_no_place_beside_it_has_its_store_in_the_folder_of_all_stores() {
    let room = Room::new("store-demo");
    let printed = written(&room.0, &["demo", "--store", "--weights", "*.down_proj.*=q4"]);
    let cache = room.place("cache");
    assert!(printed.contains(cache.to_str().expect("the path is text")), "{printed}");
    assert_eq!(cache.read_dir().expect("it is there").flatten().filter(|it| it.path().is_dir()).count(), 1);
}

/// A file size limit simulates a full disk.
#[test]
fn a_full_disk_is_reported_and_no_part_of_a_store_is_left() {
    let (model, room) = (Copied::of("gqa", "store-full"), Room::new("store-full"));
    let script = "trap '' XFSZ; ulimit -f 64; exec \"$0\" quantize \"$1\" --store";
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(mainstem().get_program()).arg(&model.0).current_dir(&room.0);
    let output = command.output().expect("there is a shell");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    let place = model.file("mainstem-store").display().to_string();
    assert!(error.contains("cannot write the weights' store") && error.contains(&place), "{error}");
    assert!(error.contains("os error"), "{error}");
    assert!(!model.file("mainstem-store").exists());
}

#[test]
fn flags_for_an_output_need_one() {
    let room = Room::new("store-flags");
    for (arguments, reason) in [
        (&["demo", "--weights", "q8"][..], "OUT"),
        (&["demo", "out", "--store"], "OUT requires --weights"),
        (&["demo", "--store", "--force"], "OUT"),
        (&["demo", "--store", "--rounding", "least-squares"], "OUT"),
    ] {
        let output = quantize(&room.0, arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(reason), "{arguments:?}: {error}");
        assert!(room.names().is_empty());
    }
}
