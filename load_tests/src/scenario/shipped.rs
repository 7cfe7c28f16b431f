//! The built-in scenarios, usable without their files.
//!
//! Invariant: the built-in scenarios are exactly the files in `scenarios/`, except that of the soak test.

use std::path::Path;

/// Name and text of each built-in scenario.
pub const SHIPPED: [(&str, &str); 5] = [
    ("flover-interval", include_str!("../../scenarios/flover-interval.toml")),
    ("flover-poisson", include_str!("../../scenarios/flover-poisson.toml")),
    ("flover-lengths", include_str!("../../scenarios/flover-lengths.toml")),
    ("flover-progress", include_str!("../../scenarios/flover-progress.toml")),
    ("tiny", include_str!("../../scenarios/tiny.toml")),
];

/// Returns the built-in scenario named by a path without a directory, with or without `.toml`.
pub fn find(path: &Path) -> Option<&'static str> {
    let name = path.to_str()?;
    let name = name.strip_suffix(".toml").unwrap_or(name);
    SHIPPED.iter().find(|(shipped, _)| *shipped == name).map(|(_, text)| *text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::file::Scenario;

    /// Every built-in scenario is valid, and every other file of the directory is one.
    #[test]
    fn every_shipped_scenario_is_good() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios");
        let mut files = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().is_some_and(|name| name == "soak.toml") {
                continue;
            }
            let scenario = Scenario::read(&path).unwrap_or_else(|error| panic!("{error:#}"));
            assert!(!scenario.tables.is_empty() && !scenario.text.is_empty(), "{}", path.display());
            let titles = scenario.tables.iter().map(|table| table.title.to_string());
            let titles = titles.chain(scenario.plots.iter().map(|plot| plot.title.get_ref().to_string()));
            let mut titles: Vec<String> = titles.collect();
            let all = titles.len();
            titles.sort();
            titles.dedup();
            assert_eq!(titles.len(), all, "{}: two parts of the report have one title", path.display());
            let name = Path::new(path.file_name().unwrap());
            assert_eq!(find(name), Some(std::fs::read_to_string(&path).unwrap().as_str()));
            files += 1;
        }
        assert_eq!(files, SHIPPED.len());
    }

    #[test]
    fn a_name_will_do() {
        for name in ["tiny", "tiny.toml"] {
            assert!(find(Path::new(name)).is_some_and(|text| text.contains("title")), "{name}");
        }
        for name in ["tiny.json", "large", "elsewhere/tiny.toml", ""] {
            assert_eq!(find(Path::new(name)), None, "{name}");
        }
        assert!(Scenario::read(Path::new("flover-interval")).is_ok());
    }
}
