//! Tests of `config/monitoring` against the table of metrics: Prometheus does not report unknown names and
//! labels in expressions, which would result in empty graphs and alerts that never fire.

use mainstem::telemetry::{METRICS, Metric, MetricKind};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

const DASHBOARD: &str = include_str!("../../config/monitoring/grafana/mainstem.json");
const RULES: &str = include_str!("../../config/monitoring/alerts.yml");
const RULES_TEST: &str = include_str!("../../config/monitoring/alerts_test.yml");
const PROMETHEUS: &str = include_str!("../../config/monitoring/prometheus.yml");

/// Labels of every series: the first two are the server's, the others Prometheus's.
const COMMON: [&str; 4] = ["model_name", "engine", "instance", "job"];

#[derive(Deserialize)]
struct RuleFile {
    groups: Vec<Group>,
}

#[derive(Deserialize)]
struct Group {
    rules: Vec<Rule>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    record: Option<String>,
    alert: Option<String>,
    expr: String,
    #[serde(rename = "for")]
    _for: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

fn rules() -> Vec<Rule> {
    let file: RuleFile = serde_saphyr::from_str(RULES).expect("alerts.yml is YAML of rules");
    file.groups.into_iter().flat_map(|group| group.rules).collect()
}

/// Returns the dashboard's expressions with their legends.
fn dashboard() -> Vec<(String, String)> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("the dashboard is JSON");
    let panels = dashboard["panels"].as_array().expect("it has panels");
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64()).collect();
    assert!(ids.len() == panels.len() && !ids.contains(&None), "each panel has an id of its own");
    let text = |value: &Value| value.as_str().expect("a target is text").to_owned();
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    targets.map(|target| (text(&target["expr"]), text(&target["legendFormat"]))).collect()
}

#[test]
fn the_dashboard_asks_for_what_there_is_and_for_all_of_it() {
    let mut shown = BTreeSet::new();
    for (expr, legend) in dashboard() {
        let query = Query::read(&expr).unwrap_or_else(|why| panic!("{expr}: {why}"));
        shown.extend(query.check(&BTreeSet::new()).unwrap_or_else(|why| panic!("{expr}: {why}")));
        for label in between(&legend, "{{", "}}") {
            assert!(query.keeps(label), "no label {label:?} comes of {expr}");
        }
    }
    let current = METRICS.iter().filter(|metric| !metric.help.starts_with("Deprecated: "));
    let hidden: Vec<_> = current.map(|metric| metric.name).filter(|name| !shown.contains(name)).collect();
    assert!(hidden.is_empty(), "on no panel: {hidden:?}");
    for query in between(DASHBOARD, "label_values(", ")") {
        let selector = query.rsplit_once(',').expect("a selector and a label").0.replace("\\\"", "\"");
        let names: Vec<_> =
            Query::read(&selector).expect("a selector").uses.iter().map(Use::metric).collect();
        assert!(matches!(names[..], [Ok(_)]), "{query}: {names:?}");
    }
}

#[test]
fn rules_ask_for_what_there_is() {
    let rules = rules();
    let recorded: BTreeSet<_> = rules.iter().filter_map(|rule| rule.record.as_deref()).collect();
    for rule in &rules {
        let name = rule.record.as_ref().or(rule.alert.as_ref()).expect("a rule has a name");
        let query = Query::read(&rule.expr).unwrap_or_else(|why| panic!("{name}: {why}"));
        query.check(&recorded).unwrap_or_else(|why| panic!("{name}: {why}"));
        if rule.alert.is_none() {
            continue;
        }
        for needed in ["summary", "action"] {
            assert!(rule.annotations.contains_key(needed), "{name} has no {needed}");
        }
        assert!(rule.labels.contains_key("severity"), "{name} has no severity");
        for text in rule.annotations.values() {
            let labels = between(text, "$labels.", " ");
            assert!(labels.iter().all(|label| query.keeps(label)), "{name}: labels of {text:?}");
        }
        assert!(
            RULES_TEST.contains(&format!("alertname=\"{name}\"")),
            "alerts_test.yml does not have {name}"
        );
    }
}

#[test]
fn prometheus_loads_the_rules_and_scrapes_the_default_address() {
    let config: Value = serde_saphyr::from_str(PROMETHEUS).expect("prometheus.yml is YAML");
    assert_eq!(config["rule_files"][0], "alerts.yml");
    let scrape = &config["scrape_configs"][0];
    assert_eq!(scrape["job_name"], "mainstem", "the alerts ask for this job");
    let defaults: toml::Table =
        include_str!("../../config/mainstem.toml").parse().expect("the defaults are TOML");
    let server = &defaults["server"];
    let address = format!("{}:{}", server["host"].as_str().expect("a text"), server["port"]);
    assert_eq!(scrape["static_configs"][0]["targets"][0], address);
}

/// The check refuses invalid expressions.
#[test]
fn what_would_stay_empty_is_refused() {
    let recorded = BTreeSet::from(["a:b:c"]);
    let verdict = |expr| Query::read(expr).and_then(|query| query.check(&recorded).map(drop));
    let sound = [
        "a:b:c > 1 and up == 0",
        "sum by (reason) (rate(mainstem_admission_rejections_total{reason=~\"busy|invalid\"}[5m]))",
        "mainstem_num_requests_waiting{model_name=~\"$model_name\"} > 0.8 * 256",
        "histogram_quantile(0.9, sum by (le) (rate(mainstem_step_seconds_bucket[$__rate_interval])))",
    ];
    for expr in sound {
        assert_eq!(verdict(expr), Ok(()), "{expr}");
    }
    let unsound = [
        "a:b:d",
        "mainstem_no_such_thing",
        "rate(mainstem_step_seconds[5m])",
        "rate(mainstem_num_requests_waiting_count[5m])",
        "rate(mainstem_num_requests_waiting[5m])",
        "mainstem_generation_tokens_total",
        "avg_over_time(mainstem_generation_tokens_total[5m])",
        "mainstem_num_requests_waiting{reason=\"busy\"}",
        "rate(mainstem_admission_rejections_total{reason=\"full\"}[5m])",
        "rate(mainstem_step_seconds_count{le=\"1\"}[5m])",
        "sum by (phase) (mainstem_num_requests_waiting)",
        "histogram_quantile(0.9, sum by (instance) (rate(mainstem_step_seconds_bucket[5m])))",
        "sum(mainstem_num_requests_waiting",
    ];
    for expr in unsound {
        assert!(verdict(expr).is_err(), "{expr}");
    }
}

/// The series and labels that a PromQL expression uses.
struct Query<'a> {
    uses: Vec<Use<'a>>,
    /// Labels kept by aggregations; `None` without an aggregation.
    kept: Option<BTreeSet<&'a str>>,
    has_quantile: bool,
}

/// A selector.
struct Use<'a> {
    name: &'a str,
    /// Labels with the values they are compared with.
    matchers: Vec<(&'a str, &'a str)>,
    /// The function around it, if it selects a range of time.
    range_function: Option<&'a str>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Lexeme<'a> {
    Word(&'a str),
    Text(&'a str),
    Range,
    Sign(char),
}

fn lexemes(mut expr: &str) -> Result<Vec<Lexeme<'_>>, String> {
    let in_word = |c: char| c.is_ascii_alphanumeric() || "_:$.".contains(c);
    let mut found = Vec::new();
    while let Some(first) = expr.trim_start().chars().next() {
        expr = expr.trim_start();
        let (lexeme, len) = match first {
            '"' => {
                let len = expr[1..].find('"').ok_or("a text has no end")?;
                (Lexeme::Text(&expr[1..=len]), len + 2)
            }
            '[' => (Lexeme::Range, expr.find(']').ok_or("a range has no end")? + 1),
            c if in_word(c) => {
                let len = expr.find(|c| !in_word(c)).unwrap_or(expr.len());
                (Lexeme::Word(&expr[..len]), len)
            }
            sign => (Lexeme::Sign(sign), sign.len_utf8()),
        };
        found.push(lexeme);
        expr = &expr[len..];
    }
    Ok(found)
}

impl<'a> Query<'a> {
    fn read(expr: &'a str) -> Result<Query<'a>, String> {
        let lexemes = lexemes(expr)?;
        let mut query = Query { uses: Vec::new(), kept: None, has_quantile: false };
        // The function before each open parenthesis; "" if there is none.
        let mut open = Vec::new();
        let mut at = 0;
        while let Some(&lexeme) = lexemes.get(at) {
            at += 1;
            match lexeme {
                Lexeme::Word("by") => {
                    let list = lexemes[at..].iter().take_while(|lexeme| **lexeme != Lexeme::Sign(')'));
                    query.kept.get_or_insert_default().extend(list.filter_map(Lexeme::word));
                }
                Lexeme::Word("sum" | "max" | "count") => drop(query.kept.get_or_insert_default()),
                Lexeme::Word("histogram_quantile") => query.has_quantile = true,
                Lexeme::Word(name) if name.starts_with("mainstem_") || name.contains(':') => {
                    let braces = braces(&lexemes[at..]);
                    at += braces.len();
                    let is_ranged = lexemes.get(at) == Some(&Lexeme::Range);
                    let range_function = is_ranged.then(|| open.last().copied().unwrap_or_default());
                    query.uses.push(Use { name, matchers: matchers(braces), range_function });
                }
                Lexeme::Sign('(') => {
                    let before = at.checked_sub(2).and_then(|before| lexemes[before].word());
                    open.push(before.unwrap_or_default());
                }
                Lexeme::Sign(')') => drop(open.pop().ok_or("a parenthesis too many")?),
                _ => {}
            }
        }
        if open.is_empty() { Ok(query) } else { Err("a parenthesis is open".to_owned()) }
    }

    /// Returns the metrics used. Fails for expressions that would have no or no meaningful result in
    /// Prometheus.
    fn check(&self, recorded: &BTreeSet<&str>) -> Result<Vec<&'static str>, String> {
        let mut metrics = Vec::new();
        for used in self.uses.iter().filter(|used| !recorded.contains(used.name)) {
            let (metric, suffix) = used.metric()?;
            used.check_range(metric)?;
            used.check_matchers(metric, suffix)?;
            for label in self.kept.iter().flatten() {
                label_values(metric, suffix, label)?;
            }
            if self.has_quantile && (suffix != "_bucket" || !self.keeps("le")) {
                return Err(format!("a quantile of {} needs its buckets, by le", used.name));
            }
            metrics.push(metric.name);
        }
        Ok(metrics)
    }

    /// Returns whether the result can have the label.
    fn keeps(&self, label: &str) -> bool {
        match &self.kept {
            Some(kept) => kept.contains(label),
            None => {
                COMMON.contains(&label)
                    || self.uses.iter().any(|used| {
                        used.metric()
                            .is_ok_and(|(metric, suffix)| label_values(metric, suffix, label).is_ok())
                    })
            }
        }
    }
}

impl<'a> Lexeme<'a> {
    fn word(&self) -> Option<&'a str> {
        if let Lexeme::Word(word) = self { Some(word) } else { None }
    }
}

/// The lexemes from brace to brace, if they begin with one.
fn braces<'l, 'a>(lexemes: &'l [Lexeme<'a>]) -> &'l [Lexeme<'a>] {
    if lexemes.first() != Some(&Lexeme::Sign('{')) {
        return &[];
    }
    let end = lexemes.iter().position(|lexeme| *lexeme == Lexeme::Sign('}'));
    &lexemes[..end.map_or(lexemes.len(), |end| end + 1)]
}

/// The labels that stand in braces, each with its text.
fn matchers<'a>(braces: &[Lexeme<'a>]) -> Vec<(&'a str, &'a str)> {
    let text = |lexeme: &Lexeme<'a>| if let Lexeme::Text(text) = lexeme { Some(*text) } else { None };
    braces.iter().filter_map(Lexeme::word).zip(braces.iter().filter_map(text)).collect()
}

impl Use<'_> {
    /// Returns the metric of the series, and the suffix of its name.
    fn metric(&self) -> Result<(&'static Metric, &'static str), String> {
        let is_histogram = |metric: &Metric| matches!(metric.kind, MetricKind::Histogram(_));
        METRICS
            .iter()
            .find_map(|metric| {
                let suffixes: &[_] =
                    if is_histogram(metric) { &["_bucket", "_sum", "_count"] } else { &[""] };
                let suffix = self.name.strip_prefix(metric.name)?;
                suffixes.iter().find(|known| **known == suffix).map(|known| (*metric, *known))
            })
            .ok_or_else(|| format!("{} is no series of the table's", self.name))
    }

    /// Checks that counters are read as rates, and gauges are not.
    fn check_range(&self, metric: &Metric) -> Result<(), String> {
        match (metric.kind, self.range_function) {
            (MetricKind::Gauge, None | Some("avg_over_time" | "min_over_time" | "max_over_time")) => Ok(()),
            (MetricKind::Counter | MetricKind::Histogram(_), Some("rate" | "increase")) => Ok(()),
            (_, function) => {
                Err(format!("{} is a {}, read with {function:?}", self.name, metric.kind.as_str()))
            }
        }
    }

    fn check_matchers(&self, metric: &Metric, suffix: &str) -> Result<(), String> {
        for (label, text) in &self.matchers {
            let known = label_values(metric, suffix, label)?;
            let alternatives = text.split('|').filter(|value| !known.is_empty() && !value.contains('$'));
            for value in alternatives {
                if !known.contains(&value) {
                    return Err(format!("{label} is never {value:?}"));
                }
            }
        }
        Ok(())
    }
}

/// Returns the known values of a label. Fails if the series have no such label.
fn label_values(metric: &Metric, suffix: &str, label: &str) -> Result<&'static [&'static str], String> {
    if COMMON.contains(&label) || (suffix == "_bucket" && label == "le") {
        return Ok(&[]);
    }
    let own = metric.labels.iter().find(|(name, _)| *name == label);
    own.map(|(_, values)| *values).ok_or_else(|| format!("{}{suffix} has no label {label}", metric.name))
}

/// Returns the texts between two delimiters.
fn between<'a>(text: &'a str, left: &'a str, right: &str) -> Vec<&'a str> {
    text.split(left).skip(1).map(|rest| rest.split(right).next().unwrap_or(rest)).collect()
}
