//! Which programs there are, and how a test says that it cannot run.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The top of the repository.
pub fn repository() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.ancestors().nth(3).expect("crates/test/e2e lies three levels below the top").to_path_buf()
}

/// Finds a program in PATH and the system directories, which an ordinary user's PATH may lack.
pub fn find(tool: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(system).map(|dir| dir.join(tool)).find(|file| {
        file.metadata().is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
    })
}

/// The first of `tools` that is not installed.
pub fn missing<'a>(tools: &[&'a str]) -> Option<&'a str> {
    tools.iter().copied().find(|tool| find(tool).is_none())
}

/// Prints that the running test is skipped, past the test harness's capture, so that it is always seen.
///
/// The line has the form `skipped: REASON [TEST]`; the test run compares REASON with `tests/skips.allowed`. A test
/// prints one such line and returns.
pub fn skip(reason: &str) {
    let thread = std::thread::current();
    let line = format!("\nskipped: {reason} [{}]\n", thread.name().unwrap_or("unnamed"));
    // One write, so that lines of parallel tests do not mix. No report is possible if standard error is closed.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Returns from the test with a skip line when one of the named programs is not installed.
#[macro_export]
macro_rules! needs {
    ($($tool:expr),+ $(,)?) => {
        if let Some(tool) = $crate::tools::missing(&[$($tool),+]) {
            $crate::tools::skip(&format!("needs {tool}"));
            return;
        }
    };
}

/// A program of ours: beside the test (`target/debug`), or in `TAPIO_BIN_DIR`.
#[track_caller]
pub fn our(program: &str) -> PathBuf {
    let dir = std::env::var_os("TAPIO_BIN_DIR").map_or_else(
        || {
            let exe = std::env::current_exe().expect("the running program has a path");
            let dir = exe.parent().expect("a program lies in a directory");
            // A test lies in target/PROFILE/deps, a program in target/PROFILE.
            let is_test = dir.ends_with("deps");
            dir.ancestors().nth(usize::from(is_test)).expect("deps lies in a directory").to_path_buf()
        },
        PathBuf::from,
    );
    let file = dir.join(program);
    assert!(file.exists(), "{} is not built: run `cargo build --workspace --bins` first", file.display());
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_not_installed_is_missing() {
        assert_eq!(missing(&["sh", "no-such-program-here", "cat"]), Some("no-such-program-here"));
        assert_eq!(missing(&["sh", "cat"]), None);
    }

    #[test]
    fn the_repository_is_the_directory_with_the_lock_file() {
        assert!(repository().join("Cargo.lock").exists());
    }
}
