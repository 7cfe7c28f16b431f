//! Deprecated spellings of configuration keys. They are accepted in files, environment variables and
//! overrides and set the key of the current name; flags have their aliases in `cli/flags.rs`.
//!
//! Invariant: a deprecated spelling is not a key itself, and the key that it sets exists.

/// Deprecated spellings with the keys that they set.
const ALIASES: [(&str, &str); 2] =
    [("kv.page_positions", "kv.page_size"), ("kv.attended_share", "kv.sparse_attention")];

/// Returns the key that `spelling` sets. Anything but a deprecated spelling is returned as it is.
pub fn resolve(spelling: &str) -> &str {
    ALIASES.iter().find(|(deprecated, _)| *deprecated == spelling).map_or(spelling, |(_, key)| key)
}

/// All deprecated spellings.
pub fn deprecated<'a>() -> impl Iterator<Item = &'a str> {
    ALIASES.iter().map(|(deprecated, _)| *deprecated)
}

#[cfg(test)]
mod tests {
    use super::super::layers::LayeredSettings;
    use super::*;

    #[test]
    fn deprecated_spellings_set_existing_keys() {
        let settings = LayeredSettings::new();
        for spelling in deprecated() {
            assert!(settings.keys().any(|key| key == resolve(spelling)), "{spelling}");
            assert!(settings.keys().all(|key| key != spelling), "{spelling}");
        }
        assert_eq!(resolve("server.port"), "server.port");
    }
}
