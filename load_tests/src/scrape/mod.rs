//! The server's own Prometheus metrics, scraped before and after a run.
//!
//! Invariant: any metrics text yields a report of its known metrics, or none; it never causes an error.

pub(crate) mod exposition;
mod families;
pub(crate) mod increase;

use crate::report::{RunReport, ServerReport};

/// One scrape of `/metrics`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scrape {
    /// The text as received.
    pub text: String,
}

/// Builds the server report from two scrapes, with the client's values of the same run. Returns `None` if
/// there is no known metric.
pub fn report(before: &Scrape, after: &Scrape, client: &RunReport) -> Option<ServerReport> {
    families::report(&increase::MetricsIncrease::between(&before.text, &after.text), client)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        measure::{
            GoodputLimits,
            testing::{completed, failed, record, settings},
        },
        run::RunRecord,
    };

    /// Returns the server report for a client with two completed requests of 2 tokens and a failed one: 20
    /// prompt tokens, TTFT 10 and 20 ms, gaps 5 and 15 ms.
    fn between(before: &str, after: &str) -> Option<ServerReport> {
        let samples = vec![completed(0, 0, &[10, 15]), completed(0, 0, &[20, 35]), failed(0, 0)];
        let server = Some([before, after].map(|text| Scrape { text: text.to_owned() }).into());
        let record = RunRecord { server, ..record(samples) };
        crate::measure::report(&settings(), &record, &GoodputLimits::new()).server
    }

    fn row(report: &ServerReport, name: &str) -> (f64, Option<f64>) {
        let row = report.rows.iter().find(|row| row.name == name);
        let row = row.unwrap_or_else(|| panic!("no {name} in {:?}", report.rows));
        ((row.server * 1e6).round() / 1e6, row.client)
    }

    const OURS_BEFORE: &str = r#"# HELP mainstem_request_success_total Accepted requests that have ended.
# TYPE mainstem_request_success_total counter
mainstem_request_success_total{model_name="demo",engine="0",finished_reason="stop"} 3
mainstem_request_success_total{model_name="demo",engine="0",finished_reason="length"} 1
mainstem_generation_tokens_total{model_name="demo",engine="0"} 100
mainstem_step_slots_sum{model_name="demo",engine="0"} 60
mainstem_step_slots_count{model_name="demo",engine="0"} 20
mainstem_step_phase_seconds_sum{model_name="demo",engine="0",phase="forward"} 0.5
mainstem_time_to_first_token_seconds_bucket{model_name="demo",engine="0",le="0.01"} 4
mainstem_time_to_first_token_seconds_bucket{model_name="demo",engine="0",le="0.02"} 4
mainstem_time_to_first_token_seconds_bucket{model_name="demo",engine="0",le="+Inf"} 4
mainstem_time_to_first_token_seconds_sum{model_name="demo",engine="0"} 0.02
mainstem_time_to_first_token_seconds_count{model_name="demo",engine="0"} 4
"#;

    const OURS_AFTER: &str = r#"# TYPE mainstem_num_requests_running gauge
mainstem_num_requests_running{model_name="demo",engine="0"} 0
mainstem_request_success_total{model_name="demo",engine="0",finished_reason="stop"} 4
mainstem_request_success_total{model_name="demo",engine="0",finished_reason="length"} 3
mainstem_request_success_total{model_name="demo",engine="0",finished_reason="abort"} 2
mainstem_request_success_total{model_name="demo",engine="0",finished_reason="timeout"} 1
mainstem_request_success_total{model_name="demo",engine="0",finished_reason="error"} 1
mainstem_admission_rejections_total{model_name="demo",engine="0",reason="busy"} 5
mainstem_admission_rejections_total{model_name="demo",engine="0",reason="too_long"} 1
mainstem_prompt_tokens_total{model_name="demo",engine="0"} 20
mainstem_generation_tokens_total{model_name="demo",engine="0"} 105
mainstem_step_slots_sum{model_name="demo",engine="0"} 75
mainstem_step_slots_count{model_name="demo",engine="0"} 30
mainstem_step_rows_sum{model_name="demo",engine="0"} 45
mainstem_step_rows_count{model_name="demo",engine="0"} 10
mainstem_iteration_tokens_sum{model_name="demo",engine="0"} 40
mainstem_iteration_tokens_count{model_name="demo",engine="0"} 10
mainstem_slot_shuffles_total{model_name="demo",engine="0"} 2
mainstem_slot_moves_total{model_name="demo",engine="0"} 7
mainstem_device_restarts_total{model_name="demo",engine="0"} 0
mainstem_step_phase_seconds_sum{model_name="demo",engine="0",phase="forward"} 0.75
mainstem_step_phase_seconds_sum{model_name="demo",engine="0",phase="plan"} 0.125
mainstem_time_to_first_token_seconds_bucket{model_name="demo",engine="0",le="0.01"} 5
mainstem_time_to_first_token_seconds_bucket{model_name="demo",engine="0",le="0.02"} 7
mainstem_time_to_first_token_seconds_bucket{model_name="demo",engine="0",le="+Inf"} 8
mainstem_time_to_first_token_seconds_sum{model_name="demo",engine="0"} 0.09
mainstem_time_to_first_token_seconds_count{model_name="demo",engine="0"} 8
"#;

    #[test]
    fn our_own_metrics_by_hand() {
        let report = between(OURS_BEFORE, OURS_AFTER).unwrap();
        for (name, server, client) in [
            ("requests succeeded", 3.0, Some(2.0)),
            ("requests failed", 2.0, Some(1.0)),
            ("requests aborted", 2.0, None),
            ("requests rejected", 6.0, None),
            ("prompt tokens", 20.0, Some(20.0)),
            ("output tokens", 5.0, Some(4.0)),
            ("steps", 10.0, None),
            ("sequences per step", 1.5, None),
            ("rows per step", 4.5, None),
            ("holes per step", 0.5, None),
            ("shuffles", 2.0, None),
            ("moves", 7.0, None),
            ("device restarts", 0.0, None),
            ("phase forward", 0.25, None),
            ("phase plan", 0.125, None),
            ("TTFT mean", 17.5, Some(15.0)),
            // One of four values within 10 ms, two within 10 to 20 ms: the median is in the middle of the
            // second bucket.
            ("TTFT p50", 15.0, Some(15.0)),
            ("TTFT p99", 20.0, Some(19.9)),
        ] {
            assert_eq!(row(&report, name), (server, client), "{name}");
        }
        assert_eq!((report.steps, report.sequences_per_step), (Some(10), Some(1.5)));
        let has_row = |name: &str| report.rows.iter().any(|row| row.name.starts_with(name));
        for unknown in ["ITL", "queue", "phase sample", "clients disconnected", "server restarted"] {
            assert!(!has_row(unknown), "{unknown}");
        }
    }

    #[test]
    fn the_metrics_of_vllm_by_hand() {
        let after = r#"vllm:request_success_total{engine="0",finished_reason="stop",model_name="org/m"} 2.0
vllm:request_success_total{engine="0",finished_reason="repetition",model_name="org/m"} 1.0
vllm:request_success_created{engine="0",finished_reason="stop",model_name="org/m"} 1.78e+09
vllm:prompt_tokens_total{engine="0",model_name="org/m"} 20.0
vllm:generation_tokens_total{engine="0",model_name="org/m"} 4.0
vllm:generation_tokens_total{engine="1",model_name="org/m"} 3.0
vllm:num_preemptions_total{engine="0",model_name="org/m"} 1.0
vllm:iteration_tokens_total_sum{engine="0",model_name="org/m"} 24.0
vllm:iteration_tokens_total_count{engine="0",model_name="org/m"} 6.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01",model_name="org/m"} 3.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="org/m"} 4.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="org/m"} 0.05
vllm:inter_token_latency_seconds_count{engine="0",model_name="org/m"} 4.0
"#;
        let report = between("", after).unwrap();
        for (name, server, client) in [
            ("requests succeeded", 3.0, Some(2.0)),
            ("output tokens", 7.0, Some(4.0)),
            ("preemptions", 1.0, None),
            ("steps", 6.0, None),
            ("tokens per step", 4.0, None),
            ("ITL mean", 12.5, Some(10.0)),
            ("ITL p99", 10.0, Some(14.9)),
        ] {
            assert_eq!(row(&report, name), (server, client), "{name}");
        }
        assert_eq!((report.steps, report.sequences_per_step), (Some(6), None));
        let old = after.replace("inter_token_latency", "time_per_output_token");
        assert_eq!(row(&between("", &old).unwrap(), "ITL mean").0, 12.5);
    }

    #[test]
    fn the_metrics_of_llama_cpp_by_hand() {
        let reading = |prompt: u64, steps: u64, busy: f64| {
            format!(
                "llamacpp:prompt_tokens_total {prompt}\nllamacpp:prompt_seconds_total 1.5\n\
                 llamacpp:tokens_predicted_total {steps}\nllamacpp:n_decode_total {steps}\n\
                 llamacpp:n_busy_slots_per_decode {busy}\n"
            )
        };
        // 100 steps with 200 sequences, then 300 steps with 900.
        let report = between(&reading(5, 100, 2.0), &reading(25, 400, 2.75)).unwrap();
        assert_eq!(row(&report, "prompt tokens"), (20.0, Some(20.0)));
        assert_eq!(row(&report, "prompt processing time"), (0.0, None));
        assert_eq!((report.steps, report.sequences_per_step), (Some(300), Some(3.0)));
        // After a restart, counts and means are since the start.
        let report = between(&reading(5, 100, 2.0), &reading(25, 40, 1.5)).unwrap();
        assert_eq!(row(&report, "prompt tokens").0, 25.0);
        assert_eq!(row(&report, "server restarted").0, 1.0);
        assert_eq!((report.steps, report.sequences_per_step), (Some(40), Some(1.5)));
    }

    #[test]
    fn what_is_not_known_gives_no_report() {
        for text in
            ["", "<html>404</html>", "go_goroutines 7\nother_total 9\n", "vllm:prompt_tokens_total NaN\n"]
        {
            assert_eq!(between(text, text), None, "{text}");
            assert_eq!(between(OURS_AFTER, text), None, "{text}");
            assert!(between(text, OURS_AFTER).is_some());
        }
    }
}
