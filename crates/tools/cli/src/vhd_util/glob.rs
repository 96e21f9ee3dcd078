//! File name patterns as the shell's: `*`, `?`, `[a-z]`, `[!a-z]`, `{a,b}`, `\` before a plain character.
//!
//! A leading dot is matched by a dot alone, so that files being made are not listed.

use std::path::{Path, PathBuf};

use super::output::Failure;

/// The most patterns that braces may stand for.
const ALTERNATIVES_MAX: usize = 1024;

/// Whether the pattern has characters that stand for others. Braces alone only name several files.
pub(super) fn has_wildcards(pattern: &str) -> bool {
    pattern.contains(['*', '?', '['])
}

/// The files that match a pattern, sorted, or as their directories have them. A directory that cannot be read is an
/// error.
pub(super) fn files(pattern: &str, sorted: bool) -> Result<Vec<PathBuf>, Failure> {
    let mut found = Vec::new();
    for plain in alternatives(pattern)? {
        let (mut places, rest) = match plain.strip_prefix('/') {
            Some(rest) => (vec![PathBuf::from("/")], rest.to_string()),
            None => (vec![PathBuf::new()], plain),
        };
        let parts: Vec<&str> = rest.split('/').filter(|part| !part.is_empty()).collect();
        for part in parts {
            let mut next = Vec::new();
            for place in &places {
                step(place, part, &mut next)?;
            }
            places = next;
        }
        found.extend(places);
    }
    if sorted {
        found.sort();
        found.dedup();
    }
    Ok(found)
}

/// Whether a whole name matches a pattern, braces included.
pub(super) fn matches(pattern: &str, name: &str) -> bool {
    let name: Vec<char> = name.chars().collect();
    alternatives(pattern).is_ok_and(|patterns| {
        patterns.iter().any(|pattern| match_part(&pattern.chars().collect::<Vec<_>>(), &name))
    })
}

/// What `part` of a pattern finds in the directory `place`.
fn step(place: &Path, part: &str, found: &mut Vec<PathBuf>) -> Result<(), Failure> {
    if !part.contains(['*', '?', '[', '\\']) {
        let path = place.join(part);
        if std::fs::symlink_metadata(&path).is_ok() {
            found.push(path);
        }
        return Ok(());
    }
    let directory = if place.as_os_str().is_empty() { Path::new(".") } else { place };
    if !directory.is_dir() {
        return Ok(());
    }
    let failed = |error: std::io::Error| {
        Failure::new(error.raw_os_error().unwrap_or(libc::EIO), format!("{}: {error}", directory.display()))
    };
    let pattern: Vec<char> = part.chars().collect();
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let text: Vec<char> = name.to_string_lossy().chars().collect();
        let hidden_ok = text.first() != Some(&'.') || pattern.first() == Some(&'.');
        if hidden_ok && match_part(&pattern, &text) {
            found.push(place.join(name));
        }
    }
    Ok(())
}

/// Patterns without braces that `pattern` stands for.
fn alternatives(pattern: &str) -> Result<Vec<String>, Failure> {
    let mut done = Vec::new();
    let mut open = vec![pattern.to_string()];
    while let Some(pattern) = open.pop() {
        match first_braces(&pattern) {
            Some((start, end, choices)) => {
                for choice in choices.into_iter().rev() {
                    open.push(format!("{}{choice}{}", &pattern[..start], &pattern[end..]));
                }
            }
            None => done.push(pattern),
        }
        if done.len() + open.len() > ALTERNATIVES_MAX {
            return Err(Failure::invalid(format!(
                "the pattern stands for more than {ALTERNATIVES_MAX} others"
            )));
        }
    }
    Ok(done)
}

/// Where the first braces with a comma begin and end, and what stands between their commas.
fn first_braces(pattern: &str) -> Option<(usize, usize, Vec<&str>)> {
    for (start, _) in pattern.match_indices('{') {
        let mut depth = 0;
        let mut cuts = vec![start + 1];
        for (at, character) in pattern[start..].char_indices() {
            match character {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 1 => cuts.push(start + at + 1),
                _ => {}
            }
            if depth == 0 {
                if cuts.len() == 1 {
                    break;
                }
                let end = start + at;
                let ends = cuts.iter().skip(1).map(|cut| cut - 1).chain([end]);
                let choices = cuts.iter().zip(ends).map(|(&from, to)| &pattern[from..to]).collect();
                return Some((start, end + 1, choices));
            }
        }
    }
    None
}

/// Matches without looking back further than the last star, so that no pattern takes long.
fn match_part(pattern: &[char], name: &[char]) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        if pattern.get(p) == Some(&'*') {
            star = Some((p, n));
            p += 1;
        } else if let Some(width) = match_one(&pattern[p..], name[n]) {
            p += width;
            n += 1;
        } else if let Some((at, from)) = star {
            star = Some((at, from + 1));
            p = at + 1;
            n = from + 1;
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|&character| character == '*')
}

/// How many characters of the pattern match this one character, `None` where they do not.
fn match_one(pattern: &[char], character: char) -> Option<usize> {
    match pattern {
        ['?', ..] => Some(1),
        ['\\', plain, ..] => (*plain == character).then_some(2),
        ['[', rest @ ..] => match class(rest, character) {
            Some((is_in, width)) => is_in.then_some(width + 1),
            None => (character == '[').then_some(1),
        },
        [plain, ..] => (*plain == character).then_some(1),
        [] => None,
    }
}

/// Whether the class that begins behind a bracket has the character, and its width with the closing bracket.
fn class(pattern: &[char], character: char) -> Option<(bool, usize)> {
    let negated = matches!(pattern.first(), Some('!' | '^'));
    let mut at = usize::from(negated);
    let first = at;
    let mut is_in = false;
    loop {
        let low = *pattern.get(at)?;
        if low == ']' && at > first {
            return Some((is_in != negated, at + 1));
        }
        if pattern.get(at + 1) == Some(&'-') && pattern.get(at + 2).is_some_and(|&high| high != ']') {
            is_in |= (low..=pattern[at + 2]).contains(&character);
            at += 3;
        } else {
            is_in |= low == character;
            at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_the_shells_do() {
        for (pattern, name, yes) in [
            ("*.vhd", "a.vhd", true),
            ("*.vhd", "a.vhdx", false),
            ("VHD-*", "VHD-123", true),
            ("?.vhd", "a.vhd", true),
            ("[a-c]*", "b1", true),
            ("[!a-c]*", "b1", false),
            ("[]x]", "]", true),
            ("[x", "[x", true),
            ("{a,b{1,2}}.vhd", "b2.vhd", true),
            ("{a,b}.vhd", "c.vhd", false),
            ("{a}", "{a}", true),
            ("a\\*b", "a*b", true),
            ("a\\*b", "axb", false),
            ("*a*a*a*a*b", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", false),
            ("", "", true),
        ] {
            assert_eq!(matches(pattern, name), yes, "{pattern} {name}");
        }
    }

    #[test]
    fn files_are_found_in_order_and_without_dots() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b.vhd", "a.vhd", ".c.vhd", "d.raw"] {
            std::fs::write(dir.path().join(name), b"").unwrap();
        }
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        std::fs::write(dir.path().join("sub/e.vhd"), b"").unwrap();
        let find = |pattern: &str| {
            let found = files(&format!("{}/{pattern}", dir.path().display()), true).unwrap();
            found
                .iter()
                .map(|path| path.strip_prefix(dir.path()).unwrap().display().to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(find("*.vhd"), ["a.vhd", "b.vhd"]);
        assert_eq!(find("{*.raw,*/*.vhd}"), ["d.raw", "sub/e.vhd"]);
        assert_eq!(find("none*"), [""; 0]);
        assert_eq!(find("a.vhd"), ["a.vhd"]);
    }

    #[test]
    fn braces_cannot_explode() {
        assert!(alternatives(&"{a,b}".repeat(20)).is_err());
    }
}
