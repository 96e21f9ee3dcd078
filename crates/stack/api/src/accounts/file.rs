//! The file of accounts: a line each, `KIND ROLE NAME [HASH]`.
//!
//! ```text
//! own      vm-admin       alice   $argon2id$v=19$m=19456,t=2,p=1$...
//! system   pool-operator  bob
//! group    pool-admin     wheel
//! ```

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use tapio_model::Role;

use super::hash::{self, Memory};
use crate::files;

/// A larger file is none of ours.
const FILE_LEN_MAX: u64 = 1 << 20;

/// What a line is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// An account of the toolstack's own, with a hash.
    Own,
    /// An account of the system.
    System,
    /// All accounts of a group of the system.
    Group,
}

/// One line.
#[derive(Clone, PartialEq, Eq)]
pub struct Row {
    /// What it is about.
    pub kind: RowKind,
    /// What it may do.
    pub role: Role,
    /// Of the account or group.
    pub name: String,
    /// Of its password.
    pub hash: Option<String>,
}

impl std::fmt::Debug for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A hash can be guessed at: it is not for logs.
        write!(f, "{} {} {}", kind_word(self.kind), self.role.name(), self.name)
    }
}

const KINDS: [(RowKind, &str); 3] =
    [(RowKind::Own, "own"), (RowKind::System, "system"), (RowKind::Group, "group")];

fn kind_word(kind: RowKind) -> &'static str {
    KINDS.iter().find(|(known, _)| *known == kind).map_or("", |(_, word)| word)
}

/// The file.
#[derive(Debug)]
pub struct AccountFile {
    path: PathBuf,
}

impl AccountFile {
    /// The file at this path; it need not be there yet.
    pub const fn new(path: PathBuf) -> Self {
        Self { path }
    }

    fn told(&self, error: impl std::fmt::Display) -> String {
        format!("{}: {error}", self.path.display())
    }

    /// All lines.
    ///
    /// # Errors
    /// A sentence with the file and the line that is wrong.
    pub fn rows(&self) -> Result<Vec<Row>, String> {
        let len = match fs::metadata(&self.path) {
            Ok(data) => data.len(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(self.told(error)),
        };
        if len > FILE_LEN_MAX {
            return Err(self.told("larger than any list of accounts"));
        }
        let text = fs::read_to_string(&self.path).map_err(|error| self.told(error))?;
        rows_of(&text).map_err(|why| self.told(why))
    }

    /// Whether bytes are such a file.
    ///
    /// # Errors
    /// A sentence with the line that is wrong.
    pub fn check(bytes: &[u8]) -> Result<(), String> {
        if bytes.len() as u64 > FILE_LEN_MAX {
            return Err("larger than any list of accounts".to_owned());
        }
        let text = std::str::from_utf8(bytes).map_err(|_| "it is no text".to_owned())?;
        rows_of(text).map(drop)
    }

    /// Adds an account or group, or gives it another role; an own account needs a password.
    ///
    /// # Errors
    /// The name or password will not do, or the file cannot be written.
    pub fn add(&self, kind: RowKind, name: &str, role: Role, password: Option<&str>) -> Result<(), String> {
        if !name_is_fit(name) {
            return Err(format!("'{name}' is no name: 1 to 64 letters, digits and any of . _ - @ will do"));
        }
        let hash = match (kind, password) {
            (RowKind::Own, Some(password)) => Some(Memory::default().hash(password)?),
            (RowKind::Own, None) => return Err(format!("{name} needs a password")),
            _ => None,
        };
        self.change(|rows| {
            rows.retain(|row| row.kind != kind || row.name != name);
            rows.push(Row { kind, role, name: name.to_owned(), hash });
            Ok(())
        })
    }

    /// Removes an account or group.
    ///
    /// # Errors
    /// There is none, or the file cannot be written.
    pub fn remove(&self, kind: RowKind, name: &str) -> Result<(), String> {
        self.change(|rows| {
            let before = rows.len();
            rows.retain(|row| row.kind != kind || row.name != name);
            if rows.len() == before {
                Err(format!("there is no {} account '{name}'", kind_word(kind)))
            } else {
                Ok(())
            }
        })
    }

    /// Gives an own account another password; answers its row.
    ///
    /// # Errors
    /// There is none, the password will not do, or the file cannot be written.
    pub fn set_password(&self, name: &str, password: &str) -> Result<Row, String> {
        self.set_hash(name, Memory::default().hash(password)?)
    }

    /// The same with a hash that was made elsewhere.
    pub(super) fn set_hash(&self, name: &str, hash: String) -> Result<Row, String> {
        self.change(|rows| {
            let row = rows.iter_mut().find(|row| row.kind == RowKind::Own && row.name == name);
            let row = row.ok_or_else(|| format!("there is no account '{name}'"))?;
            row.hash = Some(hash);
            Ok(row.clone())
        })
    }

    /// Reads, changes and replaces the file, one process after the other.
    fn change<T>(&self, change: impl FnOnce(&mut Vec<Row>) -> Result<T, String>) -> Result<T, String> {
        let lock_path = self.path.with_extension("lock");
        let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&lock_path);
        let lock: File = lock.map_err(|error| format!("{}: {error}", lock_path.display()))?;
        lock.lock().map_err(|error| format!("{}: {error}", lock_path.display()))?;
        let mut rows = self.rows()?;
        let answer = change(&mut rows)?;
        let mut text = String::from("# Accounts of tapiod; 'tapiod user' changes this file.\n");
        for Row { kind, role, name, hash } in rows {
            let line = [kind_word(kind), role.name(), &name, hash.as_deref().unwrap_or_default()].join(" ");
            text.push_str(line.trim_end());
            text.push('\n');
        }
        files::replace(&self.path, text.as_bytes()).map_err(|error| self.told(error))?;
        Ok(answer)
    }
}

fn rows_of(text: &str) -> Result<Vec<Row>, String> {
    let lines =
        text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
    lines.map(|(at, line)| row(line).map_err(|why| format!("line {}: {why}", at + 1))).collect()
}

fn row(line: &str) -> Result<Row, String> {
    let expected = || "'KIND ROLE NAME [HASH]' is expected".to_owned();
    let words: Vec<&str> = line.split_whitespace().collect();
    let (kind, role, name, hash) = match *words {
        [kind, role, name] => (kind, role, name, None),
        [kind, role, name, hash] => (kind, role, name, Some(hash)),
        _ => return Err(expected()),
    };
    let kind = KINDS.iter().find(|(_, word)| *word == kind).ok_or_else(expected)?.0;
    match (kind, hash) {
        (RowKind::Own, Some(hash)) => hash::check(hash)?,
        (RowKind::Own, None) | (_, Some(_)) => return Err(expected()),
        (_, None) => {}
    }
    let role = Role::named(role).filter(|_| name_is_fit(name)).ok_or_else(expected)?;
    Ok(Row { kind, role, name: name.to_owned(), hash: hash.map(str::to_owned) })
}

fn name_is_fit(name: &str) -> bool {
    let fit = |c: char| c.is_ascii_alphanumeric() || "._-@".contains(c);
    (1..=64).contains(&name.len()) && name.chars().all(fit) && !name.starts_with('-')
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn file() -> (tempfile::TempDir, AccountFile) {
        let dir = tempfile::tempdir().expect("a directory");
        let file = AccountFile::new(dir.path().join("accounts"));
        (dir, file)
    }

    #[test]
    fn accounts_come_go_and_change() {
        let (dir, file) = file();
        assert_eq!(file.rows(), Ok(Vec::new()));
        file.add(RowKind::Own, "alice", Role::VmAdmin, Some("correct horse")).expect("added");
        file.add(RowKind::Group, "wheel", Role::PoolAdmin, None).expect("added");
        file.add(RowKind::System, "alice", Role::ReadOnly, None).expect("added");
        let mode = fs::metadata(dir.path().join("accounts")).expect("the file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let hash = |file: &AccountFile| file.rows().expect("rows")[0].hash.clone().expect("a hash");
        let verify = |hash: &str, password: &str| Memory::default().verify(Some(hash), password);
        assert!(verify(&hash(&file), "correct horse"));
        assert!(!verify(&hash(&file), "correct horsf"));
        let before = hash(&file);
        file.set_password("alice", "battery staple").expect("changed");
        assert_ne!(before, hash(&file));
        assert!(verify(&hash(&file), "battery staple"));
        assert!(!format!("{:?}", file.rows()).contains("argon2"), "a hash is not for logs");
        file.remove(RowKind::Own, "alice").expect("removed");
        assert!(file.remove(RowKind::Own, "alice").expect_err("gone").contains("no own account"));
        assert_eq!(file.rows().expect("rows").len(), 2);
        assert!(file.set_password("alice", "battery staple").is_err());
    }

    #[test]
    fn what_will_not_do_is_refused_and_nothing_changes() {
        let (_dir, file) = file();
        file.add(RowKind::Own, "alice", Role::VmAdmin, Some("correct horse")).expect("added");
        let before = file.rows();
        for (name, password) in [
            ("a b", "long enough"),
            ("", "long enough"),
            ("-x", "long enough"),
            ("bob", "short"),
            ("bob", &"x".repeat(2000)),
        ] {
            assert!(file.add(RowKind::Own, name, Role::ReadOnly, Some(password)).is_err(), "{name}");
        }
        assert!(file.add(RowKind::Own, "bob", Role::ReadOnly, None).is_err());
        assert_eq!(file.rows(), before);
    }

    #[test]
    fn a_wrong_line_is_told_by_number() {
        let (dir, file) = file();
        for line in [
            "own vm-admin alice",
            "own king alice $x",
            "group pool-admin",
            "own vm-admin a nohash",
            "system read-only b h",
        ] {
            fs::write(dir.path().join("accounts"), format!("# c\n\n{line}\n")).expect("written");
            assert!(file.rows().expect_err(line).contains("line 3"), "{line}");
        }
    }
}
