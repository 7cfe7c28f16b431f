//! Configuration keys and metrics have a row in the documentation.

use crate::Offence;

/// Names of `text` that `page` does not mention in backticks. A name is the first capture of a line: for
/// TOML, the key with its section (`server.port`); for the metrics' table, every string that begins with
/// `mainstem_`.
pub fn undocumented_keys(path: &str, names: &[(String, usize)], page: &str) -> Vec<Offence> {
    let missing = |name: &str| !page.contains(&format!("`{name}`"));
    let offence = |(name, line): &(String, usize)| Offence {
        path: path.to_owned(),
        line: *line,
        problem: format!("`{name}` has no row in the documentation"),
    };
    names.iter().filter(|(name, _)| missing(name)).map(offence).collect()
}

/// Keys of a TOML text as `section.key`, with their lines.
pub fn toml_keys(text: &str) -> Vec<(String, usize)> {
    let mut section = "";
    let mut keys = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = name;
        } else if let Some((key, _)) = line.split_once(" = ")
            && !line.starts_with('#')
        {
            keys.push((format!("{section}.{key}"), at + 1));
        }
    }
    keys
}

/// Strings of a Rust text that are names in lower case beginning with `prefix`, with their lines.
pub fn strings_with(text: &str, prefix: &str) -> Vec<(String, usize)> {
    let quoted = format!("\"{prefix}");
    let in_line = |(at, line): (usize, &str)| {
        let parts = line.match_indices(&quoted).filter_map(|(start, _)| line[start + 1..].split('"').next());
        let names = parts.filter(|name| name.chars().all(|it| it.is_ascii_lowercase() || it == '_'));
        names.map(|name| (name.to_owned(), at + 1)).collect::<Vec<_>>()
    };
    text.lines().enumerate().flat_map(in_line).collect()
}
