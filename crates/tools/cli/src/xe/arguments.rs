//! What was typed: a command, its parameters, where to connect.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::error::{Failure, Result};

/// The server and the account.
#[derive(Clone, Debug, Default)]
pub struct Connection {
    /// Host name or address; none for the socket of this host.
    pub server: Option<String>,
    /// TCP port.
    pub port: Option<u16>,
    /// Account.
    pub user: Option<String>,
    /// Its password.
    pub password: Option<String>,
    /// A file whose first line is the password, or whose lines are account and password.
    pub password_file: Option<PathBuf>,
    /// Plain HTTP.
    pub plain: bool,
    /// Certificates that are trusted, as PEM.
    pub cafile: Option<PathBuf>,
    /// The fingerprint (SHA-256) that the server's certificate must have, in place of what was seen before.
    pub fingerprint: Option<String>,
    /// The socket of this host.
    pub socket: Option<PathBuf>,
    /// Never asks on the terminal, never writes a word about certificates.
    pub quiet: bool,
}

/// What was typed.
#[derive(Clone, Debug, Default)]
pub struct XeArguments {
    /// The command, and words without `=`.
    pub words: Vec<String>,
    /// Parameters in order; a later one of the same name counts.
    pub params: Vec<(String, String)>,
    /// Values alone, with commas.
    pub minimal: bool,
    /// As JSON.
    pub json: bool,
    /// `--help` was given.
    pub wants_help: bool,
    /// Where to connect.
    pub connection: Connection,
}

/// Parameters that say how, not what; lists take no filters from them.
const STANDARD: [&str; 16] = [
    "server",
    "port",
    "username",
    "password",
    "passwordfile",
    "minimal",
    "json",
    "force",
    "multiple",
    "all",
    "message-priority",
    "trace",
    "traceparent",
    "params",
    "nossl",
    "progress",
];

impl XeArguments {
    /// Reads the arguments of the program, after `~/.xe` and `XE_EXTRA_ARGS`.
    pub fn read(words: &[String]) -> Result<Self> {
        let mut arguments = Self::default();
        if let Some(home) = std::env::var_os("HOME")
            && let Ok(text) = std::fs::read_to_string(Path::new(&home).join(".xe"))
        {
            arguments.rc(&text)?;
        }
        if let Ok(extra) = std::env::var("XE_EXTRA_ARGS") {
            let extra: Vec<String> =
                extra.split(',').map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned).collect();
            arguments.take(&extra)?;
        }
        if let Ok(password) = std::env::var("XE_PASSWORD") {
            arguments.connection.password = Some(password);
        }
        arguments.take(words)?;
        Ok(arguments)
    }

    /// These words alone, without anything of the user's.
    pub fn of(words: &[String]) -> Result<Self> {
        let mut arguments = Self::default();
        arguments.take(words)?;
        Ok(arguments)
    }

    /// Lines of `name=value`; `#` begins a comment.
    fn rc(&mut self, text: &str) -> Result<()> {
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            if let Some((name, value)) = line.split_once('=')
                && !self.connect(name.trim(), value.trim())?
            {
                self.params.push((name.trim().to_owned(), value.trim().to_owned()));
            }
        }
        Ok(())
    }

    fn take(&mut self, words: &[String]) -> Result<()> {
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let mut value = || {
                let next = words.next().cloned();
                next.ok_or_else(|| Failure::other(format!("{word} needs a value; see 'xe help'")))
            };
            match word.as_str() {
                "-s" => _ = self.connect("server", &value()?)?,
                "-p" => _ = self.connect("port", &value()?)?,
                "-u" => _ = self.connect("username", &value()?)?,
                "-pw" => _ = self.connect("password", &value()?)?,
                "-pwf" => _ = self.connect("passwordfile", &value()?)?,
                "--socket" => self.connection.socket = Some(value()?.into()),
                "--cafile" => self.connection.cafile = Some(value()?.into()),
                "--nossl" => self.connection.plain = true,
                "--minimal" => self.minimal = true,
                "--json" => self.json = true,
                "--help" | "-h" => self.wants_help = true,
                // Tracing of the original has nothing to talk to here.
                "--debug" | "--debug-on-fail" | "--trace" => {}
                "--traceparent" => _ = value()?,
                flag if flag.starts_with("--") => match flag[2..].split_once('=') {
                    Some((name, value)) => self.param(name, value)?,
                    None => self.param(&flag[2..], "true")?,
                },
                word => match word.split_once('=') {
                    Some((name, value)) => self.param(name, value)?,
                    None => self.words.push(word.to_owned()),
                },
            }
        }
        Ok(())
    }

    fn param(&mut self, name: &str, value: &str) -> Result<()> {
        if !self.connect(name, value)? {
            self.params.push((name.to_owned(), value.to_owned()));
        }
        Ok(())
    }

    /// Takes a parameter that says where to connect, or how to print.
    fn connect(&mut self, name: &str, value: &str) -> Result<bool> {
        let is_true = || boolean(name, value);
        let to = &mut self.connection;
        match name {
            "server" => to.server = Some(value.to_owned()).filter(|server| !server.is_empty()),
            "port" => {
                let port = value.parse();
                to.port = Some(port.map_err(|_| Failure::other(format!("port: '{value}' is no port")))?);
            }
            "username" => to.user = Some(value.to_owned()),
            "password" => to.password = Some(value.to_owned()),
            "passwordfile" => to.password_file = Some(value.into()),
            "nossl" => to.plain = is_true()?,
            "minimal" => self.minimal = is_true()?,
            "json" => self.json = is_true()?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// A parameter.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.params.iter().rev().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// A parameter that must be given.
    pub fn need(&self, name: &str) -> Result<&str> {
        self.get(name).ok_or_else(|| Failure::Missing(name.to_owned()))
    }

    /// A parameter that is true or false, or what it is when it is not given.
    pub fn truth(&self, name: &str, otherwise: bool) -> Result<bool> {
        self.get(name).map_or(Ok(otherwise), |value| boolean(name, value))
    }

    /// Parameters of a map: `name:key=value`.
    pub fn map(&self, name: &str) -> BTreeMap<String, String> {
        let pairs = self.params.iter().filter_map(|(known, value)| {
            let key = known.strip_prefix(name)?.strip_prefix([':', '-'])?;
            // `sm-config-x` was a way to write `sm-config:x`; longer names are other parameters.
            (known.as_bytes().get(name.len()) == Some(&b':') || name == "driver-params")
                .then(|| (key.to_owned(), value.clone()))
        });
        pairs.collect()
    }

    /// Parameters that say what, not how.
    pub fn filters(&self) -> impl Iterator<Item = (&str, &str)> {
        self.params
            .iter()
            .filter(|(name, _)| !STANDARD.contains(&name.as_str()) && !name.starts_with("database:"))
            .map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

/// Reads a truth.
pub fn boolean(name: &str, value: &str) -> Result<bool> {
    match value.to_ascii_lowercase().as_str() {
        "true" | "t" | "yes" | "y" | "1" => Ok(true),
        "false" | "f" | "no" | "n" | "0" => Ok(false),
        _ => Err(Failure::other(format!("{name}: '{value}' is neither true nor false"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<XeArguments> {
        let mut arguments = XeArguments::default();
        let words: Vec<String> = text.split(' ').map(str::to_owned).collect();
        arguments.take(&words)?;
        Ok(arguments)
    }

    #[test]
    fn words_flags_parameters_and_maps() {
        let read = read(
            "-s box -p 8443 vdi-create sr-uuid=1 sm-config:type=raw sm-config:a:b=c=d --force --minimal \
             --live=false sm-configs:x=y",
        )
        .expect("good");
        assert_eq!(read.words, ["vdi-create"]);
        assert_eq!((read.connection.server.as_deref(), read.connection.port), (Some("box"), Some(8443)));
        assert!(
            read.minimal && read.truth("live", true) == Ok(false) && read.truth("force", false) == Ok(true)
        );
        assert_eq!(read.need("sr-uuid"), Ok("1"));
        assert_eq!(read.need("uuid"), Err(Failure::Missing("uuid".into())));
        let map = read.map("sm-config");
        assert_eq!(map.len(), 2);
        assert_eq!((map["type"].as_str(), map["a:b"].as_str()), ("raw", "c=d"));
        let filters: Vec<_> = read.filters().map(|(name, _)| name).collect();
        assert_eq!(filters, ["sr-uuid", "sm-config:type", "sm-config:a:b", "live", "sm-configs:x"]);
    }

    #[test]
    fn bad_words_are_explained() {
        for (text, part) in
            [("-s", "needs a value"), ("-p x vm-list", "no port"), ("minimal=maybe", "neither")]
        {
            match read(text) {
                Err(Failure::Other(said)) => assert!(said.contains(part), "{said}"),
                other => panic!("{text}: {other:?}"),
            }
        }
    }

    #[test]
    fn the_rc_file_comes_first() {
        let mut arguments = XeArguments::default();
        arguments.rc("# mine\nserver = box\nusername=joe\n").expect("good");
        arguments.take(&["-u".into(), "eve".into(), "vm-list".into()]).expect("good");
        assert_eq!(arguments.connection.server.as_deref(), Some("box"));
        assert_eq!(arguments.connection.user.as_deref(), Some("eve"));
    }
}
