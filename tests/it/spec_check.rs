//! Tests of `mainstem spec`, and of finding the built-in specification that is nearest to a model.

use crate::common::{Copied, fixture, mainstem};
use crate::families::{decoders, others};
use mainstem::formats::{Checkpoint, Folder, HubConfig};
use mainstem::model::spec::SpecFile;
use mainstem::model::spec::nearest::nearest;
use mainstem::specs;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Output;

fn spec(arguments: &[&str]) -> Output {
    mainstem().arg("spec").args(arguments).output().expect("the program starts")
}

/// Checks a model; returns the exit code and the report.
fn check(model: &Path, flags: &[&str]) -> (Option<i32>, Value) {
    let model = model.to_str().expect("it is text");
    let output = spec(&[&["check", model, "--json"], flags].concat());
    let report = serde_json::from_slice(&output.stdout);
    (output.status.code(), report.unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr))))
}

/// Returns the tables of tensors of the built-in specification with a name.
fn tensors(name: &str) -> Vec<toml::Value> {
    let spec = SpecFile::named(name).expect("it is built in");
    let of = |part: &toml::Table| part.get("tensors").cloned();
    let stacks = ["encoder", "decoder"].iter().filter_map(|stack| spec.entries().get(*stack)?.as_table());
    stacks.chain([spec.entries()]).filter_map(of).collect()
}

/// The relative of a model whose family is built in is that family, or one that has all its names.
#[test]
fn the_nearest_of_a_family_is_itself_or_has_all_its_names() {
    let mut tried = 0;
    // Those of CTranslate2 have their settings elsewhere.
    let names = decoders().iter().copied().chain(others()).filter(|name| !name.starts_with("ctranslate2"));
    for name in names {
        let folder = Folder::disk(&fixture("families").join(name));
        let config = HubConfig::from_folder(&folder).expect("it has a configuration");
        let model_type = config.opt_str("model_type").expect("it is text").expect("it has one");
        let Ok((file, _)) = SpecFile::shipped(model_type) else { continue };
        let checkpoint = Checkpoint::open_folder(&folder).expect("it has tensors");
        let found = nearest(&config, checkpoint.names()).expect("its own names it");
        let is_alike = found.known == found.names || tensors(found.name) == tensors(specs::name_of(file));
        assert!(is_alike, "{name}: {found:?}");
        tried += 1;
    }
    assert!(tried > 40, "{tried}");
}

#[test]
fn a_model_that_fits_is_said_to_fit() {
    for model in ["gqa", "families/invented_one", "families/bart"] {
        let (code, report) = check(&fixture(model), &[]);
        assert_eq!(
            (code, &report["problems"], &report["missing"]),
            (Some(0), &json!([]), &json!([])),
            "{model}"
        );
    }
}

/// A model of an unknown type is compared with the nearest, and the refusal to load it says what to do.
#[test]
fn an_unknown_type_is_compared_with_the_nearest_specification() {
    let model = Copied::of("gqa", "unknown-type");
    model.configure("model_type", json!("brand_new"));
    let (code, report) = check(&model.0, &[]);
    assert_eq!(code, Some(1));
    assert_eq!(report["is_relative"], json!(true));
    assert_eq!(report["nearest"]["name"], json!(specs::name_of(specs::ALL[0].0)));
    let output = mainstem().arg("inspect").arg(&model.0).output().expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr);
    for named in ["brand_new", "nearest is 'llama'", "docs/models.md", "mainstem spec check"] {
        assert!(error.contains(named), "{named}: {error}");
    }
    // What the comparison suggests is a specification of the model.
    std::fs::write(model.file("spec.toml"), "base = \"llama\"\nmodel_types = [\"brand_new\"]\n")
        .expect("it is written");
    assert_eq!(check(&model.0, &[]).0, Some(0));
}

/// All differences are listed at once, and tensors of all layers as one.
#[test]
fn everything_that_does_not_fit_is_listed() {
    let model = Copied::of("gqa", "misfit");
    let text = "base = 'llama'\nmodel_types = ['llama']\n[attention]\nqk_norm = 'per_head'\n\
                [tensors]\nup = 'model.layers.{i}.mlp.down_proj.weight'\n\
                q_norm = 'model.layers.{i}.self_attn.q_norm.weight'\nk_norm = 'model.k_norm.weight'\n";
    std::fs::write(model.file("mine.toml"), text).expect("it is written");
    let file = model.file("mine.toml");
    let (code, report) = check(&model.0, &["--spec", file.to_str().expect("it is text")]);
    assert_eq!(code, Some(1));
    let layers = report["missing"][0]["count"].as_u64().expect("a number");
    let missing = json!([
        {"pattern": "model.layers.{i}.self_attn.q_norm.weight", "count": layers},
        {"pattern": "model.k_norm.weight", "count": 1}
    ]);
    assert_eq!((&report["missing"], layers > 1), (&missing, true));
    let unused = json!([{"pattern": "model.layers.{i}.mlp.up_proj.weight", "count": layers}]);
    assert_eq!(report["unknown"], unused);
    let problems = report["problems"].to_string();
    assert!(problems.contains("down_proj.weight' has shape"), "{problems}");
    assert_eq!(report["problems"].as_array().map(Vec::len), Some(1), "{problems}");
}

/// If a value is missing, tensors that the specification never names are still listed.
#[test]
fn a_missing_key_does_not_hide_unknown_tensors() {
    let model = Copied::of("gqa", "missing-key");
    model.configure("num_attention_heads", Value::Null);
    let text = "base = 'llama'\nmodel_types = ['llama']\n[tensors]\no = 'elsewhere'\n";
    std::fs::write(model.file("spec.toml"), text).expect("it is written");
    let (code, report) = check(&model.0, &[]);
    assert_eq!(code, Some(1));
    assert!(report["problems"].to_string().contains("'num_attention_heads' is missing"), "{report}");
    assert_eq!(report["unknown"][0]["pattern"], json!("model.layers.{i}.self_attn.o_proj.weight"));
    assert_eq!(report["unknown"].as_array().map(Vec::len), Some(1), "{report}");
}

/// A key of the base would be read, and the default not be used.
#[test]
fn a_default_alone_replaces_a_lookup_of_the_base() {
    let text = "base = 'llama'\nmodel_types = ['mine']\n[norm]\neps = { default = 0.25 }\n";
    let spec = SpecFile::parse("mine.toml", text).expect("it is one");
    assert_eq!(spec.entries()["norm"]["eps"].as_table().map(toml::Table::len), Some(1));
}

#[test]
fn latent_attention_refuses_settings_that_it_does_not_have() {
    for (setting, named) in [
        ("[attention]\nsoftcap = 2.0", "attention.softcap"),
        ("[attention]\nsinks = true", "attention.sinks"),
        ("[attention]\nqk_norm_weight = false", "attention.qk_norm_weight"),
        ("[tensors]\nk = 'k'", "tensors.k"),
    ] {
        let text = format!("base = 'deepseek_v3'\nmodel_types = ['mine']\n{setting}\n");
        let error = SpecFile::parse("mine.toml", &text).expect_err("it has no effect");
        assert!(format!("{error:#}").contains(&format!("'{named}' has no effect")), "{error:#}");
    }
}

/// Published files have tensors that predict several tokens at once.
#[test]
fn layers_of_other_predictions_are_ignored() {
    let spec = SpecFile::named("ernie4_5_moe").expect("it is built in");
    let known = spec.known_names();
    assert!(known.contain("model.mtp_block.0.self_attn.q_proj.weight"));
    assert!(known.contain("model.mtp_emb_norm.0.weight") && !known.contain("model.other.weight"));
}

/// Output of `show` is a specification without a base.
#[test]
fn what_is_shown_stands_alone() {
    let output = spec(&["show", "gemma3"]);
    let text = String::from_utf8(output.stdout).expect("it is text");
    let alone = SpecFile::parse("shown", &text).expect("it is one");
    assert_eq!(Some(alone.entries()), SpecFile::named("gemma3").ok().as_ref().map(SpecFile::entries));
    assert!(!text.contains("base ="), "{text}");
    let output = spec(&["show", "gemma33"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("did you mean 'gemma3'?"));
    let listed = String::from_utf8(spec(&["list"]).stdout).expect("it is text");
    assert_eq!(listed.lines().count(), specs::ALL.len());
}
