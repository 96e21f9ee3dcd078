//! The files of a crate import each other in no circle. A file and the one that declares it, or that it declares, are
//! one thing in several files: between them, and what lies further above and below, anything goes.

use std::collections::{BTreeMap, BTreeSet};

use super::Source;

/// The segments of a path or of a module below the root of its crate.
type Path = Vec<String>;

/// A crate: its modules by their paths.
#[derive(Default)]
struct Crate {
    modules: BTreeMap<Path, Module>,
}

/// A module that has a file.
#[derive(Default)]
struct Module {
    file: String,
    /// Paths that it imports or names, from the root of the crate.
    named: Vec<Path>,
    /// What it exports from elsewhere: the name and the path.
    exported: BTreeMap<String, Path>,
}

/// The crate and the module that a file is; none for a file outside of `src`.
fn module_of(path: &str) -> Option<(&str, Path)> {
    let (dir, inside) = path.strip_suffix(".rs")?.split_once("/src/")?;
    let mut segments: Path = inside.split('/').map(String::from).collect();
    let last = segments.last()?;
    if ["mod", "lib", "main"].contains(&last.as_str()) {
        segments.pop();
    }
    Some((dir, segments))
}

/// The lines of a file without comments, and without the tests at its end.
fn code(text: &str) -> Vec<&str> {
    let lines: Vec<&str> = text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
    let tests = lines.windows(2).position(|pair| {
        let opens = pair[1].contains("mod ") && pair[1].trim_end().ends_with('{');
        pair[0].trim() == "#[cfg(test)]" && opens
    });
    lines[..tests.unwrap_or(lines.len())].to_vec()
}

/// What follows `use` in a line that begins an import, and whether it is exported.
fn import(line: &str) -> Option<(&str, bool)> {
    let line = line.trim();
    let (visibility, tree) = line.split_once("use ")?;
    let visibility = visibility.trim_end();
    let is_visibility = visibility.is_empty()
        || visibility == "pub"
        || visibility.strip_prefix("pub(").is_some_and(|rest| rest.ends_with(')'));
    // Prose in a text of several lines ends otherwise.
    (is_visibility && line.ends_with([';', '{', ','])).then_some((tree, !visibility.is_empty()))
}

/// The paths of an import, each with the name it gets.
fn expand(tree: &str) -> Vec<(Path, String)> {
    let mut found = Vec::new();
    let (mut depth, mut begin) = (0, 0);
    for (at, letter) in tree.char_indices().chain([(tree.len(), ',')]) {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                found.extend(expand_one(tree[begin..at].trim()));
                begin = at + 1;
            }
            _ => {}
        }
    }
    found
}

fn expand_one(item: &str) -> Vec<(Path, String)> {
    let segments = |text: &str| -> Path {
        text.split("::").map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
    };
    if let Some((prefix, list)) = item.split_once('{') {
        let prefix = segments(prefix);
        let list = list.rsplit_once('}').map_or(list, |(list, _)| list);
        let below = expand(list).into_iter();
        return below.map(|(path, name)| ([prefix.clone(), path].concat(), name)).collect();
    }
    let (path, name) = item.split_once(" as ").unwrap_or((item, ""));
    let mut path = segments(path);
    if path.last().is_some_and(|last| last == "self") && path.len() > 1 {
        path.pop();
    }
    let name =
        if name.is_empty() { path.last().cloned().unwrap_or_default() } else { name.trim().to_owned() };
    if path.is_empty() { Vec::new() } else { vec![(path, name)] }
}

/// Paths that begin with `crate::` or `super::`, wherever they stand in a line.
fn inline(line: &str) -> Vec<Path> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    for (at, _) in line.match_indices("crate::").chain(line.match_indices("super::")) {
        if line[..at].ends_with(|c: char| is_word(c) || c == ':') {
            continue;
        }
        let rest = &line[at..];
        let end = rest.find(|c: char| !is_word(c) && c != ':').unwrap_or(rest.len());
        found.push(rest[..end].split("::").filter(|part| !part.is_empty()).map(String::from).collect());
    }
    found
}

impl Crate {
    /// A path as seen in `module`, from the root; none where it leads to another crate.
    fn absolute(&self, module: &[String], path: &[String]) -> Option<Path> {
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => Some(rest.to_vec()),
            "self" => Some([module, rest].concat()),
            "super" => {
                let above = path.iter().take_while(|part| *part == "super").count();
                let kept = module.len().checked_sub(above)?;
                Some([&module[..kept], &path[above..]].concat())
            }
            _ => {
                let child = [module, std::slice::from_ref(first)].concat();
                self.modules.contains_key(&child).then(|| [module, path].concat())
            }
        }
    }

    fn read(&mut self, module: &Path, text: &str) {
        let (mut named, mut exported) = (Vec::new(), BTreeMap::new());
        let mut lines = code(text).into_iter();
        while let Some(line) = lines.next() {
            let Some((tree, is_exported)) = import(line) else {
                named.extend(inline(line).iter().filter_map(|path| self.absolute(module, path)));
                continue;
            };
            let mut tree = tree.to_owned();
            while !tree.contains(';') {
                let Some(line) = lines.next() else { break };
                tree.push_str(line);
            }
            for (path, name) in expand(tree.split(';').next().unwrap_or_default()) {
                let Some(path) = self.absolute(module, &path) else { continue };
                if is_exported {
                    exported.insert(name, path.clone());
                }
                named.push(path);
            }
        }
        let read = self.modules.entry(module.clone()).or_default();
        read.named.extend(named);
        read.exported.extend(exported);
    }

    /// The module in which what a path names is written: through modules that only export it.
    fn home<'a>(&'a self, path: &'a [String], steps_left: usize) -> Option<&'a Path> {
        let len = (0..=path.len()).rev().find(|len| self.modules.contains_key(&path[..*len]))?;
        let (module, read) = self.modules.get_key_value(&path[..len])?;
        let next = path.get(len).and_then(|name| read.exported.get(name));
        match next {
            Some(next) if steps_left > 0 && next != &path[..=len] => self.home(next, steps_left - 1),
            _ => Some(module),
        }
    }

    /// The modules that a module imports, but for those above and below it.
    fn imports<'a>(&'a self, of: &Path) -> BTreeSet<&'a Path> {
        let homes = self.modules[of].named.iter().filter_map(|path| self.home(path, 6));
        homes.filter(|home| !home.starts_with(of) && !of.starts_with(home)).collect()
    }
}

/// Complains about every file in a circle.
pub fn circles(files: &[Source]) -> Vec<String> {
    let mut crates: BTreeMap<&str, Crate> = BTreeMap::new();
    let rust =
        || files.iter().filter_map(|file| module_of(&file.path).map(|(dir, module)| (file, dir, module)));
    for (file, dir, module) in rust() {
        crates.entry(dir).or_default().modules.entry(module).or_default().file.clone_from(&file.path);
    }
    for (file, dir, module) in rust() {
        if let Some(known) = crates.get_mut(dir) {
            known.read(&module, &file.text);
        }
    }
    let mut complaints = Vec::new();
    for known in crates.values() {
        let imports: BTreeMap<&Path, BTreeSet<&Path>> =
            known.modules.keys().map(|module| (module, known.imports(module))).collect();
        let reached = |from: &Path| {
            let mut found: BTreeSet<&Path> = BTreeSet::new();
            let mut open: Vec<&Path> = imports[from].iter().copied().collect();
            while let Some(next) = open.pop() {
                if found.insert(next) {
                    open.extend(&imports[next]);
                }
            }
            found
        };
        let reached: BTreeMap<&Path, BTreeSet<&Path>> =
            imports.keys().map(|from| (*from, reached(from))).collect();
        for (module, _) in reached.iter().filter(|(module, all)| all.contains(*module)) {
            let file = &known.modules[*module].file;
            let next = imports[module].iter().find(|next| reached[*next].contains(module));
            let next = next.map_or("itself", |next| &known.modules[*next].file);
            complaints.push(format!("{file}:1: imports {next}, which leads back here: a circle"));
        }
    }
    complaints
}

#[test]
fn a_circle_is_found_through_an_export_and_files_above_and_below_make_none() {
    let file = |name: &str, text: &str| Source::example(&format!("crates/w/c/src/{name}.rs"), text);
    let files = [
        file(
            "lib",
            "mod one;\nmod two;\nmod three;\npub use two::{\n    part::Exported as Known,\n    Other,\n};\n",
        ),
        file("one", "use std::fmt;\nuse crate::{Known, fmt as _};\nmod below;\nuse below::Low;\n"),
        file("one/below", "use super::One;\n// use crate::two::Other;\n"),
        file("two/mod", "pub mod part;\nfn f() {\n    part::g();\n}\n"),
        file("two/part", "fn g(_: &super::super::three::Three) {}\n"),
        file("three", "use crate::one::One;\n\n#[cfg(test)]\nmod tests {\n    use crate::two::Other;\n}\n"),
    ];
    let found = circles(&files);
    assert_eq!(
        found,
        [
            "crates/w/c/src/one.rs:1: imports crates/w/c/src/two/part.rs, which leads back here: a circle",
            "crates/w/c/src/three.rs:1: imports crates/w/c/src/one.rs, which leads back here: a circle",
            "crates/w/c/src/two/part.rs:1: imports crates/w/c/src/three.rs, which leads back here: a circle",
        ]
    );
}
