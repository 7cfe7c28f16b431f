//! Merging of `mainstem serve` arguments from several sources.
//!
//! Invariant: a flag of several sources is taken from the last one only, because the program rejects
//! duplicate flags.

use std::collections::HashSet;

use super::{file::Variant, scale::ScenarioScale};

/// Builds the command line that serves `model` (or the built-in one) on an ephemeral port. Later lists
/// override earlier ones, and `slots` overrides all.
pub fn serve_args(model: Option<&str>, lists: &[&[String]], slots: Option<u32>) -> Vec<String> {
    let slots = slots.map(|slots| vec!["--slots".to_owned(), slots.to_string()]).unwrap_or_default();
    let own = ["--host", "127.0.0.1", "--port", "0"].map(str::to_owned);
    let lists: Vec<&[String]> =
        [own.as_slice()].into_iter().chain(lists.iter().copied()).chain([slots.as_slice()]).collect();
    let words = ["serve"].into_iter().chain(model).map(str::to_owned);
    words.chain(merge(&lists)).collect()
}

/// Returns the arguments of a variant.
pub fn variant_args(variant: &Variant, scale: &ScenarioScale) -> Vec<String> {
    let Variant { policy, window_ms, shuffle, args, .. } = variant;
    let window = window_ms.map(|ms| format!("{:.6}ms", scale.time(ms).as_secs_f64() * 1e3));
    let flags = [("--policy", policy), ("--window", &window), ("--shuffle", shuffle)];
    let flags = flags.into_iter().filter_map(|(flag, value)| Some([flag.to_owned(), value.clone()?]));
    flags.flatten().chain(args.iter().cloned()).collect()
}

/// Formats the command line for a report, with API keys hidden.
pub fn redacted(args: &[String]) -> String {
    let shown = |flag: &Vec<&str>| match name(flag) {
        secret @ "--api-key" => format!("{secret} (hidden)"),
        _ => flag.join(" "),
    };
    flags(args).iter().map(shown).collect::<Vec<_>>().join(" ")
}

/// Concatenates the flags of all lists, without those overridden by a later list.
fn merge(lists: &[&[String]]) -> Vec<String> {
    let mut given = HashSet::new();
    let mut kept: Vec<Vec<String>> = Vec::new();
    for list in lists.iter().rev() {
        let flags = flags(list);
        let mine: Vec<_> = flags.iter().filter(|flag| !given.contains(name(flag))).collect();
        kept.push(mine.into_iter().flatten().map(|word| word.to_string()).collect());
        given.extend(flags.iter().map(|flag| name(flag)));
    }
    kept.into_iter().rev().flatten().collect()
}

/// Splits a list into flags with their values.
fn flags(list: &[String]) -> Vec<Vec<&str>> {
    let mut flags: Vec<Vec<&str>> = Vec::new();
    for word in list {
        match flags.last_mut() {
            Some(flag) if !word.starts_with("--") => flag.push(word),
            _ => flags.push(vec![word]),
        }
    }
    flags
}

/// Returns `--flag` of both `--flag value` and `--flag=value`.
fn name<'a>(flag: &[&'a str]) -> &'a str {
    flag[0].split('=').next().unwrap_or(flag[0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn line(model: Option<&str>, lists: &[&str], slots: Option<u32>) -> String {
        let lists: Vec<Vec<String>> = lists.iter().map(|list| words(list)).collect();
        serve_args(model, &lists.iter().map(Vec::as_slice).collect::<Vec<_>>(), slots).join(" ")
    }

    #[test]
    fn later_arguments_override_earlier_ones() {
        assert_eq!(line(None, &[], None), "serve --host 127.0.0.1 --port 0");
        assert_eq!(
            line(Some("hf:a/b"), &["--slots 32 --device fake --fake-step 2ms", "--policy fused"], Some(8)),
            "serve hf:a/b --host 127.0.0.1 --port 0 --device fake --fake-step 2ms --policy fused --slots 8"
        );
        assert_eq!(
            line(
                None,
                &["--slots=32 --kv-type f32", "--policy fused --slots 4", "--kv-type=bf16 --port 81"],
                None
            ),
            "serve --host 127.0.0.1 --policy fused --slots 4 --kv-type=bf16 --port 81"
        );
        // A flag may be repeated within one list.
        let twice = "serve --host 127.0.0.1 --port 0 --api-key a --api-key b";
        assert_eq!(line(None, &["--api-key c", "--api-key a --api-key b"], None), twice);
    }

    #[test]
    fn a_key_is_not_shown() {
        let args = words("serve model --api-key secret --slots 4 --api-key=secret --api-key-file f");
        let expected = "serve model --api-key (hidden) --slots 4 --api-key (hidden) --api-key-file f";
        assert_eq!(redacted(&args), expected);
    }

    fn plain() -> Variant {
        let name = toml::Spanned::new(0..0, "plain".to_owned());
        Variant { name, policy: None, window_ms: None, shuffle: None, args: vec![] }
    }

    #[test]
    fn a_window_is_scaled_and_the_rest_is_as_written() {
        let scale = ScenarioScale { tokens: 1.0, time: 0.125, solo: Duration::from_millis(700) };
        let variant = Variant {
            policy: Some("window".into()),
            window_ms: Some(2000.0),
            shuffle: Some("off".into()),
            args: words("--threads 1"),
            ..plain()
        };
        assert_eq!(
            variant_args(&variant, &scale).join(" "),
            "--policy window --window 250.000000ms --shuffle off --threads 1"
        );
        assert!(variant_args(&plain(), &scale).is_empty());
    }
}
