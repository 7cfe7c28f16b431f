//! Each check finds an offence that is planted for it, and nothing in the same tree without it.

use tidy::{Dependencies, Offence, Tree};

const DOC: &str = "//! A module.\n\n";

fn tree(files: &[(&str, String)]) -> Tree {
    let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (*path, text.as_str())).collect();
    Tree::from_texts(&files)
}

fn one(path: &str, text: &str) -> Tree {
    tree(&[(path, format!("{DOC}{text}"))])
}

/// The lines of offences, with the words that each must have.
fn assert_found(offences: &[Offence], expected: &[(&str, usize, &str)]) {
    let found: Vec<String> = offences.iter().map(Offence::to_string).collect();
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for (offence, (path, line, words)) in offences.iter().zip(expected) {
        assert_eq!((offence.path.as_str(), offence.line), (*path, *line), "{offence}");
        assert!(offence.problem.contains(words), "{offence}");
    }
}

#[test]
fn an_import_through_a_closed_door() {
    let page = "x\n## Dependencies\n\n```\ntext, server -> formats\nserver -> actors\n```\n";
    let dependencies = Dependencies::parse(page).expect("the page has rules");
    let files = [
        ("src/text/mod.rs", "use crate::formats::Folder;\nuse crate::{formats, server::Api};\n"),
        ("src/server/mod.rs", "fn f() { crate::actors::go(); crate::text::stop() }\n"),
        (
            "src/formats/mod.rs",
            "#[cfg(test)]\nmod tests { use crate::server::Api; }\nuse mainstem_kernels::X;\n",
        ),
    ];
    let files = files.map(|(path, text)| (path, format!("{DOC}{text}")));
    assert_found(
        &tidy::forbidden_imports(&tree(&files), &dependencies),
        &[
            ("src/text/mod.rs", 4, "`text` imports `server`"),
            ("src/server/mod.rs", 3, "`server` imports `text`"),
            ("src/formats/mod.rs", 5, "`formats` imports `kernels`"),
        ],
    );
    for broken in ["", "\n## Dependencies\n", "\n## Dependencies\n\n```\ntext formats\n```\n"] {
        assert!(Dependencies::parse(broken).is_err(), "{broken:?}");
    }
}

#[test]
fn a_long_function_and_a_long_file() {
    let body = |lines: usize| format!("fn f() {{\n{}}}\n", "    g();\n".repeat(lines - 2));
    assert_found(&tidy::long_functions(&one("src/a.rs", &body(70))), &[]);
    assert_found(&tidy::long_functions(&one("src/a.rs", &body(71))), &[("src/a.rs", 3, "`f` has 71 lines")]);
    let method = format!("impl A {{\n{}}}\n", body(71));
    assert_found(&tidy::long_functions(&one("src/a.rs", &method)), &[("src/a.rs", 4, "`f`")]);
    assert_found(&tidy::long_functions(&one("src/a/tests.rs", &body(200))), &[]);
    let constants = |count: usize| "const A: u8 = 0;\n".repeat(count);
    let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", body(90));
    assert_found(&tidy::long_files(&one("src/a.rs", &(constants(498) + &tests))), &[]);
    assert_found(
        &tidy::long_files(&one("src/a.rs", &(constants(499) + &tests))),
        &[("src/a.rs", 1, "501 lines")],
    );
}

#[test]
fn a_wide_line() {
    let line = |columns: usize| format!("// {}\n", "é".repeat(columns - 3));
    assert_found(&tidy::wide_lines(&one("src/a.rs", &line(110))), &[]);
    assert_found(
        &tidy::wide_lines(&one("tests/it/a.rs", &line(111))),
        &[("tests/it/a.rs", 3, "111 columns")],
    );
}

#[test]
fn a_module_file_beside_its_folder() {
    let files = ["src/a.rs", "src/a/b.rs", "src/c/mod.rs", "src/c/d.rs"].map(|path| (path, DOC.to_owned()));
    assert_found(&tidy::module_style(&tree(&files)), &[("src/a.rs", 1, "src/a/mod.rs")]);
}

#[test]
fn tests_in_a_file_with_another_name() {
    let text = "#[cfg(test)]\nmod tests;\n\n#[cfg(test)]\nmod answers;\n\n#[cfg(test)]\nmod inline {}\n";
    assert_found(&tidy::misplaced_tests(&one("src/a.rs", text)), &[("src/a.rs", 7, "`mod answers`")]);
}

#[test]
fn documentation_that_says_nothing_on_hover() {
    let text = "/// The same, for lanes.\nstruct A;\n\n/// A lane.\n/// What it does follows.\nstruct B;\n";
    assert_found(&tidy::first_words(&one("src/a.rs", text)), &[("src/a.rs", 3, "\"The same\"")]);
    let text = "fn f() {\n    // Copies to the sink page.\n}\n";
    assert_found(&tidy::first_words(&one("src/a.rs", text)), &[("src/a.rs", 4, "\"sink page\"")]);
}

#[test]
fn a_public_item_without_documentation() {
    let text = "pub struct A { pub field: u8 }\n\nimpl A {\n    pub fn new() -> A { A { field: 0 } }\n    \
                fn own() {}\n}\n\n\
                impl Clone for A { fn clone(&self) -> A { A::new() } }\n\npub(crate) fn f() {}\n";
    assert_found(
        &tidy::undocumented(&one("src/a.rs", text)),
        &[("src/a.rs", 3, "`A` is public"), ("src/a.rs", 6, "`new` is public")],
    );
}

#[test]
fn a_circle_of_files() {
    let files = [
        ("src/lib.rs", "mod a;\nmod b;\nmod c;\n"),
        // To b through a re-export of c.
        ("src/a/mod.rs", "mod own;\nuse crate::c::B;\nuse own::Own;\npub struct A;\n"),
        ("src/a/own.rs", "use super::A;\npub struct Own;\n"),
        ("src/b.rs", "pub struct B;\nfn f() { crate::a::f(); }\n"),
        ("src/c.rs", "pub use crate::b::B;\n"),
    ];
    let files = files.map(|(path, text)| (path, format!("{DOC}{text}")));
    assert_eq!(tidy::cycles(&tree(&files)), [["src/a/mod.rs", "src/b.rs"]]);
    assert_eq!(tidy::known_cycles("# These.\nsrc/a.rs src/b.rs\n"), [["src/a.rs", "src/b.rs"]]);
}

#[test]
fn a_key_and_a_metric_without_a_row() {
    let keys = tidy::toml_keys("# no = 1\n[server]\nhost = \"a = b\"\nport = 1\n\n[kv]\nsize = 2\n");
    let offences = tidy::undocumented_keys("config.toml", &keys, "| `server.port` | | `kv.size` |");
    assert_found(&offences, &[("config.toml", 3, "`server.host`")]);
    let metrics = tidy::strings_with("(\"app_a\", \"b\"),\n\"app_c\"", "app_");
    assert_eq!(metrics, [("app_a".to_owned(), 1), ("app_c".to_owned(), 2)]);
}
