//! Contents of disks to files and from files, over HTTP, with what was cut off resumed.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderName, IF_MATCH, RANGE};
use hyper::{Method, Response, StatusCode};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;

use super::{Command, command};
use crate::xe::error::{Failure, Result};
use crate::xe::out;
use crate::xe::session::Session;
use crate::xe::task;

pub(super) static COMMANDS: &[Command] = &[
    command(
        "vdi-export",
        &["uuid", "filename"],
        &["format", "base", "progress"],
        "Writes the contents of a VDI to a file, raw or as a VHD, or the difference to another VDI (format=vhd base=UUID)",
        export,
    ),
    command(
        "vdi-import",
        &["uuid", "filename"],
        &["format", "progress"],
        "Reads the contents of a VDI from a file, raw or a VHD",
        import,
    ),
];

/// Attempts in a row that bring nothing, before the command fails.
const ATTEMPTS_MAX: u32 = 5;

/// Between two attempts, the longer the more have failed.
pub(super) const PAUSE: Duration = Duration::from_millis(500);

/// Bytes that are read from a file at once.
const PIECE_LEN: usize = 256 << 10;

/// Longest text of an error that is read.
const TEXT_LEN_MAX: usize = 64 << 10;

/// A file between its first byte and its last, and the bar.
pub(super) struct Bar {
    pub(super) bar: ProgressBar,
    is_told: bool,
    told: u64,
}

impl Bar {
    /// A bar on a terminal; elsewhere lines, if the command line asks for them (`--progress`).
    pub(super) fn new(session: &Session, what: &str) -> Result<Self> {
        let template =
            format!("{what} [{{bar:40}}] {{bytes}} of {{total_bytes}}  {{bytes_per_sec}}  {{eta}}");
        Self::with(session, &template)
    }

    /// One that follows the progress of a task.
    pub(super) fn of_task(session: &Session, what: &str) -> Result<Self> {
        Self::with(session, &format!("{what} [{{bar:40}}] {{percent}} %  {{eta}}"))
    }

    fn with(session: &Session, template: &str) -> Result<Self> {
        let is_asked = session.truth("progress", false)?;
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("#>."));
        }
        let is_told = is_asked && bar.is_hidden();
        Ok(Self { bar, is_told, told: 0 })
    }

    pub(super) fn at(&mut self, done: u64, len: u64) {
        self.bar.set_length(len);
        self.bar.set_position(done);
        let percent = done.saturating_mul(100).checked_div(len).unwrap_or(100);
        if self.is_told && (percent >= self.told + 10 || (percent == 100 && self.told < 100)) {
            self.told = percent / 10 * 10;
            eprintln!("{percent} %");
        }
    }

    fn say(&self, text: &str) {
        self.bar.suspend(|| eprintln!("{text}"));
    }
}

fn format(session: &Session) -> Result<&str> {
    match session.or("format", "raw") {
        format @ ("raw" | "vhd") => Ok(format),
        other => Err(Failure::other(format!("format={other}: raw and vhd are known"))),
    }
}

pub(super) fn file_error(path: &Path, error: &std::io::Error) -> Failure {
    Failure::other(format!("{}: {error}", path.display()))
}

/// A task for one attempt; destroyed when its end is known.
pub(super) struct Attempt<'a> {
    session: &'a Session,
    pub(super) task: String,
}

impl<'a> Attempt<'a> {
    pub(super) fn new(session: &'a Session, name: &str) -> Result<Self> {
        let task = session.text("task.create", &[name.into(), "".into()])?;
        Ok(Self { session, task })
    }

    /// Gives it up where its request did not reach the server, which would never end it.
    pub(super) fn drop_unseen(&self) -> Result<bool> {
        let task = Value::from(self.task.as_str());
        let record = self.session.call("task.get_record", std::slice::from_ref(&task))?;
        // The server takes "destroy" away from a task that it works on.
        let allowed = record.get("allowed_operations").and_then(Value::as_array);
        let is_ours = allowed.is_some_and(|words| words.iter().any(|word| word == "destroy"));
        if record.get("status").and_then(Value::as_str) != Some("pending") || !is_ours {
            return Ok(false);
        }
        self.session.call("task.destroy", &[task])?;
        Ok(true)
    }

    /// How it ended, and what its `other_config` says then.
    pub(super) fn end(self) -> Result<(Result<String>, Value)> {
        let ended = task::follow(&self.session.client, &self.task)?;
        let config = self.session.call("task.get_other_config", &[self.task.as_str().into()])?;
        // What it came to is known; that it could not be cleared away changes nothing of that.
        let _ = self.session.call("task.destroy", &[self.task.as_str().into()]);
        Ok((ended, config))
    }
}

/// Counts attempts that bring nothing.
#[derive(Default)]
struct Patience {
    failed: u32,
    best: u64,
}

impl Patience {
    /// Whether to try again after an attempt that came to this place.
    fn goes_on(&mut self, place: u64) -> bool {
        self.failed = if place > self.best { 0 } else { self.failed + 1 };
        self.best = self.best.max(place);
        if self.failed >= ATTEMPTS_MAX {
            return false;
        }
        std::thread::sleep(PAUSE * (self.failed + 1));
        true
    }
}

/// What a server answers that refuses: the error of the task, or its text.
pub(super) fn refused(attempt: Attempt<'_>, status: StatusCode, text: &str) -> Failure {
    match attempt.end() {
        Ok((Err(failure), _)) => failure,
        _ => Failure::other(format!("the server answered {status}: {text}")),
    }
}

pub(super) async fn text_of(answer: Response<Incoming>) -> String {
    let body = Limited::new(answer.into_body(), TEXT_LEN_MAX).collect().await;
    body.map(|body| String::from_utf8_lossy(&body.to_bytes()).into_owned()).unwrap_or_default()
}

/// The file of an export, which has its name when it is whole.
struct Target {
    file: File,
    part: PathBuf,
    done: u64,
    tag: Option<String>,
}

impl Target {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        // Holes instead of zeros: a raw disk is mostly empty.
        if bytes.iter().all(|&byte| byte == 0) {
            self.file.seek(SeekFrom::Current(i64::try_from(bytes.len()).unwrap_or(i64::MAX)))?;
        } else {
            self.file.write_all(bytes)?;
        }
        self.done += bytes.len() as u64;
        Ok(())
    }
}

/// A connection that is lost is an error to be dealt with, not the end of this program.
pub(super) fn outlive_lost_connections() {
    // SAFETY: the call sets how this process takes one signal, and reads no memory of ours.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

fn export(session: &Session) -> Result<()> {
    outlive_lost_connections();
    let format = format(session)?;
    let vdi = session.reference("VDI", "uuid")?;
    let mut query = format!("/export_raw_vdi?vdi={vdi}&format={format}");
    if session.arguments.get("base").is_some() {
        query.push_str(&format!("&base={}", session.reference("VDI", "base")?));
    }
    if out::is_served() {
        return export_there(session, &query);
    }
    let path = PathBuf::from(session.need("filename")?);
    if path.exists() {
        return Err(Failure::other(format!("{} is there already", path.display())));
    }
    let mut part = path.clone().into_os_string();
    part.push(".part");
    let part = PathBuf::from(part);
    let file = OpenOptions::new().write(true).create(true).truncate(true).open(&part);
    let file = file.map_err(|error| file_error(&part, &error))?;
    let mut target = Target { file, part, done: 0, tag: None };
    let written = download(session, &query, &mut target).and_then(|()| {
        let named = target
            .file
            .set_len(target.done)
            .and_then(|()| target.file.sync_all())
            .and_then(|()| std::fs::rename(&target.part, &path));
        named.map_err(|error| file_error(&path, &error))
    });
    written.inspect_err(|_| {
        // It is of no use to anything.
        let _ = std::fs::remove_file(&target.part);
    })
}

fn download(session: &Session, query: &str, target: &mut Target) -> Result<()> {
    let mut bar = Bar::new(session, "vdi-export")?;
    let mut patience = Patience::default();
    loop {
        let attempt = Attempt::new(session, "xe vdi-export")?;
        let lost = match session.client.wait(receive(session, query, &attempt, target, &mut bar))? {
            Received::Whole => {
                bar.bar.finish_and_clear();
                return attempt.end()?.0.map(drop);
            }
            Received::Refused(status, text) => return Err(refused(attempt, status, &text)),
            Received::Lost(why) => why,
        };
        // Until the server hears of it, the VDI is held by this attempt.
        if !attempt.drop_unseen()? {
            attempt.end()?.0.err();
        }
        if !patience.goes_on(target.done) {
            return Err(Failure::other(format!("the connection is lost again and again: {lost}")));
        }
        bar.say(&format!("the connection was lost ({lost}); going on at byte {}", target.done));
    }
}

enum Received {
    Whole,
    Lost(String),
    Refused(StatusCode, String),
}

async fn receive(
    session: &Session,
    query: &str,
    attempt: &Attempt<'_>,
    target: &mut Target,
    bar: &mut Bar,
) -> Result<Received> {
    let mut headers: Vec<(HeaderName, String)> = Vec::new();
    if let Some(tag) = target.tag.as_ref().filter(|_| target.done > 0) {
        headers.push((RANGE, format!("bytes={}-", target.done)));
        headers.push((IF_MATCH, tag.clone()));
    }
    let query = format!("{query}&task_id={}", attempt.task);
    let answer = match session.client.http(Method::GET, &query, &headers, Empty::<Bytes>::new()).await? {
        Ok(answer) => answer,
        Err(error) => return Ok(Received::Lost(error.to_string())),
    };
    let status = answer.status();
    if !status.is_success() {
        return Ok(Received::Refused(status, text_of(answer).await));
    }
    if status != StatusCode::PARTIAL_CONTENT {
        // A server without ranges sends everything again.
        let again = target.file.set_len(0).and_then(|()| target.file.rewind());
        again.map_err(|error| file_error(&target.part, &error))?;
        target.done = 0;
    }
    let header = |name: HeaderName| answer.headers().get(name)?.to_str().ok();
    target.tag = header(ETAG).map(str::to_owned);
    let len = header(CONTENT_LENGTH).and_then(|len| len.parse::<u64>().ok()).map(|len| target.done + len);
    let mut body = answer.into_body();
    while let Some(frame) = body.frame().await {
        let Ok(data) = (match frame {
            Ok(frame) => frame.into_data(),
            Err(error) => return Ok(Received::Lost(error.to_string())),
        }) else {
            continue;
        };
        target.write(&data).map_err(|error| file_error(&target.part, &error))?;
        bar.at(target.done, len.unwrap_or(target.done));
    }
    match len {
        Some(len) if target.done < len => Ok(Received::Lost("it ended early".to_owned())),
        _ => Ok(Received::Whole),
    }
}

/// Lets a client of another kind fetch a VDI into its file.
fn export_there(session: &Session, query: &str) -> Result<()> {
    let attempt = Attempt::new(session, "xe vdi-export")?;
    let path = format!("{query}&session_id={}&task_id={}", session.client.session(), attempt.task);
    let is_there = out::fetch(session.need("filename")?, &path).map_err(Failure::Other)?;
    if attempt.drop_unseen()? {
        return Err(Failure::other("the client did not fetch the VDI"));
    }
    match attempt.end()?.0 {
        Ok(_) if !is_there => Err(Failure::other("the client could not write the file")),
        ended => ended.map(drop),
    }
}

/// Reads a VDI from a file that a client of another kind sends: it waits for the answer before it does.
fn import_from_there(session: &Session, query: &str) -> Result<()> {
    let attempt = Attempt::new(session, "xe vdi-import")?;
    let path = format!("{query}&early=true&session_id={}&task_id={}", session.client.session(), attempt.task);
    let is_sent = out::put(session.need("filename")?, &path).map_err(Failure::Other)?;
    if attempt.drop_unseen()? {
        return Err(Failure::other("the client did not send the file"));
    }
    match attempt.end()?.0 {
        Ok(_) if !is_sent => Err(Failure::other("the client could not send all of the file")),
        ended => ended.map(drop),
    }
}

/// A file as the body of a request, from a place on.
pub(super) struct Source {
    pub(super) file: File,
    pub(super) left: u64,
}

impl Body for Source {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<std::io::Result<Frame<Bytes>>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        let mut piece = vec![0; usize::try_from(self.left).map_or(PIECE_LEN, |left| left.min(PIECE_LEN))];
        match self.file.read_exact(&mut piece) {
            Ok(()) => {
                self.left -= piece.len() as u64;
                Poll::Ready(Some(Ok(Frame::data(piece.into()))))
            }
            Err(error) => Poll::Ready(Some(Err(error))),
        }
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

fn import(session: &Session) -> Result<()> {
    outlive_lost_connections();
    let format = format(session)?;
    let vdi = session.reference("VDI", "uuid")?;
    if out::is_served() {
        return import_from_there(session, &format!("/import_raw_vdi?vdi={vdi}&format={format}"));
    }
    let path = PathBuf::from(session.need("filename")?);
    let failed = |error| file_error(&path, &error);
    let len = File::open(&path).and_then(|file| file.metadata()).map_err(failed)?.len();
    let query = format!("/import_raw_vdi?vdi={vdi}&format={format}");
    let mut bar = Bar::new(session, "vdi-import")?;
    let mut patience = Patience::default();
    let mut start = 0;
    loop {
        let attempt = Attempt::new(session, "xe vdi-import")?;
        let mut file = File::open(&path).map_err(failed)?;
        file.seek(SeekFrom::Start(start)).map_err(failed)?;
        let body = Source { file, left: len - start };
        let mut headers: Vec<(HeaderName, String)> = Vec::new();
        if start > 0 {
            headers.push((CONTENT_RANGE, format!("bytes {start}-{}/{len}", len - 1)));
        }
        let target = format!("{query}&task_id={}", attempt.task);
        let sent = async {
            let sending = session.client.http(Method::PUT, &target, &headers, body);
            tokio::pin!(sending);
            loop {
                tokio::select! {
                    answer = &mut sending => break match answer? {
                        Ok(answer) if answer.status().is_success() => Ok(Received::Whole),
                        Ok(answer) => Ok(Received::Refused(answer.status(), text_of(answer).await)),
                        Err(error) => Ok(Received::Lost(error.to_string())),
                    },
                    () = tokio::time::sleep(PAUSE) => {
                        let params = [Value::from(attempt.task.as_str())];
                        let progress = session.client.call_async("task.get_progress", &params).await;
                        if let Some(done) = progress.ok().as_ref().and_then(Value::as_f64) {
                            bar.at(start + (done * (len - start) as f64) as u64, len);
                        }
                    }
                }
            }
        };
        let lost = match session.client.wait(sent)? {
            Received::Whole => {
                bar.at(len, len);
                bar.bar.finish_and_clear();
                return attempt.end()?.0.map(drop);
            }
            Received::Refused(status, text) if status != StatusCode::BAD_REQUEST => {
                return Err(refused(attempt, status, &text));
            }
            Received::Refused(_, text) => text,
            Received::Lost(why) => why,
        };
        let (ended, config) = match attempt.drop_unseen()? {
            true => (Err(Failure::Api("IMPORT_ERROR_PREMATURE_EOF".to_owned(), Vec::new())), Value::Null),
            false => attempt.end()?,
        };
        match ended {
            // All of it had come.
            Ok(_) => return Ok(()),
            Err(Failure::Api(code, _)) if code == "IMPORT_ERROR_PREMATURE_EOF" => {}
            Err(failure) => return Err(failure),
        }
        // A VHD is sent again from its beginning.
        let received = config.get("received").and_then(Value::as_str).and_then(|place| place.parse().ok());
        start = received.filter(|place| *place < len).unwrap_or(0);
        if !patience.goes_on(start) {
            return Err(Failure::other(format!("the connection is lost again and again: {lost}")));
        }
        bar.say(&format!("the connection was lost; going on at byte {start}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_end_when_they_bring_nothing() {
        let mut patience = Patience { failed: ATTEMPTS_MAX - 2, best: 10 };
        assert!(patience.goes_on(11), "it came further");
        assert_eq!((patience.failed, patience.best), (0, 11));
        patience.failed = ATTEMPTS_MAX - 1;
        assert!(!patience.goes_on(11));
    }
}
