//! The scripts of one plugin of version 3: a program for each method, JSON on standard input and output.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tapio_types::ApiError;

use super::wire::{Failure, bounded};
use crate::errors;
use crate::external::script::{self, Said, Script, printable};
use crate::traits::Ctx;
use crate::worker::UNFINISHED;

/// Bytes of a bad answer that an error shows.
const SHOWN: usize = 200;
/// Parameters of an error of a plugin that are kept.
const PARAMS_MAX: usize = 8;

/// The directory of a plugin's scripts.
#[derive(Clone, Debug)]
pub(super) struct Scripts {
    pub(super) dir: PathBuf,
    /// How long a script may take.
    pub(super) limit: Duration,
}

/// What a script answers of which nothing is needed.
#[derive(Debug)]
pub(super) struct Nothing;

impl<'de> serde::Deserialize<'de> for Nothing {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        serde::de::IgnoredAny::deserialize(from).map(|_| Self)
    }
}

impl Scripts {
    pub(super) fn new(dir: PathBuf, limit: Duration) -> Self {
        Self { dir, limit }
    }

    /// The plugin's name for people.
    fn name(&self) -> String {
        self.dir.file_name().unwrap_or(OsStr::new("?")).to_string_lossy().into_owned()
    }

    /// The program of a method; the case of its name is of no account.
    pub(super) fn path(&self, method: &str) -> Option<PathBuf> {
        let exact = self.dir.join(method);
        if exact.exists() {
            return Some(exact);
        }
        let entries = fs::read_dir(&self.dir).ok()?;
        let mut names = entries.flatten().map(|entry| entry.file_name());
        let name = names.find(|name| name.to_str().is_some_and(|name| name.eq_ignore_ascii_case(method)))?;
        Some(self.dir.join(name))
    }

    pub(super) fn has(&self, method: &str) -> bool {
        self.path(method).is_some()
    }

    /// Calls a method.
    ///
    /// # Errors
    /// 38: there is no such script. The script's own error; one that says what it printed instead of an answer; see
    /// [`script::run`].
    pub(super) fn call<T: DeserializeOwned>(
        &self,
        ctx: &dyn Ctx,
        method: &str,
        args: &[(&str, Value)],
    ) -> Result<T, ApiError> {
        self.call_within(ctx, method, args, self.limit)
    }

    /// [`Self::call`] with another deadline.
    ///
    /// # Errors
    /// As there.
    pub(super) fn call_within<T: DeserializeOwned>(
        &self,
        ctx: &dyn Ctx,
        method: &str,
        args: &[(&str, Value)],
        limit: Duration,
    ) -> Result<T, ApiError> {
        let doing = format!("{method} of {}", self.name());
        let program = self.path(method).ok_or_else(|| {
            let missing = self.dir.join(method);
            errors::fail(38, format_args!("{doing}: {} is not there", missing.display()))
        })?;
        let mut named = Map::new();
        named.insert("dbg".to_owned(), Value::from(format!("tapio {method}")));
        named.extend(args.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        let input = Value::Object(named).to_string();
        let script = Script {
            program: &program,
            doing: &doing,
            arguments: &["--json"],
            environment: &[],
            input: input.as_bytes(),
            limit,
        };
        let said = script::run(ctx, &script)?;
        self.read(&doing, &program, &said)
    }

    fn read<T: DeserializeOwned>(&self, doing: &str, program: &Path, said: &Said) -> Result<T, ApiError> {
        if said.status.success() {
            // Scripts without a result may print nothing at all.
            let text = if said.stdout.trim_ascii().is_empty() { b"null" } else { &said.stdout[..] };
            return serde_json::from_slice(text).map_err(|error| {
                let shown = printable(&said.stdout, SHOWN);
                let text = format!(
                    "{doing}: {} answered no JSON of the published shape ({error}): '{shown}'; ask its vendor",
                    program.display()
                );
                // It ended as if all was well, and may have done it.
                errors::fail_with(47, text, UNFINISHED)
            });
        }
        match serde_json::from_slice::<Failure>(&said.stdout) {
            Ok(failure) => Err(failure.told(doing)),
            Err(_) => {
                let (end, words) = (said.end(), said.last_words());
                let text =
                    format!("{doing}: {} {end} without an error of its own: {words}", program.display());
                Err(errors::fail_with(47, text, UNFINISHED))
            }
        }
    }
}

impl Failure {
    /// The error as the toolstack knows it. `SR_` and `VDI_` codes are passed on.
    pub(super) fn told(&self, doing: &str) -> ApiError {
        let text =
            |value: &Value| bounded(value.as_str().map_or_else(|| value.to_string(), str::to_owned).as_str());
        let params: Vec<String> = self.params.iter().take(PARAMS_MAX).map(text).collect();
        let first = params.first().cloned().unwrap_or_default();
        let what = format!("{doing}: {}", params.join(", "));
        match self.code.as_str() {
            "Sr_not_attached" | "SR_does_not_exist" => errors::fail(47, what),
            "Volume_does_not_exist" => ApiError::new("VDI_MISSING", [String::new(), first]),
            "Unimplemented" => errors::fail(38, what),
            "Cancelled" => errors::cancelled(),
            "Activated_on_another_host" => {
                errors::fail(46, format_args!("{doing}: it is in use on another host, {first}"))
            }
            code if is_code(code) => {
                let mut params = params;
                // A word of ours that a plugin cannot say.
                params.iter_mut().filter(|param| *param == UNFINISHED).for_each(String::clear);
                ApiError::new(code.to_owned(), params)
            }
            code => errors::fail(
                1200,
                format_args!("{} says {}", what.trim_end_matches([':', ' ']), bounded(code)),
            ),
        }
    }
}

fn is_code(code: &str) -> bool {
    let is_plain = |c: u8| c.is_ascii_uppercase() || c.is_ascii_digit() || c == b'_';
    (code.starts_with("SR_") || code.starts_with("VDI_")) && code.len() <= 64 && code.bytes().all(is_plain)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::worker::is_unfinished;

    fn told(value: Value) -> ApiError {
        serde_json::from_value::<Failure>(value).expect("an error").told("SR.ls of x")
    }

    #[test]
    fn errors_of_scripts_become_errors_of_clients() {
        assert_eq!(told(json!({"code": "Volume_does_not_exist", "params": ["7"]})).code, "VDI_MISSING");
        assert_eq!(told(json!({"code": "Unimplemented", "params": ["no"]})).code, "SR_BACKEND_FAILURE_38");
        assert_eq!(
            told(json!({"code": "SR_BACKEND_FAILURE_44", "params": ["", "full", ""]})).params[1],
            "full"
        );
        let own = told(json!({"code": "EArray", "params": ["down", 5], "backtrace": {"files": []}}));
        assert_eq!(own.code, "SR_BACKEND_FAILURE_1200");
        assert!(own.params[1].contains("SR.ls of x: down, 5 says EArray"), "{own}");
        let sly = told(json!({"code": "SR_BACKEND_FAILURE_47", "params": ["", "", "unfinished"]}));
        assert!(!is_unfinished(&sly), "{sly}");
        assert_eq!(told(json!({"code": "SESSION_INVALID"})).code, "SR_BACKEND_FAILURE_1200");
    }
}
