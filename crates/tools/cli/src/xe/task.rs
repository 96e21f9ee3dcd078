//! Long work: a task of the toolstack, a bar on the terminal, Ctrl-C.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use super::client::Client;
use super::error::{Failure, Result};

/// How long one question for events waits, in seconds.
const WAIT_S: f64 = 30.0;

/// Work shorter than this shows no bar.
const QUIET: Duration = Duration::from_millis(300);

/// Parts of the bar.
const BAR_PARTS: u64 = 1000;

/// How a task stands.
enum State {
    Pending(f64),
    Done(Result<String>),
}

/// Sends `Async.<method>` and waits for its end; Ctrl-C cancels it. Answers the result: a reference, or an empty text.
/// The task is destroyed when its end is known: it has no other waiter. Its steps stay for `tapio timeline`.
pub fn run(client: &Client, method: &str, params: &[Value]) -> Result<String> {
    let task = client.call(&format!("Async.{method}"), params)?;
    let task = task.as_str().unwrap_or_default().to_owned();
    let bar = ProgressBar::new(BAR_PARTS);
    bar.set_style(style(method));
    let done = client.wait(watch(client, &task, &bar));
    bar.finish_and_clear();
    let ended = done?;
    // What it came to is known; that it could not be cleared away changes nothing of that.
    let _ = client.call("task.destroy", &[task.into()]);
    ended
}

/// Waits for the end of a task that this client made for a transfer; Ctrl-C cancels it.
pub fn follow(client: &Client, task: &str) -> Result<Result<String>> {
    client.wait(watch(client, task, &ProgressBar::hidden()))
}

fn style(method: &str) -> ProgressStyle {
    let template = format!("{method} [{{bar:40}}] {{percent:>3}} %  {{elapsed}}");
    ProgressStyle::with_template(&template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("#>.")
}

/// What the task came to; an error where that is not known, so that the task may still run.
async fn watch(client: &Client, task: &str, bar: &ProgressBar) -> Result<Result<String>> {
    let mut token = String::new();
    let mut cancelled = false;
    let began = std::time::Instant::now();
    loop {
        let params = [json!([format!("task/{task}")]), json!(token), json!(WAIT_S)];
        let answer = tokio::select! {
            answer = client.call_async("event.from", &params) => answer,
            _ = tokio::signal::ctrl_c() => {
                if cancelled {
                    return Err(Failure::other(format!("left alone; the task goes on: {task}")));
                }
                cancelled = true;
                bar.suspend(|| eprintln!("cancelling; Ctrl-C again leaves it alone"));
                match client.call_async("task.cancel", &[task.into()]).await {
                    // It cannot be cancelled, or has just ended: what it answers is still worth knowing.
                    Ok(_) | Err(Failure::Api(..)) => continue,
                    Err(error) => return Err(error),
                }
            }
        };
        let answer = answer?;
        token = answer.get("token").and_then(Value::as_str).unwrap_or_default().to_owned();
        for event in answer.get("events").and_then(Value::as_array).into_iter().flatten() {
            if event.get("ref").and_then(Value::as_str) != Some(task) {
                continue;
            }
            if event.get("operation").and_then(Value::as_str) == Some("del") {
                return Err(Failure::other("another client destroyed the task; its result is not known"));
            }
            match state(&event["snapshot"]) {
                State::Done(result) => return Ok(result),
                State::Pending(part) if began.elapsed() > QUIET => {
                    bar.set_position((part.clamp(0.0, 1.0) * BAR_PARTS as f64) as u64);
                }
                State::Pending(_) => {}
            }
        }
    }
}

fn state(record: &Value) -> State {
    let strings = |name: &str| {
        let all = record.get(name).and_then(Value::as_array).into_iter().flatten();
        all.filter_map(|text| Some(text.as_str()?.to_owned())).collect::<Vec<String>>()
    };
    match record.get("status").and_then(Value::as_str).unwrap_or_default() {
        "success" => {
            let text = record.get("result").and_then(Value::as_str).unwrap_or_default();
            State::Done(Ok(result(text)))
        }
        "failure" | "cancelled" => {
            let mut info = strings("error_info").into_iter();
            let code = info.next().unwrap_or_else(|| "TASK_CANCELLED".into());
            State::Done(Err(Failure::Api(code, info.collect())))
        }
        _ => State::Pending(record.get("progress").and_then(Value::as_f64).unwrap_or(0.0)),
    }
}

/// The text inside `<value>...</value>`, or inside a type in it.
fn result(xml: &str) -> String {
    let Some(inner) = xml.trim().strip_prefix("<value>").and_then(|rest| rest.strip_suffix("</value>"))
    else {
        return xml.trim().to_owned();
    };
    let inner = match inner.strip_prefix("<string>").and_then(|rest| rest.strip_suffix("</string>")) {
        Some(text) => text,
        None => inner,
    };
    if inner == "<string/>" || inner == "<nil/>" {
        return String::new();
    }
    ["&lt;<", "&gt;>", "&quot;\"", "&apos;'", "&amp;&"].iter().fold(inner.to_owned(), |text, pair| {
        let (escape, plain) = pair.split_at(pair.len() - 1);
        text.replace(escape, plain)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_unpacked() {
        assert_eq!(result("<value>OpaqueRef:1</value>"), "OpaqueRef:1");
        assert_eq!(result("<value><string>a &lt;b&gt; &amp;amp;</string></value>"), "a <b> &amp;");
        assert_eq!(result("<value><string/></value>"), "");
        assert_eq!(result(""), "");
    }

    #[test]
    fn the_end_of_a_task_is_understood() {
        let ended = |record: Value| match state(&record) {
            State::Done(result) => Some(result),
            State::Pending(_) => None,
        };
        assert_eq!(ended(json!({"status": "pending", "progress": 0.5})), None);
        assert_eq!(ended(json!({"status": "cancelling"})), None);
        assert_eq!(ended(json!({"status": "success", "result": "<value>x</value>"})), Some(Ok("x".into())));
        let failed = ended(json!({"status": "failure", "error_info": ["VDI_IN_USE", "a"]}));
        assert_eq!(failed, Some(Err(Failure::Api("VDI_IN_USE".into(), vec!["a".into()]))));
        let cancelled = ended(json!({"status": "cancelled", "error_info": []}));
        assert_eq!(cancelled, Some(Err(Failure::Api("TASK_CANCELLED".into(), vec![]))));
    }
}
