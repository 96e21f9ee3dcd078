//! The repository's house rules, as a test. Each rule is a function from the list of files to complaints; each is
//! tried on a bad example too, so that none of them can pass by seeing nothing.

mod assertions;
mod circles;
mod ignored;
mod locks;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Longest line of Rust, in characters.
const LINE_COLUMNS_MAX: usize = 120;

/// Longest file of Rust or shell, in lines.
const FILE_LINES_MAX: usize = 900;

/// Largest file at all, in bytes.
const FILE_LEN_MAX: usize = 256 << 10;

/// How far above an `unsafe` its reason may begin, in lines.
const SAFETY_REACH_LINES: usize = 12;

/// Names of asynchronous runtimes that the data plane must not mention.
const RUNTIMES: [&str; 4] = ["tokio", "async-std", "smol", "monoio"];

/// A file of the repository.
struct Source {
    /// From the top of the repository, with `/`.
    path: String,
    text: String,
    executable: bool,
    len: usize,
}

impl Source {
    fn example(path: &str, text: &str) -> Self {
        Self { path: path.into(), text: text.into(), executable: false, len: text.len() }
    }

    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Lines with their 1-based numbers.
    fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.lines().enumerate().map(|(index, line)| (index + 1, line))
    }

    fn at(&self, line: usize, what: &str) -> String {
        format!("{}:{line}: {what}", self.path)
    }
}

fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(3)
        .expect("three levels below the top")
        .to_path_buf()
}

/// Every file that is, or would be, under version control.
fn sources() -> Vec<Source> {
    let top = top();
    let listed = Command::new("git")
        .args(["-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(&top)
        .output();
    let mut paths: Vec<String> = match listed {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout)
            .split('\0')
            .filter(|path| !path.is_empty())
            .map(String::from)
            .collect(),
        // An unpacked archive has no history; everything that is not built counts.
        _ => walk(&top),
    };
    paths.sort();
    let read = |path: String| {
        let file = top.join(&path);
        let data = file.symlink_metadata().ok().filter(std::fs::Metadata::is_file)?;
        let bytes = std::fs::read(&file).ok()?;
        let executable = data.permissions().mode() & 0o111 != 0;
        Some(Source {
            path,
            len: bytes.len(),
            text: String::from_utf8_lossy(&bytes).into_owned(),
            executable,
        })
    };
    // A file that is listed but gone is about to be removed from the list.
    paths.into_iter().filter_map(read).collect()
}

fn walk(top: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut open = vec![top.to_path_buf()];
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(&dir).expect("a directory of the repository").flatten() {
            let path = entry.path();
            let name = entry.file_name();
            if path.is_dir() && name != "target" && name != ".git" {
                open.push(path);
            } else if path.is_file() {
                let inside = path.strip_prefix(top).expect("below the top");
                found.push(inside.to_string_lossy().into_owned());
            }
        }
    }
    found
}

// --- the rules ---

fn crate_arrows(files: &[Source], table: &str) -> Vec<String> {
    let mut allowed: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for line in table.lines().filter(|line| !line.starts_with('#')) {
        if let Some((from, to)) = line.split_once(':') {
            allowed.insert(from.trim(), to.split_whitespace().collect());
        }
    }
    let data_plane = allowed.remove("data-plane").unwrap_or_default();
    let mut complaints = Vec::new();
    for manifest in files {
        let Some(folder) = manifest.path.strip_prefix("crates/").and_then(|p| p.strip_suffix("/Cargo.toml"))
        else {
            continue;
        };
        let name = folder.rsplit('/').next().unwrap_or_default();
        let Some(allowed) = allowed.get(folder) else {
            complaints
                .push(manifest.at(1, "this crate is not in tests/arrows.txt, or in another wing there"));
            continue;
        };
        let mut section = "";
        for (number, line) in manifest.lines() {
            let line = line.trim();
            if line.starts_with('[') {
                section = line.trim_matches(['[', ']']);
                continue;
            }
            let is_arrow = section.ends_with("dependencies") && !section.ends_with("dev-dependencies");
            let dependency = line.split(['.', '=', ' ']).next().unwrap_or_default();
            let ours = dependency.strip_prefix("tapio-");
            if is_arrow && ours.is_some_and(|to| !allowed.contains(to)) {
                complaints.push(manifest.at(number, &format!("{name} must not depend on {dependency}")));
            }
            if data_plane.contains(name) && RUNTIMES.contains(&dependency) {
                complaints.push(manifest.at(number, &format!("the data plane must not know {dependency}")));
            }
        }
    }
    for file in files.iter().filter(|file| file.is_rust()) {
        let name =
            file.path.strip_prefix("crates/").and_then(|path| path.split('/').nth(1)).unwrap_or_default();
        for (number, line) in file.lines().filter(|_| data_plane.contains(name)) {
            let code = line.split("//").next().unwrap_or_default();
            if RUNTIMES.iter().any(|runtime| code.contains(&format!("{}::", runtime.replace('-', "_")))) {
                complaints.push(file.at(number, "the data plane must not know an asynchronous runtime"));
            }
        }
    }
    complaints
}

fn debug_marks(files: &[Source]) -> Vec<String> {
    // Put together here so that this file does not find itself. Words count in comments alone: one of the keys that
    // tapdisk publishes begins with such a word.
    let words = [concat!("FIX", "ME"), concat!("XX", "X")];
    let code = [concat!("db", "g!("), concat!("<<<<", "<<< ")];
    let todo = concat!("TO", "DO");
    let mut complaints = Vec::new();
    for file in files.iter().filter(|file| file.is_rust() || file.text.starts_with("#!")) {
        let comment_starts = if file.is_rust() { "//" } else { "#" };
        for (number, line) in file.lines() {
            let comment = line.split_once(comment_starts).map_or("", |(_, comment)| comment);
            let found = words.iter().filter(|word| has_word(comment, word));
            for mark in found.chain(code.iter().filter(|mark| has_word(line, mark))) {
                complaints.push(file.at(number, &format!("leftover mark {mark}")));
            }
            let without_issue = comment.match_indices(todo).any(|(at, _)| {
                let rest = comment[at + todo.len()..].strip_prefix("(#").unwrap_or_default();
                !rest.starts_with(|c: char| c.is_ascii_digit())
            });
            if has_word(comment, todo) && without_issue {
                complaints.push(
                    file.at(number, &format!("{todo} without the number of its issue, as {todo}(#12)")),
                );
            }
        }
    }
    complaints
}

/// Whether `word` stands in `line` and is not the middle of a longer one (a temporary name has its X's).
fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        let joins = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        let longer_before = word.starts_with(char::is_alphabetic) && joins(before);
        let longer_after = word.ends_with(char::is_alphabetic) && joins(after);
        !longer_before && !longer_after
    })
}

fn unsafe_without_reason(files: &[Source]) -> Vec<String> {
    let word = concat!("un", "safe");
    let mut complaints = Vec::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        let lines: Vec<&str> = file.text.lines().collect();
        for (index, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let opens = [" {", " impl"].iter().any(|tail| code.contains(&format!("{word}{tail}")));
            let above = &lines[index.saturating_sub(SAFETY_REACH_LINES)..=index];
            if opens && !above.iter().any(|line| line.contains("SAFETY:")) {
                complaints.push(file.at(index + 1, &format!("{word} without a SAFETY: comment")));
            }
        }
    }
    complaints
}

fn sizes(files: &[Source]) -> Vec<String> {
    let mut complaints = Vec::new();
    for file in files {
        if file.len > FILE_LEN_MAX {
            complaints
                .push(file.at(1, &format!("{} bytes, more than {FILE_LEN_MAX}: no blobs here", file.len)));
        }
        let lines = file.text.lines().count();
        if (file.is_rust() || file.text.starts_with("#!")) && lines > FILE_LINES_MAX {
            complaints.push(
                file.at(lines, &format!("more than {FILE_LINES_MAX} lines: this is more than one idea")),
            );
        }
        for (number, line) in file.lines().filter(|_| file.is_rust()) {
            // Neither a string nor the row of a table can be broken without changing it.
            let unbreakable =
                line.contains('"') || line.trim_start().trim_start_matches(['/', '!', ' ']).starts_with('|');
            if !unbreakable && line.chars().count() > LINE_COLUMNS_MAX {
                complaints.push(file.at(number, &format!("longer than {LINE_COLUMNS_MAX} columns")));
            }
        }
    }
    complaints
}

fn document_titles(files: &[Source]) -> Vec<String> {
    let mut complaints = Vec::new();
    for file in files.iter().filter(|file| file.path.ends_with(".md")) {
        let mut fenced = false;
        let mut titles = 0;
        for (_, line) in file.lines() {
            fenced ^= line.trim_start().starts_with("```");
            titles += usize::from(!fenced && line.starts_with("# "));
        }
        if titles != 1 {
            complaints.push(
                file.at(1, &format!("{titles} titles; a document has exactly one line with a single #")),
            );
        }
    }
    complaints
}

fn file_modes(files: &[Source]) -> Vec<String> {
    let mut complaints = Vec::new();
    for file in files {
        let script = file.text.starts_with("#!") && !file.is_rust();
        if script && !file.executable {
            complaints.push(file.at(1, "starts with #! but is not executable"));
        }
        if file.executable && !script {
            complaints.push(file.at(1, "is executable but does not start with #!"));
        }
    }
    complaints
}

fn never_imported(files: &[Source]) -> Vec<String> {
    let by_path: BTreeMap<&str, &Source> = files.iter().map(|file| (file.path.as_str(), file)).collect();
    let mut complaints = Vec::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        let path = Path::new(&file.path);
        let (Some(dir), Some(stem)) = (path.parent(), path.file_stem().and_then(|stem| stem.to_str())) else {
            continue;
        };
        let dir_name = dir.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        // Cargo finds these by itself.
        let is_root = matches!(stem, "main" | "lib" | "build")
            || ["tests", "bin", "benches", "examples", "fuzz_targets"].contains(&dir_name);
        if is_root {
            continue;
        }
        // `a/mod.rs` is declared where `a.rs` would be.
        let (dir, stem) = match (stem, dir.parent()) {
            ("mod", Some(above)) => (above, dir_name),
            _ => (dir, stem),
        };
        let dir_text = dir.to_string_lossy();
        let parents = [
            format!("{dir_text}.rs"),
            format!("{dir_text}/mod.rs"),
            format!("{dir_text}/lib.rs"),
            format!("{dir_text}/main.rs"),
        ];
        let declares = |source: &Source| {
            source.lines().any(|(_, line)| {
                let line = line.trim();
                let declared = line.strip_suffix(';').and_then(|line| line.split_whitespace().last());
                declared == Some(stem) && line.contains("mod ")
            })
        };
        let is_build_script = files.iter().any(|other| {
            other.path.ends_with("/Cargo.toml")
                && other
                    .text
                    .lines()
                    .any(|line| line.starts_with("build = ") && line.ends_with(&format!("/{stem}.rs\"")))
        });
        // A file of tests may be named by a #[path] in the file it tests, beside it.
        let named = format!("#[path = \"{stem}.rs\"]");
        let beside = files.iter().filter(|other| Path::new(&other.path).parent() == Some(dir));
        let is_named = beside.into_iter().any(|other| other.text.contains(&named));
        if !is_named
            && !is_build_script
            && !parents.iter().filter_map(|parent| by_path.get(parent.as_str())).any(|file| declares(file))
        {
            complaints.push(file.at(1, "no module declares this file"));
        }
    }
    complaints
}

fn control_characters(files: &[Source]) -> Vec<String> {
    let mut complaints = Vec::new();
    for file in files
        .iter()
        .filter(|file| file.is_rust() || file.path.ends_with(".md") || file.text.starts_with("#!"))
    {
        for (number, line) in file.text.split('\n').enumerate() {
            if line.chars().any(|c| c.is_control() && c != '\t') {
                complaints.push(file.at(number + 1, "a control character"));
            }
            if line.ends_with([' ', '\t']) {
                complaints.push(file.at(number + 1, "white space at the end of the line"));
            }
        }
        if !file.text.is_empty() && !file.text.ends_with('\n') {
            complaints.push(file.at(file.text.lines().count(), "no line end at the end"));
        }
    }
    complaints
}

/// The two licences, and a licence field in every crate.
fn licences(files: &[Source]) -> Vec<String> {
    let mut complaints = Vec::new();
    for name in [
        "LICENSE-MIT",
        "LICENSE-APACHE",
        "README.md",
        "ARCHITECTURE.md",
        "HACKING.md",
        "CHANGELOG.md",
        "deny.toml",
    ] {
        if !files.iter().any(|file| file.path == name) {
            complaints.push(format!("{name} is missing"));
        }
    }
    for file in
        files.iter().filter(|file| file.path.starts_with("crates/") && file.path.ends_with("/Cargo.toml"))
    {
        if !file.text.contains("license.workspace = true") || !file.text.contains("[lints]\nworkspace = true")
        {
            complaints.push(file.at(1, "a crate takes its licence and its lints from the workspace"));
        }
    }
    complaints
}

// --- the tests ---

#[track_caller]
fn assert_none(complaints: &[String]) {
    assert!(complaints.is_empty(), "{} complaints:\n{}", complaints.len(), complaints.join("\n"));
}

#[track_caller]
fn assert_finds(complaints: &[String], what: &str) {
    assert!(
        complaints.iter().any(|complaint| complaint.contains(what)),
        "{what:?} was not found: {complaints:?}"
    );
}

#[test]
fn the_list_of_files_is_not_empty() {
    let files = sources();
    for path in ["Cargo.toml", "crates/test/testkit/tests/tidy/main.rs", "scripts/test"] {
        assert!(files.iter().any(|file| file.path == path), "{path} is not among {} files", files.len());
    }
}

#[test]
fn crates_depend_only_on_what_the_table_allows() {
    let files = sources();
    let table = &files.iter().find(|file| file.path == "tests/arrows.txt").expect("the table").text;
    assert_none(&crate_arrows(&files, table));
    let bad = [
        Source::example(
            "crates/data/ring/Cargo.toml",
            "[dependencies]\ntapio-front.workspace = true\ntokio = \"1\"\n",
        ),
        Source::example("crates/unknown/Cargo.toml", ""),
        Source::example("crates/data/ring/src/lib.rs", "use tokio::fs;\n"),
    ];
    let found = crate_arrows(&bad, table);
    assert_finds(&found, "ring must not depend on tapio-front");
    assert_finds(&found, "must not know tokio");
    assert_finds(&found, "must not know an asynchronous runtime");
    assert_finds(&found, "not in tests/arrows.txt");
}

/// Packages that the programs of `packages` are built from and that have the feature `doubles` then.
fn doubles_in(packages: &[&str]) -> Vec<String> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["tree", "--offline", "--locked", "--edges", "normal,features", "--prefix", "none"]);
    cargo.args(packages.iter().flat_map(|package| ["-p", package])).current_dir(top());
    let output = cargo.output().expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().filter(|line| line.contains("feature \"doubles\"")).map(String::from).collect()
}

#[test]
fn installed_programs_contain_no_doubles() {
    let manifest = sources().into_iter().find(|file| file.path == "Cargo.toml").expect("the workspace").text;
    let (_, list) = manifest.split_once("default-members = [").expect("installed programs");
    let (list, _) = list.split_once(']').expect("the end of the list");
    let folders = list.split('"').skip(1).step_by(2);
    let names: Vec<String> = folders
        .map(|folder| folder.rsplit('/').next().unwrap_or_default())
        .map(|name| if name == "tapiod" { name.into() } else { format!("tapio-{name}") })
        .collect();
    assert!(names.len() >= 5, "{names:?}");
    assert_none(&doubles_in(&names.iter().map(String::as_str).collect::<Vec<_>>()));
    assert_finds(&doubles_in(&["tapio-bench"]), "tapio-front feature \"doubles\"");
}

#[test]
fn no_debug_marks_are_left() {
    assert_none(&debug_marks(&sources()));
    let text = concat!(
        "// TO",
        "DO later\n// TO",
        "DO(#12) fine\nlet x = db",
        "g!(1);\n// FIX",
        "ME soon\nlet key = \"FIX",
        "ME_key\";\n"
    );
    let found = debug_marks(&[Source::example("a.rs", text)]);
    assert_eq!(found.len(), 3, "{found:?}");
}

#[test]
fn every_unsafe_has_its_reason() {
    assert_none(&unsafe_without_reason(&sources()));
    let text = concat!("fn a() {\n    un", "safe { b() }\n}\n");
    assert_finds(&unsafe_without_reason(&[Source::example("a.rs", text)]), "a.rs:2");
}

#[test]
fn lines_files_and_blobs_have_bounds() {
    assert_none(&sizes(&sources()));
    let bad = [
        Source::example("a.rs", &"x".repeat(LINE_COLUMNS_MAX + 1)),
        Source::example("b.rs", &"\n".repeat(FILE_LINES_MAX + 1)),
        Source::example("c.bin", &"y".repeat(FILE_LEN_MAX + 1)),
    ];
    let found = sizes(&bad);
    assert_finds(&found, "a.rs:1: longer");
    assert_finds(&found, "more than one idea");
    assert_finds(&found, "no blobs");
}

#[test]
fn every_test_asserts_or_says_what_it_proves() {
    assert_none(&assertions::missing(&sources()));
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    assert_none(&circles::circles(&sources()));
}

#[test]
fn tests_that_are_ignored_are_on_the_list_of_skips() {
    assert_none(&ignored::unlisted(&sources()));
    let mark = ["#[", "ignore"].concat();
    let test = format!("{mark} = \"by hand\"]\nfn by_hand() {{}}\n\nfn other() {{}}\n");
    let list = |line| Source::example("tests/skips.allowed", line);
    let without = [Source::example("crates/a/tests/it.rs", &test), list("ignored: a::other  why\n")];
    assert_eq!(ignored::unlisted(&without).len(), 1, "not on the list");
    let with = [Source::example("crates/a/tests/it.rs", &test), list("ignored: (a|b)::by_hand  why\n")];
    assert_none(&ignored::unlisted(&with));
}

#[test]
fn locks_of_the_programs_cannot_be_poisoned() {
    assert_none(&locks::poisonable(&sources()));
    let bad =
        "use std::sync::{\n    Arc, Mutex,\n};\n#[cfg(test)]\nmod tests {\n    use std::sync::Condvar;\n}\n";
    let found = locks::poisonable(&[
        Source::example("crates/data/x/src/a.rs", bad),
        Source::example("crates/data/x/src/b.rs", "use std::sync::atomic::AtomicU64;\n"),
        Source::example("crates/data/x/src/c.rs", "fn a(_: std::sync::PoisonError<()>) {}\n"),
        Source::example("crates/data/x/src/d/tests.rs", bad),
        Source::example("crates/data/x/tests/e.rs", bad),
        Source::example("crates/test/x/src/f.rs", bad),
    ]);
    assert_eq!(found.len(), 2, "{found:?}");
    assert_finds(&found, "data/x/src/a.rs:1: std's Mutex");
    assert_finds(&found, "data/x/src/c.rs:1: std's PoisonError");
}

#[test]
fn documents_have_one_title() {
    assert_none(&document_titles(&sources()));
    let found = document_titles(&[Source::example("a.md", "# One\n```\n# in code\n```\n# Two\n")]);
    assert_finds(&found, "2 titles");
}

#[test]
fn scripts_are_executable_and_nothing_else_is() {
    assert_none(&file_modes(&sources()));
    assert_finds(&file_modes(&[Source::example("run", "#!/bin/sh\n")]), "not executable");
    let mut odd = Source::example("note.md", "# Note\n");
    odd.executable = true;
    assert_finds(&file_modes(&[odd]), "does not start with #!");
}

#[test]
fn every_file_is_part_of_a_program() {
    assert_none(&never_imported(&sources()));
    let files = [
        Source::example("crates/x/src/lib.rs", "mod a;\n#[cfg(test)]\nmod tests {}\n"),
        Source::example("crates/x/src/a.rs", "pub(crate) mod c;\n"),
        Source::example("crates/x/src/a/c.rs", ""),
        Source::example("crates/x/src/b.rs", ""),
        Source::example("crates/x/Cargo.toml", "build = \"../build-of-x.rs\"\n"),
        Source::example("crates/build-of-x.rs", "fn main() {}\n"),
    ];
    let found = never_imported(&files);
    assert_eq!(found, ["crates/x/src/b.rs:1: no module declares this file"]);
}

#[test]
fn text_is_plain() {
    assert_none(&control_characters(&sources()));
    let found = control_characters(&[Source::example("a.rs", "x \n\u{1b}[0m\nlast")]);
    assert_eq!(found.len(), 3, "{found:?}");
}

#[test]
fn documents_and_licences_are_there() {
    assert_none(&licences(&sources()));
    assert_finds(&licences(&[]), "LICENSE-MIT is missing");
}
