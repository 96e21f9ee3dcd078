//! Completion in shells: of commands, parameters, UUIDs and names. Shells ask `xe __complete SHELL LINE [WORD]`.

use std::collections::BTreeSet;

use serde_json::Value;
use tapio_model::columns::{TABLES, Table, table};

use super::arguments::XeArguments;
use super::client::Client;
use super::commands::{self, Found};
use super::error::Failure;
use super::generic::Verb;
use super::help;

const BASH: &str = r#"# Completions of xe for bash: put them into /etc/bash_completion.d/xe
_tapio_xe() {
    local IFS=$'\n'
    COMPREPLY=($(xe __complete bash "${COMP_LINE:0:$COMP_POINT}" "${COMP_WORDS[COMP_CWORD]}" 2>/dev/null))
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=:] ]]; then compopt -o nospace; fi
}
complete -F _tapio_xe xe
"#;

const ZSH: &str = r#"#compdef xe
# Completions of xe for zsh: put them into a directory of $fpath as _xe
_tapio_xe() {
    local -a found
    found=("${(@f)$(xe __complete zsh "$LBUFFER" 2>/dev/null)}")
    [[ -n "$found" ]] && compadd -Q -S '' -- "${found[@]}"
}
compdef _tapio_xe xe
"#;

const FISH: &str = r#"# Completions of xe for fish: put them into ~/.config/fish/completions/xe.fish
complete -c xe -f -a '(xe __complete fish (commandline -cp | string collect) 2>/dev/null)'
"#;

/// Prints the completions of a shell.
pub fn script(shell: Option<&str>) -> bool {
    let text = match shell {
        Some("bash") => BASH,
        Some("zsh") => ZSH,
        Some("fish") => FISH,
        _ => return Failure::other("completion: give bash, zsh or fish").told(),
    };
    super::out::print(text).is_ok()
}

/// Answers a shell: candidates, a line each. What cannot be known is no error.
pub fn run(words: &[String]) {
    let [shell, line, rest @ ..] = words else { return };
    let (before, current) = split(line);
    let Some(arguments) = XeArguments::read(&before[before.len().min(1)..]).ok() else { return };
    let mut known = Server { arguments: &arguments, client: None };
    let mut all = candidates(&arguments, &current, &mut known);
    all.retain(|candidate| candidate.starts_with(&current));
    // Where the shell takes '=' and ':' for the end of a word, it wants what comes after them.
    let strip = match (shell.as_str(), rest.first()) {
        ("bash", Some(word)) => {
            let word = if word == "=" || word == ":" { "" } else { word.as_str() };
            let escaped = escape(&current);
            escaped.len().saturating_sub(word.len()).min(escaped.len())
        }
        _ => 0,
    };
    for candidate in all {
        let text = if shell == "fish" { candidate } else { escape(&candidate) };
        if let Some(rest) = text.get(strip..) {
            println!("{rest}");
        }
    }
    if let Some(client) = known.client.flatten() {
        client.end();
    }
}

fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for letter in text.chars() {
        if letter.is_whitespace() || "()'\"\\&;|<>$`*?[]!#".contains(letter) {
            escaped.push('\\');
        }
        escaped.push(letter);
    }
    escaped
}

/// Words of a line, without their escapes and quotes, and the one that is being typed.
fn split(line: &str) -> (Vec<String>, String) {
    let (mut words, mut word, mut any) = (Vec::new(), String::new(), false);
    let mut quote = None;
    let mut letters = line.chars();
    while let Some(letter) = letters.next() {
        match (letter, quote) {
            ('\\', None | Some('"')) => {
                word.extend(letters.next());
                any = true;
            }
            ('"' | '\'', None) => (quote, any) = (Some(letter), true),
            (letter, Some(open)) if letter == open => quote = None,
            (letter, None) if letter.is_whitespace() => {
                if any {
                    words.push(std::mem::take(&mut word));
                }
                any = false;
            }
            (letter, _) => {
                word.push(letter);
                any = true;
            }
        }
    }
    (words, word)
}

/// The toolstack, asked when something is needed from it.
struct Server<'a> {
    arguments: &'a XeArguments,
    client: Option<Option<Client>>,
}

impl Server<'_> {
    fn call(&mut self, method: &str) -> Option<Value> {
        let arguments = self.arguments;
        let client = self.client.get_or_insert_with(|| {
            let mut connection = arguments.connection.clone();
            connection.quiet = true;
            Client::connect(&connection).ok()
        });
        client.as_ref()?.call(method, &[]).ok()
    }

    /// A field of all objects that belong to a table.
    fn values(&mut self, table: &Table, field: &str) -> Vec<String> {
        let Some(Value::Object(records)) = self.call(&format!("{}.get_all_records", table.class)) else {
            return Vec::new();
        };
        let belongs = |record: &Value| {
            table
                .only
                .iter()
                .all(|(field, wanted)| record.get(field).and_then(Value::as_bool) == Some(*wanted))
        };
        let texts = records
            .values()
            .filter(|record| belongs(record))
            .filter_map(|record| Some(record.get(field)?.as_str()?.to_owned()));
        texts.collect::<BTreeSet<_>>().into_iter().collect()
    }
}

/// The table a parameter's UUIDs are of.
fn table_of(command: &Found, param: &str, name: &str) -> Option<&'static Table> {
    if param == "uuid" {
        return match command {
            Found::Made(table, _) => Some(table),
            Found::Own(_) => {
                let all = TABLES.iter().filter(|table| name.starts_with(&format!("{}-", table.name)));
                // `vgpu-type-list` is about the longer name.
                all.max_by_key(|table| table.name.len()).copied()
            }
        };
    }
    if (param, name) == ("base", "vdi-export") {
        return table("vdi");
    }
    let short = param.strip_suffix("-uuid")?;
    let last = short.rsplit('-').next().unwrap_or(short);
    table(match short {
        "on" => "host",
        "vdi-from" | "vdi-to" => "vdi",
        _ => last,
    })
}

fn candidates(arguments: &XeArguments, current: &str, server: &mut Server<'_>) -> Vec<String> {
    let Some(name) = arguments.words.first() else {
        return help::names().into_iter().collect();
    };
    match name.as_str() {
        "help" => return help::names().into_iter().collect(),
        "completion" => return vec!["bash".into(), "zsh".into(), "fish".into()],
        _ => {}
    }
    let Some(command) = commands::find(name) else { return Vec::new() };
    if let Some((param, typed)) = current.split_once('=') {
        let typed_list = typed.rsplit_once(',').map_or("", |(before, _)| before);
        return values(arguments, &command, name, param, typed_list, server)
            .into_iter()
            .map(|value| format!("{param}={value}"))
            .collect();
    }
    params(arguments, &command)
}

/// Parameters that are not given yet.
fn params(arguments: &XeArguments, command: &Found) -> Vec<String> {
    let (required, optional, _) = command.words();
    let mut names = Vec::new();
    for param in required.iter().chain(optional) {
        match *param {
            "FIELD" => {
                if let Found::Made(table, verb) = command {
                    let columns =
                        table.columns.iter().filter(|column| *verb != Verb::ParamSet || column.writable);
                    names.extend(columns.map(|column| format!("{}=", column.name)));
                }
            }
            param if param.chars().next().is_some_and(char::is_uppercase) && param.len() > 4 => {}
            param if param.ends_with([':', '-']) => names.push(param.to_owned()),
            "force" | "multiple" => names.push(format!("--{param}")),
            param => names.push(format!("{param}=")),
        }
    }
    names.retain(|name| arguments.get(name.trim_end_matches('=').trim_start_matches("--")).is_none());
    names
}

fn values(
    arguments: &XeArguments,
    command: &Found,
    name: &str,
    param: &str,
    before: &str,
    server: &mut Server<'_>,
) -> Vec<String> {
    if let Some(table) = table_of(command, param, name) {
        return server.values(table, "uuid");
    }
    let listed = |names: Vec<String>| match before {
        "" => names,
        before => names.into_iter().map(|name| format!("{before},{name}")).collect(),
    };
    match (param, command) {
        ("format", _) => vec!["raw".into(), "vhd".into()],
        ("params", Found::Made(table, _)) => {
            let mut names: Vec<String> = table.columns.iter().map(|column| column.name.to_owned()).collect();
            if before.is_empty() {
                names.push("all".into());
            }
            listed(names)
        }
        ("param-name", Found::Made(table, verb)) => {
            let reads = matches!(verb, Verb::ParamGet);
            let columns = table.columns.iter().filter(|column| reads || column.writable);
            columns.map(|column| column.name.to_owned()).collect()
        }
        ("vm" | "template" | "host" | "on" | "cd-name", _) => {
            let of = match param {
                "on" => "host",
                "cd-name" => "vdi",
                param => param,
            };
            table(of).map(|table| server.values(table, "name_label")).unwrap_or_default()
        }
        ("class", _) => TABLES.iter().map(|table| table.name.to_owned()).collect(),
        ("type", _) if name.starts_with("sr-") => {
            table("sm").map(|table| server.values(table, "type")).unwrap_or_default()
        }
        ("mode", _) => vec!["RO".into(), "RW".into()],
        ("type", _) if name.starts_with("vbd-") => vec!["Disk".into(), "CD".into(), "Floppy".into()],
        (
            "bootable" | "shared" | "sharable" | "read-only" | "unpluggable" | "online" | "paused"
            | "managed",
            _,
        ) => {
            vec!["true".into(), "false".into()]
        }
        ("name-label", Found::Made(table, Verb::List)) => {
            // Only where it was not chosen by UUID already.
            if arguments.get("uuid").is_some() { Vec::new() } else { server.values(table, "name_label") }
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offered(line: &str) -> Vec<String> {
        let (before, current) = split(line);
        let mut arguments = XeArguments::default();
        for word in &before[1..] {
            match word.split_once('=') {
                Some((name, value)) => arguments.params.push((name.into(), value.into())),
                None => arguments.words.push(word.clone()),
            }
        }
        let mut server = Server { arguments: &arguments, client: Some(None) };
        let mut all = candidates(&arguments, &current, &mut server);
        all.retain(|candidate| candidate.starts_with(&current));
        all
    }

    #[test]
    fn lines_are_split_as_shells_do() {
        assert_eq!(
            split("xe vm-start vm=My\\ VM "),
            (vec!["xe".into(), "vm-start".into(), "vm=My VM".into()], String::new())
        );
        assert_eq!(split("xe 'a b' c\"d e"), (vec!["xe".into(), "a b".into()], "cd e".into()));
        assert_eq!(split(""), (vec![], String::new()));
        assert_eq!(escape("My VM (1)"), "My\\ VM\\ \\(1\\)");
    }

    #[test]
    fn commands_parameters_and_values_are_offered() {
        assert_eq!(offered("xe vdi-sna"), ["vdi-snapshot"]);
        assert!(offered("xe ").len() > 150);
        assert_eq!(offered("xe vdi-create sr"), ["sr-uuid="]);
        assert!(offered("xe vdi-create sr-uuid=1 sr").is_empty());
        assert_eq!(offered("xe vbd-create mode="), ["mode=RO", "mode=RW"]);
        assert_eq!(offered("xe vdi-list params=uuid,cbt"), ["params=uuid,cbt-enabled"]);
        assert_eq!(offered("xe sr-param-set name-l"), ["name-label="]);
        assert!(offered("xe sr-param-set ty").is_empty(), "it cannot be set");
        assert_eq!(offered("xe vm-shutdown --f"), ["--force"]);
        assert_eq!(offered("xe frob "), Vec::<String>::new());
    }

    #[test]
    fn parameters_name_their_tables() {
        let of = |name: &str, param: &str| {
            table_of(&commands::find(name).expect(name), param, name).map(|table| table.name)
        };
        assert_eq!(of("vdi-create", "sr-uuid"), Some("sr"));
        assert_eq!(of("vdi-copy", "base-vdi-uuid"), Some("vdi"));
        assert_eq!(of("vdi-list-changed-blocks", "vdi-from-uuid"), Some("vdi"));
        assert_eq!(of("vdi-destroy", "uuid"), Some("vdi"));
        assert_eq!(of("sr-param-list", "uuid"), Some("sr"));
        assert_eq!(of("vdi-export", "base"), Some("vdi"));
        assert_eq!(of("vdi-create", "name-label"), None);
    }
}
