//! Cylinders, heads and sectors per track: unused, but some readers still check them.

/// The geometry field of a footer.
///
/// The size of the disk is the footer's current size; the geometry only approximates it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Geometry {
    /// Cylinders.
    pub cylinders: u16,
    /// Heads.
    pub heads: u8,
    /// Sectors per track.
    pub sectors: u8,
}

/// The most sectors that a geometry can state.
const SECTORS_MAX: u64 = 65_535 * 16 * 255;

impl Geometry {
    /// The largest geometry, which stands for "see the size" where a creator does not want it counted.
    pub const MAX: Self = Self { cylinders: 65_535, heads: 16, sectors: 255 };

    /// The geometry for a disk of `len` bytes, by the algorithm in the appendix of the published specification.
    ///
    /// It counts sectors in 32 bits, and so does XenServer's tool, which calls an image invalid whose geometry is
    /// larger
    /// than what it computes: from 2 TiB on the geometry is that of the remainder.
    pub fn for_len(len: u64) -> Self {
        let sectors = (len.div_ceil(512) & u64::from(u32::MAX)).clamp(1, SECTORS_MAX);
        let mut per_track = 17;
        let mut heads;
        let mut tracks;
        if sectors >= 65_535 * 16 * 63 {
            (per_track, heads, tracks) = (255, 16, sectors / 255);
        } else {
            tracks = sectors / 17;
            heads = tracks.div_ceil(1024).max(4);
            if tracks >= heads * 1024 || heads > 16 {
                (per_track, heads, tracks) = (31, 16, sectors / 31);
            }
            if tracks >= heads * 1024 {
                (per_track, heads, tracks) = (63, 16, sectors / 63);
            }
        }
        let narrow = |value: u64| u8::try_from(value).unwrap_or(u8::MAX);
        Self {
            cylinders: u16::try_from(tracks / heads).unwrap_or(u16::MAX),
            heads: narrow(heads),
            sectors: narrow(per_track),
        }
    }

    /// The bytes that the geometry stands for, usually a little less than the disk's size.
    pub fn len(&self) -> u64 {
        u64::from(self.cylinders) * u64::from(self.heads) * u64::from(self.sectors) * 512
    }

    /// Whether the geometry stands for no bytes at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn from_u32(word: u32) -> Self {
        let [a, b, heads, sectors] = word.to_be_bytes();
        Self { cylinders: u16::from_be_bytes([a, b]), heads, sectors }
    }

    pub(crate) fn to_u32(self) -> u32 {
        let [a, b] = self.cylinders.to_be_bytes();
        u32::from_be_bytes([a, b, self.heads, self.sectors])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn known_sizes_give_known_geometries() {
        let chs = |len| {
            let g = Geometry::for_len(len);
            (g.cylinders, g.heads, g.sectors)
        };
        assert_eq!(chs(64 * MIB), (963, 8, 17));
        assert_eq!(chs(0), (0, 4, 17));
        assert_eq!(chs(2 * MIB), (60, 4, 17));
        assert_eq!(chs(1024 * MIB), (2080, 16, 63));
        assert_eq!(chs(2040 << 30), (65535, 16, 255));
        // As XenServer's vhd-util creates them.
        assert_eq!(chs((2 << 40) + (2 << 20)), (60, 4, 17));
    }

    #[test]
    fn the_geometry_never_claims_more_than_the_disk() {
        for mib in (1..300_000).step_by(37) {
            let geometry = Geometry::for_len(mib * MIB);
            assert!(geometry.len() <= mib * MIB, "{mib} MiB");
            assert_eq!(Geometry::from_u32(geometry.to_u32()), geometry);
        }
    }
}
