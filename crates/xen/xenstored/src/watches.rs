//! The watches, by the path that they are about.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::rc::Rc;

/// A connection's number.
pub type ConnId = usize;

/// A watch, filed under its absolute path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watch {
    /// Whose.
    pub conn: ConnId,
    /// What comes back in its events.
    pub token: Rc<[u8]>,
    /// Bytes left off the front of the paths of its events: its path was a relative one.
    pub relative: usize,
    /// Levels below its path that it is about; all without.
    pub depth: Option<u32>,
}

/// All watches. An event costs a look-up for each level of its path, however many watches there are.
#[derive(Debug, Default)]
pub struct Watches {
    by_path: BTreeMap<Rc<str>, Vec<Watch>>,
}

impl Watches {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_path.is_empty()
    }

    /// Adds one. False when the connection has one of this path and token already.
    pub fn add(&mut self, path: &Rc<str>, watch: Watch) -> bool {
        let here = self.by_path.entry(path.clone()).or_default();
        if here.iter().any(|known| known.conn == watch.conn && known.token == watch.token) {
            return false;
        }
        here.push(watch);
        true
    }

    /// The one of this path and token.
    pub fn get(&self, conn: ConnId, path: &str, token: &[u8]) -> Option<&Watch> {
        self.by_path.get(path)?.iter().find(|watch| watch.conn == conn && *watch.token == *token)
    }

    /// Takes one away. False when there is none.
    pub fn remove(&mut self, conn: ConnId, path: &str, token: &[u8]) -> bool {
        let Some(here) = self.by_path.get_mut(path) else { return false };
        let before = here.len();
        here.retain(|watch| watch.conn != conn || *watch.token != *token);
        let found = here.len() < before;
        if here.is_empty() {
            self.by_path.remove(path);
        }
        found
    }

    /// Calls `tell` for the watches on a path and on what is above it.
    pub fn above(&self, path: &str, mut tell: impl FnMut(&Watch)) {
        let mut level = 0;
        let mut end = path.len();
        loop {
            if let Some(here) = self.by_path.get(&path[..end]) {
                here.iter()
                    .filter(|watch| watch.depth.is_none_or(|depth| level <= depth))
                    .for_each(&mut tell);
            }
            if end <= 1 {
                return;
            }
            level += 1;
            end = match path[..end].rfind('/') {
                Some(0) => 1,
                Some(slash) => slash,
                // A special name, whose domain stands behind a slash.
                None => return,
            };
        }
    }

    /// Calls `tell` with the path and the watch for all watches below a path.
    pub fn below(&self, path: &str, mut tell: impl FnMut(&str, &Watch)) {
        let first = if path == "/" { path.to_owned() } else { format!("{path}/") };
        for (below, watches) in
            self.by_path.range::<str, _>((Bound::Excluded(first.as_str()), Bound::Unbounded))
        {
            if !below.starts_with(&first) {
                return;
            }
            watches.iter().for_each(|watch| tell(below, watch));
        }
    }

    /// All watches of a connection with their paths.
    pub fn of(&self, conn: ConnId) -> impl Iterator<Item = (&Rc<str>, &Watch)> {
        self.by_path
            .iter()
            .flat_map(|(path, here)| here.iter().map(move |watch| (path, watch)))
            .filter(move |(_, watch)| watch.conn == conn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch(conn: ConnId, depth: Option<u32>) -> Watch {
        Watch { conn, token: Rc::from(b"t".as_slice()), relative: 0, depth }
    }

    fn told(watches: &Watches, path: &str) -> Vec<ConnId> {
        let mut told = Vec::new();
        watches.above(path, |watch| told.push(watch.conn));
        told
    }

    #[test]
    fn events_reach_what_is_above_as_deep_as_wanted() {
        let mut watches = Watches::default();
        let paths: [(&str, Option<u32>); 5] =
            [("/", None), ("/a", Some(0)), ("/a", Some(1)), ("/a/b", None), ("@releaseDomain", None)];
        for (conn, (path, depth)) in paths.into_iter().enumerate() {
            assert!(watches.add(&path.into(), watch(conn, depth)));
        }
        assert_eq!(told(&watches, "/a"), [1, 2, 0]);
        assert_eq!(told(&watches, "/a/b"), [3, 2, 0]);
        assert_eq!(told(&watches, "/a/b/c"), [3, 0]);
        assert_eq!(told(&watches, "/"), [0]);
        assert_eq!(told(&watches, "/ab"), [0]);
        assert_eq!(told(&watches, "@releaseDomain/5"), [4]);
        let mut below = Vec::new();
        watches.below("/", |path, watch| below.push((path.to_owned(), watch.conn)));
        assert_eq!(below, [("/a".to_owned(), 1), ("/a".to_owned(), 2), ("/a/b".to_owned(), 3)]);
    }

    #[test]
    fn path_and_token_name_one_of_a_connection() {
        let mut watches = Watches::default();
        let path: Rc<str> = "/a".into();
        assert!(watches.add(&path, watch(1, None)) && watches.add(&path, watch(2, None)));
        assert!(!watches.add(&path, watch(1, Some(3))));
        assert!(!watches.remove(3, "/a", b"t") && !watches.remove(1, "/a", b"u"));
        assert!(watches.remove(1, "/a", b"t") && watches.remove(2, "/a", b"t"));
        assert!(watches.is_empty());
    }
}
