//! The tag of a group that is a copy and gets names of its own: how far that has come. See `resign`.

use uuid::Uuid;

/// Begins the tag of a group that is being resigned; the SR's new UUID follows.
pub(super) const BEGUN: &str = "tapio.resign.";
/// The same once volumes have their new names.
pub(super) const NAMED: &str = "tapio.resign.named.";
/// How far it has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// All names are old.
    Fresh,
    /// The SR gets this UUID.
    Begun(Uuid),
    /// The same; volumes have their names.
    Named(Uuid),
}

impl State {
    /// By the tags of the group, with commas between them.
    pub(super) fn of(tags: &str) -> Self {
        let after =
            |prefix| tags.split(',').find_map(|tag| crate::dir::facts::plain_uuid(tag.strip_prefix(prefix)?));
        match (after(NAMED), after(BEGUN)) {
            (Some(sr), _) => Self::Named(sr),
            (None, Some(sr)) => Self::Begun(sr),
            (None, None) => Self::Fresh,
        }
    }
}

/// Whether a group has the tag of one that is being resigned.
pub(super) fn is_unfinished(tags: &str) -> bool {
    State::of(tags) != State::Fresh
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_follow_from_tags() {
        let sr = Uuid::from_u128(7);
        for (tags, state) in [
            (String::new(), State::Fresh),
            ("other,tapio.resign.x".into(), State::Fresh),
            (format!("other,{BEGUN}{sr}"), State::Begun(sr)),
            (format!("{NAMED}{sr}"), State::Named(sr)),
        ] {
            assert_eq!((State::of(&tags), is_unfinished(&tags)), (state, state != State::Fresh), "{tags}");
        }
    }
}
