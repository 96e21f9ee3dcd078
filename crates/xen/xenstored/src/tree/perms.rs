//! What a caller may do with a node.
//!
//! The first entry names the owner, which may do everything, and what every domain may that is not named after it.

use std::rc::Rc;

use tapio_xenstore::wire::Permission;

/// What one domain may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Perm {
    /// `n`, `r`, `w` or `b`.
    pub access: Access,
    /// The domain.
    pub domid: u32,
}

/// Kinds of access, as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Access(u8);

impl Access {
    /// Nothing.
    pub const NONE: Self = Self(0);
    /// Value, children and permissions may be read.
    pub const READ: Self = Self(1);
    /// It may be changed and removed, and children may be added.
    pub const WRITE: Self = Self(2);
    /// Its permissions may be changed.
    pub const OWNER: Self = Self(4);
    const ALL: Self = Self(7);

    /// Whether all of `wanted` is in it.
    pub fn has(self, wanted: Self) -> bool {
        self.0 & wanted.0 == wanted.0
    }

    /// The letter of the wire.
    pub fn letter(self) -> char {
        match self.0 & 3 {
            0 => 'n',
            1 => 'r',
            2 => 'w',
            _ => 'b',
        }
    }

    /// From the letter of the wire.
    pub fn from_letter(letter: u8) -> Option<Self> {
        Some(Self(match letter {
            b'n' => 0,
            b'r' => 1,
            b'w' => 2,
            b'b' => 3,
            _ => return None,
        }))
    }
}

/// Whose request it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The domain; 0 for connections by socket.
    pub domid: u32,
    /// The domain it acts for (`SET_TARGET`).
    pub target: Option<u32>,
    /// Whether it may do everything: the control domain, sockets.
    pub privileged: bool,
}

impl Caller {
    /// The control domain, which may do everything.
    pub const CONTROL: Self = Self { domid: 0, target: None, privileged: true };

    /// An ordinary domain.
    pub fn guest(domid: u32) -> Self {
        Self { domid, target: None, privileged: false }
    }

    fn is(&self, domid: u32) -> bool {
        self.domid == domid || self.target == Some(domid)
    }
}

/// The permissions of a node, owner first. Nodes that inherit them share them. One word: the list has its length.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Perms(Rc<Box<[Perm]>>);

impl Default for Perms {
    /// The control domain's alone.
    fn default() -> Self {
        Self::of_list(&[Perm { access: Access::NONE, domid: 0 }])
    }
}

impl Perms {
    fn of_list(entries: &[Perm]) -> Self {
        Self(Rc::new(entries.into()))
    }

    /// From the entries of a request; `None` when there are none.
    pub fn new(entries: &[Perm]) -> Option<Self> {
        (!entries.is_empty()).then(|| Self::of_list(entries))
    }

    /// The entries, owner first.
    pub fn entries(&self) -> &[Perm] {
        &self.0
    }

    /// How many entries.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Never: there is always an owner.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The owner.
    pub fn owner(&self) -> u32 {
        self.0[0].domid
    }

    /// What a caller may do.
    pub fn of(&self, caller: &Caller) -> Access {
        if caller.privileged || caller.is(self.owner()) {
            return Access::ALL;
        }
        let named = self.0[1..].iter().find(|perm| caller.is(perm.domid));
        named.unwrap_or(&self.0[0]).access
    }

    /// What a node that this caller creates below inherits: an ordinary domain owns what it creates.
    pub fn inherited_by(&self, caller: &Caller) -> Self {
        if caller.privileged || caller.domid == self.owner() {
            return self.clone();
        }
        let mut entries = self.0.to_vec();
        entries[0].domid = caller.domid;
        Self::of_list(&entries)
    }

    /// Without what is said about a domain that does not exist any more; `None` when nothing is.
    pub fn without(&self, domid: u32) -> Option<Self> {
        let dead = |perm: &&Perm| perm.domid == domid;
        self.0[1..].iter().any(|perm| dead(&perm)).then(|| {
            let others = self.0[1..].iter().filter(|perm| !dead(perm)).copied();
            Self(Rc::new(std::iter::once(self.0[0]).chain(others).collect()))
        })
    }

    /// As the wire has them: `n0\0r5\0`.
    pub fn to_wire(&self, out: &mut Vec<u8>) {
        for perm in self.entries() {
            out.extend_from_slice(format!("{}{}\0", perm.access.letter(), perm.domid).as_bytes());
        }
    }

    /// From the entries of a request; `None` when there are none, or a domain that cannot be.
    pub fn from_wire(entries: &[Permission]) -> Option<Self> {
        let perm = |entry: &Permission| {
            let access = Access::from_letter(entry.access.letter() as u8)?;
            (entry.domid <= 0xffff).then_some(Perm { access, domid: entry.domid })
        };
        Self::new(&entries.iter().map(perm).collect::<Option<Vec<Perm>>>()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn perms(text: &str) -> Perms {
        let entry = |one: &str| Permission::parse(one.as_bytes()).expect("an entry");
        Perms::from_wire(&text.split(',').map(entry).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn owner_named_and_others() {
        let perms = perms("r1,b2,n3");
        for (domid, letter, owner) in [(1, 'b', true), (2, 'b', false), (3, 'n', false), (4, 'r', false)] {
            let access = perms.of(&Caller::guest(domid));
            assert_eq!((access.letter(), access.has(Access::OWNER)), (letter, owner), "domain {domid}");
        }
        assert!(perms.of(&Caller::CONTROL).has(Access::OWNER));
        let stub = Caller { target: Some(1), ..Caller::guest(9) };
        assert!(perms.of(&stub).has(Access::OWNER));
    }

    #[test]
    fn inheritance_and_dead_domains() {
        let parent = perms("n0,b5,r6");
        assert_eq!(parent.inherited_by(&Caller::CONTROL), parent);
        assert_eq!(parent.inherited_by(&Caller::guest(5)), perms("n5,b5,r6"));
        assert_eq!(parent.without(6), Some(perms("n0,b5")));
        assert_eq!(parent.without(0), None);
    }

    #[test]
    fn entries_of_the_wire() {
        let far = Permission::parse(b"r70000").expect("the wire allows it");
        assert_eq!(Perms::from_wire(&[far]), None);
        assert_eq!(Perms::from_wire(&[]), None);
        let mut out = Vec::new();
        perms("w7,b0").to_wire(&mut out);
        assert_eq!(out, b"w7\0b0\0");
    }
}
