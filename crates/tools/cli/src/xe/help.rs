//! Help: the list of commands, and what each takes.

use std::collections::BTreeSet;

use tapio_model::columns::{Show, TABLES};

use super::arguments::XeArguments;
use super::commands::{self, Found};
use super::error::Failure;
use super::generic::VERBS;
use super::out::print;

/// Options of every command.
pub const OPTIONS: &str = "\
Options:
  -s SERVER       a host; without it the socket of this host
  -p PORT         443, or 80 with --nossl
  -u USER         an account; default: root
  -pwf FILE       a file with the password. XE_PASSWORD in the environment does the same; on a terminal it is asked for
  --nossl         plain HTTP: only for a network without other users
  --cafile FILE   trust certificates signed by these, instead of the one that was seen first
                  (~/.config/tapio/known_hosts)
  --socket PATH   the socket of this host (TAPIO_SOCKET); default: /run/tapio/xapi
  --minimal       values alone, with commas between them
  --json          lists and records as JSON
~/.xe may hold lines 'server=...', 'username=...', 'password=...'; XE_EXTRA_ARGS holds the same with commas.";

/// How parameters are given.
pub const AFTER: &str = "\
Parameters are NAME=VALUE; those of a map MAP:KEY=VALUE, as sm-config:type=raw. '--NAME' is NAME=true. Sizes take
bytes, KiB, MiB, GiB and TiB.

Examples:
  xe sr-create name-label=disks type=file device-config:location=/srv/disks
  xe vdi-create sr-uuid=... name-label=data virtual-size=10GiB
  xe vdi-list sr-name-label=disks params=uuid,name-label,physical-utilisation
  xe vm-param-get uuid=... param-name=other-config param-key=owner
  xe completion bash > /etc/bash_completion.d/xe
";

/// Names of all commands.
pub fn names() -> BTreeSet<String> {
    let made = TABLES
        .iter()
        .flat_map(|table| VERBS.iter().map(move |made| format!("{}{}", table.name, made.ending)));
    let own = commands::all().map(|command| command.name.to_owned());
    made.chain(own).chain(["help".into(), "completion".into()]).collect()
}

/// What there is.
pub fn overview() -> String {
    let mut text = format!(
        "Usage: xe COMMAND [OPTIONS] [NAME=VALUE ...]\n\n{OPTIONS}\n\n'xe help COMMAND' says what a command takes.\n\nCommands:\n"
    );
    let mut commands: Vec<&commands::Command> = commands::all().collect();
    commands.sort_by_key(|command| command.name);
    for command in commands {
        text.push_str(&format!("  {:<30} {}\n", command.name, command.about));
    }
    let tables: Vec<&str> = TABLES.iter().map(|table| table.name).collect();
    text.push_str(&format!("\nFor each of {}:\n", tables.join(", ")));
    for made in VERBS {
        text.push_str(&format!("  {:<30} {}\n", format!("NAME{}", made.ending), made.about));
    }
    text.push_str(&format!("  {:<30} {}\n", "completion bash|zsh|fish", "Prints completions for a shell"));
    text.push_str(&format!("\n{AFTER}"));
    text
}

fn page(name: &str, found: &Found) -> String {
    let (required, optional, about) = found.words();
    let mut text = format!(
        "command name            : {name}\n        reqd params     : {}\n        optional params : {}\n        description     : {about}.\n",
        required.join(", "),
        optional.join(", ")
    );
    if let Found::Made(table, _) = found {
        let fields: Vec<String> = table
            .columns
            .iter()
            .map(|column| match column.writable {
                true => format!("{} (can be set)", column.name),
                false if matches!(column.show, Show::Asked(_)) => format!("{} (not in lists)", column.name),
                false => column.name.to_owned(),
            })
            .collect();
        text.push_str(&format!("        fields          : {}\n", fields.join(", ")));
    }
    text
}

/// How much two names have to be alike (Jaro-Winkler, 0 to 1) for one to be meant by the other.
const LIKENESS_MIN: f64 = 0.88;

/// There is no command of this name.
pub fn unknown(name: &str) -> Failure {
    let alike = names().into_iter().map(|known| (strsim::jaro_winkler(name, &known), known));
    let nearest = alike.filter(|(likeness, _)| *likeness >= LIKENESS_MIN).max_by(|a, b| a.0.total_cmp(&b.0));
    Failure::UnknownCommand(name.to_owned(), nearest.map(|(_, known)| known))
}

/// Prints the list, or what one command takes.
pub fn run(name: Option<&str>, arguments: &XeArguments) -> bool {
    let text = match name {
        None | Some("help") if arguments.get("markdown").is_some() => commands::catalogue(),
        None | Some("help") if arguments.minimal => names().into_iter().collect::<Vec<_>>().join(",") + "\n",
        None | Some("help") => overview(),
        Some(name) => match commands::find(name) {
            Some(found) => page(name, &found),
            None => return commands::why_absent(name).map_or_else(|| unknown(name), Failure::other).told(),
        },
    };
    print(&text).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_command_is_told_the_nearest() {
        let meant = |name: &str| match unknown(name) {
            Failure::UnknownCommand(_, nearest) => nearest.unwrap_or_default(),
            other => panic!("{other:?}"),
        };
        assert_eq!(meant("vdi-lst"), "vdi-list");
        assert_eq!(meant("vm-strat"), "vm-start");
        assert_eq!(meant("sr-crate"), "sr-create");
        assert_eq!(meant("florist"), "");
    }

    #[test]
    fn every_command_has_a_page() {
        let overview = overview();
        for name in names() {
            if let Some(found) = commands::find(&name) {
                let page = page(&name, &found);
                assert!(page.lines().count() >= 4 && page.contains(&name), "{name}");
                let made = matches!(found, Found::Made(..));
                assert!(made || overview.contains(&format!("  {name} ")), "{name}");
            }
        }
        assert!(names().len() > 150, "{}", names().len());
    }
}
