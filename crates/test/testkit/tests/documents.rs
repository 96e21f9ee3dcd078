//! What the pages of `docs/design/` claim about the code: a test or fuzz target that a table names in its last column
//! exists. So a page cannot go on claiming what was removed or renamed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Header of a table column that names tests.
const COLUMN: &str = "shown by";

fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(3)
        .expect("three levels below the top")
        .to_path_buf()
}

/// Files below `dir` with this ending, `target` left out.
fn files(dir: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() && entry.file_name() != "target" {
                open.push(path);
            } else if path.extension().is_some_and(|extension| extension == ending) {
                found.push(path);
            }
        }
    }
    found
}

/// Names of functions and of fuzz targets.
fn known(top: &Path) -> BTreeSet<String> {
    let mut names: BTreeSet<String> = files(&top.join("fuzz/fuzz_targets"), "rs")
        .iter()
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
        .collect();
    for file in files(&top.join("crates"), "rs").iter().chain(&files(&top.join("crates"), "py")) {
        let text = std::fs::read_to_string(file).expect("a source file is text");
        let after = |keyword: &str| {
            let defines = |line: &str| {
                let at = line.find(keyword)? + keyword.len();
                let rest = &line[at..];
                let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
                Some(rest[..end].to_owned())
            };
            text.lines().filter_map(defines).collect::<Vec<_>>()
        };
        names.extend(after("fn "));
        names.extend(after("def "));
    }
    names
}

/// What the tables of `text` name in their column of tests, with the line; paths and commands are left out.
fn named(text: &str) -> Vec<(usize, String)> {
    let mut names = Vec::new();
    let mut in_table = false;
    for (index, line) in text.lines().enumerate() {
        let Some(row) = line.strip_prefix('|') else {
            in_table = false;
            continue;
        };
        let Some(last) = row.trim_end().trim_end_matches('|').rsplit('|').next() else { continue };
        if last.trim() == COLUMN {
            in_table = true;
        } else if in_table {
            let quoted = last.split('`').skip(1).step_by(2);
            let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            let plain = quoted.map(|name| name.rsplit("::").next().unwrap_or(name));
            names.extend(
                plain.filter(|name| name.chars().all(is_name)).map(|name| (index + 1, name.to_owned())),
            );
        }
    }
    names
}

#[test]
fn every_test_that_a_page_names_exists() {
    let top = top();
    let known = known(&top);
    let mut count = 0;
    let mut missing = Vec::new();
    for page in files(&top.join("docs/design"), "md") {
        let text = std::fs::read_to_string(&page).expect("a page is text");
        for (line, name) in named(&text) {
            count += 1;
            if !known.contains(&name) {
                missing.push(format!("{}:{line}: there is no test or fuzz target '{name}'", page.display()));
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    assert!(count > 20, "only {count} names were found: the tables have another shape than this test reads");
}

#[test]
fn names_are_found_in_their_column_alone() {
    let page = "| a | shown by |\n|---|---|\n| `no` | `a_test`, fuzz target `t`, `it::b_test`, `make test` |\n\n| `x` | `y` |\n";
    let names: Vec<String> = named(page).into_iter().map(|(_, name)| name).collect();
    assert_eq!(names, ["a_test", "t", "b_test"]);
}

/// Names in backquotes in the first column of the table of crates, as `wing/crate`.
fn crates_of(architecture: &str) -> BTreeSet<String> {
    let rows = architecture.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.filter_map(|row| row.split_once('`')).map(|(name, _)| name.to_owned()).collect()
}

/// The folders of crates, as `wing/crate`.
fn folders_of_crates(top: &Path) -> BTreeSet<String> {
    let inside = |dir: &Path| -> Vec<PathBuf> {
        std::fs::read_dir(dir).expect("a folder").map(|entry| entry.expect("an entry").path()).collect()
    };
    let crates = top.join("crates");
    let wings = inside(&crates).into_iter().filter(|path| path.is_dir());
    let folders = wings.flat_map(|wing| inside(&wing));
    folders.map(|dir| dir.strip_prefix(&crates).expect("inside").to_string_lossy().into_owned()).collect()
}

/// The words of the first drawing below the heading `## The whole`.
fn words_of_the_drawing(architecture: &str) -> BTreeSet<&str> {
    let (_, below) = architecture.split_once("## The whole").expect("the heading");
    let drawing = below.split("```").nth(1).expect("a drawing");
    drawing.split(|c: char| !c.is_alphanumeric() && c != '-').collect()
}

#[test]
fn the_overview_and_the_table_of_arrows_name_every_crate() {
    let top = top();
    let text = std::fs::read_to_string(top.join("ARCHITECTURE.md")).expect("the overview");
    let arrows = std::fs::read_to_string(top.join("tests/arrows.txt")).expect("the table of arrows");
    let folders = folders_of_crates(&top);
    assert_eq!(
        crates_of(&text),
        folders,
        "the table of ARCHITECTURE.md and the folders below crates/ differ"
    );
    let rows = arrows.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once(':'));
    let named: BTreeSet<String> =
        rows.map(|(name, _)| name.to_owned()).filter(|name| name != "data-plane").collect();
    assert_eq!(named, folders, "tests/arrows.txt and the folders below crates/ differ");
    let drawn = words_of_the_drawing(&text);
    for folder in &folders {
        let (wing, name) = folder.split_once('/').expect("wing/crate");
        assert!(drawn.contains(wing), "the drawing of ARCHITECTURE.md lacks the wing {wing}");
        assert!(drawn.contains(name), "the drawing of ARCHITECTURE.md lacks {folder}");
    }
}

#[test]
fn every_link_of_a_page_leads_to_a_file() {
    let top = top();
    let mut pages = files(&top.join("docs"), "md");
    pages.extend(["README.md", "ARCHITECTURE.md", "HACKING.md", "CHANGELOG.md"].map(|name| top.join(name)));
    let mut count = 0;
    let mut dead = Vec::new();
    for page in pages {
        let text = std::fs::read_to_string(&page).expect("a page is text");
        let targets =
            text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
        for target in targets.filter(|target| !target.contains("://") && !target.starts_with('#')) {
            count += 1;
            let file = target.split('#').next().unwrap_or(target);
            if !page.parent().expect("a folder").join(file).exists() {
                dead.push(format!("{}: {target}", page.display()));
            }
        }
    }
    assert!(dead.is_empty(), "links that lead nowhere:\n{}", dead.join("\n"));
    assert!(count > 20, "only {count} links were found");
}

/// Paths of source files below `crates/` that `text` names, with their lines. A part in capitals stands for any name.
fn paths(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        for (at, _) in line.match_indices("crates/") {
            let rest = &line[at..];
            let end =
                rest.find(|c: char| !(c.is_ascii_alphanumeric() || "/_-.".contains(c))).unwrap_or(rest.len());
            let path = rest[..end].trim_end_matches(['.', '/']);
            let stands_for_any =
                path.split(['/', '.']).any(|part| part.len() > 1 && part == part.to_uppercase());
            if !stands_for_any && path != "crates" {
                found.push((index + 1, path.to_owned()));
            }
        }
    }
    found
}

#[test]
fn every_file_that_a_page_names_exists() {
    let top = top();
    let mut wrong = Vec::new();
    let mut count = 0;
    for page in ["README.md", "ARCHITECTURE.md", "HACKING.md"]
        .iter()
        .map(|name| top.join(name))
        .chain(files(&top.join("docs"), "md"))
    {
        let text = std::fs::read_to_string(&page).expect("a page is text");
        for (line, path) in paths(&text) {
            count += 1;
            if !top.join(&path).exists() {
                wrong.push(format!("{}:{line}: there is no {path}", page.display()));
            }
        }
    }
    assert!(count > 50, "only {count} paths were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn paths_are_found_wherever_they_stand() {
    let text = "in `crates/a/b.rs` and (crates/c-d/e),\nbut not crates/WING/NAME or crates/x/NAME.rs.";
    assert_eq!(paths(text), [(1, "crates/a/b.rs".to_owned()), (1, "crates/c-d/e".to_owned())]);
}
