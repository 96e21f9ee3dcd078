//! The value of a node.

use std::fmt;
use std::ops::Deref;

/// Bytes that fit into the node itself: numbers, states and short names do, paths do not.
const SHORT_LEN_MAX: usize = 22;

/// A few bytes, in place where they are short: most values of a host are, and have no allocation of their own.
#[derive(Clone)]
pub struct Value(Repr);

#[derive(Clone)]
enum Repr {
    Short { len: u8, bytes: [u8; SHORT_LEN_MAX] },
    Long(Box<[u8]>),
}

/// A hundred thousand of them are in memory.
const _: () = assert!(size_of::<Value>() == 24);

impl Deref for Value {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Repr::Short { len, bytes } => &bytes[..usize::from(*len)],
            Repr::Long(bytes) => bytes,
        }
    }
}

impl From<&[u8]> for Value {
    fn from(value: &[u8]) -> Self {
        let mut bytes = [0; SHORT_LEN_MAX];
        match bytes.get_mut(..value.len()) {
            Some(short) => {
                short.copy_from_slice(value);
                Self(Repr::Short { len: value.len() as u8, bytes })
            }
            None => Self(Repr::Long(value.into())),
        }
    }
}

impl Default for Value {
    fn default() -> Self {
        Self::from(&[][..])
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Value {}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_every_length_come_back() {
        let bytes: Vec<u8> = (0..100).collect();
        for len in 0..=bytes.len() {
            let value = Value::from(&bytes[..len]);
            assert_eq!(*value, bytes[..len]);
            assert_eq!(value.clone(), value);
            assert_eq!(matches!(value.0, Repr::Long(_)), len > SHORT_LEN_MAX);
        }
        assert_eq!(*Value::default(), []);
        assert_eq!(format!("{:?}", Value::from(&[1, 2][..])), "[1, 2]");
    }
}
