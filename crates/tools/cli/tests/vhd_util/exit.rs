//! Exit statuses and lines that scripts branch on, as XenServer's `vhd-util` was seen to have them.

use crate::Place;

fn place() -> Place {
    let place = Place::new();
    place.ok("create -n a.vhd -s 20");
    place.ok("create -n s.vhd -s 10 -S 100");
    place.ok("create -n f.vhd -s 4 -r");
    place.ok("snapshot -n b.vhd -p a.vhd");
    std::fs::create_dir(place.path("dir")).unwrap();
    std::fs::create_dir(place.path("sub")).unwrap();
    std::fs::rename(place.path("b.vhd"), place.path("sub/lost.vhd")).unwrap();
    std::fs::write(place.path("empty"), b"").unwrap();
    std::fs::write(place.path("short"), [0; 100]).unwrap();
    std::fs::write(place.path("zeros"), [0; 70_000]).unwrap();
    place
}

#[test]
fn statuses_are_those_of_xenserver() {
    let place = place();
    for (status, line) in [
        (32, "query -v -n empty"),
        (32, "coalesce -n empty"),
        (32, "fill -n empty"),
        (32, "repair -n empty"),
        (32, "snapshot -n new.vhd -p empty"),
        (32, "revert -n a.vhd -j empty"),
        (22, "check -n empty"),
        (5, "query -v -n short"),
        (22, "query -v -n zeros"),
        (21, "query -v -n dir"),
        (21, "set -f hidden -v 1 -n dir"),
        (21, "snapshot -n new.vhd -p dir"),
        (22, "check -n dir"),
        (22, "modify -n sub/lost.vhd -p dir"),
        (2, "check -n sub/lost.vhd"),
        (2, "coalesce -n sub/lost.vhd"),
        (2, "query -p -n none"),
        (38, "resize -j j -s 8 -n a.vhd"),
        (22, "resize -f -s 8 -n a.vhd"),
        (38, "modify -z -n f.vhd"),
        (28, "snapshot -n new.vhd -p a.vhd -l 1x"),
        (22, "snapshot -n new.vhd -p a.vhd -S 10"),
        (34, "read -t 40960 -n a.vhd"),
        (34, "read -b 10 -n a.vhd"),
        (34, "fill -b -t 99999 -n a.vhd"),
        (22, "set -n a.vhd -f hidden -v 256"),
        (2, "scan a.vhd none"),
        (2, "scan -m none"),
        (2, "scan -c -m none/x"),
        (32, "scan empty"),
        (5, "scan short"),
        (21, "scan dir a.vhd"),
        (22, "scan -p zeros"),
    ] {
        place.fails(status, line);
    }
    assert!(!place.path("new.vhd").exists());
}

#[test]
fn numbers_are_read_up_to_what_is_no_digit() {
    let place = place();
    place.ok("create -n x.vhd -s 10x -S +20y");
    assert_eq!(place.ok("query -v -S -n x.vhd"), "10\n20\n");
    place.ok("set -n x.vhd -f hidden -v 1x");
    assert_eq!(place.ok("query -f -n x.vhd"), "hidden: 1\n");
    place.ok("snapshot -n y.vhd -p x.vhd -l x");
    // The original makes a disk of no bytes.
    place.fails(22, "create -n z.vhd -s abc");
    place.fails(22, "create -n z.vhd -s -1");
    assert!(!place.path("z.vhd").exists());
}

#[test]
fn a_scan_says_first_what_is_not_there() {
    let place = place();
    let missing = "vhd=none scan-error=-2 error-message='failure scanning target'\n";
    let output = place.run(["scan", "a.vhd", "none", "s.vhd"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), missing);
    let output = place.run(["scan", "-c", "a.vhd", "none", "dir", "empty"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        format!(
            "{missing}vhd=a.vhd capacity=20971520 size=3584 hidden=0 parent=none\n\
             vhd=dir scan-error=-21 error-message='opening file'\n\
             vhd=empty scan-error=-32 error-message='opening file'\n"
        )
    );
}

#[test]
fn reads_print_numbers_as_printf_does() {
    let place = place();
    assert_eq!(place.ok("read -x -i 0 -c 2 -n a.vhd"), "block 0: sec: 0: 0\nblock 0: sec: 0x1: 0\n");
    assert_eq!(place.ok("read -x -m 0 -n a.vhd"), "block 0 not allocated\n");
    // The table goes on behind the disk.
    let said = place.ok("read -x -b 3 -c 4 -n s.vhd");
    let lines = ["0x3", "0x4", "0x5", "0x6"].map(|block| format!("block: {block}: offset: not allocated\n"));
    assert_eq!(said, lines.concat());
}

#[test]
fn errors_are_printed_where_the_original_prints_its_own() {
    let place = place();
    for line in ["query -v -n none", "check -n none", "coalesce -n a.vhd", "read -p -n zeros", "query -n"] {
        let output = place.run(line.split(' '));
        assert!(!output.stdout.is_empty() && output.stderr.is_empty(), "{line}: {output:?}");
    }
    for line in ["create -n none/x -s 4", "snapshot -n x -p none", "key -p -n none"] {
        let output = place.run(line.split(' '));
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{line}: {output:?}");
    }
}

#[test]
fn a_child_has_the_size_of_its_parent() {
    let place = place();
    for len in [10_481_664_u64, 4_194_204] {
        std::fs::File::create(place.path("r.raw")).unwrap().set_len(len).unwrap();
        place.ok("snapshot -m -n c.vhd -p r.raw -S 100");
        place.ok("snapshot -e -n d.vhd -p c.vhd");
        for image in ["c.vhd", "d.vhd"] {
            let said = place.ok(&format!("read -p -n {image}"));
            assert!(said.contains(&format!(" MB ({len} Bytes)\nGeometry")), "{said}");
        }
        place.ok("coalesce -n c.vhd");
        assert_eq!(std::fs::metadata(place.path("r.raw")).unwrap().len(), len);
    }
}
