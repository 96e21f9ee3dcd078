//! `tapiod user`: the accounts that may log in.

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::Path;

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use tapio_api::accounts::{AccountFile, FILE, RowKind};
use tapio_model::Role;
use zeroize::Zeroizing;

use crate::args::{User, Which};

/// Longest line of a password.
const PASSWORD_LINE_MAX: usize = 4096;

/// Does a command on the accounts of a state directory.
///
/// # Errors
/// A sentence.
pub fn run(state_dir: &Path, command: User) -> Result<(), String> {
    let file = AccountFile::new(state_dir.join(FILE));
    match command {
        User::Add { name, role, which } => {
            let role = Role::named(&role)
                .ok_or_else(|| format!("--role {role}: one of {} is expected", names_of_roles()))?;
            crate::dirs::make_dir(state_dir, crate::dirs::OURS)?;
            let kind = kind(which);
            let password = if kind == RowKind::Own { Some(password(&name)?) } else { None };
            file.add(kind, &name, role, password.as_deref().map(String::as_str))
        }
        User::Passwd { name } => {
            if !file.rows()?.iter().any(|row| row.kind == RowKind::Own && row.name == name) {
                return Err(format!("there is no account '{name}': 'tapiod user list' shows them"));
            }
            let password = password(&name)?;
            file.set_password(&name, &password).map(drop)
        }
        User::Remove { name, which } => file.remove(kind(which), &name),
        User::List => {
            let mut out = String::new();
            for row in file.rows()? {
                let kind = match row.kind {
                    RowKind::Own => "own",
                    RowKind::System => "system",
                    RowKind::Group => "group",
                };
                out.push_str(&format!("{:<8} {:<14} {}\n", kind, row.role.name(), row.name));
            }
            io::stdout().write_all(out.as_bytes()).map_err(|error| format!("standard output: {error}"))
        }
    }
}

/// The names of all roles, the greatest first.
fn names_of_roles() -> String {
    let names: Vec<&str> = Role::ALL.iter().rev().map(|role| role.name()).collect();
    names.join(", ")
}

const fn kind(which: Which) -> RowKind {
    match which {
        Which { group: true, .. } => RowKind::Group,
        Which { system: true, .. } => RowKind::System,
        _ => RowKind::Own,
    }
}

/// A line of standard input; from a terminal it is asked for, twice, and not shown.
fn password(name: &str) -> Result<Zeroizing<String>, String> {
    let stdin = io::stdin();
    if !stdin.is_terminal() {
        return line();
    }
    let hidden = Hidden::begin();
    eprint!("Password for {name}: ");
    let first = line();
    eprint!("\nThe same again: ");
    let second = line();
    eprintln!();
    drop(hidden);
    let (first, second) = (first?, second?);
    if first == second { Ok(first) } else { Err("the two are not the same; nothing was changed".to_owned()) }
}

fn line() -> Result<Zeroizing<String>, String> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(PASSWORD_LINE_MAX));
    let mut stdin = io::Read::take(io::stdin().lock(), PASSWORD_LINE_MAX as u64);
    stdin.read_until(b'\n', &mut bytes).map_err(|error| format!("standard input: {error}"))?;
    let text = std::str::from_utf8(&bytes).map_err(|_| "the password is not UTF-8".to_owned())?;
    let text = text.trim_end_matches(['\r', '\n']);
    if text.is_empty() {
        return Err("no password on standard input".to_owned());
    }
    Ok(Zeroizing::new(text.to_owned()))
}

/// A terminal that does not show what is typed, until it is dropped.
struct Hidden(Option<Termios>);

impl Hidden {
    fn begin() -> Self {
        let Ok(before) = tcgetattr(io::stdin()) else { return Self(None) };
        let mut settings = before.clone();
        settings.local_modes.remove(LocalModes::ECHO);
        let _ = tcsetattr(io::stdin(), OptionalActions::Flush, &settings);
        Self(Some(before))
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = tcsetattr(io::stdin(), OptionalActions::Flush, before);
        }
    }
}
