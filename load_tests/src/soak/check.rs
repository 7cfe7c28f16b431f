//! Compares the faults that clients saw with those that the server counted.
//!
//! Invariant: errors that no injected fault explains are problems.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::scrape::increase::MetricsIncrease;

/// Kinds of injected faults for which the devices are rebuilt.
const DEVICE_FAULTS: [&str; 3] = ["fail", "panic", "hang"];

/// The faults that a server counted.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ServerFaults {
    /// Injected faults by kind.
    pub injected: BTreeMap<String, u64>,
    /// Rebuilds of the devices.
    pub restarts: u64,
    pub non_finite_rows: u64,
    /// Choices of accepted requests that ended with an error.
    pub failed_choices: u64,
    /// Sequences that one fault of a device can end.
    pub slots: u64,
}

/// The faults that clients saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ClientFaults {
    /// Requests that ended with `device_failed`.
    pub device_failed: u64,
    /// Requests that ended with `sampling_failed`.
    pub sampling_failed: u64,
    /// Choices of both.
    pub failed_choices: u64,
    /// Choices of requests whose clients disconnected, and may not have seen a fault.
    pub hung_up_choices: u64,
}

impl ServerFaults {
    /// Reads the faults between two scrapes of the metrics.
    pub fn between(before: &str, after: &str) -> ServerFaults {
        let increase = MetricsIncrease::between(before, after);
        let total = |name: &str| increase.total(name).unwrap_or(0.0) as u64;
        let of = |label: &'static str, value: &'static str, name: &str| {
            let is_it = |labels: &BTreeMap<String, String>| labels.get(label).is_some_and(|own| own == value);
            increase.total_where(name, is_it).unwrap_or(0.0) as u64
        };
        let kinds = ["fail", "panic", "hang", "slow", "nan"];
        let injected = |kind| (kind, of("kind", kind, "mainstem_injected_faults_total"));
        let injected = kinds.map(injected).into_iter().filter(|(_, count)| *count > 0);
        ServerFaults {
            injected: injected.map(|(kind, count)| (kind.to_owned(), count)).collect(),
            restarts: total("mainstem_device_restarts_total"),
            non_finite_rows: total("mainstem_non_finite_rows_total"),
            failed_choices: of("finished_reason", "error", "mainstem_request_success_total"),
            slots: increase.gauge("mainstem_slots").map_or(0.0, |(_, now)| now) as u64,
        }
    }

    /// Returns whether the server had none that would change an answer.
    pub fn is_quiet(&self) -> bool {
        self.restarts == 0 && self.non_finite_rows == 0 && self.injected.is_empty()
    }

    fn injected(&self, kinds: &[&str]) -> u64 {
        kinds.iter().filter_map(|kind| self.injected.get(*kind)).sum()
    }

    /// Returns what the injected faults do not explain. `failed_requests` of the client must be among what
    /// the server counted.
    pub fn check(&self, client: &ClientFaults, failed_requests: u64) -> Vec<String> {
        let device_faults = self.injected(&DEVICE_FAULTS);
        let rows = self.injected(&["nan"]);
        let most = client.failed_choices + client.hung_up_choices;
        let checks = [
            (
                self.restarts == device_faults,
                format!(
                    "the devices were rebuilt {} times after {device_faults} injected faults",
                    self.restarts
                ),
            ),
            (
                self.non_finite_rows <= rows,
                format!("{} rows were not finite, but {rows} were injected", self.non_finite_rows),
            ),
            (
                client.sampling_failed <= self.non_finite_rows,
                format!(
                    "{} requests got sampling_failed, but {} rows were not finite",
                    client.sampling_failed, self.non_finite_rows
                ),
            ),
            (
                client.device_failed <= self.restarts * self.slots,
                format!(
                    "{} requests got device_failed, but {} faults end at most {} sequences each",
                    client.device_failed, self.restarts, self.slots
                ),
            ),
            (
                (failed_requests..=most).contains(&self.failed_choices),
                format!(
                    "the server counted {} choices that ended with an error, but the clients saw between \
                     {failed_requests} and {most}",
                    self.failed_choices
                ),
            ),
        ];
        checks.into_iter().filter(|(is_right, _)| !is_right).map(|(_, problem)| problem).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "mainstem_slots 4\nmainstem_injected_faults_total{kind=\"fail\"} 1\n\
                          mainstem_device_restarts_total 1\n";
    const AFTER: &str = "mainstem_slots 4\nmainstem_injected_faults_total{kind=\"fail\"} 2\n\
                         mainstem_injected_faults_total{kind=\"hang\"} 1\n\
                         mainstem_injected_faults_total{kind=\"nan\"} 3\n\
                         mainstem_injected_faults_total{kind=\"slow\"} 0\n\
                         mainstem_device_restarts_total 3\nmainstem_non_finite_rows_total 2\n\
                         mainstem_request_success_total{finished_reason=\"error\"} 9\n\
                         mainstem_request_success_total{finished_reason=\"stop\"} 100\n";

    fn server() -> ServerFaults {
        ServerFaults::between(BEFORE, AFTER)
    }

    const CLIENT: ClientFaults =
        ClientFaults { device_failed: 5, sampling_failed: 2, failed_choices: 9, hung_up_choices: 4 };

    #[test]
    fn faults_are_read_as_increases() {
        let injected = [("fail", 1), ("hang", 1), ("nan", 3)].map(|(kind, count)| (kind.to_owned(), count));
        let expected = ServerFaults {
            injected: injected.into(),
            restarts: 2,
            non_finite_rows: 2,
            failed_choices: 9,
            slots: 4,
        };
        assert_eq!(server(), expected);
        assert_eq!(server().check(&CLIENT, 7), [""; 0]);
        assert!(!server().is_quiet() && ServerFaults::between("", "mainstem_slots 4\n").is_quiet());
    }

    #[test]
    fn what_no_fault_explains_is_a_problem() {
        let problem = |server: ServerFaults, client: ClientFaults| {
            let problems = server.check(&client, 7);
            assert_eq!(problems.len(), 1, "{problems:?}");
            problems.into_iter().next().unwrap()
        };
        let again = ServerFaults { restarts: 3, ..server() };
        assert!(problem(again, CLIENT).contains("rebuilt 3 times after 2 injected faults"));
        let rows = ServerFaults { non_finite_rows: 4, ..server() };
        assert!(problem(rows, CLIENT).contains("4 rows were not finite, but 3"));
        let sampling = ClientFaults { sampling_failed: 3, ..CLIENT };
        assert!(problem(server(), sampling).contains("3 requests got sampling_failed"));
        let device = ClientFaults { device_failed: 9, ..CLIENT };
        assert!(problem(server(), device).contains("9 requests got device_failed"));
        for failed_choices in [6, 14] {
            let other = ServerFaults { failed_choices, ..server() };
            assert!(problem(other, CLIENT).contains("between 7 and 13"));
        }
    }
}
