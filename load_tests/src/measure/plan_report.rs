//! The plan of a run as shown in its report.
//!
//! Invariant: the plan report contains no API key or other secret of the settings.

use url::Url;

use crate::{
    plan::{
        arrivals::Arrivals,
        prompts::PromptSource,
        requests::{Endpoint, LoadSpec},
        trace::TraceEntry,
    },
    report::PlanReport,
    run::RunSettings,
};

/// Builds the plan report from the settings of a run.
pub fn report(settings: &RunSettings) -> PlanReport {
    let RunSettings { load, arrivals, target, .. } = settings;
    PlanReport {
        requests: load.requests,
        arrivals: arrivals.to_string(),
        closed_loop: matches!(arrivals, Arrivals::Users { .. }),
        rate: arrivals.rate().filter(|rate| rate.is_finite()),
        burstiness: arrivals.burstiness(),
        max_concurrency: settings.max_concurrency,
        prompt: prompt(load),
        output: output(load),
        endpoint: endpoint(target.endpoint).to_owned(),
        seed: load.seed,
    }
}

/// Returns the URL without user name and password.
pub fn redact_url(text: &str) -> String {
    match Url::parse(text) {
        Ok(mut url) if !url.username().is_empty() || url.password().is_some() => {
            // Removing credentials from a URL that has them cannot fail.
            let _ = url.set_username("").and_then(|()| url.set_password(None));
            url.to_string()
        }
        _ => text.to_owned(),
    }
}

fn prompt(load: &LoadSpec) -> String {
    let otherwise = match &load.prompts {
        PromptSource::Ids { .. } | PromptSource::Words => load.prompt.to_string(),
        PromptSource::Texts(_) => "from the texts".to_owned(),
    };
    describe_source(load, |entry| entry.prompt_len, otherwise)
}

fn output(load: &LoadSpec) -> String {
    let otherwise = load.output.map_or("from the texts".to_owned(), |length| length.to_string());
    describe_source(load, |entry| entry.output_len, otherwise)
}

/// Describes the source of a length: the trace where its entries have one, else `otherwise`.
fn describe_source(load: &LoadSpec, length: fn(&TraceEntry) -> Option<u32>, otherwise: String) -> String {
    let entries = load.trace.as_deref().unwrap_or_default();
    let traced = entries.iter().filter(|entry| length(entry).is_some()).count();
    match traced {
        0 => otherwise,
        _ if traced == entries.len() => "from the trace".to_owned(),
        _ => format!("from the trace, else {otherwise}"),
    }
}

fn endpoint(endpoint: Endpoint) -> &'static str {
    match endpoint {
        Endpoint::Completions => "completions",
        Endpoint::Chat => "chat",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{measure::testing::settings, plan::lengths::LengthDistribution};

    fn entry(prompt_len: Option<u32>, output_len: Option<u32>) -> TraceEntry {
        TraceEntry { due: Default::default(), prompt_len, output_len }
    }

    #[test]
    fn where_lengths_come_from_is_reported() {
        let mut load = LoadSpec { output: Some(LengthDistribution::Fixed(7)), ..settings().load };
        let lengths = |load: &LoadSpec| (prompt(load), output(load));
        assert_eq!(lengths(&load), ("4".into(), "7".into()));
        load.trace = Some([entry(Some(1), None), entry(None, None)].into());
        assert_eq!(lengths(&load), ("from the trace, else 4".into(), "7".into()));
        load.trace = Some([entry(Some(1), Some(2))].into());
        assert_eq!(lengths(&load), ("from the trace".into(), "from the trace".into()));
        load = LoadSpec { prompts: PromptSource::Texts([].into()), trace: None, output: None, ..load };
        assert_eq!(lengths(&load), ("from the texts".into(), "from the texts".into()));
    }

    #[test]
    fn a_password_in_a_url_is_not_shown() {
        assert_eq!(redact_url("https://me:secret@host:8443/api"), "https://host:8443/api");
        assert_eq!(redact_url("https://secret@host/api"), "https://host/api");
        for plain in ["http://127.0.0.1:8080", "no url at all"] {
            assert_eq!(redact_url(plain), plain);
        }
    }
}
