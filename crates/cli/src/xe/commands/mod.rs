//! The commands that are more than a list or a field.

mod console;
mod disk;
mod drive;
mod host;
mod machine;
mod network;
mod select;
mod sr;
mod status;

use tapio_model::columns::Table;

use super::arguments::Arguments;
use super::error::Result;
use super::generic::{self, VERBS, Verb};
use super::session::Session;
use super::wait;

/// A command.
#[derive(Debug)]
pub struct Command {
    /// As `vdi-create`.
    pub name: &'static str,
    /// Parameters that must be given.
    pub required: &'static [&'static str],
    /// Parameters that may be given; a name that ends in `:` is a map.
    pub optional: &'static [&'static str],
    /// One sentence for people.
    pub about: &'static str,
    run: fn(&Session) -> Result<()>,
}

const fn command(
    name: &'static str,
    required: &'static [&'static str],
    optional: &'static [&'static str],
    about: &'static str,
    run: fn(&Session) -> Result<()>,
) -> Command {
    Command { name, required, optional, about, run }
}

static GENERAL: &[Command] = &[command(
    "event-wait",
    &["class"],
    &["FIELD"],
    "Waits until an object has these fields; 'FIELD=/=VALUE' for another value",
    wait::run,
)];

/// Every command that is not made from a table.
pub fn all() -> impl Iterator<Item = &'static Command> {
    [
        GENERAL,
        sr::COMMANDS,
        disk::COMMANDS,
        drive::COMMANDS,
        machine::COMMANDS,
        host::COMMANDS,
        network::COMMANDS,
        console::COMMANDS,
        status::COMMANDS,
    ]
    .into_iter()
    .flatten()
}

/// What a name stands for.
#[derive(Clone, Copy, Debug)]
pub enum Found {
    /// A command of its own.
    Own(&'static Command),
    /// One made from a table.
    Made(&'static Table, Verb),
}

/// The command of this name.
pub fn find(name: &str) -> Option<Found> {
    let own = all().find(|command| command.name == name).map(Found::Own);
    own.or_else(|| generic::parse(name).map(|(table, verb)| Found::Made(table, verb)))
}

impl Found {
    /// Parameters that must be given, those that may, and a sentence.
    pub fn words(&self) -> (&'static [&'static str], &'static [&'static str], &'static str) {
        match self {
            Self::Own(command) => (command.required, command.optional, command.about),
            Self::Made(_, verb) => {
                let made = VERBS.iter().find(|made| made.verb == *verb);
                made.map_or((&[], &[], ""), |made| (made.required, made.optional, made.about))
            }
        }
    }

    /// The first parameter that must be given and is not.
    pub fn missing(&self, arguments: &Arguments) -> Option<String> {
        let (required, ..) = self.words();
        required.iter().find(|name| arguments.get(name).is_none()).map(|name| (*name).to_owned())
    }

    /// Does it.
    pub fn execute(&self, session: &Session) -> Result<()> {
        match self {
            Self::Own(command) => (command.run)(session),
            Self::Made(table, verb) => generic::run(session, table, *verb),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_explained() {
        let mut seen = BTreeSet::new();
        for command in all() {
            assert!(seen.insert(command.name), "{} is there twice", command.name);
            assert!(!command.about.is_empty() && !command.about.ends_with('.'), "{}", command.name);
            assert!(generic::parse(command.name).is_none(), "{} is made from a table, too", command.name);
        }
        assert!(seen.len() > 70, "{}", seen.len());
        assert!(matches!(find("vdi-list"), Some(Found::Made(..))));
        assert!(matches!(find("vdi-create"), Some(Found::Own(_))));
        assert!(find("vdi-frob").is_none());
    }

    /// A command that names a message which the table does not have could only fail.
    #[test]
    fn messages_that_commands_send_are_in_the_table() {
        let methods = tapio_model::methods();
        let sources = [
            include_str!("console.rs"),
            include_str!("disk.rs"),
            include_str!("drive.rs"),
            include_str!("host.rs"),
            include_str!("machine.rs"),
            include_str!("network.rs"),
            include_str!("select.rs"),
            include_str!("sr.rs"),
            include_str!("status.rs"),
        ];
        let mut checked = 0;
        for text in sources {
            for word in text.split('"').skip(1).step_by(2) {
                let Some((class, message)) = word.split_once('.') else { continue };
                let is_method = tapio_model::CLASSES.iter().any(|known| known.name == class)
                    && message.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
                if is_method {
                    checked += 1;
                    assert!(methods.iter().any(|method| method == word), "{word}");
                }
            }
        }
        assert!(checked > 60, "{checked}");
    }
}
