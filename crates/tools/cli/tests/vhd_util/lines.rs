//! What it prints, to the letter: other programs read it.

use crate::Place;

#[test]
fn usage_without_a_command() {
    let place = Place::new();
    let usage = "usage: vhd-util COMMAND [OPTIONS]\nCOMMAND := { create | snapshot | query | read | set | repair | \
                 resize | fill | coalesce | modify | scan | check | revert | key | copy }\n";
    assert_eq!(place.ok(""), usage);
    let output = place.run(["frob"]);
    assert_eq!(output.status.code(), Some(22));
    assert_eq!(String::from_utf8_lossy(&output.stdout), usage);
    assert!(place.ok("--help").contains("Examples:"));
    assert!(place.ok("create --help").contains("-s <MIB>"));
    place.fails(22, "create -n a.vhd");
    place.fails(22, "create -n a.vhd -s 0");
    place.fails(22, "create -n a.vhd -s 8 -S 4");
    place.fails(22, "create -n a.vhd -s 99999999999999999999");
}

#[test]
fn query_prints_one_line_a_fact_in_a_fixed_order() {
    let place = Place::new();
    place.ok("create -n a.vhd -s 63");
    assert_eq!(place.ok("query -n a.vhd -v"), "64\n");
    assert_eq!(place.ok("query -n a.vhd -s"), "3584\n");
    assert_eq!(place.ok("query -n a.vhd -f"), "hidden: 0\n");
    assert_eq!(place.ok("query -n a.vhd -p"), "a.vhd has no parent\n");
    assert_eq!(place.ok("query -n a.vhd -d"), "chain depth: 1\n");
    assert_eq!(place.ok("query -Smadfpsv -n a.vhd").lines().count(), 8);
    place.ok("snapshot -n b.vhd -p a.vhd");
    let parent = place.path("a.vhd").display().to_string();
    assert_eq!(place.ok("query --debug -vsfp -n b.vhd"), format!("64\n5120\n{parent}\nhidden: 0\n"));
    assert_eq!(place.ok("query -vsfpau -n b.vhd"), "64\n5120\n./a.vhd\nhidden: 0\n0\n");
    assert_eq!(place.ok("query -d -n b.vhd"), "chain depth: 2\n");
    place.ok("create -n big.vhd -s 64 -S 2097152");
    assert_eq!(place.ok("query -S -n big.vhd"), "2097152\n");
}

#[test]
fn query_without_the_parent_still_prints_the_rest() {
    let place = Place::new();
    place.ok("create -n a.vhd -s 4");
    place.ok("snapshot -n b.vhd -p a.vhd");
    std::fs::remove_file(place.path("a.vhd")).unwrap();
    let output = place.run(["query", "-vpf", "-n", "b.vhd"]);
    assert_eq!(output.status.code(), Some(libc::ENOENT));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.starts_with("4\nquery failed\nhidden: 0\nvhd-util: ") && said.contains("./a.vhd"), "{said}");
    place.fails(libc::ENOENT, "query -v -n none.vhd");
    std::fs::write(place.path("junk.vhd"), vec![1; 4096]).unwrap();
    assert!(place.fails(22, "query -v -n junk.vhd").contains("conectix"));
}

#[test]
fn query_as_json() {
    let place = Place::new();
    place.ok("create -n a.vhd -s 64 -S 128");
    place.ok("snapshot -n b.vhd -p a.vhd");
    let facts: serde_json::Value = serde_json::from_str(&place.ok("query --json -n b.vhd")).unwrap();
    assert_eq!(facts["virtual_bytes"], 64 << 20);
    assert_eq!(facts["type"], "differencing");
    assert_eq!(facts["chain_depth"], 2);
    assert_eq!(facts["parent"], place.path("a.vhd").display().to_string());
}

#[test]
fn set_changes_one_field() {
    let place = Place::new();
    place.ok("create -n a.vhd -s 4");
    place.ok("set -n a.vhd -f hidden -v 1");
    place.ok("set -n a.vhd -f marker -v 200");
    assert_eq!(place.ok("query -fm -n a.vhd"), "hidden: 1\nmarker: 200\n");
    place.ok("set -n a.vhd -f hidden -v 0");
    assert_eq!(place.ok("query -f -n a.vhd"), "hidden: 0\n");
    place.ok("check -n a.vhd");
    place.fails(22, "set -n a.vhd -f colour -v 1");
    place.fails(22, "set -n a.vhd -f hidden -v 256");
}

#[test]
fn check_ends_with_a_verdict() {
    let place = Place::new();
    place.ok("create -n a.vhd -s 4");
    place.ok("snapshot -n b.vhd -p a.vhd");
    assert_eq!(place.ok("check -n a.vhd"), "a.vhd is valid\n");
    let both = format!("b.vhd is valid\n{} is valid\n", place.path("a.vhd").display());
    assert_eq!(place.ok("check -p -n b.vhd"), both);
    let mut bytes = std::fs::read(place.path("a.vhd")).unwrap();
    let end = bytes.len();
    bytes[end - 500] ^= 1;
    std::fs::write(place.path("a.vhd"), &bytes).unwrap();
    assert!(place.fails(22, "check -n a.vhd").contains("primary footer invalid"));
    assert!(
        String::from_utf8_lossy(&place.run(["check", "-i", "-n", "a.vhd"]).stdout).contains("a.vhd is valid")
    );
    let output = place.run(["check", "--json", "-n", "a.vhd"]);
    assert_eq!(output.status.code(), Some(22));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["valid"], false);
    assert_eq!(report["images"][0]["findings"][0]["kind"], "primary-footer");
    std::fs::remove_file(place.path("a.vhd")).unwrap();
    assert!(place.fails(libc::ENOENT, "check -n b.vhd").contains("could not find parent a.vhd"));
}

#[test]
fn check_counts_sectors() {
    let place = Place::new();
    place.ok("create -n a.vhd -s 4");
    place.write("a.vhd", 0, &[1; 8192]);
    place.ok("snapshot -n b.vhd -p a.vhd");
    place.write("b.vhd", 4096, &[2; 8192]);
    let said = String::from_utf8(place.run(["check", "-t", "-p", "-s", "-n", "b.vhd"]).stdout).unwrap();
    assert_eq!(
        said,
        "a.vhd: secs allocated: 0x1000 secs written: 0x10 (0.39%)\n\
         b.vhd: secs allocated: 0x1000 secs written: 0x10 (0.39%) secs not in parent: 0x8 (50.00%) \
         secs not in ancestors: 0x8 (50.00%)\n"
    );
}

#[test]
fn scan_prints_lines_and_trees() {
    let place = Place::new();
    place.ok("create -n a.vhd -s 64");
    place.ok("snapshot -e -n b.vhd -p a.vhd");
    place.ok("snapshot -e -n c.vhd -p a.vhd");
    place.ok("snapshot -e -n d.vhd -p c.vhd");
    place.ok("set -n a.vhd -f hidden -v 1");
    place.ok("set -n c.vhd -f hidden -v 1");
    place.ok("create -n other.vhd -s 2");
    let a = "vhd=a.vhd capacity=67108864 size=3584 hidden=1 parent=none\n";
    let tree = format!(
        "{a}   vhd=b.vhd capacity=67108864 size=5120 hidden=0 parent=a.vhd\n   \
         vhd=c.vhd capacity=67108864 size=5120 hidden=1 parent=a.vhd\n      \
         vhd=d.vhd capacity=67108864 size=5120 hidden=0 parent=c.vhd\n\
         vhd=other.vhd capacity=2097152 size=3584 hidden=0 parent=none\n"
    );
    assert_eq!(place.ok("scan -f -p -m *.vhd"), tree);
    assert_eq!(place.ok("scan -p -a d.vhd b.vhd other.vhd").lines().count(), 5);
    assert_eq!(place.ok("scan -f a.vhd"), a);
    assert_eq!(
        place.ok("scan -f -M d.vhd"),
        "vhd=d.vhd capacity=67108864 size=5120 hidden=0 marker=0 keyhash= parent=c.vhd\n"
    );
    let parent = place.path("a.vhd").display().to_string();
    let line = format!("vhd=b.vhd capacity=67108864 size=5120 hidden=0 parent={parent}\n");
    assert_eq!(place.ok("scan -v b.vhd"), line);
    assert!(place.ok("scan -p d.vhd").ends_with("parent=c.vhd (not found in scan)\n"));
    let list: serde_json::Value = serde_json::from_str(&place.ok("scan --json -m *.vhd")).unwrap();
    assert_eq!(list.as_array().unwrap().len(), 5);
}

#[test]
fn scan_reports_what_it_cannot_read() {
    let place = Place::new();
    place.ok("create -n b.vhd -s 2");
    std::fs::write(place.path("a.vhd"), b"no image").unwrap();
    let output = place.run(["scan", "-f", "-c", "-m", "*.vhd"]);
    assert!(output.status.success());
    let said = String::from_utf8(output.stdout).unwrap();
    // In the order of the directory.
    let mut said: Vec<_> = said.lines().collect();
    said.sort_unstable();
    assert_eq!(
        said,
        [
            "vhd=a.vhd scan-error=-5 error-message='opening file'",
            "vhd=b.vhd capacity=2097152 size=3584 hidden=0 parent=none"
        ]
    );
    let output = place.run(["scan", "-m", "*.vhd"]);
    assert_eq!(output.status.code(), Some(libc::EIO), "the number of what failed");
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), 1);
    assert_eq!(place.ok("scan -m none*"), "", "a repository without images is no error");
    let output = place.run(["scan", "none.vhd"]);
    assert_eq!(output.status.code(), Some(libc::ENOENT));
    let line = "vhd=none.vhd scan-error=-2 error-message='failure scanning target'\n";
    assert_eq!(String::from_utf8_lossy(&output.stdout), line);
    place.fails(22, "scan");
    place.fails(22, "scan -l bad/name -m *");
}

#[test]
fn coalesce_says_how_much_it_wrote() {
    let place = Place::new();
    place.ok("create -n a.vhd -s 8");
    place.ok("snapshot -n b.vhd -p a.vhd");
    place.write("b.vhd", 4096, &[2; 8192]);
    place.write("b.vhd", 6 << 20, &[3; 512]);
    assert_eq!(place.ok("coalesce -n b.vhd"), "Coalesced 17 sectors");
    assert!(place.ok("coalesce -p -n b.vhd").ends_with("\r100.00%\nCoalesced 17 sectors"));
    assert!(place.fails(22, "coalesce -n a.vhd").contains("nothing to merge"));
    place.ok("check -n a.vhd -b");
    let all = place.run(["read", "-n", "a.vhd", "-r", "7", "-c", "3"]).stdout;
    assert_eq!((all.len(), all[0], all[512]), (1536, 0, 2));
}

#[test]
fn read_prints_what_is_parsed_by_others() {
    let place = Place::new();
    place.ok("create -n a.vhd -s 64");
    place.ok("snapshot -n b.vhd -p a.vhd");
    let headers = place.ok("read -p -n b.vhd");
    assert!(headers.contains("\nDisk type           : Differencing hard disk\n"), "{headers}");
    assert!(headers.contains("\n       decoded name : ./a.vhd\n"), "{headers}");
    assert_eq!(headers.matches("(Good!)").count(), 3, "{headers}");
    assert!(place.ok("read -p -n a.vhd").contains("Disk type           : Dynamic hard disk\n"));
    place.write("b.vhd", (2 << 20) + 1024, &[5; 1024]);
    assert_eq!(place.run(["read", "-B", "-n", "b.vhd"]).stdout, [0x40, 0, 0, 0]);
    assert_eq!(
        place.ok("read -n b.vhd -b 0 -c 2"),
        "block: 0: offset: not allocated\nblock: 1: offset: 7680\n"
    );
    assert_eq!(
        place.ok("read -n b.vhd -t 4098"),
        "logical sector 4098: block number: 1, sector offset: 2, file offset: 9216\n"
    );
    assert_eq!(place.ok("read -n b.vhd -i 4097 -c 2"), "block 1: sec: 1: 0\nblock 1: sec: 2: 1\n");
    assert_eq!(place.ok("read -n b.vhd -e 0 -c 131072"), "4098 2\n");
    assert_eq!(place.ok("read -x -n b.vhd -e 0 -c 131072"), "0x1002 0x2\n");
    assert_eq!(place.ok("read -n b.vhd -j 1"), "batmap for block 1: 0\n");
    assert_eq!(place.run(["read", "-n", "b.vhd", "-m", "1"]).stdout[..2], [0x30, 0]);
    assert_eq!(place.run(["read", "-n", "b.vhd", "-a"]).stdout, [0; 512]);
    let block = place.run(["read", "-n", "b.vhd", "-d", "1"]).stdout;
    assert_eq!((block.len(), block[1024], block[2048]), (2 << 20, 5, 0));
    assert_eq!(place.run(["read", "-n", "b.vhd", "-R", "2098175", "-c", "2"]).stdout, [0, 5]);
    place.fails(libc::ERANGE, "read -n b.vhd -r 131072");
    place.fails(libc::ERANGE, "read -n b.vhd -b 32");
    place.fails(libc::ERANGE, "read -n b.vhd -t 18446744073709551615");
    let json: serde_json::Value = serde_json::from_str(&place.ok("read -p --json -n b.vhd")).unwrap();
    assert_eq!(json["header"]["locators"][0]["path"], "./a.vhd");
}

#[test]
fn read_shows_headers_of_a_broken_image() {
    let place = Place::new();
    place.ok("create -n a.vhd -s 4");
    let mut bytes = std::fs::read(place.path("a.vhd")).unwrap();
    bytes[600] ^= 1;
    std::fs::write(place.path("a.vhd"), &bytes).unwrap();
    let output = place.run(["read", "-p", "-n", "a.vhd"]);
    assert_eq!(output.status.code(), Some(22));
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("a.vhd appears invalid; dumping headers") && said.contains("(Bad!)"), "{said}");
}

#[test]
fn modify_changes_parent_and_size() {
    let place = Place::new();
    place.ok("create -n a.vhd -s 4");
    std::fs::copy(place.path("a.vhd"), place.path("copy.vhd")).unwrap();
    place.ok("snapshot -n b.vhd -p a.vhd");
    place.ok("modify -n b.vhd -p copy.vhd");
    assert_eq!(place.ok("query -p -n b.vhd"), format!("{}\n", place.path("copy.vhd").display()));
    place.ok("modify -n a.vhd -s 8192");
    assert_eq!(std::fs::metadata(place.path("a.vhd")).unwrap().len(), 8192);
    place.ok("check -n a.vhd");
    assert!(place.fails(22, "modify -n a.vhd -s 512").contains("at least 3584"));
    place.write("a.vhd", 0, &[1; 512]);
    place.ok("modify -n a.vhd -z");
    assert_eq!(place.ok("query -a -n a.vhd"), "0\n");
    place.fails(22, "modify -n a.vhd -p b.vhd");
    place.fails(22, "modify -n b.vhd -m");
}

#[test]
fn output_into_a_closed_pipe_is_no_panic() {
    let place = Place::new();
    place.ok("create -n a.vhd -s 64");
    let line = format!(
        "'{}' vhd-util read -n a.vhd -r 0 -c 131072 | head -c 1 > /dev/null",
        env!("CARGO_BIN_EXE_tapio")
    );
    let output =
        std::process::Command::new("sh").args(["-c", &line]).current_dir(place.dir.path()).output().unwrap();
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}
