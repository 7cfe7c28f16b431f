//! Pickles alone: executing them here gives the same values as in Python.

use super::super::machine;
use super::super::value::{Heap, Value};
use super::content;
use serde::Deserialize;

#[derive(Deserialize)]
struct Program {
    /// In hexadecimal.
    pickle: String,
    /// The value as text; `None` if Python rejects the pickle.
    makes: Option<String>,
}

fn shown(heap: &Heap, value: Value) -> String {
    let each = |end: &str| heap.items(value).iter().map(|item| shown(heap, *item) + end).collect::<Vec<_>>();
    match value {
        Value::None => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Int(number) => number.to_string(),
        Value::Float => "float".to_owned(),
        Value::Text(text) => format!("'{text}'"),
        Value::Tuple(_) => format!("({})", each(", ").concat()),
        Value::List(_) => format!("[{}]", each("").join(", ")),
        Value::Dict(_) => {
            let pairs = heap.pairs(value).unwrap().iter();
            let pairs = pairs.map(|(key, item)| format!("{}: {}", shown(heap, *key), shown(heap, *item)));
            format!("{{{}}}", pairs.collect::<Vec<_>>().join(", "))
        }
        other => other.kind(),
    }
}

fn unhex(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn programs_make_what_they_make_in_python() {
    let programs: Vec<Program> = serde_json::from_slice(&content("programs.json")).unwrap();
    for Program { pickle, makes } in programs {
        let bytes = unhex(&pickle);
        let made = machine::run(&bytes);
        let made = made.map(|made| shown(&made.heap, made.root));
        assert_eq!(made.as_ref().ok(), makes.as_ref(), "{}: {made:?}", bytes.escape_ascii());
    }
}
