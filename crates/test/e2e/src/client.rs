//! NBD clients.

use std::path::Path;
use std::process::Command;

use crate::process::{Finished, TOOL_LIMIT, run, run_within};

/// A command that finds the distribution's Python and its `nbd` module, whatever Python the developer put first.
fn with_system_path(program: &str) -> Command {
    let mut command = Command::new(program);
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("/usr/bin:/bin:/usr/sbin:/sbin:{path}"));
    command
}

/// Runs a tool with arguments.
#[track_caller]
pub fn tool(program: &str, args: &[&str]) -> Finished {
    run(with_system_path(program).args(args))
}

/// Runs Python statements in nbdsh with `h` connected to `uri`. A failed `assert` fails the test with its traceback.
#[track_caller]
pub fn nbdsh(uri: &str, script: &str) -> String {
    run(with_system_path("nbdsh").args(["-u", uri, "-c", script])).ok()
}

/// Runs Python statements in nbdsh with the structured-reply and meta-context handling that `uri` needs done by the
/// script itself; `uri` is bound to the variable `uri`.
#[track_caller]
pub fn nbdsh_unconnected(uri: &str, script: &str) -> String {
    let script = format!("uri = {uri:?}\n{script}");
    run(with_system_path("nbdsh").args(["-c", &script])).ok()
}

/// One field of `nbdinfo --json` for the first export.
#[track_caller]
pub fn nbdinfo(uri: &str) -> serde_json::Value {
    let text = tool("nbdinfo", &["--json", uri]).ok();
    let value: serde_json::Value = serde_json::from_str(&text)
        .unwrap_or_else(|error| panic!("nbdinfo printed something that is not JSON: {error}\n{text}"));
    value["exports"][0].clone()
}

/// The map of an export as `(offset, length, type)`, neighbours of one type merged by nbdinfo; type bit 0 is a hole,
/// bit 1 reads as zeroes.
#[track_caller]
pub fn nbd_map(uri: &str) -> Vec<(u64, u64, u64)> {
    let text = tool("nbdinfo", &["--map", "--json", uri]).ok();
    let value: serde_json::Value = serde_json::from_str(&text)
        .unwrap_or_else(|error| panic!("nbdinfo --map printed something that is not JSON: {error}\n{text}"));
    let rows = value.as_array().unwrap_or_else(|| panic!("nbdinfo --map printed no list: {text}"));
    let number = |row: &serde_json::Value, key: &str| {
        row[key].as_u64().unwrap_or_else(|| panic!("no number {key:?} in {row}"))
    };
    rows.iter().map(|row| (number(row, "offset"), number(row, "length"), number(row, "type"))).collect()
}

/// Copies an export into a raw file, whole.
#[track_caller]
pub fn copy_out(uri: &str, to: &Path) {
    run_within(with_system_path("nbdcopy").arg(uri).arg(to), TOOL_LIMIT * 3).ok();
}

/// `sha256sum` of a file.
#[track_caller]
pub fn sha256(path: &Path) -> String {
    let line = run(Command::new("sha256sum").arg(path)).ok();
    line.split_whitespace().next().unwrap_or_default().to_string()
}

/// A file of `len` bytes that no compression, hole detection or offset mistake can imitate.
#[track_caller]
pub fn random_file(path: &Path, len: u64) {
    use std::io::Read;
    let source = std::fs::File::open("/dev/urandom").expect("every Linux has /dev/urandom");
    let mut to =
        std::fs::File::create(path).unwrap_or_else(|e| panic!("cannot create {}: {e}", path.display()));
    std::io::copy(&mut source.take(len), &mut to)
        .unwrap_or_else(|e| panic!("filling {}: {e}", path.display()));
}
