//! Whole images: resized, taken back, repaired, filled, copied, encrypted.

use tapio_format::vhd::crypt::DiskCipher;
use tapio_format::vhd::offline::Chain;

use crate::Place;

const MIB: usize = 1 << 20;

fn disk(place: &Place, name: &str, len: usize) -> Vec<u8> {
    let chain = Chain::open(&place.path(name)).unwrap();
    let mut bytes = vec![0; len];
    chain.read_at(0, &mut bytes).unwrap();
    bytes
}

/// A base and a leaf of 8 MiB with some data in both.
fn chain(place: &Place) -> Vec<u8> {
    place.ok("create -n base.vhd -s 8");
    place.write("base.vhd", 512, &vec![1; 3 * MIB]);
    place.ok("snapshot -n leaf.vhd -p base.vhd");
    place.write("leaf.vhd", 2 * MIB as u64, &vec![2; 2 * MIB]);
    disk(place, "leaf.vhd", 8 * MIB)
}

#[test]
fn resize_within_and_beyond_the_table() {
    let place = Place::new();
    place.ok("create -n a.vhd -s 8 -S 1024");
    place.ok("resize -f -n a.vhd -s 1000");
    assert_eq!(place.ok("query -vS -n a.vhd"), "1000\n1024\n");
    assert!(place.fails(22, "resize -f -n a.vhd -s 2000").contains("resize -j"));
    assert!(place.fails(22, "resize -f -n a.vhd -s 8").contains("not made smaller"));
    place.write("a.vhd", 0, &vec![3; 5 * MIB]);
    place.ok("resize -j a.journal -n a.vhd -s 2000000");
    assert_eq!(place.ok("query -v -n a.vhd"), "2000000\n");
    assert!(!place.path("a.journal").exists());
    assert_eq!(place.ok("check -b -n a.vhd"), "a.vhd is valid\n");
    assert!(disk(&place, "a.vhd", 5 * MIB).iter().all(|&byte| byte == 3));
    place.fails(22, "resize -n a.vhd -s 8");
    place.fails(22, "resize -f -j x -n a.vhd -s 8");
}

#[test]
fn a_resize_stopped_between_its_steps_is_taken_back() {
    for point in ["BEGIN", "DATA_MOVED", "METADATA_MOVED", "END"] {
        let place = Place::new();
        let before = chain(&place);
        let output = place
            .command()
            .args(["resize", "-j", "j", "-n", "leaf.vhd", "-s", "500000"])
            .env(format!("VHD_UTIL_TEST_FAIL_RESIZE_{point}"), "1")
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(22));
        if point == "END" {
            place.ok("check -n leaf.vhd");
        } else {
            assert!(place.fails(22, "check -n leaf.vhd").contains("revert"));
            assert!(place.fails(22, "coalesce -n leaf.vhd").contains("revert"));
            assert!(place.fails(libc::EINVAL, "resize -j j -n leaf.vhd -s 500000").contains("revert"));
        }
        place.ok("revert -n leaf.vhd -j j");
        assert_eq!(place.ok("query -v -n leaf.vhd"), "8\n", "{point}");
        place.ok("check -p -n leaf.vhd");
        assert!(disk(&place, "leaf.vhd", 8 * MIB) == before);
    }
}

#[test]
fn a_reparent_stopped_between_its_steps_is_repeated() {
    for point in ["BEGIN", "LOCATOR", "END"] {
        let place = Place::new();
        let before = chain(&place);
        std::fs::copy(place.path("base.vhd"), place.path("other.vhd")).unwrap();
        let output = place
            .command()
            .args(["modify", "-n", "leaf.vhd", "-p", "other.vhd"])
            .env(format!("VHD_UTIL_TEST_FAIL_REPARENT_{point}"), "1")
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(22));
        assert!(disk(&place, "leaf.vhd", 8 * MIB) == before, "{point}");
        place.ok("modify -n leaf.vhd -p other.vhd");
        place.ok("check -p -n leaf.vhd");
        assert!(disk(&place, "leaf.vhd", 8 * MIB) == before);
    }
}

#[test]
fn repair_brings_the_footer_back() {
    let place = Place::new();
    place.ok("create -n a.vhd -s 8");
    let whole = std::fs::read(place.path("a.vhd")).unwrap();
    for (damaged, line) in
        [(3072..3584, "repair -n a.vhd"), (3072..3073, "repair -b -n a.vhd"), (0..512, "repair -n a.vhd")]
    {
        let mut bytes = whole.clone();
        bytes[damaged].fill(0x77);
        std::fs::write(place.path("a.vhd"), &bytes).unwrap();
        place.fails(22, "check -n a.vhd");
        place.ok(line);
        place.ok("check -n a.vhd");
        assert!(std::fs::read(place.path("a.vhd")).unwrap() == whole);
    }
}

#[test]
fn fill_makes_an_image_stand_alone() {
    let place = Place::new();
    let before = chain(&place);
    place.ok("fill -n leaf.vhd");
    assert_eq!(place.ok("query -a -n leaf.vhd"), "4\n");
    place.write("base.vhd", 0, &vec![9; 8 * MIB]);
    assert!(disk(&place, "leaf.vhd", 8 * MIB) == before, "the parent is not read any more");
    place.ok("check -b -t -n leaf.vhd");

    place.ok("snapshot -n next.vhd -p leaf.vhd");
    place.ok("fill -b -f 4095 -t 4096 -n next.vhd");
    assert_eq!(place.ok("query -a -n next.vhd"), "2\n");
    let seen = disk(&place, "next.vhd", 8 * MIB);
    assert!(seen[..4 * MIB].iter().all(|&byte| byte == 0) && seen[4 * MIB..] == before[4 * MIB..]);
    place.ok("check -b -t -n next.vhd");
    place.fails(22, "fill -b -f 5 -t 4 -n next.vhd");
    place.fails(libc::ERANGE, "fill -b -t 16384 -n next.vhd");
    place.fails(22, "fill -f 4 -n next.vhd");
}

#[test]
fn copy_gives_one_image_for_a_chain() {
    let place = Place::new();
    let before = chain(&place);
    place.ok("copy -n leaf.vhd -N copy.vhd");
    assert_eq!(place.ok("query -p -n copy.vhd"), "copy.vhd has no parent\n");
    assert!(disk(&place, "copy.vhd", 8 * MIB) == before);
    place.ok("check -b -n copy.vhd");
    place.fails(libc::EEXIST, "copy -n leaf.vhd -N copy.vhd");
    place.ok("create -r -n fixed.vhd -s 2");
    place.write("fixed.vhd", 0, &[5; 512]);
    place.ok("copy -n fixed.vhd -N fixed2.vhd");
    assert_eq!(std::fs::metadata(place.path("fixed2.vhd")).unwrap().len(), 2 * MIB as u64 + 512);
    assert_eq!(disk(&place, "fixed2.vhd", 512), [5; 512]);
}

#[test]
fn copy_encrypts() {
    let place = Place::new();
    let before = chain(&place);
    let key: Vec<u8> = (0..64).collect();
    std::fs::write(place.path("key"), &key).unwrap();
    place.ok("copy -n leaf.vhd -N secret.vhd -k key");
    place.ok("check -n secret.vhd");
    let mut seen = disk(&place, "secret.vhd", 8 * MIB);
    assert!(seen != before);
    // Sectors that are in no image are zeros, all others are to be decrypted.
    let cipher = DiskCipher::new(&key).unwrap();
    for (sector, bytes) in
        seen.chunks_exact_mut(512).enumerate().filter(|(_, bytes)| bytes.iter().any(|&b| b != 0))
    {
        cipher.decrypt(sector as u64, bytes);
    }
    assert!(seen == before);
    std::fs::copy(place.path("key"), place.path("secret,aes-xts-plain,512.key")).unwrap();
    place.ok("key -c -n secret.vhd -k secret,aes-xts-plain,512.key");
    place.fails(22, "copy -n secret.vhd -N twice.vhd -k key");
    std::fs::write(place.path("short"), &key[..20]).unwrap();
    place.fails(22, "copy -n leaf.vhd -N other.vhd -k short");
    assert!(!place.path("other.vhd").exists());
}

#[test]
fn keys_are_set_checked_and_printed() {
    let place = Place::new();
    place.ok("create -n a.vhd -s 8");
    assert_eq!(place.ok("key -p -n a.vhd"), "none\n");
    let path = place.path("a,aes-xts-plain,256.key");
    std::fs::write(&path, [0; 32]).unwrap();
    let zeros = "0".repeat(64);
    let hash = place.ok("key -C -k a,aes-xts-plain,256.key");
    assert!(hash.starts_with("f5a5fd42d16a2030"), "{hash}");
    place.ok("key -s -n a.vhd -k a,aes-xts-plain,256.key");
    assert_eq!(place.ok("key -p -n a.vhd"), format!("{zeros} {hash}"));
    place.ok("key -c -n a.vhd -k a,aes-xts-plain,256.key");
    assert!(place.ok("scan -f -M a.vhd").contains(&format!("keyhash={}", hash.trim())));
    let headers = place.ok("read -p -n a.vhd");
    assert!(headers.contains(&format!("Batmap keyhash hash : {hash}")), "{headers}");
    place.ok("snapshot -n b.vhd -p a.vhd");
    assert_eq!(place.ok("key -p -n b.vhd"), format!("{zeros} {hash}"), "a child has its parent's key");
    std::fs::write(&path, [1; 32]).unwrap();
    assert!(
        place.fails(libc::ENOKEY, "key -c -n a.vhd -k a,aes-xts-plain,256.key").contains("is not the key")
    );
    std::fs::write(&path, [1; 31]).unwrap();
    place.fails(22, "key -c -n a.vhd -k a,aes-xts-plain,256.key");
    std::fs::write(place.path("any.key"), [1; 32]).unwrap();
    assert!(place.fails(libc::EPERM, "key -s -n a.vhd -k any.key").contains("must be called"));
    place.ok(&format!("key -s -n a.vhd -H {} -N {}", "ab".repeat(32), "cd".repeat(32)));
    assert_eq!(place.ok("key -p -n a.vhd"), format!("{} {}\n", "cd".repeat(32), "ab".repeat(32)));
    place.fails(22, "key -s -n a.vhd -H xyz");
    place.write("a.vhd", 0, &[1; 512]);
    assert!(place.fails(22, &format!("key -s -n a.vhd -H {zeros}")).contains("holds data already"));
    place.fails(22, "key -n a.vhd");
}
