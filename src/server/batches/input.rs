//! The requests of a batch job: a file with a request per line, in the format of OpenAI's batch API.
//!
//! Invariant: only the place and the size of a request are kept in memory, and its id; its body is read when
//! it runs.

use crate::server::fields::shorten;
use actix_web::web::Bytes;
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Maximum number of faulty lines that are listed.
const LISTED_MAX: usize = 20;

/// Bytes of a line beside the request's body: ids, URL and punctuation.
const LINE_OVERHEAD: usize = 64 << 10;

/// Maximum length of an id in bytes. All ids of a file are in memory.
const ID_BYTES_MAX: usize = 512;

/// Number of tokens that a request without a maximum is expected to generate.
const EXPECTED_ANSWER: u64 = 256;

/// Bytes of text that count as one token.
const TOKEN_BYTES: u64 = 4;

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The rules for the requests of a file.
#[derive(Clone, Copy, Debug)]
pub struct InputRules<'a> {
    /// Maximum size of a body in bytes.
    pub body_limit: usize,
    /// Maximum number of requests.
    pub requests_max: usize,
    /// The paths of endpoints that requests may be for.
    pub urls: &'a [&'a str],
}

/// The checked requests of a file.
pub struct Input {
    file: File,
    path: PathBuf,
    requests: Vec<Place>,
    /// The index of each request by its id.
    ids: HashMap<Box<str>, usize>,
}

/// The place of a request in its file, and its size.
struct Place {
    offset: u64,
    bytes: usize,
    /// Number of the line, from 1.
    line: u64,
    size: RequestSize,
    /// Number of sequences that the API makes of it.
    sequences: usize,
    /// Whether it asks for a stream.
    is_stream: bool,
}

/// The size of a request, before it is tokenized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestSize {
    /// Bytes of the texts in the body, with [`TOKEN_BYTES`] for each number: an estimate of the prompt.
    pub text: u64,
    /// Maximum number of generated tokens, if the body has one.
    pub answer: Option<u64>,
}

impl RequestSize {
    /// Returns the number of tokens that are likely to be computed for the request.
    pub fn tokens(self) -> u64 {
        self.prompt_tokens() + self.answer_tokens()
    }

    /// Returns the number of tokens that the prompt is likely to have.
    pub fn prompt_tokens(self) -> u64 {
        self.text / TOKEN_BYTES
    }

    /// Returns the number of tokens that are likely to be generated.
    pub fn answer_tokens(self) -> u64 {
        self.answer.unwrap_or(EXPECTED_ANSWER)
    }
}

/// A request to run.
pub struct BatchRequest {
    pub custom_id: String,
    /// Path of the endpoint.
    pub url: String,
    /// JSON, as it is in the file.
    pub body: Bytes,
}

/// A line, as far as it is checked before the job starts.
#[derive(Deserialize)]
struct CheckedLine {
    custom_id: Option<String>,
    method: Option<String>,
    url: Option<String>,
    body: Option<Measured>,
}

/// A line that is run.
#[derive(Deserialize)]
struct Line<'a> {
    custom_id: String,
    url: String,
    #[serde(borrow)]
    body: &'a RawValue,
}

impl Input {
    /// Reads a file line by line and checks the requests, all but their bodies. Fails with the faults of all
    /// lines, or of the first [`LISTED_MAX`].
    pub fn open(path: &Path, rules: &InputRules<'_>) -> Result<Input> {
        let (input, faults) = Input::scan(path, rules)?;
        faults.check(path)?;
        ensure!(input.count() > 0, "{} has no requests", path.display());
        Ok(input)
    }

    /// Reads a file like [`Input::open`], and returns its requests with the faults of the other lines. Fails
    /// if the file cannot be read.
    pub fn scan(path: &Path, rules: &InputRules<'_>) -> Result<(Input, Faults)> {
        let cannot_read = || format!("cannot read {}", path.display());
        let file = File::open(path).with_context(cannot_read)?;
        let is_file = file.metadata().with_context(cannot_read)?.is_file();
        ensure!(is_file, "{} is not a regular file; the requests of a batch are read twice", path.display());
        let mut input = Input { file, path: path.to_owned(), requests: Vec::new(), ids: HashMap::new() };
        let mut faults = Faults::default();
        let reader = BufReader::new(input.file.try_clone()?);
        let mut lines = Lines::new(reader, rules.body_limit.saturating_add(LINE_OVERHEAD));
        while let Some(line) = lines.next().with_context(cannot_read)? {
            if let Err(fault) = input.add(&line, rules) {
                faults.add(line.number, fault);
            }
            if input.count() > rules.requests_max {
                faults.add(line.number, format!("the file has more than {} requests", rules.requests_max));
                break;
            }
        }
        Ok((input, faults))
    }

    /// Checks a line and adds its request. Returns the fault of a line that is not a request.
    fn add(&mut self, line: &RawLine<'_>, rules: &InputRules<'_>) -> Result<(), String> {
        let RawLine { offset, number, bytes } = *line;
        let Some(bytes) = bytes else {
            let limit = rules.body_limit;
            return Err(format!("longer than the {limit} bytes of a body (server.body_limit) and its ids"));
        };
        if bytes.trim_ascii().is_empty() {
            return Ok(());
        }
        // Structures may also be arrays for the parser.
        if !bytes.trim_ascii_start().starts_with(b"{") {
            return Err("not a JSON object".to_owned());
        }
        let checked: CheckedLine = serde_json::from_slice(bytes).map_err(|error| json_fault(&error))?;
        let id = checked.custom_id.filter(|id| !id.is_empty()).ok_or("'custom_id' is missing")?;
        if id.len() > ID_BYTES_MAX {
            return Err(format!("'custom_id' is longer than {ID_BYTES_MAX} bytes"));
        }
        match checked.method.as_deref() {
            Some("POST") => {}
            Some(other) => {
                return Err(format!("'method' is {:?}; it must be \"POST\"", shorten(other)));
            }
            None => return Err("'method' is missing; it must be \"POST\"".to_owned()),
        }
        let url = checked.url.ok_or("'url' is missing")?;
        let named = shorten(&url);
        match rules.urls {
            urls if urls.contains(&&*url) => {}
            [only] => return Err(format!("'url' is {named:?}; it must be {only:?}, as in the batch")),
            urls => return Err(format!("'url' is {named:?}; it must be one of {}", urls.join(", "))),
        }
        let body = checked.body.ok_or("'body' is missing")?;
        match self.ids.entry(id.into()) {
            Entry::Occupied(known) => {
                let line = self.requests[*known.get()].line;
                Err(format!("'custom_id' {:?} is that of line {line}, too", shorten(known.key())))
            }
            Entry::Vacant(new) => {
                new.insert(self.requests.len());
                let (size, sequences, is_stream) = (body.size(), body.sequences(), body.is_stream);
                let place = Place { offset, bytes: bytes.len(), line: number, size, sequences, is_stream };
                self.requests.push(place);
                Ok(())
            }
        }
    }

    /// Returns the number of requests.
    pub fn count(&self) -> usize {
        self.requests.len()
    }

    /// Returns the index of the request with this id.
    pub fn index_of(&self, custom_id: &str) -> Option<usize> {
        self.ids.get(custom_id).copied()
    }

    /// Returns the size of the request at `index`.
    pub fn size(&self, index: usize) -> RequestSize {
        self.requests[index].size
    }

    /// Returns the number of sequences that the API makes of the request at `index`: for each text, the
    /// number of its choices. A body that is invalid counts as one.
    pub fn sequences(&self, index: usize) -> usize {
        self.requests[index].sequences
    }

    /// Returns the length in bytes of the line of the request at `index`.
    pub fn bytes(&self, index: usize) -> usize {
        self.requests[index].bytes
    }

    /// Returns whether the request at `index` asks for a stream.
    pub fn is_stream(&self, index: usize) -> bool {
        self.requests[index].is_stream
    }

    /// Returns the order in which to run the requests for which `is_open` returns true.
    ///
    /// Requests with prompts of about the same length run together, because their chunks fill steps evenly
    /// and they end together. Long prompts go first, and among them long answers: what is left for the end is
    /// short, so few slots are idle while the last ones finish. Requests of a group keep the order of the
    /// file, in which those with a common prefix are usually neighbours, and find it in the prefix cache.
    pub fn order(&self, is_open: impl Fn(usize) -> bool) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.count()).filter(|index| is_open(*index)).collect();
        order.sort_by_key(|index| {
            let RequestSize { text, answer } = self.size(*index);
            Reverse((length_group(text), length_group(answer.unwrap_or(EXPECTED_ANSWER))))
        });
        order
    }

    /// Reads the request at `index`. Fails if the file has changed since it was checked.
    pub fn read(&self, index: usize) -> Result<BatchRequest> {
        let Place { offset, bytes, line, .. } = self.requests[index];
        let place = || format!("{}:{line}", self.path.display());
        let mut text = vec![0; bytes];
        self.file.read_exact_at(&mut text, offset).with_context(place)?;
        let text = Bytes::from(text);
        match serde_json::from_slice(&text) {
            Ok(Line { custom_id, url, body }) if self.index_of(&custom_id) == Some(index) => {
                let body = text.slice_ref(body.get().as_bytes());
                Ok(BatchRequest { custom_id, url, body })
            }
            _ => bail!("{}: the line has changed while the job ran", place()),
        }
    }
}

/// Returns the group of a length: four groups for each doubling.
fn length_group(length: u64) -> u64 {
    match length.checked_ilog2() {
        Some(doublings @ 2..) => u64::from(doublings) * 4 + (length >> (doublings - 2) & 3),
        _ => length,
    }
}

/// Returns the message of a JSON error, with the column as its only place, since the text is one line.
fn json_fault(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let message = text.rsplit_once(" at line ").map_or(&*text, |(message, _)| message);
    format!("{message}, at column {}", error.column())
}

/// The faults of a file's lines.
#[derive(Debug, Default)]
pub struct Faults {
    /// Number and fault of the first [`LISTED_MAX`] faulty lines.
    pub listed: Vec<(u64, String)>,
    /// Number of the other ones.
    pub unlisted: usize,
}

impl Faults {
    fn add(&mut self, line: u64, fault: String) {
        match self.listed.len() {
            ..LISTED_MAX => self.listed.push((line, fault)),
            _ => self.unlisted += 1,
        }
    }

    /// Fails if there are faults, with a line for each.
    fn check(&self, path: &Path) -> Result<()> {
        let path = path.display();
        let mut lines: Vec<_> =
            self.listed.iter().map(|(line, fault)| format!("{path}:{line}: {fault}")).collect();
        if self.unlisted > 0 {
            lines.push(format!("{} more lines of {path} are invalid", self.unlisted));
        }
        if lines.is_empty() { Ok(()) } else { Err(anyhow!(lines.join("\n"))) }
    }
}

/// The lines of a file, of which one at a time is in memory.
struct Lines<R> {
    reader: R,
    /// Maximum length of a line in bytes.
    limit: usize,
    offset: u64,
    number: u64,
    buffer: Vec<u8>,
}

/// A line of a file.
struct RawLine<'a> {
    offset: u64,
    /// From 1.
    number: u64,
    /// Its bytes without the line feed; `None` if it is too long.
    bytes: Option<&'a [u8]>,
}

impl<R: BufRead> Lines<R> {
    fn new(reader: R, limit: usize) -> Lines<R> {
        Lines { reader, limit, offset: 0, number: 0, buffer: Vec::new() }
    }

    /// Returns the next line; `None` after the last.
    fn next(&mut self) -> io::Result<Option<RawLine<'_>>> {
        let mut offset = self.offset;
        self.buffer.clear();
        // The line feed does not count.
        let most = (self.limit as u64).saturating_add(1);
        let mut read = (&mut self.reader).take(most).read_until(b'\n', &mut self.buffer)? as u64;
        if read == 0 {
            return Ok(None);
        }
        let is_whole = self.buffer.pop_if(|byte| *byte == b'\n').is_some() || read < most;
        if !is_whole {
            read += self.reader.skip_until(b'\n')? as u64;
        }
        self.offset += read;
        self.number += 1;
        let mut bytes = &self.buffer[..];
        if let Some(rest) = bytes.strip_prefix(BYTE_ORDER_MARK).filter(|_| self.number == 1) {
            (bytes, offset) = (rest, offset + BYTE_ORDER_MARK.len() as u64);
        }
        Ok(Some(RawLine { offset, number: self.number, bytes: is_whole.then_some(bytes) }))
    }
}

/// The size of a JSON value, which is not kept.
#[derive(Debug, Default)]
struct Measured {
    /// Bytes of its texts, without the names of fields, and [`TOKEN_BYTES`] for each number.
    text: u64,
    /// The value, if it is a number.
    number: Option<u64>,
    is_number: bool,
    is_true: bool,
    /// Number of its texts, if it is a list of texts or of lists. A list of numbers is one text, as ids.
    texts: Option<usize>,
    /// Values of an object's fields: the maximum number of generated tokens, the number of choices, that of
    /// the texts of its prompt, and whether it asks for a stream.
    answer: Option<u64>,
    choices: Option<u64>,
    prompts: Option<usize>,
    is_stream: bool,
}

impl Measured {
    fn sequences(&self) -> usize {
        let choices = usize::try_from(self.choices.unwrap_or(1)).unwrap_or(usize::MAX);
        choices.saturating_mul(self.prompts.unwrap_or(1)).max(1)
    }

    fn of_number(number: Option<u64>) -> Measured {
        Measured { text: TOKEN_BYTES, number, is_number: true, ..Measured::default() }
    }

    fn size(&self) -> RequestSize {
        // Whether a number is valid is not known yet.
        RequestSize { text: self.text, answer: self.answer.map(|tokens| tokens.min(u32::MAX.into())) }
    }
}

impl<'de> Deserialize<'de> for Measured {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Measured, D::Error> {
        deserializer.deserialize_any(Measure)
    }
}

/// Measures a value while it is parsed.
struct Measure;

impl<'de> Visitor<'de> for Measure {
    type Value = Measured;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Measured, E> {
        Ok(Measured::default())
    }

    fn visit_bool<E>(self, is_true: bool) -> Result<Measured, E> {
        Ok(Measured { is_true, ..Measured::default() })
    }

    fn visit_u64<E>(self, number: u64) -> Result<Measured, E> {
        Ok(Measured::of_number(Some(number)))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Measured, E> {
        Ok(Measured::of_number(None))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Measured, E> {
        Ok(Measured::of_number(None))
    }

    fn visit_str<E>(self, text: &str) -> Result<Measured, E> {
        Ok(Measured { text: text.len() as u64, ..Measured::default() })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Measured, A::Error> {
        let mut all = Measured::default();
        let (mut count, mut is_one_text) = (0, true);
        while let Some(item) = items.next_element::<Measured>()? {
            all.text += item.text;
            is_one_text &= count > 0 || item.is_number;
            count += 1;
        }
        all.texts = (!is_one_text).then_some(count);
        Ok(all)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Measured, A::Error> {
        let mut all = Measured::default();
        while let Some(name) = fields.next_key::<String>()? {
            let value = fields.next_value::<Measured>()?;
            all.text += value.text;
            match &*name {
                "max_tokens" | "max_completion_tokens" => all.answer = value.number.or(all.answer),
                "n" | "best_of" => all.choices = all.choices.max(value.number),
                "prompt" | "input" | "documents" | "items" | "queries" | "text_1" | "text_2" | "data_1"
                | "data_2" => all.prompts = all.prompts.max(value.texts),
                "stream" => all.is_stream = value.is_true,
                _ => {}
            }
        }
        Ok(all)
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::testing::Scratch;
    use serde_json::{Value, json};

    pub fn line(id: &str, body: &Value) -> String {
        json!({"custom_id": id, "method": "POST", "url": "/v1/completions", "body": body}).to_string()
    }

    pub const RULES: InputRules<'_> =
        InputRules { body_limit: 100, requests_max: 5000, urls: &["/v1/completions", "/v1/embeddings"] };

    /// Opens a file with these bytes, in which a body may have 100 bytes.
    pub fn open(text: &[u8]) -> Result<Input> {
        let folder = Scratch::new();
        let path = folder.path().join("in.jsonl");
        std::fs::write(&path, text).unwrap();
        Input::open(&path, &RULES)
    }

    fn error_of(text: &str) -> String {
        open(text.as_bytes()).err().unwrap().to_string()
    }

    #[test]
    fn requests_are_found_whatever_the_ends_of_lines() {
        let (a, b) = (line("a", &json!({"prompt": "x"})), line("b", &json!({"prompt": [1, 2]})));
        for text in [
            format!("{a}\n{b}\n"),
            format!("{a}\n{b}"),
            format!("{a}\r\n{b}\r\n"),
            format!("\u{feff}\n\n{a}\n \t\r\n{b}\n\n"),
            format!("\u{feff}{a}\n  {b}  "),
        ] {
            let input = open(text.as_bytes()).unwrap();
            assert_eq!((input.count(), input.index_of("b"), input.index_of("c")), (2, Some(1), None));
            for (index, (id, body)) in
                [("a", json!({"prompt": "x"})), ("b", json!({"prompt": [1, 2]}))].into_iter().enumerate()
            {
                let request = input.read(index).unwrap();
                assert_eq!((&*request.custom_id, &*request.url), (id, "/v1/completions"), "{text:?}");
                assert_eq!(serde_json::from_slice::<Value>(&request.body).unwrap(), body);
            }
        }
    }

    #[test]
    fn each_fault_is_named_with_its_line() {
        let good = line("a", &json!({}));
        let get = good.replace("POST", "GET").replace("\"a\"", "\"g\"");
        for (faulty, named) in [
            ("{\"custom_id\": \"b\"", "EOF while parsing an object, at column 17"),
            ("[\"b\", \"POST\", \"/v1/completions\", {}]", "not a JSON object"),
            ("{\"custom_id\": 5}", "invalid type: integer `5`, expected a string, at column 15"),
            ("{\"method\": \"POST\"}", "'custom_id' is missing"),
            (&get, "'method' is \"GET\""),
            (&good.replace("\"a\"", "\"b\"").replace("completions", "files"), "'url' is \"/v1/files\""),
            (&good.replace("\"a\"", "\"b\"").replace("body", "text"), "'body' is missing"),
            (&good, "'custom_id' \"a\" is that of line 1, too"),
            (&good.replace("\"a\"", "\"\\u0061\""), "'custom_id' \"a\" is that of line 1, too"),
            (&format!("{good} {good}"), "trailing characters"),
        ] {
            let error = error_of(&format!("{good}\n\n{faulty}\n"));
            let (place, message) = error.split_once(": ").unwrap();
            assert!(place.ends_with("in.jsonl:3") && message.starts_with(named), "{error}");
        }
        assert!(error_of(" \n").ends_with("in.jsonl has no requests"));
    }

    #[test]
    fn a_file_has_a_maximum_number_of_requests() {
        let folder = Scratch::new();
        let path = folder.path().join("in.jsonl");
        let lines = ["a", "b", "c", "d"].map(|id| line(id, &json!({})));
        std::fs::write(&path, lines.join("\n")).unwrap();
        let faults = |requests_max| {
            let rules = InputRules { requests_max, urls: &["/v1/embeddings", "/v1/completions"], ..RULES };
            Input::scan(&path, &rules).unwrap().1.listed
        };
        assert_eq!(faults(4), []);
        assert_eq!(faults(2), [(3, "the file has more than 2 requests".to_owned())]);
    }

    #[test]
    fn all_faults_are_reported_up_to_a_number() {
        let error = error_of(&"{}\n".repeat(3));
        assert_eq!(error.lines().count(), 3);
        let error = error_of(&"{}\n".repeat(25));
        assert!(error.contains(":20: ") && !error.contains(":21: "));
        assert!(error.contains("\n5 more lines of "), "{error}");
    }

    /// One byte more than the longest line is refused, and the lines after it are still read.
    #[test]
    fn lines_have_a_maximum_length() {
        let longest = 100 + LINE_OVERHEAD;
        let padded = |id: &str, length: usize| {
            let empty = line(id, &json!({"prompt": ""}));
            empty.replace("\"\"", &format!("\"{}\"", "x".repeat(length - empty.len())))
        };
        let text = |length| format!("{}\n{}\n", padded("a", length), line("b", &json!({})));
        assert_eq!(open(text(longest).as_bytes()).unwrap().count(), 2);
        assert_eq!(open(padded("a", longest).as_bytes()).unwrap().count(), 1);
        let error = error_of(&(text(longest + 1) + "{}\n"));
        assert!(error.contains("in.jsonl:1: longer than the 100 bytes"), "{error}");
        assert!(error.contains("in.jsonl:3: 'custom_id' is missing") && !error.contains(":2:"), "{error}");
        let mut lines = Lines::new(&b"123\n1234\n12\n12345"[..], 3);
        let mut found = Vec::new();
        while let Some(RawLine { offset, number, bytes }) = lines.next().unwrap() {
            found.push((offset, number, bytes.map(<[u8]>::len)));
        }
        assert_eq!(found, [(0, 1, Some(3)), (4, 2, None), (9, 3, Some(2)), (12, 4, None)]);
    }

    #[test]
    fn sizes_count_texts_and_token_ids_but_no_names() {
        let chat = json!({
            "messages": [
                {"role": "user", "content": "12345"},
                {"role": "user", "content": [{"text": "678"}]},
            ],
            "max_tokens": null, "max_completion_tokens": 7, "stop": null, "logprobs": true,
        });
        let ids = json!({"prompt": [1, 2, 3], "max_tokens": u64::MAX, "extra": {"max_tokens": 9}});
        let text = format!("{}\n{}\n", line("a", &chat), line("b", &ids));
        let input = open(text.as_bytes()).unwrap();
        assert_eq!(input.size(0), RequestSize { text: 4 + 5 + 4 + 3 + 4, answer: Some(7) });
        assert_eq!(input.size(1), RequestSize { text: 20, answer: Some(u32::MAX.into()) });
    }

    #[test]
    fn a_request_has_a_sequence_for_each_choice_of_each_text() {
        for (body, sequences) in [
            (json!({"prompt": "a"}), 1),
            (json!({"prompt": [1, 2, 3], "n": 2}), 2),
            (json!({"prompt": ["a", "b"], "n": 2, "best_of": 3}), 6),
            (json!({"input": [[1, 2], [3]]}), 2),
            (json!({"prompt": [], "n": 0}), 1),
            (json!({"query": "q", "documents": ["a", {"text": "b"}, "c"]}), 3),
            (json!({"text_1": "a", "text_2": ["b", "c"]}), 2),
            (json!({"queries": ["a", "b"], "items": ["c", "d"]}), 2),
            (json!({"prompt": 5, "n": "many"}), 1),
            (json!("text"), 1),
        ] {
            let input = open(line("a", &body).as_bytes()).unwrap();
            assert_eq!((input.sequences(0), input.is_stream(0)), (sequences, false), "{body}");
        }
        let input = open(line("a", &json!({"stream": true, "n": 2})).as_bytes()).unwrap();
        assert!(input.is_stream(0) && input.sequences(0) == 2);
    }

    /// Regression: a fault repeated any text of the line, and ids of any length were kept.
    #[test]
    fn texts_of_clients_are_not_repeated_at_length() {
        let long = "\u{7f}".repeat(40_000);
        let with = |field: &str, value: &str| {
            let mut line = json!({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}});
            line[field] = value.into();
            line.to_string()
        };
        for field in ["custom_id", "method", "url"] {
            let error = error_of(&with(field, &long));
            assert!(error.contains(field) && error.len() < 1000, "{field}: {} bytes", error.len());
        }
        let same = with("custom_id", &"x".repeat(ID_BYTES_MAX));
        let error = error_of(&format!("{same}\n{same}"));
        assert!(error.contains("is that of line 1, too") && error.len() < 400, "{error}");
    }

    #[test]
    fn long_prompts_go_first_and_equal_ones_as_in_the_file() {
        let body = |bytes: usize, answer: u64| json!({"prompt": "x".repeat(bytes), "max_tokens": answer});
        let bodies = [body(10, 5), body(990, 5), body(10, 500), body(1000, 5), body(985, 5), body(0, 5)];
        let lines: Vec<_> =
            bodies.iter().enumerate().map(|(index, body)| line(&index.to_string(), body)).collect();
        let input = open(lines.join("\n").as_bytes()).unwrap();
        assert_eq!(input.order(|_| true), [1, 3, 4, 2, 0, 5]);
        assert_eq!(input.order(|index| index % 2 == 1), [1, 3, 5]);
        let groups: Vec<u64> = (0..5000).map(length_group).collect();
        assert!(groups.is_sorted() && groups[4999] < 60);
    }

    #[test]
    fn a_file_that_changes_is_noticed() {
        let folder = Scratch::new();
        let path = folder.path().join("in.jsonl");
        let lines = [line("a", &json!({})), line("b", &json!({}))];
        std::fs::write(&path, lines.join("\n")).unwrap();
        let input = Input::open(&path, &RULES).unwrap();
        std::fs::write(&path, lines[1].clone() + "\n" + &lines[0]).unwrap();
        let error = input.read(1).err().unwrap().to_string();
        assert!(error.ends_with("in.jsonl:2: the line has changed while the job ran"), "{error}");
    }
}
