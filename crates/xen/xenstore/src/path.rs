//! Paths of nodes.

use std::borrow::Borrow;
use std::fmt;

/// Longest absolute path in bytes (`XENSTORE_ABS_PATH_MAX`).
pub const ABSOLUTE_LEN_MAX: usize = 3072;
/// Longest relative path in bytes (`XENSTORE_REL_PATH_MAX`).
pub const RELATIVE_LEN_MAX: usize = 2048;

/// A path that has been checked: absolute, plain characters, no `//`, no slash at its end (but the root's).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Path(String);

/// Why something is no path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathError {
    /// It is empty or has an empty part.
    Empty,
    /// It is longer than allowed.
    TooLong,
    /// A character other than letters, digits and `-/_@`.
    Character(char),
}

impl fmt::Display for PathError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("the path or a part of it is empty"),
            Self::TooLong => {
                write!(
                    f,
                    "the path is longer than {ABSOLUTE_LEN_MAX} bytes, or {RELATIVE_LEN_MAX} as a relative one"
                )
            }
            Self::Character(c) => {
                write!(f, "the character {c:?} in a path: letters, digits and -/_@ are allowed")
            }
        }
    }
}

impl std::error::Error for PathError {}

fn check(text: &str) -> Result<(), PathError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '/' | '_' | '@');
    if let Some(c) = text.chars().find(|c| !plain(*c)) {
        return Err(PathError::Character(c));
    }
    if text.is_empty() || text.contains("//") || (text.len() > 1 && text.ends_with('/')) {
        return Err(PathError::Empty);
    }
    Ok(())
}

impl Path {
    /// An absolute path, or a relative one that begins at `/local/domain/DOMID`.
    ///
    /// # Errors
    /// It is none.
    pub fn resolve(text: &str, domid: u32) -> Result<Self, PathError> {
        if text.starts_with('/') {
            return Self::parse(text);
        }
        if text.len() > RELATIVE_LEN_MAX {
            return Err(PathError::TooLong);
        }
        check(text)?;
        Ok(Self(format!("/local/domain/{domid}/{text}")))
    }

    /// An absolute path.
    ///
    /// # Errors
    /// It is none.
    pub fn parse(text: &str) -> Result<Self, PathError> {
        if text.len() > ABSOLUTE_LEN_MAX {
            return Err(PathError::TooLong);
        }
        check(text)?;
        match text.chars().next() {
            Some('/') => Ok(Self(text.to_owned())),
            first => Err(first.map_or(PathError::Empty, PathError::Character)),
        }
    }

    /// The root of the tree.
    pub fn root() -> Self {
        Self("/".into())
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it is `/`.
    pub fn is_root(&self) -> bool {
        self.0 == "/"
    }

    /// The path without its last part; `None` for the root.
    pub fn parent(&self) -> Option<Self> {
        match self.0.rfind('/') {
            _ if self.is_root() => None,
            Some(0) | None => Some(Self::root()),
            Some(at) => Some(Self(self.0[..at].to_owned())),
        }
    }

    /// The last part; empty for the root.
    pub fn name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or_default()
    }

    /// Its parts from the root on; none for the root.
    pub fn parts(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.0.split('/').filter(|part| !part.is_empty())
    }

    /// The node `name` below it. `name` may have several parts.
    ///
    /// # Errors
    /// The whole is no path.
    pub fn child(&self, name: &str) -> Result<Self, PathError> {
        let parent = if self.is_root() { "" } else { &self.0 };
        if name.starts_with('/') {
            return Err(PathError::Empty);
        }
        Self::parse(&format!("{parent}/{name}"))
    }

    /// How many levels it is below `above`: 0 for itself, `None` if it is not below it.
    pub fn depth_below(&self, above: &Path) -> Option<usize> {
        if above.is_root() {
            return Some(self.parts().count());
        }
        match self.0.strip_prefix(&above.0)? {
            "" => Some(0),
            rest if rest.starts_with('/') => Some(rest.matches('/').count()),
            _ => None,
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl AsRef<str> for Path {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for Path {
    fn borrow(&self) -> &str {
        &self.0
    }
}

/// What is watched that is no node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Special {
    /// `@introduceDomain`: a domain came.
    IntroduceDomain,
    /// `@releaseDomain`: a domain has shut down or is gone. Newer daemons also know `@releaseDomain/DOMID`.
    ReleaseDomain(Option<u32>),
}

impl Special {
    /// The one of this name.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "@introduceDomain" => Some(Self::IntroduceDomain),
            "@releaseDomain" => Some(Self::ReleaseDomain(None)),
            _ => {
                let domid = super::wire::decimal(text.strip_prefix("@releaseDomain/")?.as_bytes())?;
                Some(Self::ReleaseDomain(Some(u32::try_from(domid).ok()?)))
            }
        }
    }
}

impl fmt::Display for Special {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::IntroduceDomain => f.write_str("@introduceDomain"),
            Self::ReleaseDomain(None) => f.write_str("@releaseDomain"),
            Self::ReleaseDomain(Some(domid)) => write!(f, "@releaseDomain/{domid}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> Path {
        Path::parse(text).unwrap()
    }

    #[test]
    fn plain_paths_are_paths() {
        for good in ["/", "/a", "/local/domain/0/backend/vbd3/1/51712/queue-0/ring-ref", "/a_B-9@x"] {
            assert_eq!(path(good).as_str(), good);
        }
        assert_eq!(Path::parse("/a/").unwrap_err(), PathError::Empty);
        assert_eq!(Path::parse("//").unwrap_err(), PathError::Empty);
        assert_eq!(Path::parse("/a//b").unwrap_err(), PathError::Empty);
        assert_eq!(Path::parse("").unwrap_err(), PathError::Empty);
        assert_eq!(Path::parse("a").unwrap_err(), PathError::Character('a'));
        for c in ['.', ' ', '\0', '\n', 'ä', ':', '*', '~'] {
            assert_eq!(Path::parse(&format!("/a{c}")).unwrap_err(), PathError::Character(c));
        }
        assert_eq!(path(&format!("/{}", "a".repeat(3071))).as_str().len(), 3072);
        assert_eq!(Path::parse(&format!("/{}", "a".repeat(3072))).unwrap_err(), PathError::TooLong);
    }

    #[test]
    fn relative_paths_begin_at_the_domain() {
        assert_eq!(Path::resolve("device/vbd", 7).unwrap().as_str(), "/local/domain/7/device/vbd");
        assert_eq!(Path::resolve("/device", 7).unwrap().as_str(), "/device");
        assert_eq!(Path::resolve(&"a".repeat(2049), 7).unwrap_err(), PathError::TooLong);
        assert!(Path::resolve(&"a".repeat(2048), 7).is_ok());
        assert_eq!(Path::resolve("a/", 7).unwrap_err(), PathError::Empty);
    }

    #[test]
    fn parts_are_where_they_are() {
        let deep = path("/a/b/c");
        assert_eq!(deep.parent().unwrap(), path("/a/b"));
        assert_eq!(path("/a").parent().unwrap(), Path::root());
        assert_eq!(Path::root().parent(), None);
        assert_eq!((deep.name(), Path::root().name()), ("c", ""));
        assert_eq!(deep.parts().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(Path::root().child("x/y").unwrap(), path("/x/y"));
        assert_eq!(deep.child("d").unwrap(), path("/a/b/c/d"));
        for bad in ["", "/d", "d/", "d.e"] {
            assert!(deep.child(bad).is_err(), "{bad:?}");
        }
        assert_eq!(deep.depth_below(&path("/a")), Some(2));
        assert_eq!(deep.depth_below(&deep), Some(0));
        assert_eq!(deep.depth_below(&Path::root()), Some(3));
        assert_eq!(path("/ab").depth_below(&path("/a")), None);
        assert_eq!(path("/a").depth_below(&deep), None);
    }

    #[test]
    fn special_watches_have_names() {
        for text in ["@introduceDomain", "@releaseDomain", "@releaseDomain/12"] {
            assert_eq!(Special::parse(text).unwrap().to_string(), text);
        }
        for bad in
            ["@x", "@releaseDomain/", "@releaseDomain/-1", "@introduceDomain/1", "@releaseDomain/4294967296"]
        {
            assert_eq!(Special::parse(bad), None, "{bad}");
        }
    }
}
