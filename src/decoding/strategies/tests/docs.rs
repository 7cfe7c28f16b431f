//! The tables of docs/sampling.md; `UPDATE_DOCS=1 cargo test documented_table` regenerates them.

use super::super::Kind;
use super::super::params::Param;
use super::super::plan::GENERAL_PARAMS;
use super::super::registry::TABLE;
use super::super::unit::{Place, Strategy};

#[test]
fn the_documented_tables_of_strategies_are_up_to_date() {
    const BEGIN: &str = "<!-- generated from the table of strategies -->\n";
    const END: &str = "<!-- end -->";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/sampling.md");
    let text = std::fs::read_to_string(path).expect("the page exists");
    let (before, rest) = text.split_once(BEGIN).expect("the tables have a start marker");
    let (_, after) = rest.split_once(END).expect("the tables have an end marker");
    let expected = format!("{before}{BEGIN}{}{END}{after}", tables());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &expected).expect("the page can be written");
        return;
    }
    assert!(text == expected, "docs/sampling.md is out of date; UPDATE_DOCS=1 regenerates it");
}

/// Formats the table of strategies as Markdown, a section per place.
fn tables() -> String {
    let sections: [(&str, &[Place]); 6] = [
        ("Always first", &[Place::First]),
        ("Edits of logits", &[Place::Edit]),
        ("Last edits", &[Place::Last]),
        ("Filters and temperature", &[Place::Filter]),
        ("Mirostat", &[Place::Instead]),
        ("Named strategies", &[Place::Named]),
    ];
    let mut text = String::new();
    for (title, places) in sections {
        text +=
            &format!("\n### {title}\n\n| name | what it does | parameter | default | values | meaning |\n");
        text += "|---|---|---|---|---|---|\n";
        TABLE.iter().filter(|row| places.contains(&row.place)).for_each(|row| add_rows(&mut text, row));
    }
    text += "\n### General parameters\n\n| parameter | meaning |\n|---|---|\n";
    GENERAL_PARAMS.iter().for_each(|(name, doc)| text += &format!("| `{name}` | {doc} |\n"));
    text + "\n"
}

/// Adds a strategy: a line per parameter, the name and the summary in the first.
fn add_rows(text: &mut String, row: &Strategy) {
    let mut head = format!("{} | {}", names(row.name, row.aliases), row.summary);
    if row.params.is_empty() {
        *text += &format!("| {head} | | | | |\n");
    }
    for param in row.params {
        let (default, values) = default_and_values(param);
        let name = names(param.name, param.aliases);
        *text += &format!("| {head} | {name} | {default} | {values} | {} |\n", param.doc);
        head = " | ".to_owned();
    }
}

fn names(name: &str, aliases: &[&str]) -> String {
    let all = std::iter::once(&name).chain(aliases).map(|name| format!("`{name}`"));
    all.collect::<Vec<_>>().join(", ")
}

fn default_and_values(param: &Param) -> (String, String) {
    match param.kind {
        Kind::Float { default, bounds } => (default.to_string(), bounds.to_string()),
        Kind::Integer { default, min, max } if max >= i32::MAX.into() => {
            (default.to_string(), format!("whole, at least {min}"))
        }
        Kind::Integer { default, min, max } => (default.to_string(), format!("{min} to {max}")),
        Kind::Choice(choices) => (choices[0].to_owned(), choices.join(", ")),
        Kind::Tokens => ("none".to_owned(), "token ids".to_owned()),
        Kind::Sequences => ("none".to_owned(), "texts or lists of token ids".to_owned()),
        Kind::Texts(texts) => {
            let texts: Vec<String> = texts.iter().map(|text| format!("`{text:?}`")).collect();
            (texts.join(" "), "texts".to_owned())
        }
        Kind::Biases => ("none".to_owned(), "numbers or `false`".to_owned()),
    }
}
