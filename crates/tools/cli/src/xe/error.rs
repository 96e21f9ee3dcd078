//! Why a command failed, in the words that users of `xe` know.

use std::process::ExitCode;

/// Why a command failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// A parameter that must be given was not.
    Missing(String),
    /// There is no such command; one whose name is much like it, if there is one.
    UnknownCommand(String, Option<String>),
    /// The toolstack refused: a code and its parameters.
    Api(String, Vec<String>),
    /// Anything else: a sentence.
    Other(String),
}

/// What a command answers.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// A failure that is a sentence.
    pub fn other(text: impl Into<String>) -> Self {
        Self::Other(text.into())
    }

    /// Prints it on standard error, and is false: it did not go well.
    pub fn told(&self) -> bool {
        self.tell(&|_| None);
        false
    }

    /// Prints it on standard error, with what `named` calls the references in it.
    pub fn tell(&self, named: &dyn Fn(&str) -> Option<String>) {
        super::out::complain(&self.text(named));
    }

    /// Prints it on standard error: the status of a program that ends with it.
    pub fn report(&self) -> ExitCode {
        self.told();
        ExitCode::FAILURE
    }

    /// What is printed.
    pub fn text(&self, named: &dyn Fn(&str) -> Option<String>) -> String {
        match self {
            Self::Missing(param) => {
                format!("Required parameter not found: {param}\nFor usage run: 'xe help'\n")
            }
            Self::UnknownCommand(command, nearest) => {
                let hint =
                    nearest.as_ref().map(|name| format!("Did you mean '{name}'?\n")).unwrap_or_default();
                format!("Unknown command: {command}\n{hint}For usage run: 'xe help'\n")
            }
            Self::Other(text) => format!("Error: {text}\n"),
            Self::Api(code, params) => {
                let Some(known) = tapio_model::errors::error(code) else {
                    return format!("Error code: {code}\nError parameters: {}\n", params.join(", "));
                };
                let mut text = format!("{}\n", known.text);
                for (at, name) in known.params.iter().enumerate() {
                    let value = params.get(at).map_or("<unknown>".into(), |value| shown(value, named));
                    text.push_str(&format!("{name}: {value}\n"));
                }
                for value in params.iter().skip(known.params.len()) {
                    text.push_str(&format!("<extra>: {}\n", shown(value, named)));
                }
                text
            }
        }
    }
}

fn shown(param: &str, named: &dyn Fn(&str) -> Option<String>) -> String {
    named(param).unwrap_or_else(|| param.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(failure: &Failure) -> String {
        failure.text(&|param| (param == "OpaqueRef:1").then(|| "aaaa (disk)".to_owned()))
    }

    #[test]
    fn failures_are_said_as_users_know_them() {
        assert_eq!(
            text(&Failure::Missing("uuid".into())),
            "Required parameter not found: uuid\nFor usage run: 'xe help'\n"
        );
        assert_eq!(
            text(&Failure::UnknownCommand("frob".into(), None)),
            "Unknown command: frob\nFor usage run: 'xe help'\n"
        );
        assert_eq!(
            text(&Failure::UnknownCommand("vdi-lst".into(), Some("vdi-list".into()))),
            "Unknown command: vdi-lst\nDid you mean 'vdi-list'?\nFor usage run: 'xe help'\n"
        );
        assert_eq!(text(&Failure::other("no")), "Error: no\n");
        let known = Failure::Api("VDI_IN_USE".into(), vec!["OpaqueRef:1".into()]);
        assert_eq!(text(&known), "The disk is in use.\nvdi: aaaa (disk)\noperation: <unknown>\n");
        let extra = Failure::Api("VDI_READONLY".into(), vec!["OpaqueRef:2".into(), "more".into()]);
        assert_eq!(text(&extra), "The disk is read-only.\nvdi: OpaqueRef:2\n<extra>: more\n");
        let foreign = Failure::Api(
            "SR_BACKEND_FAILURE_96".into(),
            vec![
                String::new(),
                "The request is missing or has an incorrect target IQN parameter".into(),
                "<x/>".into(),
            ],
        );
        assert_eq!(
            text(&foreign),
            "Error code: SR_BACKEND_FAILURE_96\nError parameters: , The request is missing or has an incorrect target IQN parameter, <x/>\n"
        );
    }
}
