//! A question on the terminal.

use std::fs;
use std::io::{self, BufRead, IsTerminal, Write};
use std::os::fd::AsRawFd;

/// Asks on the terminal, without showing what is typed; none where there is no terminal.
pub fn hidden(question: &str) -> Option<String> {
    let terminal = fs::OpenOptions::new().read(true).write(true).open("/dev/tty").ok()?;
    if !terminal.is_terminal() {
        return None;
    }
    let fd = terminal.as_raw_fd();
    // SAFETY: termios is plain data, all zeroes are a value of it.
    let mut before: libc::termios = unsafe { std::mem::zeroed() };
    // SAFETY: `fd` is open as long as `terminal` lives, and the structure is ours.
    if unsafe { libc::tcgetattr(fd, &mut before) } != 0 {
        return None;
    }
    let mut hidden = before;
    hidden.c_lflag &= !libc::ECHO;
    // SAFETY: as above.
    unsafe { libc::tcsetattr(fd, libc::TCSAFLUSH, &hidden) };
    let mut answer = String::new();
    let read =
        write!(&terminal, "{question}").and_then(|()| io::BufReader::new(&terminal).read_line(&mut answer));
    // SAFETY: as above.
    unsafe { libc::tcsetattr(fd, libc::TCSAFLUSH, &before) };
    // The line end that was not shown.
    let _ = writeln!(&terminal);
    read.ok()?;
    Some(answer.trim_end_matches(['\r', '\n']).to_owned())
}
