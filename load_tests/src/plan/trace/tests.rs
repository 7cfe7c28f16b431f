//! Tests with traces in their published formats, and with malformed files.
//!
//! Invariant: every file that a test writes has a unique name and is removed.

use super::*;
use crate::plan::files::TempFile;

/// Due time in seconds, prompt length, output length.
type EntryValues = (f64, Option<u32>, Option<u32>);

fn read_entries_at(name: &str, content: &str, speed: f64) -> Vec<EntryValues> {
    let entries =
        read(TempFile::new(name, content).path(), speed).unwrap_or_else(|error| panic!("{error:#}"));
    entries.iter().map(|entry| (entry.due.as_secs_f64(), entry.prompt_len, entry.output_len)).collect()
}

fn read_entries(name: &str, content: &str) -> Vec<EntryValues> {
    read_entries_at(name, content, 1.0)
}

fn read_error(name: &str, content: &str) -> String {
    let error = format!("{:#}", read(TempFile::new(name, content).path(), 1.0).unwrap_err());
    assert!(error.contains(name), "the file is named: {error}");
    error
}

#[test]
fn the_traces_of_azure_have_dates_to_the_tenth_of_a_microsecond() {
    let of_2023 = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n\
        2023-11-16 18:15:46.6805900,374,44\r\n\
        2023-11-16 18:15:50.9951690,396,109\r\n\
        2023-11-17 00:00:00.0000001,879,55\r\n";
    let expected = [
        (0.0, Some(374), Some(44)),
        (4.314579, Some(396), Some(109)),
        // To midnight: 5 h, 44 min and 13.31941 s.
        (5.0 * 3600.0 + 44.0 * 60.0 + 13.319_410_1, Some(879), Some(55)),
    ];
    assert_eq!(read_entries("azure.csv", of_2023), expected);
    let of_2024 = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
        2024-05-10 00:00:00.009930+00:00,2162,5\n\
        2024-05-10 02:00:00.017335+02:00,2399,6\n";
    assert_eq!(
        read_entries("azure-2024.csv", of_2024),
        [(0.0, Some(2162), Some(5)), (0.007405, Some(2399), Some(6))]
    );
    // Across the end of February in a leap year.
    let leap = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-02-29 23:59:59,1,1\n2024-03-01 00:00:00,1,1\n";
    assert_eq!(read_entries("azure-leap.csv", leap)[1].0, 1.0);
}

#[test]
fn of_burstgpt_those_that_failed_are_left_out() {
    let content = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
        5,ChatGPT,472,18,490,Conversation log\n\
        45.5,ChatGPT,1087,0,1087,Conversation log\n\
        118,GPT-4,417,276,693,API log\n";
    assert_eq!(
        read_entries("burst.csv", content),
        [(0.0, Some(472), Some(18)), (113.0, Some(417), Some(276))]
    );
    // The first remaining request is due at once.
    let first_failed = content.replace("472,18,", "472,0,");
    assert_eq!(read_entries("burst-2.csv", &first_failed), [(0.0, Some(417), Some(276))]);
}

#[test]
fn of_mooncake_times_are_milliseconds() {
    let content = r#"{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}

{"timestamp": 30535.5, "input_length": 0, "output_length": 26, "hash_ids": []}
"#;
    let expected = [(0.0, Some(6955), Some(52)), (3.0535, Some(1), Some(26))];
    assert_eq!(read_entries("mooncake.jsonl", content), expected);
    let faster = [(0.0, Some(6955), Some(52)), (1.2214, Some(1), Some(26))];
    assert_eq!(read_entries_at("mooncake-fast.jsonl", content, 2.5), faster);
}

#[test]
fn generic_traces_are_sorted_and_may_lack_lengths() {
    let seconds = " Arrival_S , note\n3,\"a, b\"\n1.25,\n2,x\n";
    let expected = [(0.0, None, None), (0.75, None, None), (1.75, None, None)];
    assert_eq!(read_entries("seconds.csv", seconds), expected);
    let ms = "output_tokens,arrival_ms,prompt_tokens\n7,1500,\n8,1000.5,3\n";
    assert_eq!(read_entries("ms.csv", ms), [(0.0, Some(3), Some(8)), (0.4995, None, Some(7))]);
    let mixed =
        "\u{feff}{\"arrival_s\": \"2\", \"PROMPT_TOKENS\": 4, \"output_tokens\": null}\n{\"arrival_s\": 1}";
    assert_eq!(read_entries("mixed.jsonl", mixed), [(0.0, None, None), (1.0, Some(4), None)]);
    // Simultaneous requests keep the order of the file.
    let at_once = "arrival_s,prompt_tokens\n1,5\n1,4\n0,3\n1,2\n";
    assert_eq!(
        read_entries("at-once.csv", at_once).iter().map(|entry| entry.1.unwrap()).collect::<Vec<_>>(),
        [3, 5, 4, 2]
    );
}

#[test]
fn what_is_wrong_is_reported_with_its_place() {
    let deep = format!("{{\"timestamp\": 1}}\n{{\"hash_ids\": {}", "[".repeat(1_000_000));
    for (name, content, expected) in [
        ("empty.csv", "", "line 1: no column is named timestamp"),
        ("header.csv", "timestamp,prompt_tokens\n", "no request with an answer"),
        (
            "no-time.csv",
            "time,prompt_tokens\n1,2\n",
            "line 1: no column is named timestamp, arrival_s or arrival_ms",
        ),
        ("failed.csv", "timestamp,output_tokens\n1,0\n", "no request with an answer"),
        ("ragged.csv", "timestamp,prompt_tokens\n1,2\n3\n", "line: 3"),
        ("word.csv", "timestamp\n1\nsoon\n", "line 3: 'soon' is neither a number nor a date"),
        ("day.csv", "timestamp\n2023-02-30 00:00:00\n", "line 2: '2023-02-30 00:00:00' is neither"),
        ("nan.csv", "timestamp\nNaN\n", "line 2: the time NaN is not between 0 and"),
        ("inf.csv", "timestamp\ninf\n", "line 2: the time inf is not between"),
        ("huge.csv", "timestamp\n1e300\n", "line 2: the time 1e300 is not between"),
        ("past.csv", "timestamp\n1\n-0.5\n", "line 3: the time -0.5 is not between"),
        ("no-value.csv", "timestamp,prompt_tokens\n,5\n", "line 2: the time is missing"),
        ("twice.csv", "timestamp,arrival_ms\n1,1000\n", "line 2: arrival_ms duplicates another field"),
        (
            "tokens.csv",
            "timestamp,prompt_tokens\n1,-4\n",
            "line 2: prompt_tokens is '-4', not a number of tokens",
        ),
        ("float.csv", "timestamp,prompt_tokens\n1,4.5\n", "line 2: prompt_tokens is '4.5'"),
        ("many.csv", "timestamp,output_length\n1,10000001\n", "line 2: output_length is '10000001'"),
        ("overflow.csv", "timestamp,output_length\n1,99999999999999999999\n", "line 2: output_length"),
        ("cut.jsonl", "{\"timestamp\": 1}\n{\"timesta", "line 2, column 9: EOF"),
        ("list.jsonl", "{\"timestamp\": 1}\n[1]", "line 2: expected an object"),
        ("kind.jsonl", "{\"timestamp\": [1]}", "line 1: timestamp is neither a number nor a string"),
        ("bool.jsonl", "{\"timestamp\": 1, \"input_length\": true}", "line 1: input_length is neither"),
        ("no-time.jsonl", "{\"timestamp\": 1}\n{\"input_length\": 1}", "line 2: the time is missing"),
        ("negative.jsonl", "{\"timestamp\": -1}", "line 1: the time -1 is not between"),
        ("deep.jsonl", deep.as_str(), "line 2, column 140: recursion limit exceeded"),
    ] {
        let error = read_error(name, content);
        assert!(error.contains(expected), "{name}: {error}");
    }
    let missing = read(Path::new("/nowhere/to/be/found.csv"), 1.0).unwrap_err();
    assert!(format!("{missing:#}").starts_with("/nowhere/to/be/found.csv: cannot be opened"));
}

#[test]
fn a_speed_that_is_none_is_refused() {
    let trace = TempFile::new("speed.csv", "timestamp\n1\n2\n");
    for speed in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = read(trace.path(), speed).unwrap_err().to_string();
        assert!(error.contains("speed of a trace must be above 0"), "{error}");
    }
    // At extremely low speed the due time saturates instead of wrapping around.
    let entries = read(trace.path(), 1e-300).unwrap();
    assert!(entries[1].due > Duration::from_secs(1 << 33));
}
