//! Histories against a model that keeps every sample, and against numbers worked out by hand.

use std::borrow::Cow;

use proptest::prelude::*;

use crate::updates::{FIGURES_MAX, Frame, Request, Updates};
use crate::{Consolidation, History, Kind, Layout, Sample, Source, UpdateError, file, json, xml};

pub fn source(name: &str, kind: Kind) -> Source {
    Source {
        name: name.to_owned().into(),
        doc: Cow::Borrowed("A figure"),
        units: Cow::Borrowed("B/s"),
        kind,
        min: 0.0,
        max: f64::INFINITY,
    }
}

fn sample(name: &str, kind: Kind, value: f64) -> Sample {
    Sample { source: source(name, kind), value, begins: false }
}

/// On a whole day, in milliseconds.
const BEGIN: u64 = 1_700_006_400_000;

fn rows(history: &History, name: &str, function: Consolidation, span: usize, count: u64) -> Vec<f64> {
    let span = history.layout().spans()[span];
    (0..count).rev().map(|age| history.row(name, function, span, age)).collect()
}

#[test]
fn kinds_of_sources_become_rates() {
    let mut history = History::new(Layout::new(5, false), BEGIN);
    for turn in 1..=4 {
        let samples = [
            sample("gauge", Kind::Gauge, 7.0),
            sample("derive", Kind::Derive, turn as f64 * 100.0),
            sample("absolute", Kind::Absolute, 100.0),
            sample("below", Kind::Gauge, -1.0),
        ];
        history.update(BEGIN + turn * 5000, &samples).expect("later");
    }
    let average = Consolidation::Average;
    assert_eq!(rows(&history, "gauge", average, 0, 4), [7.0; 4]);
    let derived = rows(&history, "derive", average, 0, 4);
    assert!(derived[0].is_nan() && derived[1..] == [20.0; 3], "{derived:?}");
    assert_eq!(rows(&history, "absolute", average, 0, 4), [20.0; 4]);
    assert!(rows(&history, "below", average, 0, 4).iter().all(|row| row.is_nan()));
    assert_eq!((history.current("absolute"), history.last("derive")), (Some(20.0), Some(400.0)));
    assert_eq!(history.update(BEGIN, &[]), Err(UpdateError::NotLater));
}

#[test]
fn a_counter_that_begins_again_is_unknown_once() {
    let mut history = History::new(Layout::new(5, false), BEGIN);
    for (turn, value) in (1..).zip([0.0, 500.0, 100.0, 200.0]) {
        history.update(BEGIN + turn * 5000, &[sample("c", Kind::Derive, value)]).expect("later");
    }
    let rows = rows(&history, "c", Consolidation::Average, 0, 3);
    assert!(rows[0] == 100.0 && rows[1].is_nan() && rows[2] == 20.0, "{rows:?}");
}

#[test]
fn a_counter_of_another_process_is_no_rate_even_if_it_is_greater() {
    let mut history = History::new(Layout::new(5, false), BEGIN);
    for (turn, value) in (1..).zip([0.0, 500.0, 9000.0, 9100.0]) {
        let begins = value == 9000.0;
        let counter = Sample { begins, ..sample("c", Kind::Derive, value) };
        let gauge = Sample { begins, ..sample("g", Kind::Gauge, 1.0) };
        history.update(BEGIN + turn * 5000, &[counter, gauge]).expect("later");
    }
    let counted = rows(&history, "c", Consolidation::Average, 0, 3);
    assert!(counted[0] == 100.0 && counted[1].is_nan() && counted[2] == 20.0, "{counted:?}");
    assert_eq!(rows(&history, "g", Consolidation::Average, 0, 3), [1.0; 3]);
}

#[test]
fn a_gap_is_unknown_and_a_row_that_is_half_unknown_too() {
    let mut history = History::new(Layout::new(5, true), BEGIN);
    let value = [sample("g", Kind::Gauge, 4.0)];
    for turn in 1..=6 {
        history.update(BEGIN + turn * 5000, &value).expect("later");
    }
    history.update(BEGIN + 30_000 + 400_000, &value).expect("later");
    for turn in 1..=6 {
        history.update(BEGIN + 430_000 + turn * 5000, &value).expect("later");
    }
    let fine = rows(&history, "g", Consolidation::Max, 0, 92);
    assert_eq!(fine.iter().filter(|row| row.is_nan()).count(), 80, "{fine:?}");
    // Half of the first minute is known, and 10 of 60 seconds of the last one, which is not over.
    let minutes = rows(&history, "g", Consolidation::Min, 1, 7);
    assert!(minutes[0] == 4.0 && minutes[1..].iter().all(|row| row.is_nan()), "{minutes:?}");
    // A source that comes later was unknown before.
    history.update(BEGIN + 465_000, &[sample("new", Kind::Gauge, 1.0)]).expect("later");
    let new = rows(&history, "new", Consolidation::Average, 0, 2);
    assert!(new[0].is_nan() && new[1] == 1.0);
}

#[test]
fn a_year_that_passes_at_once_takes_no_time_and_no_more_rows() {
    let mut history = History::new(Layout::new(5, false), BEGIN);
    history.update(BEGIN + 5000, &[sample("g", Kind::Gauge, 4.0)]).expect("later");
    history.update(BEGIN + 40_000_000_000, &[sample("g", Kind::Gauge, 4.0)]).expect("later");
    assert!(rows(&history, "g", Consolidation::Average, 3, 366).iter().all(|row| row.is_nan()));
    history.set_back(BEGIN + 7000);
    history.update(BEGIN + 10_000, &[sample("g", Kind::Gauge, 4.0)]).expect("later");
    history.update(BEGIN + 15_000, &[sample("g", Kind::Gauge, 4.0)]).expect("later");
    assert_eq!(history.current("g"), Some(4.0));
}

#[test]
fn a_thousand_disks_hold_what_is_stated() {
    // As a VBD has them.
    const SOURCES: usize = 16;
    let layout = Layout::new(5, false);
    assert_eq!(layout.source_len_max(), 774 * 4);
    let mut held = 0;
    for disk in 0..1000 {
        let mut history = History::new(layout.clone(), BEGIN);
        let values: Vec<Sample> =
            (0..SOURCES).map(|at| sample(&format!("vbd_xvda_{at}"), Kind::Gauge, f64::from(disk))).collect();
        // All rows of all archives, by few updates.
        for (steps, count) in [(1, 140), (12, 130), (60, 2000)] {
            for _ in 0..count {
                let now = history.updated_ms() + steps * 5000;
                history.update(now, &values).expect("later");
            }
        }
        history.update(history.updated_ms() + 400 * 86_400_000, &values).expect("later");
        assert_eq!(history.columns.iter().map(|column| column.archives[3].rows.len()).max(), Some(366));
        held += history.held_len();
        assert!(history.held_len() <= 60 << 10, "{} bytes for one disk", history.held_len());
        if disk >= 3 {
            // All are alike: the sum is what is to be seen.
            held += history.held_len() * (1000 - 4);
            break;
        }
    }
    println!("1000 disks hold {held} bytes");
    assert!(held <= 64_000 << 10);
}

#[test]
fn forgotten_sources_stay_forgotten_until_they_are_recorded() {
    let mut history = History::new(Layout::new(5, false), BEGIN);
    let both = [sample("a", Kind::Gauge, 1.0), sample("b", Kind::Gauge, 2.0)];
    history.update(BEGIN + 5000, &both).expect("later");
    assert!(history.forget("a") && !history.forget("a"));
    assert_eq!(history.forgotten().map(|source| source.name.as_ref()).collect::<Vec<_>>(), ["a"]);
    history.update(BEGIN + 10_000, &both).expect("later");
    let mut history = file::decode(&file::encode(&history)).expect("a file");
    assert_eq!((history.current("a"), history.current("b")), (None, Some(2.0)));
    assert!(history.record("a") && !history.record("a"));
    history.update(BEGIN + 15_000, &both).expect("later");
    assert_eq!(history.current("a"), Some(1.0));
}

#[test]
fn updates_are_the_rows_behind_a_time() {
    let mut host = History::new(Layout::new(5, false), BEGIN);
    let mut vm = History::new(Layout::new(5, false), BEGIN + 5000);
    for turn in 1..=26 {
        host.update(BEGIN + turn * 5000, &[sample("load<", Kind::Gauge, turn as f64)]).expect("later");
    }
    vm.update(BEGIN + 10_000, &[sample("m", Kind::Gauge, 0.5)]).expect("later");
    let excerpt = |request: Request, columns| {
        let mut updates = Updates::new(Frame::of(request, host.layout(), host.updated_ms(), columns));
        updates.add("host:h", &host);
        updates.add("vm:v", &vm);
        updates
    };
    let begin = BEGIN / 1000;
    let request = |start_s: i64, interval_s| Request { start_s, interval_s, function: None };
    let updates = excerpt(request((begin + 121) as i64, 5), 2);
    let expected = format!(
        "<xport><meta><start>{}</start><step>5</step><end>{}</end><rows>2</rows><columns>2</columns><legend>\
         <entry>AVERAGE:host:h:load&lt;</entry><entry>AVERAGE:vm:v:m</entry></legend></meta><data>\
         <row><t>{}</t><v>26</v><v>NaN</v></row><row><t>{}</t><v>25</v><v>NaN</v></row></data></xport>\n",
        begin + 125,
        begin + 130,
        begin + 130,
        begin + 125
    );
    assert_eq!(updates.xml(), expected);
    let json: serde_json::Value = serde_json::from_str(&excerpt(request(-125, 5), 2).json()).expect("JSON");
    assert_eq!(json["meta"]["rows"], 25);
    assert_eq!(
        json["data"][23]["values"],
        serde_json::json!([3.0, "NaN"])
            .as_array()
            .map(|all| {
                // A whole number has no fraction in the text.
                serde_json::json!([3, all[1]])
            })
            .expect("an array")
    );
    assert_eq!(json["data"][24]["values"][1], 0.5);
    let frame = |request| Frame::of(request, host.layout(), host.updated_ms(), 2);
    let minutes = excerpt(request(begin as i64, 60), 2).json();
    let meta = format!("\"start\":{},\"step\":60,\"end\":{},\"rows\":2,", begin + 60, begin + 120);
    assert!(minutes.contains(&meta), "{minutes}");
    assert_eq!(frame(request(0, 0)), frame(request(0, 86_400)), "rows that go back far enough are days");
    // Means alone are kept, and of one step they are all functions.
    let only = |start_s, function| Request { function: Some(function), ..request(start_s, 0) };
    let last = excerpt(only(-10, Consolidation::Last), 2).json();
    assert!(last.contains("\"LAST:host:h:load<\",\"LAST:vm:v:m\"") && last.contains("[26,"), "{last}");
    assert!(excerpt(only(-7000, Consolidation::Max), 2).json().contains("\"columns\":0,"));
    // An answer has so many figures, whoever asks.
    assert!(excerpt(request(-125, 5), FIGURES_MAX / 3).json().contains("\"rows\":3,"));
    assert!(excerpt(request(-125, 5), FIGURES_MAX + 1).json().contains("\"data\":[]"));
    let none = Updates::new(frame(request(-2, 5)));
    assert!(none.xml().contains("<columns>0</columns>"), "{}", none.xml());
}

#[test]
fn dumps_are_well_formed() {
    let mut history = History::new(Layout::new(5, true), BEGIN);
    history.update(BEGIN + 5000, &[sample("a&b", Kind::Derive, 1.5)]).expect("later");
    let xml = xml::dump(&history);
    assert!(xml.contains("<name>a&amp;b</name>") && xml.matches("<rra>").count() == 16);
    assert_eq!(xml.matches("<row>").count(), 4 * (120 + 120 + 168 + 366));
    let json: serde_json::Value = serde_json::from_str(&json::dump(&history)).expect("JSON");
    assert_eq!(json["rra"][0]["database"].as_array().map(Vec::len), Some(120));
    assert_eq!((&json["ds"][0]["name"], &json["ds"][0]["max"]), (&"a&b".into(), &"Infinity".into()));
}

#[test]
fn damaged_files_are_refused() {
    let mut history = History::new(Layout::new(5, true), BEGIN);
    history.update(BEGIN + 5000, &[sample("a", Kind::Gauge, 1.5)]).expect("later");
    let bytes = file::encode(&history);
    for at in 0..bytes.len() {
        assert!(file::decode(&bytes[..at]).is_err(), "{at} bytes of it");
        let mut other = bytes.clone();
        other[at] ^= 1;
        assert!(file::decode(&other).is_err(), "byte {at}");
    }
}

/// Every second of a gauge's life with its value, consolidated from scratch.
fn model(samples: &[(u64, f64)], function: Consolidation, row_s: u64, end_s: u64) -> f64 {
    let step = |end_s: u64| {
        let of = |second: u64| samples.iter().find(|(at, _)| *at >= second).copied();
        let seconds: Vec<(u64, f64)> = (end_s - 4..=end_s).filter_map(of).collect();
        let known: Vec<f64> =
            seconds.iter().map(|(_, value)| *value).filter(|value| !value.is_nan()).collect();
        // As in rrdtool, the sample that ends the step does not count against it.
        let lost = seconds.iter().filter(|(at, value)| *at < end_s && value.is_nan()).count();
        let is_lost = lost > 2 || known.is_empty();
        if is_lost { f64::NAN } else { known.iter().sum::<f64>() / known.len() as f64 }
    };
    let steps: Vec<f64> = (0..row_s / 5).map(|at| step(end_s - at * 5)).collect();
    let known: Vec<f64> = steps.iter().copied().filter(|value| !value.is_nan()).collect();
    if known.is_empty() || (steps.len() - known.len()) as f64 > steps.len() as f64 * 0.5 {
        return f64::NAN;
    }
    match function {
        Consolidation::Average => known.iter().sum::<f64>() / known.len() as f64,
        Consolidation::Min => known.iter().copied().fold(f64::INFINITY, f64::min),
        Consolidation::Max => known.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        Consolidation::Last => steps.first().copied().unwrap_or(f64::NAN),
    }
}

fn is_near(a: f64, b: f64) -> bool {
    (a.is_nan() && b.is_nan()) || (a - b).abs() <= 1e-5 * a.abs().max(1.0)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    // Samples at most a step apart: over longer intervals rrdtool's rules give all steps one rate, which
    // `rrdtool` itself is asked about.
    #[test]
    fn rows_are_those_of_a_model_that_keeps_all(
        samples in prop::collection::vec((1_u64..=5, prop::option::weighted(0.8, 0_u32..1000)), 1..150),
    ) {
        let mut history = History::new(Layout::new(5, true), BEGIN);
        let (mut now, mut all) = (BEGIN / 1000, Vec::new());
        for (interval, value) in samples {
            now += interval;
            let value = value.map_or(f64::NAN, f64::from);
            all.push((now, value));
            history.update(now * 1000, &[sample("g", Kind::Gauge, value)]).expect("later");
            history = file::decode(&file::encode(&history)).expect("a file");
        }
        for (at, row_s) in [(0, 5), (1, 60)] {
            let span = history.layout().spans()[at];
            let end = now / row_s * row_s;
            for age in 0..((end - BEGIN / 1000) / row_s).min(120) {
                for function in Consolidation::ALL {
                    let row = history.row("g", function, span, age);
                    let expected = model(&all, function, row_s, end - age * row_s);
                    prop_assert!(is_near(row, expected), "{function:?} {row_s} s, {age}: {row} not {expected}");
                }
            }
        }
    }
}
