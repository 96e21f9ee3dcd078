//! `tap-ctl list` in its two forms, and as JSON.

use std::fmt::Write;
use std::io::{self, IsTerminal};

use tapio_control::{ListRow, RunDir};

use tapio_report::failure::{Result, print, print_json};

/// What to leave out.
#[derive(Debug, Default)]
pub struct Filter {
    pub pid: Option<i32>,
    pub minor: Option<i32>,
    pub kind: Option<String>,
    pub file: Option<String>,
}

impl Filter {
    fn takes(&self, row: &ListRow) -> bool {
        (self.pid.is_none() || row.pid == self.pid)
            && (self.minor.is_none() || row.minor == self.minor)
            && (self.kind.is_none() || row.kind == self.kind)
            && (self.file.is_none() || row.path == self.file)
    }
}

pub fn run(run: &RunDir, filter: &Filter, json: bool) -> Result<()> {
    let mut rows = match filter.pid {
        Some(pid) => tapio_control::list_process(run, pid)?,
        None => tapio_control::list(run)?,
    };
    rows.retain(|row| filter.takes(row));
    if json {
        return print_json(&rows);
    }
    let form = if io::stdout().is_terminal() { table_row } else { pairs };
    print(&rows.iter().map(form).collect::<String>())
}

/// `0`, or a number with its prefix, as C prints it with `%#x`.
fn hex(state: i32) -> String {
    if state == 0 { "0".into() } else { format!("{state:#x}") }
}

fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".into(), |value| value.to_string())
}

/// For people.
fn table_row(row: &ListRow) -> String {
    format!(
        "{:>8} {:>4} {:>4} {:>10} {}\n",
        or_dash(row.pid),
        or_dash(row.minor),
        or_dash(row.state.map(hex)),
        or_dash(row.kind.as_ref()),
        or_dash(row.path.as_ref())
    )
}

/// For programs: only what is known.
fn pairs(row: &ListRow) -> String {
    let mut line = String::new();
    let mut pair = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            let space = if line.is_empty() { "" } else { " " };
            // Writing to a string cannot fail.
            let _ = write!(line, "{space}{name}={value}");
        }
    };
    pair("pid", row.pid.map(|pid| pid.to_string()));
    pair("minor", row.minor.map(|minor| minor.to_string()));
    pair("state", row.state.map(hex));
    pair("args", row.kind.as_ref().zip(row.path.as_ref()).map(|(kind, path)| format!("{kind}:{path}")));
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open() -> ListRow {
        ListRow {
            pid: Some(22688),
            minor: Some(1),
            state: Some(0x2a),
            kind: Some("vhd".into()),
            path: Some("/dev/VG/VHD 1".into()),
        }
    }

    #[test]
    fn both_forms_are_the_published_ones() {
        let process = ListRow { pid: Some(7), ..ListRow::default() };
        let number = ListRow { minor: Some(3), ..ListRow::default() };
        let attached = ListRow { pid: Some(7), minor: Some(0), state: Some(0), ..ListRow::default() };
        assert_eq!(pairs(&open()), "pid=22688 minor=1 state=0x2a args=vhd:/dev/VG/VHD 1\n");
        assert_eq!(pairs(&process), "pid=7\n");
        assert_eq!(pairs(&number), "minor=3\n");
        assert_eq!(pairs(&attached), "pid=7 minor=0 state=0\n");
        assert_eq!(table_row(&open()), "   22688    1 0x2a        vhd /dev/VG/VHD 1\n");
        assert_eq!(table_row(&number), "       -    3    -          - -\n");
        assert_eq!(table_row(&attached), "       7    0    0          - -\n");
    }

    #[test]
    fn filters_leave_out_what_is_not_known() {
        let filter = |kind: Option<&str>, file: Option<&str>| Filter {
            kind: kind.map(Into::into),
            file: file.map(Into::into),
            ..Filter::default()
        };
        assert!(filter(Some("vhd"), Some("/dev/VG/VHD 1")).takes(&open()));
        assert!(!filter(Some("aio"), None).takes(&open()));
        assert!(!filter(None, Some("/other")).takes(&ListRow::default()));
        assert!(Filter { minor: Some(1), ..Filter::default() }.takes(&open()));
        assert!(!Filter { pid: Some(1), ..Filter::default() }.takes(&open()));
    }
}
