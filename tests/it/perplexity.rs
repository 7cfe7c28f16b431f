//! Tests of `perplexity`: its results match those of transformers for the same chunks, formats are ordered by
//! quality, and models without perplexity are refused.

use crate::common::{complete, config, fixture, greedy, mainstem};
use crate::families::family;
use crate::quantize::Room;
use mainstem::cli::start;
use mainstem::model::ModelRef;
use mainstem::request::Request;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Output;

/// Settings without any rounding beyond float arithmetic.
const EXACT: &str = "--activations f32 --kv-type f32";

/// Returns the text that the demo model was not trained on.
fn held_out() -> PathBuf {
    fixture("perplexity/held_out.txt")
}

fn perplexity(model: &Path, text: &Path, line: &str) -> Output {
    let mut command = mainstem();
    command.arg("perplexity").arg(model).arg("--text").arg(text);
    command.args(["--threads", "1"]).args(line.split_whitespace()).output().expect("the program starts")
}

/// Returns the JSON report of the demo model on the held-out text.
fn demo(line: &str) -> Value {
    report(Path::new("demo"), line)
}

/// Returns the JSON report of a model on the held-out text.
fn report(model: &Path, line: &str) -> Value {
    let output = perplexity(model, &held_out(), &format!("{line} --json"));
    let (code, errors) = (output.status.code(), String::from_utf8_lossy(&output.stderr));
    assert_eq!((code, errors.as_ref()), (Some(0), ""), "{line}: away from a terminal nothing is said");
    serde_json::from_slice(&output.stdout).expect("it is JSON")
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is a number"))
}

fn near(what: &str, got: &Value, want: f64, relative: f64) {
    let got = number(got);
    assert!((got - want).abs() <= relative * want.abs(), "{what}: {got} is not {want}");
}

fn answers() -> Value {
    let text = std::fs::read(fixture("perplexity/answers.json")).expect("answers are recorded");
    serde_json::from_slice(&text).expect("they are JSON")
}

/// Compares the results after the first chunk and after some; for the first cut all chunks, including the
/// short last one.
#[test]
fn the_figures_are_those_of_transformers() {
    let answers = answers();
    for cut in answers["cuts"].as_array().expect("cuts are recorded") {
        let chunks = cut["chunks"].as_array().expect("they have chunks");
        for count in [1, chunks.len().min(9)] {
            let (context, stride) = (&cut["context"], &cut["stride"]);
            let line = format!("--context {context} --stride {stride} --limit-chunks {count} {EXACT}");
            let report = demo(&line);
            let sum = |key: &str| chunks[..count].iter().map(|chunk| number(&chunk[key])).sum::<f64>();
            assert_eq!(report["text"]["tokens"], answers["tokens"]);
            assert_eq!(number(&report["figures"]["tokens"]), sum("scored"), "{line}");
            let nll = sum("nll") / sum("scored");
            near(&line, &report["figures"]["nll"]["value"], nll, 1e-5);
            near(&line, &report["figures"]["perplexity"]["value"], nll.exp(), 1e-5);
        }
    }
}

#[test]
fn the_divergence_of_a_quantised_model_is_that_of_its_numbers() {
    let recorded = &answers()["q4_0"];
    let report = demo(&format!("--weights *=q4_0 --against F32 {EXACT}"));
    let (figures, against) = (&report["figures"], &report["figures"]["against"]);
    assert_eq!(figures["tokens"], recorded["scored"]);
    near("nll", &figures["nll"]["value"], number(&recorded["nll"]), 1e-5);
    near("kl", &against["kl"]["value"], number(&recorded["kl"]), 1e-4);
    near("error", &against["kl"]["error"], number(&recorded["kl_error"]), 1e-4);
    for (key, relative) in [("kl_median", 1e-3), ("kl_p99", 1e-3), ("kl_max", 1e-3), ("logprob", 1e-4)] {
        near(key, &against[key], number(&recorded[key]), relative);
    }
    near("same choice", &against["same_choice"], number(&recorded["same_choice"]), 1e-3);
}

/// Results do not depend on how chunks are split into steps and layers over devices; the ranks of a stage sum
/// in another order.
#[test]
fn a_model_is_itself_however_it_is_computed() {
    let whole = demo(&format!("--limit-chunks 2 {EXACT} --against f32"));
    let against = &whole["figures"]["against"];
    assert_eq!(against["kl"]["value"], 0.0);
    assert_eq!((&against["kl_max"], &against["same_choice"]), (&0.0.into(), &1.0.into()));
    assert_eq!(against["nll"], whole["figures"]["nll"]);
    for line in ["--token-budget 37", "--page-size 96", "--devices 0;1"] {
        let other = demo(&format!("--limit-chunks 2 {EXACT} --against f32 {line}"));
        assert_eq!(other["figures"], whole["figures"], "{line}");
    }
    let parted = demo(&format!("--limit-chunks 2 {EXACT} --devices 0&1"));
    near("members", &parted["figures"]["nll"]["value"], number(&whole["figures"]["nll"]["value"]), 1e-5);
}

/// Uses the settings of serving, including the rounding of activations and cache.
#[actix::test]
async fn what_is_measured_is_what_is_served() {
    let (_, tokenizer) = start::open(&ModelRef::Demo, None).unwrap();
    let text = std::fs::read_to_string(held_out()).unwrap();
    let tokens = tokenizer.encode(&text, true).unwrap()[..300].to_vec();
    let settings = [("model.weights", "q4".into()), ("kv.type", "f16".into())];
    let engine = start::start_engine(&config(Path::new(""), &settings)).await.unwrap();
    let request = Request { prompt_logprobs: Some(0), ..greedy(&tokens, 1) };
    let outcome = complete(&engine, request).await;
    engine.stop();
    let logprobs: Vec<f64> = outcome.prompt.iter().filter_map(|token| token.logprob).map(f64::from).collect();
    assert_eq!(logprobs.len(), 299);
    let report = demo("--context 300 --limit-chunks 1 --weights q4");
    near("nll", &report["figures"]["nll"]["value"], -logprobs.iter().sum::<f64>() / 299.0, 1e-6);
}

/// The formats of the Inferflow paper, after 8 bits.
#[test]
fn formats_come_in_the_order_of_their_quality() {
    let formats =
        ["q8_0", "q6_b64t1", "q5_b64t1", "q4_b32t1a", "q4_b64t1", "q3h_b64t1", "q3_b32t1b", "q2_b32t1b"];
    let mut last = 0.0;
    for format in formats {
        let report = demo(&format!("--weights *={format} --against f32 --limit-chunks 2 {EXACT}"));
        let kl = number(&report["figures"]["against"]["kl"]["value"]);
        assert!(kl > last, "{format}: {kl}, before it {last}");
        last = kl;
    }
}

/// Least-squares quants are closer to the model than round-to-nearest ones; both are measured as the
/// divergence of a written model.
#[test]
fn least_squares_are_nearer_than_equations() {
    let room = Room::new("least-squares");
    for format in ["q4_b64t1", "q3_b32t1b", "q2_b32t1b"] {
        let out = room.place("out");
        let rules = format!("*={format}");
        let written = mainstem()
            .args(["quantize", "demo", out.to_str().expect("the path is text"), "--weights", &rules])
            .args(["--rounding", "least-squares", "--force"])
            .output()
            .expect("it starts");
        assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
        let lines = [format!("--weights {rules} --against f32"), "--reference demo".to_owned()];
        let models = [Path::new("demo"), &out];
        let [equations, squares] = std::array::from_fn(|way| {
            let line = format!("{} --limit-chunks 2 {EXACT}", lines[way]);
            number(&report(models[way], &line)["figures"]["against"]["kl"]["value"])
        });
        assert!(squares < equations, "{format}: {squares}, by equations {equations}");
    }
}

#[test]
fn a_reference_is_another_model_of_the_same_words() {
    let plain = format!("--limit-chunks 1 --weights *=q4 --against q8 {EXACT}");
    let (own, named) = (demo(&plain), demo(&format!("{plain} --reference demo")));
    assert_eq!(own["figures"], named["figures"], "the same model by its name");
    let (other, words) = (family("mistral", "reference"), fixture("f16"));
    for (reference, message) in [
        (text_of(&other.0), "--reference: "),
        (text_of(&words), "cannot compare"),
        ("no/such/model".to_owned(), "--reference: cannot open the model no/such/model"),
    ] {
        let output = perplexity(Path::new("demo"), &held_out(), &format!("--reference {reference}"));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{reference}: {errors}");
        assert!(errors.contains(message), "{reference}: {errors}");
    }
}

fn text_of(path: &Path) -> String {
    path.to_str().expect("the path is text").to_owned()
}

#[test]
fn the_table_says_what_the_json_does() {
    let line = "--limit-chunks 1 --weights q4 --against q8 --context 64";
    let output = perplexity(Path::new("demo"), &held_out(), line);
    let table = String::from_utf8_lossy(&output.stdout);
    let figures = &demo(line)["figures"];
    let value =
        |estimate: &Value| format!("{:.4} ± {:.4}", number(&estimate["value"]), number(&estimate["error"]));
    let kl = format!("{:.3e} ± ", number(&figures["against"]["kl"]["value"]));
    for shown in [
        value(&figures["perplexity"]),
        value(&figures["nll"]),
        value(&figures["against"]["perplexity"]),
        kl,
        "63 tokens in 1 chunk\n".to_owned(),
        "q8 (q8_0)".to_owned(),
    ] {
        assert!(table.contains(&shown), "{shown} is not in\n{table}");
    }
}

#[test]
fn what_has_no_perplexity_is_refused_by_name() {
    let folder = std::env::temp_dir().join(format!("mainstem-perplexity-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (encoder, both) = (family("bert", "perplexity"), family("t5", "perplexity"));
    let (short, bytes) = (folder.join("short.txt"), folder.join("bytes.txt"));
    std::fs::write(&short, "").unwrap();
    std::fs::write(&bytes, b"ab\xffcd").unwrap();
    let (demo, text) = (Path::new("demo").to_owned(), held_out());
    for (model, text, line, code, message) in [
        (
            &encoder.0,
            &text,
            "",
            1,
            "is an encoder-only model, but perplexity supports generative decoder-only models only",
        ),
        (&both.0, &text, "", 1, "is an encoder-decoder"),
        (&demo, &short, "", 1, "short.txt with mainstem-demo: fewer than two tokens"),
        (&demo, &bytes, "", 1, "bytes.txt: not UTF-8 from byte 2 on"),
        (&demo, &folder.join("none.txt"), "", 1, "none.txt"),
        (&demo, &text, "--context 1025", 2, "--context 1025: mainstem-demo has a context of 1024 tokens"),
        (&demo, &text, "--context 64 --max-context 32", 2, "has a context of 32 tokens"),
        (&demo, &text, "--context 64 --stride 65", 2, "--stride 65: must be at most the chunk length, 64"),
        (&demo, &text, "--context 1", 2, "--context"),
        (&demo, &text, "--against q9", 2, "'q9'"),
        (&demo, &text, "--against nothing=q8", 1, "--against: model.weights: 'nothing' matches no tensor"),
        (&demo, &text, "--device fake", 1, "fake devices compute nothing"),
    ] {
        let output = perplexity(model, text, line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(errors.contains(message), "{line}: {errors}");
        assert_eq!((output.status.code(), output.stdout.len()), (Some(code), 0), "{line}: {errors}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}
