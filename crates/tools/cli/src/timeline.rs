//! What the steps of a task did, and when: drawn as text or SVG.

use std::fmt::Write;
use std::process::ExitCode;

use serde::{Deserialize, Serialize};

use crate::xe::{Client, Failure, XeArguments, find};
use tapio_report::failure;
use tapio_report::plot::escaped;

/// Options of `tapio timeline`.
#[derive(Debug, clap::Args)]
pub struct TimelineArguments {
    /// UUID, reference or name of the task; 'xe task-list' shows those that are there. Without it, the latest
    /// operation that had steps
    task: Option<String>,
    /// As JSON
    #[arg(long, conflicts_with = "svg")]
    json: bool,
    /// As a picture
    #[arg(long)]
    svg: bool,
    /// Columns of the text; those of the terminal unless given
    #[arg(long)]
    width: Option<usize>,
    /// Where to connect, as 'xe' takes it: -s SERVER, -u USER, --socket PATH ...
    #[arg(last = true, value_name = "XE OPTION")]
    xe: Vec<String>,
}

/// One step of an operation.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Step {
    name: String,
    subject: String,
    parent: usize,
    queued_us: u64,
    wait_us: u64,
    work_us: u64,
    result: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    undo: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// The steps of an operation, as `task.get_timeline` answers them.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Timeline {
    operation: String,
    total_us: u64,
    steps: Vec<Step>,
}

/// The reference of no task.
const NULL_REF: &str = "OpaqueRef:NULL";

/// Columns of a text that goes to no terminal.
const WIDTH: usize = 100;

/// Fewest columns that the bars get.
const BARS_MIN: usize = 20;

pub fn run(arguments: &TimelineArguments) -> ExitCode {
    match read(arguments).and_then(|timeline| shown(&timeline, arguments)) {
        Ok(text) => match failure::print(&text) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failure::report("tapio", &error),
        },
        Err(error) => error.report(),
    }
}

fn read(arguments: &TimelineArguments) -> Result<Timeline, Failure> {
    let xe = XeArguments::read(&arguments.xe)?;
    let client = Client::connect(&xe.connection)?;
    let answer = match &arguments.task {
        Some(task) => find(&client, "task", task).and_then(|task| steps_of(&client, &task)),
        // The toolstack's latest: the task itself may be gone, as `xe` destroys its own.
        None => steps_of(&client, NULL_REF),
    };
    client.end();
    let text = answer?;
    if text.is_empty() {
        return Err(Failure::other(
            "the task has no steps: it was one piece of work, or it ended before the daemon began",
        ));
    }
    serde_json::from_str(&text)
        .map_err(|error| Failure::other(format!("the timeline is not understood: {error}")))
}

/// The steps as the toolstack has them: JSON, or nothing.
fn steps_of(client: &Client, task: &str) -> Result<String, Failure> {
    let answer = client.call("task.get_timeline", &[task.into()])?;
    Ok(answer.as_str().unwrap_or_default().to_owned())
}

fn shown(timeline: &Timeline, arguments: &TimelineArguments) -> Result<String, Failure> {
    if arguments.json {
        let text = serde_json::to_string_pretty(timeline);
        return text.map(|text| text + "\n").map_err(|error| Failure::other(error.to_string()));
    }
    if arguments.svg {
        return Ok(svg(timeline));
    }
    Ok(text(timeline, arguments.width.unwrap_or_else(terminal_width)))
}

fn terminal_width() -> usize {
    match rustix::termios::tcgetwinsize(std::io::stdout()) {
        Ok(size) if size.ws_col > 0 => size.ws_col.into(),
        _ => WIDTH,
    }
}

/// When the last step ended, or the operation did.
fn end_of(timeline: &Timeline) -> u64 {
    let ends = timeline
        .steps
        .iter()
        .map(|step| step.queued_us.saturating_add(step.wait_us).saturating_add(step.work_us));
    ends.chain([timeline.total_us, 1]).max().unwrap_or(1)
}

fn milliseconds(us: u64) -> String {
    match us {
        0..100_000 => format!("{:.1} ms", us as f64 / 1e3),
        100_000..10_000_000 => format!("{:.0} ms", us as f64 / 1e3),
        _ => format!("{:.1} s", us as f64 / 1e6),
    }
}

fn label(step: &Step) -> String {
    let undo = if step.undo { "undo " } else { "" };
    format!("{undo}{} {}", step.name, short(&step.subject))
}

/// `VBD 0d5f...` instead of the whole UUID.
fn short(subject: &str) -> String {
    let short = |word: &str| match word.split_once('-') {
        Some((first, _)) if word.len() == 36 && first.len() == 8 => first.to_owned(),
        _ => word.to_owned(),
    };
    subject.split(' ').map(short).collect::<Vec<_>>().join(" ")
}

/// A line for each step: its name, dots where it waited, a bar where it worked.
fn text(timeline: &Timeline, width: usize) -> String {
    let end = end_of(timeline);
    let labels: Vec<String> = timeline.steps.iter().map(label).collect();
    let names = labels.iter().map(|label| label.chars().count()).max().unwrap_or(0).min(width / 2);
    let bars = width.saturating_sub(names + 24).max(BARS_MIN);
    // Products of a time and a number of columns must not overflow.
    let column = |us: u64| ((u128::from(us) * bars as u128 / u128::from(end)) as usize).min(bars);
    let mut text = format!("{}  {}\n", timeline.operation, milliseconds(timeline.total_us));
    for (step, label) in timeline.steps.iter().zip(&labels) {
        let label: String = label.chars().take(names).collect();
        let begin = step.queued_us.saturating_add(step.wait_us);
        let (queued, began) = (column(step.queued_us), column(begin));
        let ended = column(begin.saturating_add(step.work_us)).max(began);
        let mut bar = " ".repeat(queued) + &".".repeat(began - queued) + &"#".repeat(ended - began);
        if ended == began && step.work_us > 0 && began < bars {
            // Shorter than a column.
            bar.push('|');
        }
        let mark = match step.result.as_str() {
            "ok" => String::new(),
            other => format!("  {other}"),
        };
        let (wait, work) = (milliseconds(step.wait_us), milliseconds(step.work_us));
        let _ = writeln!(text, "{label:<names$} {wait:>9} {work:>9} {bar:<bars$}{mark}");
        if let Some(error) = &step.error {
            let _ = writeln!(text, "{:<names$} {error}", "");
        }
    }
    let worked: u64 = timeline.steps.iter().fold(0, |sum, step| sum.saturating_add(step.work_us));
    let at_once = worked as f64 / timeline.total_us.max(1) as f64;
    let _ = writeln!(
        text,
        "{} steps, {} of work in {}: {at_once:.1} at a time. Columns: waited, worked; '.' waits, '#' works",
        timeline.steps.len(),
        milliseconds(worked),
        milliseconds(timeline.total_us)
    );
    text.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// The same as a picture; a step's numbers show where the pointer is.
fn svg(timeline: &Timeline) -> String {
    const ROW: u64 = 18;
    const NAMES: f64 = 280.0;
    const BARS: f64 = 700.0;
    let end = end_of(timeline) as f64;
    let x = |us: u64| NAMES + BARS * (us as f64 / end);
    let height = ROW * (timeline.steps.len() as u64 + 2);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n<text x=\"4\" y=\"13\" font-weight=\"bold\">{} {}</text>\n",
        NAMES + BARS + 10.0,
        escaped(&timeline.operation),
        milliseconds(timeline.total_us)
    );
    for (at, step) in timeline.steps.iter().enumerate() {
        let y = ROW * (at as u64 + 1);
        let begin = step.queued_us.saturating_add(step.wait_us);
        let colour = match step.result.as_str() {
            "ok" if step.undo => "#b8860b",
            "ok" => "#2e7d32",
            "failed" => "#c62828",
            _ => "#757575",
        };
        let _ = writeln!(
            svg,
            "<g><title>{}: {}, waited {}, worked {}{}</title><text x=\"4\" y=\"{}\">{}</text><rect x=\"{:.2}\" y=\"{}\" width=\"{:.2}\" height=\"4\" fill=\"#bdbdbd\"/><rect x=\"{:.2}\" y=\"{}\" width=\"{:.2}\" height=\"12\" fill=\"{colour}\"/></g>",
            escaped(&step.name),
            escaped(&step.result),
            milliseconds(step.wait_us),
            milliseconds(step.work_us),
            step.error.as_deref().map(|error| format!(": {}", escaped(error))).unwrap_or_default(),
            y + 13,
            escaped(&label(step)),
            x(step.queued_us),
            y + 7,
            x(begin) - x(step.queued_us),
            x(begin),
            y + 3,
            (x(begin.saturating_add(step.work_us)) - x(begin)).max(0.5),
        );
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline() -> Timeline {
        serde_json::from_str(
            r#"{"operation": "VM.start", "total_us": 100000, "steps": [
                {"name": "create", "subject": "VM 5d2a1c34-0000-4000-8000-000000000001", "parent": 0,
                 "queued_us": 0, "wait_us": 0, "work_us": 50000, "result": "ok"},
                {"name": "plug", "subject": "VBD 1", "parent": 1,
                 "queued_us": 50000, "wait_us": 25000, "work_us": 25000, "result": "failed", "error": "no <room>"},
                {"name": "create", "subject": "VM 5", "parent": 0, "queued_us": 100000, "wait_us": 0, "work_us": 1,
                 "result": "ok", "undo": true}]}"#,
        )
        .expect("good")
    }

    #[test]
    fn steps_are_drawn_where_they_were() {
        let text = text(&timeline(), 80);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "VM.start  100 ms");
        let bars = |line: &str| (line.matches('#').count(), line.matches('.').count());
        assert!(lines[1].starts_with("create VM 5d2a1c34 "), "{text}");
        assert!(lines[2].ends_with("failed") && lines[3].trim() == "no <room>", "{text}");
        let (first, second) = (bars(lines[1]), bars(lines[2]));
        assert!(first.0 >= 2 * second.0 - 1 && first.0 <= 2 * second.0 + 1, "{text}");
        assert!(second.1 > 2, "{text}");
        assert!(lines[4].starts_with("undo create"), "{text}");
        assert!(lines[5].starts_with("3 steps, 75.0 ms of work in 100 ms: 0.8 at a time"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
    }

    #[test]
    fn hostile_numbers_do_no_harm() {
        let mut timeline = timeline();
        for step in &mut timeline.steps {
            (step.queued_us, step.wait_us, step.work_us) = (u64::MAX, u64::MAX, u64::MAX);
        }
        timeline.total_us = 0;
        assert!(text(&timeline, 0).lines().count() >= 5);
        assert!(svg(&timeline).ends_with("</svg>\n"));
    }

    #[test]
    fn pictures_are_well_formed() {
        let svg = svg(&timeline());
        assert!(svg.contains("no &lt;room&gt;") && !svg.contains("<room>"));
        let mut reader = quick_xml::Reader::from_str(&svg);
        let mut depth = 0;
        loop {
            match reader.read_event().expect("XML") {
                quick_xml::events::Event::Start(_) => depth += 1,
                quick_xml::events::Event::End(_) => depth -= 1,
                quick_xml::events::Event::Eof => break,
                _ => {}
            }
        }
        assert_eq!(depth, 0);
    }
}
