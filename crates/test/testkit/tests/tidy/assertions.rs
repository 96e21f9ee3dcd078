//! A test asserts something itself or by a function of its crate, or says above it what it proves.

use std::collections::{BTreeMap, BTreeSet};

use super::Source;

/// Words by which a test can fail.
const ASSERTIONS: [&str; 8] =
    ["assert", "panic!", ".expect(", ".expect_err(", ".unwrap(", ".unwrap_err(", ".ok()", ".fails()"];

/// A function, by the indentation that rustfmt gives its last brace.
struct Function<'a> {
    name: &'a str,
    /// Its first line, from 1.
    line: usize,
    is_test: bool,
    /// A documentation comment, or `should_panic`, which is an assertion.
    says_what_it_proves: bool,
    body: Vec<&'a str>,
}

impl Function<'_> {
    fn asserts(&self) -> bool {
        self.body.iter().any(|line| ASSERTIONS.iter().any(|word| line.contains(word)))
    }

    /// Names that are followed by `(`.
    fn calls(&self) -> impl Iterator<Item = &str> {
        self.body.iter().flat_map(|line| {
            line.match_indices('(').filter_map(|(at, _)| {
                let before = line.get(..at)?;
                let begin = before.rfind(|c: char| !c.is_alphanumeric() && c != '_').map_or(0, |i| i + 1);
                before.get(begin..).filter(|name| !name.is_empty())
            })
        })
    }
}

fn functions(text: &str) -> Vec<Function<'_>> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    let (mut is_test, mut says) = (false, false);
    for (index, line) in lines.iter().enumerate() {
        let trimmed = line.trim_start();
        if trimmed.starts_with("#[") || trimmed.starts_with("//") {
            is_test |= trimmed == "#[test]";
            says |= trimmed.starts_with("///") || trimmed.contains("should_panic");
            continue;
        }
        let name = trimmed.split_once("fn ").and_then(|(before, after)| {
            let is_head = before.split(' ').all(|word| {
                word.is_empty() || word.starts_with("pub") || ["const", "unsafe", "async"].contains(&word)
            });
            is_head.then(|| after.split(|c: char| !c.is_alphanumeric() && c != '_').next()).flatten()
        });
        if let Some(name) = name {
            let end = format!("{}}}", &line[..line.len() - trimmed.len()]);
            let rest = &lines[index..];
            let len = rest.iter().position(|line| *line == end).map_or(1, |last| last + 1);
            let body = rest[..len].to_vec();
            found.push(Function { name, line: index + 1, is_test, says_what_it_proves: says, body });
        }
        (is_test, says) = (false, false);
    }
    found
}

/// The crate that a file belongs to: the directory above `src` or `tests`.
fn crate_of(path: &str) -> &str {
    path.split_once("/src/").or_else(|| path.split_once("/tests/")).map_or(path, |(dir, _)| dir)
}

/// Complains about every test that asserts nothing and does not say what it proves.
pub fn missing(files: &[Source]) -> Vec<String> {
    let mut crates: BTreeMap<&str, Vec<(&Source, Function<'_>)>> = BTreeMap::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        let all = crates.entry(crate_of(&file.path)).or_default();
        all.extend(functions(&file.text).into_iter().map(|function| (file, function)));
    }
    let mut complaints = Vec::new();
    for functions in crates.values() {
        let mut asserting: BTreeSet<&str> = BTreeSet::new();
        // Functions that call an asserting one assert too, until there are no more of them.
        loop {
            let before = asserting.len();
            for (_, function) in functions {
                if function.asserts() || function.calls().any(|name| asserting.contains(name)) {
                    asserting.insert(function.name);
                }
            }
            if asserting.len() == before {
                break;
            }
        }
        let silent = functions.iter().filter(|(_, test)| {
            test.is_test
                && !test.says_what_it_proves
                && !test.asserts()
                && !test.calls().any(|name| name != test.name && asserting.contains(name))
        });
        complaints.extend(silent.map(|(file, test)| {
            file.at(test.line, &format!("'{}' asserts nothing: say above it what it proves", test.name))
        }));
    }
    complaints
}

#[test]
fn a_silent_test_is_found_and_one_that_asserts_by_a_helper_is_not() {
    let text = "#[test]\nfn silent() {\n    run(1);\n}\n\n\
                #[test]\nfn loud() {\n    check();\n}\n\n\
                fn check() {\n    deeper();\n}\n\nfn deeper() {\n    assert!(true);\n}\n\n\
                /// No bytes make it panic.\n#[test]\nfn said() {\n    run(2);\n}\n\n\
                #[test]\n#[should_panic]\nfn expected() {\n    run(3);\n}\n";
    let found = missing(&[Source::example("crates/a/src/lib.rs", text)]);
    assert_eq!(found, ["crates/a/src/lib.rs:2: 'silent' asserts nothing: say above it what it proves"]);
}
