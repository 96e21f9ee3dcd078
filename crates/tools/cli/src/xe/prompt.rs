//! A question on the terminal.

use std::fs;
use std::io::{self, BufRead, IsTerminal, Write};

use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};

/// Asks on the terminal, without showing what is typed; none where there is no terminal.
pub fn hidden(question: &str) -> Option<String> {
    let terminal = fs::OpenOptions::new().read(true).write(true).open("/dev/tty").ok()?;
    if !terminal.is_terminal() {
        return None;
    }
    let before = tcgetattr(&terminal).ok()?;
    let mut hidden = before.clone();
    hidden.local_modes.remove(LocalModes::ECHO);
    let _ = tcsetattr(&terminal, OptionalActions::Flush, &hidden);
    let mut answer = String::new();
    let read =
        write!(&terminal, "{question}").and_then(|()| io::BufReader::new(&terminal).read_line(&mut answer));
    let _ = tcsetattr(&terminal, OptionalActions::Flush, &before);
    // The line end that was not shown.
    let _ = writeln!(&terminal);
    read.ok()?;
    Some(answer.trim_end_matches(['\r', '\n']).to_owned())
}
