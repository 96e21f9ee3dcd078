//! Numbers and bytes one after the other, little-endian; lengths before what has one.

/// Writes.
#[derive(Debug, Default)]
pub struct Writer(pub Vec<u8>);

impl Writer {
    /// One byte.
    pub fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    /// Four bytes.
    pub fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Eight bytes.
    pub fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// A number of things that follow.
    pub fn count(&mut self, count: usize) {
        self.u32(count as u32);
    }

    /// Bytes behind their number.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        self.0.extend_from_slice(bytes);
    }
}

/// Reads what was written, and believes nothing.
#[derive(Debug)]
pub struct Reader<'a>(pub &'a [u8]);

/// It ends too early, or says what cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damaged(pub &'static str);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], Damaged> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(Damaged("it ends too early"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Damaged> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    /// One byte.
    pub fn u8(&mut self) -> Result<u8, Damaged> {
        Ok(self.array::<1>()?[0])
    }

    /// Four bytes.
    pub fn u32(&mut self) -> Result<u32, Damaged> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> Result<u64, Damaged> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A number of things of at least one byte each.
    pub fn count(&mut self) -> Result<usize, Damaged> {
        let count = self.u32()? as usize;
        if count > self.0.len() { Err(Damaged("it counts more than it holds")) } else { Ok(count) }
    }

    /// Bytes behind their number.
    pub fn bytes(&mut self) -> Result<&'a [u8], Damaged> {
        let len = self.u32()? as usize;
        self.take(len)
    }

    /// Text behind its length.
    pub fn text(&mut self) -> Result<&'a str, Damaged> {
        std::str::from_utf8(self.bytes()?).map_err(|_| Damaged("a text is not UTF-8"))
    }
}
