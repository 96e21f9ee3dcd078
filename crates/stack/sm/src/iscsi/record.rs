//! The records of open-iscsi's database: files with `name = value` in each line, that root alone reads.
//!
//! User names and passwords are written into the files. `iscsiadm --op update --value` would have them as an argument,
//! and arguments of a process are read by every user of the host.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use super::name::{Node, Portal};
use crate::scsi::Tree;

/// Where distributions have the database.
const ROOTS: &[&str] = &["/etc/iscsi", "/var/lib/iscsi"];
/// A comment in the records that Tapio made: open-iscsi leaves it alone.
const MARK: &str = "# made by tapio";

/// A record, found by what it is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// The directory of the database.
    root: PathBuf,
    path: PathBuf,
}

impl Record {
    /// The record with which a session to a target begins.
    pub(super) fn of_node(tree: &Tree, node: &Node) -> Option<Self> {
        let stem = stem(node.portal);
        ROOTS.iter().map(|root| tree.at(root)).find_map(|root| {
            let directory = root.join("nodes").join(&node.name);
            let begins = |name: &String| *name == stem || name.starts_with(&format!("{stem},"));
            let name = tree.names(&directory).into_iter().find(begins)?;
            let path = directory.join(name);
            // The tag of a portal group makes it a directory with a file for each interface.
            let path = if path.is_dir() { path.join("default") } else { path };
            path.is_file().then_some(Self { root, path })
        })
    }

    /// The record with which a portal is asked for its targets.
    pub(super) fn of_discovery(tree: &Tree, portal: Portal) -> Option<Self> {
        ROOTS.iter().map(|root| tree.at(root)).find_map(|root| {
            let path = root.join("send_targets").join(stem(portal)).join("st_config");
            path.is_file().then_some(Self { root, path })
        })
    }

    pub(super) fn text(&self) -> io::Result<String> {
        fs::read_to_string(&self.path)
    }

    /// Whether Tapio made it.
    pub(super) fn is_ours(&self) -> bool {
        self.text().is_ok_and(|text| text.lines().any(|line| line == MARK))
    }

    /// Puts the values in, and marks the record.
    ///
    /// # Errors
    /// The file system's; the record is as it was.
    pub(super) fn set(&self, values: &[(&str, String)]) -> io::Result<()> {
        self.put(&with_values(&self.text()?, values))
    }

    /// Replaces the record by another text, as a whole. No other user can read it at any time.
    ///
    /// # Errors
    /// The file system's; the record is as it was.
    pub(super) fn put(&self, text: &str) -> io::Result<()> {
        // Beside a record, open-iscsi would take another file for one more record.
        let beside =
            self.root.join(format!(".tapio-{}-{:?}", std::process::id(), std::thread::current().id()));
        let written = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&beside)
            .and_then(|mut file| {
                file.write_all(text.as_bytes())?;
                file.sync_all()
            })
            .and_then(|()| fs::rename(&beside, &self.path));
        written.inspect_err(|_| {
            let _ = fs::remove_file(&beside);
        })
    }

    /// Removes a record of a discovery, with its directory. Links to records of targets stay with it.
    pub(super) fn remove_discovery(&self) {
        let _ = fs::remove_file(&self.path);
        if let Some(directory) = self.path.parent() {
            let _ = fs::remove_dir(directory);
        }
    }
}

fn stem(portal: Portal) -> String {
    format!("{},{}", portal.address, portal.port)
}

/// A record with other values; an empty one leaves its line out.
fn with_values(text: &str, values: &[(&str, String)]) -> String {
    let is_set = |line: &str| {
        let name = line.split('=').next().unwrap_or_default().trim();
        line == MARK || values.iter().any(|(key, _)| *key == name)
    };
    let kept = text.lines().filter(|line| !is_set(line) && *line != "# END RECORD");
    let mut lines: Vec<String> = kept.map(str::to_owned).collect();
    let at = usize::from(lines.first().is_some_and(|line| line.starts_with('#')));
    lines.insert(at.min(lines.len()), MARK.to_owned());
    let given = values.iter().filter(|(_, value)| !value.is_empty());
    lines.extend(given.map(|(name, value)| format!("{name} = {value}")));
    lines.push("# END RECORD\n".to_owned());
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_record_gets_values_and_no_other_user_reads_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let tree = Tree::new(dir.path());
        let node = Node { portal: Portal::parse("10.0.0.1:3260").expect("a portal"), name: "iqn.a:b".into() };
        assert_eq!(Record::of_node(&tree, &node), None);
        let place = dir.path().join("etc/iscsi/nodes/iqn.a:b");
        fs::create_dir_all(&place).expect("made");
        let before =
            "# BEGIN RECORD 2.1.8\nnode.tpgt = -1\nnode.session.auth.authmethod = None\n# END RECORD\n";
        fs::write(place.join("10.0.0.1,3260"), before).expect("written");
        let record = Record::of_node(&tree, &node).expect("a record");
        assert!(!record.is_ours());
        let values = |password: &str| {
            [
                ("node.session.auth.authmethod", "CHAP".to_owned()),
                ("node.session.auth.password", password.to_owned()),
                ("node.session.auth.password_in", String::new()),
            ]
        };
        record.set(&values("first")).expect("set");
        record.set(&values("second = x")).expect("set");
        assert!(record.is_ours());
        assert_eq!(
            record.text().expect("text"),
            "# BEGIN RECORD 2.1.8\n# made by tapio\nnode.tpgt = -1\nnode.session.auth.authmethod = CHAP\n\
             node.session.auth.password = second = x\n# END RECORD\n"
        );
        let mode = fs::metadata(place.join("10.0.0.1,3260")).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        // With the tag of a portal group.
        fs::remove_file(place.join("10.0.0.1,3260")).expect("removed");
        fs::create_dir(place.join("10.0.0.1,3260,1")).expect("made");
        fs::write(place.join("10.0.0.1,3260,1/default"), before).expect("written");
        let record = Record::of_node(&tree, &node).expect("a record");
        record.set(&values("third")).expect("set");
        let names = tree.names(&place.join("10.0.0.1,3260,1"));
        assert_eq!(names, ["default"], "nothing that could be one more record");
    }
}
