//! Tests of the shipped specifications, resolved with configurations.

use super::*;
use crate::formats::HubConfig;
use crate::model::provenance::{Origin, SourcedValue};
use crate::specs;
use anyhow::Result;
use serde_json::json;
use std::path::Path;

fn config(extra: serde_json::Value) -> HubConfig {
    let mut entries = json!({
        "vocab_size": 320, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 100, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    });
    let (serde_json::Value::Object(base), serde_json::Value::Object(extra)) = (&mut entries, extra) else {
        unreachable!("both are objects")
    };
    base.extend(extra);
    HubConfig::from_entries(Path::new("config.json"), base.clone())
}

fn usual(extra: serde_json::Value) -> Result<ModelSpec> {
    SpecFile::for_model_type(specs::SYNTHETIC).unwrap().resolve(&config(extra), &|_| true)
}

#[test]
fn what_config_leaves_out_is_derived_or_has_its_default() {
    let spec = usual(json!({})).unwrap();
    let layer = &spec.last_stack().layers[0];
    assert_eq!((layer.attention.kv_heads, layer.attention.k_dim), (4, 12));
    assert!(!spec.last_stack().head.as_ref().unwrap().tied && layer.attention.q.bias.is_none());
    let spec = usual(json!({"num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": true})).unwrap();
    let attention = &spec.last_stack().layers[1].attention;
    assert_eq!((attention.k_width(), attention.q_width()), (20, 40));
    assert!(spec.last_stack().head.as_ref().unwrap().tied);
}

#[test]
fn every_value_has_its_origin() {
    let spec = usual(json!({
        "num_key_value_heads": 2, "mlp_bias": true, "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }))
    .unwrap();
    let config = |key: &str| Origin::Config(vec![key.to_owned()]);
    for (key, value, origin) in [
        ("size.vocab", json!(320), config("vocab_size")),
        ("norm.kind", json!("rms"), Origin::Specification),
        ("norm.eps", json!(1e-5), config("rms_norm_eps")),
        ("attention.kv_heads", json!(2), config("num_key_value_heads")),
        ("attention.head_dim", json!(12), Origin::Derived("size.hidden / attention.heads")),
        ("attention.bias", json!(false), Origin::Default("attention_bias".to_owned())),
        ("position.style", json!("neox"), Origin::Specification),
        ("position.theta", json!(5e5), config("rope_theta")),
        ("position.scaling", json!({"kind": "linear", "factor": 2.0}), config("rope_scaling")),
        ("mlp.activation", json!("silu"), Origin::Default("hidden_act".to_owned())),
        ("mlp.bias", json!(true), config("mlp_bias")),
    ] {
        let entry = spec.provenance.get(key).map(|it| SourcedValue { layers: Vec::new(), ..it.clone() });
        assert_eq!(entry, Some(SourcedValue { key: key.to_owned(), layers: Vec::new(), value, origin }));
    }
    assert_eq!(spec.provenance.specification, specs::ALL[0].0);
    assert_eq!(spec.provenance.config, Path::new("config.json"));
    let silent = usual(json!({})).unwrap().provenance;
    assert_eq!(silent.get("position.theta").unwrap().origin, Origin::Format);
    assert_eq!(silent.get("position.scaling").unwrap().origin, Origin::Format);
    let nested = usual(json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}})).unwrap();
    assert_eq!(nested.last_stack().ropes[0].config.theta, 5e5);
    assert_eq!(nested.provenance.get("position.theta").unwrap().origin, config("rope_parameters.rope_theta"));
    assert_eq!(silent.get("attention.kv_heads").unwrap().origin, Origin::Derived("attention.heads"));
}

/// Every number and choice of a specification file has an entry under its own key.
#[test]
fn no_value_is_left_out() {
    let file: toml::Table = specs::ALL[0].1.parse().unwrap();
    let provenance = usual(json!({})).unwrap().provenance;
    for (section, table) in file.iter().filter(|(name, _)| *name != "tensors") {
        for name in table.as_table().into_iter().flat_map(toml::Table::keys) {
            assert!(provenance.get(&format!("{section}.{name}")).is_some(), "{section}.{name}");
        }
    }
    let mut keys: Vec<_> = provenance.values.iter().map(|sourced| sourced.key.clone()).collect();
    keys.sort_unstable();
    assert!(keys.windows(2).all(|pair| pair[0] != pair[1]), "{keys:?}");
}

#[test]
fn impossible_numbers_are_refused_by_name() {
    for (extra, named) in [
        (json!({"num_key_value_heads": 3}), "3 KV heads"),
        (json!({"num_attention_heads": 0}), "heads"),
        (json!({"head_dim": 7}), "even"),
        (json!({"hidden_size": null}), "hidden_size"),
        (json!({"vocab_size": 1u64 << 60}), "vocab"),
        (json!({"num_attention_heads": 1 << 20, "head_dim": 1 << 20}), "more than"),
        (json!({"rms_norm_eps": 0.0}), "epsilon"),
        (json!({"hidden_act": "gulu"}), "`gulu`"),
    ] {
        let error = format!("{:#}", usual(extra.clone()).unwrap_err());
        assert!(error.contains(named) && error.contains("config.json"), "{extra}: {error}");
    }
}

/// Tensor names of all claimed layers and experts would take all memory and hours.
#[test]
fn a_config_cannot_ask_for_more_layers_and_experts_than_any_model_has() {
    let sparse = |layers: usize, experts: usize| {
        let extra =
            json!({"num_hidden_layers": layers, "num_local_experts": experts, "num_experts_per_tok": 2});
        let (file, text) = specs::ALL.iter().find(|(_, text)| text.contains("num_local_experts")).unwrap();
        SpecFile::parse(file, text).unwrap().resolve(&config(extra), &|_| true)
    };
    assert_eq!(sparse(61, 384).unwrap().layers(), 61);
    for (layers, experts, named) in [
        (1 << 16, 8, "the number of layers is 65536, more than 4096"),
        (1 << 12, 1 << 12, "4096 layers have more than 65536 experts"),
    ] {
        let error = format!("{:#}", sparse(layers, experts).unwrap_err());
        assert!(error.contains(named) && error.contains("config.json"), "{error}");
    }
}

#[test]
fn a_specification_names_its_wrong_key_and_line() {
    let text = specs::ALL[0].1.replace("kv_heads = {", "kv_headz = {");
    let error = format!("{:#}", SpecFile::parse("mine.toml", &text).unwrap_err());
    assert!(error.contains("mine.toml") && error.contains("kv_headz") && error.contains("line"), "{error}");
}

/// Resolves the Llama specification with some text replaced.
fn changed(from: &str, to: &str) -> Result<ModelSpec> {
    let text = specs::ALL[0].1;
    assert!(text.contains(from), "{from}");
    let spec = SpecFile::parse("mine.toml", &text.replacen(from, to, 1))?;
    spec.resolve(&config(json!({"dense": 1})), &|name| name != "absent")
}

#[test]
fn settings_in_the_wrong_place_or_missing_are_refused() {
    let overriding = |text: &str| changed("[tensors]", &format!("[[override]]\n{text}\n[tensors]"));
    for (text, named) in [
        ("layers = { only = [0] }\n[override.head]\nscale = 2.0", "table 'head'"),
        ("layers = { only = [0] }\n[override.size]\nvocab = 7", "table 'size'"),
        ("layers = { only = [0] }\n[override.position]\nkind = 'learned'", "for some layers only"),
        ("layers = { at = 1 }\n[override.attention]\nwindow = 8", "'layers.every'"),
        ("layers = { is = 1 }\n[override.attention]\nwindow = 8", "'layers.key'"),
        ("layers = { to = { key = 'nowhere' } }\n[override.attention]\nwindow = 8", "'nowhere' is missing"),
        ("when = { key = 'dense', is = 1, exists = true }", "tests either"),
        ("when = { key = 'dense', tensor = 'x' }", "either a 'key' or a 'tensor'"),
        ("[override.attention]\nsoftcap = 1e300", "attention.softcap"),
        ("[override.attention]\nchunk = 8\nwindow = 8", "'attention.chunk'"),
        ("[override.attention]\ngrowth = 0.1\ngrowth_interval = 0", "'attention.growth'"),
        ("[override.attention]\nscale = { formula = '$nothing' }", "there is no value '$nothing'"),
        ("[override.attention]\nscale = { formula = '$eps + $dims' }", "there is no '$dims'"),
    ] {
        let error = format!("{:#}", overriding(text).unwrap_err());
        assert!(error.contains(named), "{text}: {error}");
    }
}

#[test]
fn impossible_groups_of_experts_are_refused_by_name() {
    let (file, text) = specs::ALL.iter().find(|(_, text)| text.starts_with("# GLM 4.5")).unwrap();
    let with = |groups: usize, top_groups: usize| {
        let extra = json!({
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 8,
            "n_shared_experts": 1, "n_group": groups, "topk_group": top_groups,
        });
        SpecFile::parse(file, text).unwrap().resolve(&config(extra), &|_| true)
    };
    for (groups, top_groups, named) in [
        (3, 1, "not a multiple of the 3 groups"),
        (4, 5, "top_groups is 5"),
        (4, 0, "top_groups is 0"),
        (4, 1, "1 groups have only 2 experts"),
    ] {
        let error = format!("{:#}", with(groups, top_groups).unwrap_err());
        assert!(error.contains(named) && error.contains("config.json"), "{error}");
    }
    let groups = |top_groups| match &with(4, top_groups).unwrap().cached_layers()[1].mlp {
        MlpSpec::Experts(moe) => moe.groups.map(|it| (it.groups, it.top_groups)),
        MlpSpec::Dense(_) => None,
    };
    assert_eq!([groups(2), groups(4)], [Some((4, 2)), None], "all groups are no choice");
}

#[test]
fn conditions_ask_what_there_is() {
    let tied = |when: &str| {
        let text = format!("[[override]]\nwhen = {when}\n[override.head]\ntied = true\n[tensors]");
        changed("[tensors]", &text).unwrap().last_stack().head.as_ref().unwrap().tied
    };
    for (when, holds) in [
        ("{ key = 'dense', is = 1 }", true),
        ("{ key = 'dense', is = 2 }", false),
        ("{ key = 'gone' }", false),
        ("{ key = 'gone', default = true }", true),
        ("{ key = 'dense', exists = true }", true),
        ("{ key = 'gone', exists = false }", true),
        ("{ tensor = 'absent' }", false),
        ("{ tensor = 'absent', is = false }", true),
        ("{ tensor = 'absent', exists = false }", true),
        ("{ tensor = 'there', exists = false }", false),
        ("[{ key = 'dense', is = 1 }, { tensor = 'absent' }]", false),
    ] {
        assert_eq!(tied(when), holds, "{when}");
    }
}

#[test]
fn layers_are_picked_by_range_by_period_and_by_list() {
    let windows = |pick: &str, extra: serde_json::Value| {
        let more = format!("[[override]]\nlayers = {pick}\n[override.attention]\nwindow = 8\n[tensors]");
        let text = specs::ALL[0].1.replacen("[tensors]", &more, 1);
        let mut all = json!({"num_hidden_layers": 6});
        all.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let spec = SpecFile::parse("mine.toml", &text).unwrap().resolve(&config(all), &|_| true).unwrap();
        let layers = spec.last_stack().layers.iter().enumerate();
        let has = |layer: &LayerSpec| layer.attention.mask == Mask::Causal { window: Some(8) };
        layers.filter(|(_, layer)| has(layer)).map(|(index, _)| index).collect::<Vec<_>>()
    };
    let list = json!({"kinds": ["a", "b", "a", "a", "b", "a"]});
    for (pick, extra, expected) in [
        ("{ from = 4 }", json!({}), vec![4, 5]),
        ("{ to = { key = 'k', default = 2 } }", json!({}), vec![0, 1]),
        ("{ to = { key = 'k', default = 2 } }", json!({"k": 3}), vec![0, 1, 2]),
        ("{ every = 3, at = 2 }", json!({}), vec![2, 5]),
        ("{ every = 2, from = 1, to = 5 }", json!({}), vec![2, 4]),
        ("{ only = [1, 3, 9] }", json!({}), vec![1, 3]),
        ("{ only = { key = 'k' } }", json!({}), vec![]),
        ("{ key = 'kinds', is = 'b', every = 2 }", list, vec![1, 4]),
        ("{ key = 'kinds', is = 'b', every = 2 }", json!({}), vec![0, 2, 4]),
    ] {
        assert_eq!(windows(pick, extra), expected, "{pick}");
    }
}

/// Both stacks of a model must have the same width.
#[test]
fn stacks_that_do_not_fit_together_are_refused() {
    let (_, text) = specs::ALL.iter().find(|(_, text)| text.contains("encoder_ffn_dim")).unwrap();
    let sizes = json!({
        "vocab_size": 97, "d_model": 32, "max_position_embeddings": 64,
        "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
    });
    let config = HubConfig::from_entries(Path::new("config.json"), sizes.as_object().unwrap().clone());
    let resolve = |text: &str| SpecFile::parse("mine.toml", text).unwrap().resolve(&config, &|_| true);
    assert!(resolve(text).is_ok());
    let error = resolve(&text.replace("[encoder.size]", "[encoder.size]\nhidden = 64")).unwrap_err();
    assert!(format!("{error:#}").contains("64 in the encoder, but 32 in the decoder"), "{error:#}");
}

/// Every shipped specification parses, and no two are for the same model type.
#[test]
fn shipped_specifications_are_those_of_their_folder_and_each_type_has_one() {
    let mut types = Vec::new();
    for (file, text) in specs::ALL {
        types.extend(SpecFile::parse(file, text).unwrap().model_types().to_vec());
    }
    let all = types.len();
    types.sort();
    types.dedup();
    assert_eq!(types.len(), all);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("specs");
    let files =
        folder.read_dir().unwrap().flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let is_spec = |name: &String| name.ends_with(".toml") && name != "gguf.toml";
    let mut files: Vec<String> = files.filter(is_spec).map(|name| format!("specs/{name}")).collect();
    files.sort();
    let mut shipped: Vec<&str> = specs::ALL.iter().map(|(file, _)| *file).collect();
    shipped.sort();
    assert_eq!(shipped, files);
}

/// The generated files are up to date; `UPDATE_SCHEMA=1 cargo test made_of_the_types` regenerates them.
#[test]
fn what_is_made_of_the_types_is_up_to_date() {
    const MARK: &str = "<!-- The rest is generated from the types. -->\n\n";
    let file = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    let page = std::fs::read_to_string(file("docs/models.md")).unwrap();
    let (by_hand, _) = page.split_once(MARK).unwrap();
    let page = format!("{by_hand}{MARK}{}", schema::reference());
    for (name, text) in [("specs/schema.json", schema::text()), ("docs/models.md", page)] {
        if std::env::var_os("UPDATE_SCHEMA").is_some() {
            std::fs::write(file(name), &text).unwrap();
        }
        assert!(std::fs::read_to_string(file(name)).unwrap() == text, "{name} is out of date");
    }
}

/// Words of earlier versions stay accepted: each has the meaning of the current word.
#[test]
fn deprecated_words_mean_what_the_current_ones_do() {
    let parse = |[kind, style, layout, qkv, qk_norm, mlp]: [&str; 6], [scores, rows, values]: [&str; 3]| {
        let text = format!(
            "model_types = ['x']
            position = {{ kind = '{kind}', style = '{style}', layout = '{layout}' }}
            attention = {{ qkv = '{qkv}', qk_norm = '{qk_norm}' }}
            mlp = {{ kind = '{mlp}' }}
            moe = {{ {scores} = true }}
            head = {{ {rows} = true }}
            {values} = {{ some_key = [false] }}"
        );
        let text: tables::SpecText = toml::from_str(&text).unwrap();
        (text.tables(), text.supported_values)
    };
    let (old, new) = (
        ["renormalise", "normalised", "neutral"],
        ["normalize_scores", "normalize_rows", "supported_values"],
    );
    assert_eq!(
        parse(["relative", "halves", "halves", "blocks", "whole", "plain"], old),
        parse(["relative_bias", "neox", "concatenated", "fused", "full", "ungated"], new)
    );
    assert_eq!(
        parse(["relative", "interleaved", "interleaved", "groups", "whole", "plain"], old),
        parse(["relative_bias", "gptj", "interleaved", "fused_grouped", "full", "ungated"], new)
    );
}

/// Returns the error for an edited specification of Llama with a configuration.
fn edited(from: &str, to: &str, extra: serde_json::Value) -> Result<ModelSpec> {
    let text = specs::ALL[0].1;
    assert!(text.contains(from), "{from}");
    SpecFile::parse("my.toml", &text.replacen(from, to, 1))?.resolve(&config(extra), &|_| true)
}

fn refused(from: &str, to: &str, extra: serde_json::Value) -> String {
    format!("{:#}", edited(from, to, extra).unwrap_err())
}

/// Granite has Llama's structure and four factors more: with Llama's specification every answer was wrong.
#[test]
fn a_key_that_changes_what_is_computed_and_is_not_read_is_refused_unless_neutral() {
    for (key, value, neutral) in [
        ("embedding_multiplier", json!(12.0), json!(1)),
        ("residual_multiplier", json!(0.22), json!(1.0)),
        ("logits_scaling", json!(8), json!(1)),
        ("attention_multiplier", json!(0.1), json!(null)),
        ("sliding_window", json!(64), json!(128)),
        ("layer_types", json!(["sliding_attention"]), json!(["full_attention"])),
        ("final_logit_softcapping", json!(30.0), json!(null)),
        ("hidden_activation", json!("gelu"), json!("swish")),
        ("layer_norm_eps", json!(1e-12), json!(1e-5)),
        ("n_head", json!(8), json!(4)),
        ("qk_layernorm", json!(true), json!(false)),
    ] {
        let error = refused("", "", json!({key: value}));
        assert!(error.contains(&format!("key '{key}': {value} changes what is computed")), "{error}");
        assert!(error.contains("my.toml does not read it"), "{error}");
        let spec = edited("", "", json!({key: neutral})).unwrap();
        assert!(spec.provenance.unread_keys.is_empty(), "{key}");
        let ignored = format!("ignored_keys = [\"{key}\"]\n[size]");
        assert!(edited("[size]", &ignored, json!({key: value})).is_ok(), "{key}");
    }
    let window = json!({"sliding_window": 64, "use_sliding_window": false});
    assert!(edited("", "", window).is_ok());
}

#[test]
fn a_forgotten_table_is_refused_by_the_keys_that_it_would_read() {
    let section = "[position]\nkind = \"rope\"\nstyle = \"neox\"";
    let of_old = refused(section, "", json!({"rope_theta": 5e5}));
    assert!(of_old.contains("key 'rope_theta': 500000.0 changes what is computed"), "{of_old}");
    let of_new = refused(section, "", json!({"rope_parameters": {"rope_theta": 5e5}}));
    assert!(of_new.contains("key 'rope_parameters': "), "{of_new}");
    let fixed = "[position]\ntheta = 1e4";
    let error = refused("[position]", fixed, json!({"rope_theta": 5e5}));
    assert!(error.contains("key 'rope_theta': 500000.0"), "{error}");
    assert!(edited("[position]", fixed, json!({"rope_theta": 10000})).is_ok());
    let twice = json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}});
    assert!(edited("", "", twice).is_ok());
}

#[test]
fn other_keys_that_nothing_reads_are_named_and_records_of_training_are_not() {
    let extra = json!({
        "use_hyperloops": true, "note": "x", "torch_dtype": "bfloat16", "transformers_version": "5.0",
        "use_cache": true, "_name_or_path": "a", "attention_dropout": 0.1, "pad_token_id": 0, "absent": null,
        "architectures": ["LlamaForCausalLM"], "initializer_range": 0.02, "hidden_act": "silu",
    });
    let unread = edited("", "", extra).unwrap().provenance.unread_keys;
    assert_eq!(unread, ["use_hyperloops", "note"]);
}

/// A misspelt name had the default without a word, and `inspect` reported that as written.
#[test]
fn misspelt_names_of_keys_and_values_are_refused() {
    let formula = |text: &str| format!("[position]\ntheta = {{ formula = \"{text}\", default = 10000.0 }}");
    let error = refused("[position]", &formula("10000 * rope_ratoi"), json!({"rope_ratio": 50}));
    assert!(error.contains("key 'rope_ratio': nothing reads it, and my.toml names 'rope_ratoi'"), "{error}");
    let error = refused("\"rms_norm_eps\"", "\"rms_nrm_eps\"", json!({}));
    assert!(error.contains("key 'rms_norm_eps'") && error.contains("names 'rms_nrm_eps'"), "{error}");
    let error = refused("[position]", &formula("10000 * $hiden"), json!({}));
    assert!(error.contains("there is no value '$hiden'; did you mean '$hidden'?"), "{error}");
    // A value of the specification that does not exist yet is no reason for the default.
    let error = refused("[position]", &formula("10000 * $top_k"), json!({}));
    assert!(error.contains("there is no '$top_k'"), "{error}");
    let spec = edited("[position]", &formula("10000 * rope_ratio"), json!({})).unwrap();
    let origin = &spec.provenance.get("position.theta").unwrap().origin;
    assert_eq!(*origin, Origin::Default("rope_ratio".to_owned()));
}

#[test]
fn settings_of_blocks_that_nothing_selects_are_refused() {
    for (from, to, message) in [
        ("[position]", "[position]\nbuckets = 32", "'position.buckets' has no effect without position.kind"),
        ("[position]", "[position]\noffset = 2", "'position.offset' has no effect"),
        (
            "[tensors]",
            "[tensors]\nq_norm = \"x\"",
            "'tensors.q_norm' has no effect without attention.qk_norm",
        ),
        ("[tensors]", "[tensors]\nqkv = \"x\"", "'tensors.qkv' has no effect without attention.qkv"),
        ("[tensors]", "[tensors]\ngate_up = \"x\"", "'tensors.gate_up' has no effect"),
        ("[tensors]", "[moe]\ntop_k = 2\n[tensors]", "'moe.top_k' has no effect without mlp.kind"),
        ("[tensors]", "[encoder.size]\nlayers = 2\n[tensors]", "'encoder.size.layers' has no effect"),
        ("kind = \"gated\"", "kind = \"ungated\"", "'tensors.gate' has no effect without mlp.kind"),
        ("kind = \"rope\"", "kind = \"alibi\"", "'position.style' has no effect"),
        ("[tensors]", "[cross]\nscale = 1.0\n[tensors]", "'cross.scale' has no effect"),
    ] {
        let error = refused(from, to, json!({}));
        assert!(error.starts_with("my.toml: ") && error.contains(message), "{error}");
    }
    // An override for some layers may select the block, and so may a value that is looked up.
    let names = "[tensors]\nq_norm = \"q.{i}\"\nk_norm = \"k.{i}\"";
    let by_layer = format!("[[override]]\nlayers = {{ from = 1 }}\nattention.qk_norm = \"full\"\n{names}");
    assert!(edited("[tensors]", &by_layer, json!({})).is_ok());
    let cases =
        "{ key = \"use_qk_norm\", default = \"none\", cases = { true = \"full\", false = \"none\" } }";
    let by_key = format!("[[override]]\nattention.qk_norm = {cases}\n{names}");
    assert!(edited("[tensors]", &by_key, json!({})).is_ok());
}

#[test]
fn distances_follow_from_the_configuration_and_are_refused_where_they_are_not_defined() {
    let resolve = |extra: serde_json::Value| {
        let mut keys = json!({
            "vocab_size": 320, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 100, "max_position_embeddings": 128,
            "relative_attention": true, "position_buckets": 8, "max_relative_positions": -1,
            "pos_att_type": "p2c|c2p", "position_biased_input": false, "share_att_key": true,
        });
        keys.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let keys = keys.as_object().unwrap().clone();
        let config = HubConfig::from_entries(Path::new("config.json"), keys);
        let (file, text) = specs::ALL.iter().find(|(_, text)| text.contains("\"disentangled\"")).unwrap();
        SpecFile::parse(file, text).unwrap().resolve(&config, &|_| true)
    };
    let of = |extra| resolve(extra).unwrap().encoder.unwrap().layers.swap_remove(1).attention;
    let attention = of(json!({}));
    let distances = attention.distances.as_ref().unwrap();
    assert_eq!((distances.buckets(), distances.growth_end, attention.distances_width()), (16, Some(128), 64));
    assert_eq!((&distances.k, attention.scale), (&attention.k, 1.0 / 6.0));
    let attention = of(json!({"position_buckets": -1, "max_relative_positions": 20, "share_att_key": false}));
    let distances = attention.distances.as_ref().unwrap();
    assert_eq!((distances.buckets(), distances.growth_end), (40, None));
    assert!(distances.q != attention.q && distances.k != attention.k && distances.k.bias.is_some());
    for (extra, named) in [
        (json!({"relative_attention": false}), "relative_attention"),
        (json!({"pos_att_type": "c2p"}), "pos_att_type"),
        (json!({"position_biased_input": true}), "position_biased_input"),
        (json!({"norm_rel_ebd": "batch_norm"}), "norm_rel_ebd"),
        (json!({"conv_kernel_size": 3}), "conv_kernel_size"),
        (json!({"position_buckets": 1}), "1 buckets"),
        (json!({"max_relative_positions": 5}), "8 buckets"),
    ] {
        let error = format!("{:#}", resolve(extra).unwrap_err());
        assert!(error.contains(named), "{error}");
    }
}
