//! The commands that are more than a list or a field.

mod absent;
mod archive;
mod capacity;
mod care;
mod certificate;
mod cloud;
mod console;
mod database;
mod density;
mod disk;
mod drive;
mod facts;
mod group;
mod history;
mod host;
mod machine;
mod migrate;
mod network;
mod package;
mod pool;
mod recover;
mod select;
mod sr;
mod status;
mod transfer;

use tapio_model::columns::Table;

use super::arguments::XeArguments;
use super::error::{Failure, Result};
use super::generic::{self, VERBS, Verb};
use super::session::Session;
use super::wait;

pub use absent::{catalogue, why_absent};

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
        certificate::COMMANDS,
        pool::COMMANDS,
        database::COMMANDS,
        recover::COMMANDS,
        network::COMMANDS,
        console::COMMANDS,
        density::COMMANDS,
        status::COMMANDS,
        transfer::COMMANDS,
        facts::COMMANDS,
        group::COMMANDS,
        capacity::COMMANDS,
        care::COMMANDS,
        migrate::COMMANDS,
        archive::COMMANDS,
        cloud::COMMANDS,
        history::COMMANDS,
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

fn unknown(name: &str, command: String, required: &[&str], optional: &[&str]) -> String {
    let known: Vec<String> = required
        .iter()
        .chain(optional)
        .map(|word| if word.ends_with([':', '-']) { format!("{word}KEY") } else { (*word).to_owned() })
        .collect();
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    format!("Unknown parameter '{name}'; {command} takes: {known}")
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
    pub fn missing(&self, arguments: &XeArguments) -> Option<String> {
        let (required, ..) = self.words();
        required.iter().find(|name| arguments.get(name).is_none()).map(|name| (*name).to_owned())
    }

    /// A parameter that the command does not know, or a key of one that is no map. Commands that choose objects by
    /// their fields look at those themselves.
    ///
    /// # Errors
    /// A sentence that names it.
    pub fn check(&self, arguments: &XeArguments) -> Result<()> {
        let (required, optional, _) = self.words();
        let known = || required.iter().chain(optional);
        if known().any(|word| matches!(*word, "FIELD" | "KEY" | "MAP:KEY" | "vm")) {
            return Ok(());
        }
        for (name, _) in arguments.filters() {
            let (base, key) = name.split_once(':').map_or((name, None), |(base, key)| (base, Some(key)));
            let is_map = known().any(|word| word.strip_suffix(':') == Some(base));
            let is_plain = known().any(|word| *word == name);
            let is_prefixed = known().any(|word| word.ends_with('-') && name.starts_with(word));
            match key {
                Some(_) if is_map => {}
                None if is_plain || is_prefixed => {}
                None if is_map => {
                    return Err(Failure::other(format!("{name} is a map: give {name}:KEY=VALUE")));
                }
                Some(_) if known().any(|word| *word == base) => {
                    let what = format!("{base} is no map: give {base}=VALUE instead of {name}=VALUE");
                    return Err(Failure::other(what));
                }
                _ => return Err(Failure::other(unknown(name, self.name(), required, optional))),
            }
        }
        Ok(())
    }

    fn name(&self) -> String {
        match self {
            Self::Own(command) => command.name.to_owned(),
            Self::Made(table, verb) => {
                let ending = VERBS.iter().find(|made| made.verb == *verb).map_or("", |made| made.ending);
                format!("{}{ending}", table.name)
            }
        }
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

    #[test]
    fn parameters_that_are_not_known_are_named() {
        let check = |line: &str| {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let arguments = XeArguments::of(&words).expect("good words");
            find(words[0].as_str()).expect("a command").check(&arguments)
        };
        for good in [
            "vdi-create sr-uuid=1 name-label=x virtual-size=1 sm-config:type=raw other-config:a:b=c tags=red",
            "vdi-snapshot uuid=1 driver-params-type=single",
            "sr-create name-label=x type=file device-config:location=/x shared=true",
            "vm-start name-label=x power-state=halted --multiple --force",
            "vdi-list tags:contains=red other-config:a=b params=all --minimal",
            "vdi-param-set uuid=1 other-config:a=b",
            "vdi-param-add uuid=1 param-name=other-config a=b",
            "vdi-destroy uuid=1 --progress",
        ] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for (bad, said) in [
            (
                "vdi-create sr-uuid=1 name-label=x virtual-size=1 tags:red=true",
                "tags is no map: give tags=VALUE",
            ),
            (
                "vdi-create sr-uuid=1 name-label=x virtual-size=1 colour=red",
                "'colour'; vdi-create takes: sr-uuid",
            ),
            ("vdi-create sr-uuid=1 name-label=x virtual-size=1 sm-config=raw", "give sm-config:KEY=VALUE"),
            ("vdi-destroy uuid=1 name-label=x", "'name-label'; vdi-destroy takes: uuid"),
            ("vdi-destroy uuid:x=1", "uuid is no map"),
            ("vdi-param-get uuid=1 param-name=x key=y", "'key'; vdi-param-get takes"),
        ] {
            match check(bad) {
                Err(Failure::Other(text)) => assert!(text.contains(said), "{bad}: {text}"),
                other => panic!("{bad}: {other:?}"),
            }
        }
    }

    /// A command that names a message which the table does not have could only fail.
    #[test]
    fn messages_that_commands_send_are_in_the_table() {
        let methods = tapio_model::methods();
        let sources = [
            include_str!("capacity.rs"),
            include_str!("care.rs"),
            include_str!("console.rs"),
            include_str!("disk.rs"),
            include_str!("drive.rs"),
            include_str!("facts.rs"),
            include_str!("host.rs"),
            include_str!("machine.rs"),
            include_str!("network.rs"),
            include_str!("select.rs"),
            include_str!("sr.rs"),
            include_str!("status.rs"),
            include_str!("transfer.rs"),
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
