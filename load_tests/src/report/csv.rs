//! CSV output: one line per request, one line per event with tokens, progress, and durations.
//!
//! Invariant: times are exact to the nanosecond; a missing value is an empty field.

use std::{io::Write, time::Duration};

use csv::Writer;

use crate::{
    measure::{self, milliseconds, seconds},
    run::RunRecord,
    sample::{Outcome, Sample},
};

const REQUEST_COLUMNS: [&str; 16] = [
    "index",
    "model",
    "scheduled_s",
    "sent_s",
    "first_token_s",
    "ended_s",
    "lateness_ms",
    "ttft_ms",
    "tpot_ms",
    "e2e_ms",
    "prompt_tokens",
    "output_tokens",
    "output_tokens_asked",
    "retries",
    "outcome",
    "message",
];

/// Writes one line per request sent.
pub fn requests(record: &RunRecord, out: impl Write) -> anyhow::Result<()> {
    let mut writer = Writer::from_writer(out);
    writer.write_record(REQUEST_COLUMNS)?;
    for sample in &record.samples {
        let model = record.models.get(sample.model).map_or("", String::as_str);
        writer.write_record(request(sample, model))?;
    }
    Ok(writer.flush()?)
}

fn request(sample: &Sample, model: &str) -> [String; REQUEST_COLUMNS.len()] {
    let (outcome, message) = match &sample.outcome {
        Outcome::Completed => ("completed".to_owned(), ""),
        Outcome::HungUp => ("hung up".to_owned(), ""),
        Outcome::Failed(failure) => (failure.kind.to_string(), failure.message.as_str()),
    };
    let ms = |time: Option<Duration>| time.map(milliseconds).map_or(String::new(), |ms| ms.to_string());
    let first_token = sample.deliveries.first().map(|delivery| seconds(delivery.at()));
    [
        sample.index.to_string(),
        model.to_owned(),
        seconds(sample.scheduled).to_string(),
        seconds(sample.sent).to_string(),
        first_token.map_or(String::new(), |at| at.to_string()),
        seconds(sample.ended).to_string(),
        ms(Some(sample.lateness())),
        ms(sample.ttft()),
        ms(sample.tpot()),
        ms(sample.e2e()),
        sample.prompt_len.to_string(),
        sample.output_len.to_string(),
        sample.requested_output_len.to_string(),
        sample.retries.to_string(),
        outcome,
        message.to_owned(),
    ]
}

/// Writes one line per event with tokens.
pub fn tokens(record: &RunRecord, out: impl Write) -> anyhow::Result<()> {
    let mut writer = Writer::from_writer(out);
    writer.write_record(["request", "event", "at_s", "tokens", "since_due_ms", "gap_ms"])?;
    for sample in &record.samples {
        let gaps = std::iter::once(None).chain(sample.itls().map(Some));
        for (event, (delivery, gap)) in sample.deliveries.iter().zip(gaps).enumerate() {
            let since_due = milliseconds(delivery.at().saturating_sub(sample.scheduled));
            let gap_ms = gap.map(milliseconds);
            writer.serialize((
                sample.index,
                event,
                seconds(delivery.at()),
                delivery.tokens(),
                since_due,
                gap_ms,
            ))?;
        }
    }
    Ok(writer.flush()?)
}

/// Writes the progress of the run in Flover's format: each time at which tokens were received, and the
/// fraction of all tokens received by then.
pub fn progress(record: &RunRecord, out: impl Write) -> anyhow::Result<()> {
    let mut writer = Writer::from_writer(out);
    writer.write_record(["at_ms", "share"])?;
    for (at, share) in measure::progress(&record.samples) {
        writer.serialize((milliseconds(at), share))?;
    }
    Ok(writer.flush()?)
}

/// Writes the end-to-end latency of each completed request, in order of completion.
pub fn elapsed(record: &RunRecord, out: impl Write) -> anyhow::Result<()> {
    let mut completed: Vec<&Sample> =
        record.samples.iter().filter(|sample| sample.outcome == Outcome::Completed).collect();
    completed.sort_by_key(|sample| sample.ended);
    let mut writer = Writer::from_writer(out);
    writer.write_record(["request", "ended_ms", "elapsed_ms"])?;
    for sample in completed {
        writer.serialize((sample.index, milliseconds(sample.ended), sample.e2e().map(milliseconds)))?;
    }
    Ok(writer.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        measure::testing::{completed, failed, record},
        sample::{Delivery, FailureKind},
    };

    fn run() -> RunRecord {
        let nasty = FailureKind::BadSse.with_message("\"a\", b\n\r\n;\u{1f30a} 'c'");
        let mut first = completed(100, 350, &[500, 600, 1400]);
        first.deliveries[1] = Delivery::new(Duration::from_nanos(600_000_001), 5);
        let bad = Sample { outcome: Outcome::Failed(nasty), model: 1, ..completed(0, 0, &[20]) };
        let left = Sample { outcome: Outcome::HungUp, retries: 3, ..completed(0, 0, &[5]) };
        let mut record = record(vec![first, bad, left, failed(1, 1), completed(0, 0, &[30])]);
        record.models.push("org/model,\"b\"".into());
        record
    }

    /// Reads a CSV table back as lines of (column, field) pairs.
    fn table(write: impl Fn(&mut Vec<u8>) -> anyhow::Result<()>) -> Vec<Vec<(String, String)>> {
        let mut bytes = Vec::new();
        write(&mut bytes).unwrap();
        let mut reader = csv::Reader::from_reader(bytes.as_slice());
        let columns = reader.headers().unwrap().clone();
        let line = |line: csv::StringRecord| {
            columns.iter().zip(&line).map(|(column, field)| (column.to_owned(), field.to_owned())).collect()
        };
        reader.records().map(|record| line(record.unwrap())).collect()
    }

    fn field<'a>(line: &'a [(String, String)], column: &str) -> &'a str {
        &line.iter().find(|field| field.0 == column).unwrap().1
    }

    #[test]
    fn requests_are_read_back_whatever_their_messages() {
        let record = run();
        let lines = table(|out| requests(&record, out));
        assert_eq!(lines.len(), record.samples.len());
        let Outcome::Failed(failure) = &record.samples[1].outcome else { panic!() };
        assert_eq!(field(&lines[1], "message"), failure.message);
        assert_eq!((field(&lines[1], "outcome"), field(&lines[1], "model")), ("bad SSE", "org/model,\"b\""));
        assert_eq!((field(&lines[2], "outcome"), field(&lines[2], "retries")), ("hung up", "3"));
        for (column, value) in [
            ("index", "0"),
            ("model", "m"),
            ("scheduled_s", "0.1"),
            ("sent_s", "0.35"),
            ("first_token_s", "0.5"),
            ("ended_s", "1.4"),
            ("lateness_ms", "250"),
            ("ttft_ms", "400"),
            ("tpot_ms", "450"),
            ("e2e_ms", "1300"),
            ("prompt_tokens", "10"),
            ("output_tokens", "3"),
            ("output_tokens_asked", "3"),
            ("outcome", "completed"),
        ] {
            assert_eq!(field(&lines[0], column), value, "{column}");
        }
        for column in ["first_token_s", "ttft_ms", "tpot_ms", "e2e_ms"] {
            assert_eq!(field(&lines[3], column), "", "{column}");
        }
    }

    #[test]
    fn tokens_have_a_line_per_event_and_no_gap_before_the_first() {
        let lines = table(|out| tokens(&run(), out));
        assert_eq!(lines.len(), 3 + 1 + 1 + 1);
        let second: Vec<&str> = lines[1].iter().map(|field| field.1.as_str()).collect();
        assert_eq!(second, ["0", "1", "0.600000001", "5", "500.000001", "100.000001"]);
        assert_eq!(field(&lines[0], "gap_ms"), "");
        assert_eq!(field(&lines[3], "request"), "1");
    }

    #[test]
    fn progress_and_elapsed_follow_the_time_of_the_run() {
        let lines = table(|out| progress(&run(), out));
        let shares: Vec<f64> = lines.iter().map(|line| field(line, "share").parse().unwrap()).collect();
        assert!(shares.is_sorted() && shares.last() == Some(&1.0), "{shares:?}");
        assert_eq!((field(&lines[0], "at_ms"), shares[0]), ("5.0", 1.0 / 6.0));
        let lines = table(|out| elapsed(&run(), out));
        let ends: Vec<_> =
            lines.iter().map(|line| (field(line, "request"), field(line, "elapsed_ms"))).collect();
        assert_eq!(ends, [("4", "30.0"), ("0", "1300.0")]);
    }
}
