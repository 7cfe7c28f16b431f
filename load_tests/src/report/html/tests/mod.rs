//! Tests of the rendered page, parsed with an XML parser, because the page is also well-formed XML.

mod sample;

use std::collections::BTreeSet;

use roxmltree::{Document, Node, ParsingOptions};

use super::*;
use crate::report::{Latencies, Series};
pub use sample::run;
use sample::{distribution, full, sections};

fn parse(page: &str) -> Document<'_> {
    let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
    Document::parse_with_options(page, options).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns all text below a node with whitespace collapsed to single spaces.
fn text(node: Node) -> String {
    let texts = node.descendants().filter(Node::is_text).filter_map(|node| node.text());
    texts.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ")
}

fn of_class<'a, 'i>(document: &'a Document<'i>, class: &'a str) -> impl Iterator<Item = Node<'a, 'i>> {
    let has =
        move |node: &Node| node.attribute("class").is_some_and(|all| all.split(' ').any(|one| one == class));
    document.descendants().filter(has)
}

#[test]
fn every_text_is_escaped_wherever_it_stands() {
    let hostile =
        "<script>alert('1')</script><b onload=\"x\">&amp;{{ 7 * 7 }}{% raw %}]]>--><!-- </style></svg>";
    let page = page(hostile, &sections(hostile));
    let document = parse(&page);
    let known = "html head meta title style body header h1 h2 nav ol li a main section dl div dt dd b p \
                 table caption thead tbody tr th td figure figcaption svg g path text ul span details \
                 summary footer";
    let known: BTreeSet<_> = known.split_whitespace().collect();
    for node in document.descendants().filter(Node::is_element) {
        assert!(known.contains(node.tag_name().name()), "<{}>", node.tag_name().name());
        assert!(node.attributes().all(|attribute| !attribute.name().starts_with("on")), "{node:?}");
    }
    for place in ["title", "h1", "h2", "a", "p", "dd", "th", "td", "text", "span", "figcaption"] {
        let nodes: Vec<_> = document.descendants().filter(|node| node.has_tag_name(place)).collect();
        let shows = |node: &&Node| {
            text(**node).contains("<script>alert('1')</script><b onload=\"x\">&amp;{{ 7 * 7 }}")
        };
        // Figure captions contain only built-in text.
        assert_eq!(nodes.iter().any(|node| shows(&node)), place != "figcaption", "<{place}>");
    }
    assert!(of_class(&document, "plot").any(|node| node.attribute("aria-label").unwrap().contains(hostile)));
}

#[test]
fn characters_that_no_page_may_have_are_replaced() {
    let page = page("a\0b\u{1b}c\u{ffff}d\r\n", &sections("\u{0}\u{8}\u{7f}\u{85}"));
    parse(&page);
    assert!(page.contains("a\u{fffd}b\u{fffd}c\u{fffd}d"));
    assert!(!page.chars().any(|c| c.is_control() && c != '\n' && c != '\t'));
}

#[test]
fn the_page_needs_nothing_beside_it() {
    let page = page("report", &sections("text"));
    let document = parse(&page);
    let ids: BTreeSet<_> = document.descendants().filter_map(|node| node.attribute("id")).collect();
    for attribute in document.descendants().flat_map(|node| node.attributes()) {
        match attribute.name() {
            "href" => assert!(ids.contains(attribute.value().trim_start_matches('#')), "{attribute:?}"),
            name => assert!(
                !["src", "srcset", "data", "action", "style", "poster"].contains(&name),
                "{attribute:?}"
            ),
        }
    }
    assert!(!["//", "url(", "@import", "javascript:"].iter().any(|reference| page.contains(reference)));
}

#[test]
fn every_key_figure_is_on_a_card() {
    let page = page("report", &[Section::Run(Box::new(full()))]);
    let document = parse(&page);
    let cards = text(of_class(&document, "cards").next().unwrap());
    let expected = [
        "1,003 of 1,017; 4 failed, 3 hung up, 6 unsent",
        "1,267 tok/s peak 2,222 per second",
        "9.87 req/s 10 planned",
        "111 ms p50 255 ms p99",
        "17.0 ms p50 39.1 ms p99",
        "1,900 ms p50 4,370 ms p99",
        "23.4 on average peak 41",
        "67.8 %",
        "9.04 req/s 913 (90.3 %) within E2EL ≤ 2,500.5 ms and TTFT ≤ 200 ms",
    ];
    for figures in expected {
        assert!(cards.contains(figures), "{figures} is not in {cards}");
    }
    let rest = text(document.root());
    for figures in
        ["queue full", "2026-01-02 03:04:05 UTC", "tokens tok 128,390 128,384", "decode steps 5,483"]
    {
        assert!(rest.contains(figures), "{figures}");
    }
}

#[test]
fn a_run_without_anything_says_so_and_draws_nothing() {
    let nothing = Latencies { ttft: None, tpot: None, itl: None, e2el: None, lateness: None };
    let series = Series { in_flight: vec![], progress: vec![], output_throughput: vec![] };
    let mut empty = RunReport { latencies: nothing, series, duration_s: 0.0, ..run() };
    empty.counts.completed = 0;
    let sections = [
        Section::Run(Box::new(empty.clone())),
        Section::Runs { title: "runs".into(), text: "".into(), runs: vec![empty.clone(), empty.clone()] },
        Section::Runs { title: "none".into(), text: "".into(), runs: vec![] },
        Section::Sweep { title: "none".into(), text: "".into(), x_label: "x".into(), points: vec![] },
        Section::Table { title: "table".into(), text: "".into(), columns: vec!["a".into()], rows: vec![] },
    ];
    let page = page("report", &sections);
    let document = parse(&page);
    assert_eq!(of_class(&document, "plot").count(), 0);
    let all = text(document.root());
    let expected = [
        "No request completed",
        "There are no runs",
        "The sweep has no steps",
        "No rows",
        "Nothing was measured",
    ];
    assert!(expected.iter().all(|expected| all.contains(expected)), "{all}");
    parse(&super::page("", &[]));
}

#[test]
fn what_is_not_a_number_reaches_no_picture_and_is_not_called_one() {
    for odd in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300, -1e300] {
        let mut run = full();
        let values = [
            &mut run.duration_s,
            &mut run.request_throughput,
            &mut run.output_throughput,
            &mut run.mean_concurrency,
            &mut run.overlap,
        ];
        values.into_iter().for_each(|value| *value = odd);
        run.series.in_flight.push((odd, 1.0));
        run.series.progress.push((1.0, odd));
        for distribution in [&mut run.latencies.ttft, &mut run.latencies.itl].into_iter().flatten() {
            distribution.stats.median = odd;
            distribution.histogram.push((odd, 3));
        }
        let points = [odd, 1.0, 2.0].map(|x| SweepPoint { x, run: run.clone() }).into();
        let sweep = Section::Sweep { title: "".into(), text: "".into(), x_label: "x".into(), points };
        let page = page("report", &[Section::Run(Box::new(run.clone())), sweep]);
        let document = parse(&page);
        for path in document.descendants().filter_map(|node| node.attribute("d")) {
            let is_path = |c: char| c.is_ascii_digit() || " .-MLHVZahlv".contains(c);
            assert!(path.chars().all(is_path), "{odd}: {path}");
        }
        assert!(!["NaN", "inf "].iter().any(|not| text(document.root()).contains(not)), "{odd}");
    }
}

#[test]
fn the_page_of_a_large_run_is_small() {
    let mut run = full();
    let noise = |n: u32| f64::from(n.wrapping_mul(2_654_435_761) >> 12);
    let curve: Vec<_> = (0..200_000).map(|n| (f64::from(n) / 10.0, noise(n))).collect();
    run.series = Series { in_flight: curve.clone(), progress: curve.clone(), output_throughput: curve };
    let histogram: Vec<_> = (1..5_000u32).map(|n| (f64::from(n), u64::from(n))).collect();
    let latencies = &mut run.latencies;
    for distribution in [&mut latencies.ttft, &mut latencies.itl, &mut latencies.e2el].into_iter().flatten() {
        distribution.stats.max = 5_000.0;
        distribution.histogram = histogram.clone();
    }
    let page = page("report", &[Section::Run(Box::new(run))]);
    assert!((20_000..100_000).contains(&page.len()), "{} bytes", page.len());
}

fn line<'a>(curve: Node<'a, '_>) -> Option<&'a str> {
    curve.children().find(|node| node.attribute("class") == Some("line"))?.attribute("d")
}

#[test]
fn curves_look_as_their_form_says() {
    let page = page("report", &sections("text")[4..]);
    let document = parse(&page);
    let svg = of_class(&document, "plot").next().unwrap();
    let curves: Vec<_> = svg.children().filter(|node| node.has_tag_name("g")).collect();
    let marks =
        |curve: &Node| curve.children().filter(|node| node.attribute("class") == Some("mark")).count();
    assert_eq!(curves.len(), 5);
    assert!(line(curves[0]).unwrap().contains('H') && !line(curves[1]).unwrap().contains('H'));
    assert_eq!(curves.iter().map(marks).collect::<Vec<_>>(), [0, 0, 3, 3, 3]);
    assert_eq!(line(curves[3]), None);
    let dashed = curves.iter().map(|curve| curve.attribute("class").unwrap().contains("dashed"));
    assert_eq!(dashed.collect::<Vec<_>>(), [false, false, false, false, true]);
    assert!(page.contains(".dashed .line") && page.contains("stroke-dasharray"));
}

#[test]
fn contents_are_listed_when_there_are_many_parts() {
    let contents = |count| page("report", &sections("text")[..count]).matches("href=\"#part-").count();
    assert_eq!((contents(3), contents(5)), (0, 5));
}

#[test]
fn notes_are_of_what_was_odd() {
    let notes = |run: RunReport| {
        let page = page("report", &[Section::Run(Box::new(run))]);
        let document = parse(&page);
        of_class(&document, "note").map(text).collect::<Vec<_>>().join("\n")
    };
    let mut calm = run();
    (calm.counts.unsent, calm.counts.short) = (0, 0);
    assert_eq!(notes(calm.clone()), "");

    let mut late = calm.clone();
    late.latencies.lateness = Some(distribution(4.4));
    assert!(notes(late.clone()).contains("sent 10.1 ms late"), "{}", notes(late));
    let mut closed = calm.clone();
    closed.plan.closed_loop = true;
    assert!(notes(closed).contains("coordinated omission"));
    calm.counts.completed = 0;
    assert!(notes(calm).contains("No request completed"));
    assert!(
        notes(run()).contains("left 6 requests unsent")
            && notes(run()).contains("5 requests got fewer tokens")
    );
}

#[test]
fn tables_set_figures_to_the_right_and_fill_short_rows() {
    let rows = [["a", "1.5", "x", "–"].as_slice(), &["b", "-2"], &["c", "≈ 3 %", "y", "4", "5"]];
    let rows = rows.map(|row| row.iter().map(ToString::to_string).collect::<Vec<_>>());
    let table = ReportTable::new("", ["name", "first", "second", "third"], rows.into());
    let classes: Vec<_> = table.columns.iter().map(|column| column.class).collect();
    assert_eq!(classes, ["short", "figures", "short", "figures"]);
    assert_eq!(table.rows.iter().map(|row| row.cells.len()).collect::<Vec<_>>(), [4, 4, 5]);
}
